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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from evals.files import write
from evals.launched import LaunchedJob
from evals.provenance import provenance
from launch.metrics import read_metrics

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


def launch(output: Path, ranks: int, save_dir: Path) -> LaunchedJob:
    """The tiny preset, saving now and then, with errors instead of hangs."""
    return LaunchedJob(output, ranks, [
        "--deepspeed_config", "ds_configs/zero2_scape90_fp32.json", "--data", "embedded", "--eval-every", "0",
        "--eval-batches", "2", "--log-every", "1", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY),
        "--timeout", str(TIMEOUT), "--save-dir", str(save_dir), "--set", "optimizer.params.warmup_steps=0",
    ])  # fmt: skip


def strike(job: LaunchedJob, kind: str, save_dir: Path) -> None:
    """Wait for the right moment and do it; the victim is the last rank, or the one that seals a checkpoint."""
    job.wait_for(lambda: job.step() >= FAULT_AT, 240)
    if kind == "killed":
        job.rank_process(job.ranks - 1).kill()
    elif kind == "stopped":
        job.rank_process(job.ranks - 1).send_signal(signal.SIGSTOP)
    elif kind == "killed while saving":
        victim = job.rank_process(0)
        job.wait_for(lambda: any(save_dir.glob(".*.saving")), 60, every=0.0005)
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
    job = launch(output, ranks, output / "checkpoints")
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
        job = launch(output, ranks, save_dir)
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
        again = launch(output, ranks, save_dir)
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
