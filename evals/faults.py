"""Faults in the real job: a rank killed, stopped, killed while saving, a disk that fills; and what a resume loses.

    python -m evals.faults                        # 2 and 4 ranks, every fault; about 15 minutes on 2 cores
    python -m evals.faults --ranks 2 --only killed stopped

Each is a `deepspeed` launch of launch/pretrain.py. After the fault the whole launch must end by itself within a minute,
with an error that says what happened and no process left; the job is then started again and must reach, bit for bit,
the losses of a run that was never disturbed. Writes evals/results/faults.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from evals.files import write
from evals.provenance import provenance
from launch.children import end_tree
from launch.metrics import read_metrics
from launch.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
STEPS, SAVE_EVERY, FAULT_AT = 160, 20, 50
TIMEOUT = 15  # seconds, pretrain.py --timeout; DeepSpeed's launcher takes up to 30 more to end a stopped rank
LIMIT = 60  # seconds from the fault to the end of the launch
SAYS = {
    "killed": r"has ended",
    "stopped": r"is stopped",
    "killed while saving": r"has ended",
    "disk full": r"cannot write .*bytes free",
}
KINDS = tuple(SAYS)


class Job:
    """One launch of the tiny preset, its ranks marked by a tag in their environment."""

    def __init__(self, output: Path, ranks: int, save_dir: Path) -> None:
        self.output, self.ranks, self.tag = output, ranks, uuid.uuid4().hex
        self.log = output.with_suffix(f".{self.tag[:6]}.log")
        command = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(ranks)]
        command += ["--master_port", str(free_port()), "launch/pretrain.py", "--preset", "tiny"]
        command += [
            "--deepspeed_config",
            "ds_configs/zero2_scape90_fp32.json",
            "--data",
            "embedded",
            "--eval-every",
            "0",
        ]
        command += ["--eval-batches", "2", "--log-every", "1", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
        command += ["--timeout", str(TIMEOUT), "--output", str(output), "--save-dir", str(save_dir)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
        output.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**env, "SCAPE_FAULT_TAG": self.tag}, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def step(self) -> int:
        """The newest step in the records."""
        with suppress(OSError, ValueError, IndexError):
            return max(
                json.loads(line).get("step", 0) for line in (self.output / "metrics.jsonl").read_text().splitlines()
            )
        return 0

    def rank_process(self, rank: int) -> psutil.Process:
        for process in self.left():
            with suppress(psutil.Error):
                if "launch/pretrain.py" in process.cmdline() and process.environ().get("RANK") == str(rank):
                    return process
        raise RuntimeError(f"no process of rank {rank}")

    def left(self) -> list[psutil.Process]:
        """Live processes of this launch."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SCAPE_FAULT_TAG") == self.tag and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            end_tree(self.process)
        for process in self.left():
            with suppress(psutil.Error):
                process.kill()


def wait_for(condition: Any, job: Job, seconds: float, every: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if job.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the job did not come that far; see {job.log}")
        time.sleep(every)


def strike(job: Job, kind: str, save_dir: Path) -> None:
    """Wait for the right moment and do it; the victim is the last rank, or the one that seals a checkpoint."""
    wait_for(lambda: job.step() >= FAULT_AT, job, 240)
    if kind == "killed":
        job.rank_process(job.ranks - 1).kill()
    elif kind == "stopped":
        job.rank_process(job.ranks - 1).send_signal(signal.SIGSTOP)
    elif kind == "killed while saving":
        victim = job.rank_process(0)
        wait_for(lambda: any(save_dir.glob(".*.saving")), job, 60, every=0.0005)
        victim.kill()
    elif kind == "disk full":
        disk = os.statvfs(save_dir)
        (save_dir / "filler").write_bytes(b"x" * max(0, disk.f_bavail * disk.f_frsize - 200_000))


@contextmanager
def disk(small: bool, folder: Path) -> Iterator[Path]:
    """Where checkpoints go: a folder, or a file system of its own that can be filled."""
    folder.mkdir(parents=True)
    if small:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        if small:
            subprocess.run(["umount", str(folder)], check=True)


def losses(output: Path) -> dict[int, float]:
    _, steps, _ = read_metrics(output / "metrics.jsonl")
    return {record["step"]: record["loss"] for record in steps}


def undisturbed(folder: Path, ranks: int) -> dict[int, float]:
    """Losses of a run that nothing happens to."""
    output = folder / f"whole{ranks}"
    job = Job(output, ranks, output / "checkpoints")
    try:
        if job.process.wait(400) != 0:
            raise RuntimeError(f"the undisturbed run failed; see {job.log}\n{job.log.read_text()[-3000:]}")
    finally:
        job.end()
    return losses(output)


def try_fault(folder: Path, ranks: int, kind: str, whole: dict[int, float]) -> dict[str, Any]:
    """One fault and the resume after it; the result says what held."""
    name = f"{kind.replace(' ', '_')}{ranks}"
    output = folder / name
    with disk(kind == "disk full", folder / f"{name}-disk") as save_dir:
        job = Job(output, ranks, save_dir)
        try:
            strike(job, kind, save_dir)
            begin = time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                job.process.wait(LIMIT)
            seconds = time.monotonic() - begin
            ended = job.process.poll() is not None
            time.sleep(0.5)
            orphans = len(job.left()) if ended else None
        finally:
            job.end()
        said = job.log.read_text(errors="replace")
        reached = max(losses(output))
        latest = (save_dir / "latest").read_text()
        with suppress(FileNotFoundError):
            (save_dir / "filler").unlink()
        again = Job(output, ranks, save_dir)
        try:
            code = again.process.wait(400)
        finally:
            again.end()
    found = re.search(rf"(Scape\w+Error|ScapeRankLost|pretrain.py: error): .*{SAYS[kind]}.*", said)
    resumed = losses(output) if code == 0 else {}
    return {
        "fault": kind,
        "ranks": ranks,
        "ended": ended,
        "seconds": round(seconds, 1),
        "orphans": orphans,
        "error": found.group(0)[:300] if found else None,
        "at_step": reached,
        "resumed_from": latest,
        "resume_equals_undisturbed": resumed == whole,
        "log": said[-4000:] if not found else "",
    }


def holds(result: dict[str, Any]) -> bool:
    """Whether a fault ended as it should."""
    in_time = result["ended"] and result["seconds"] <= LIMIT and result["orphans"] == 0
    return bool(in_time and result["error"] and result["resume_equals_undisturbed"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evals.faults", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--output", type=Path, default=ROOT / "evals" / "results" / "faults.json")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="scape-faults-") as folder:
        for ranks in args.ranks:
            whole = undisturbed(Path(folder), ranks)
            for kind in args.only:
                results.append(try_fault(Path(folder), ranks, kind, whole))
                print(json.dumps(results[-1]), flush=True)
    report = {**provenance(), "limit_s": LIMIT, "timeout_s": TIMEOUT, "runs": results}
    write(args.output, json.dumps(report, indent=1) + "\n")
    if not all(map(holds, results)):
        sys.exit("evals.faults: not every fault ended as it should")


if __name__ == "__main__":
    main()
