"""One `deepspeed` launch of launch/pretrain.py as a proof watches it: its ranks' processes, its progress, its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from launch.children import end_tree
from launch.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
TAG = "SCAPE_EVALS_TAG"


class LaunchedJob:
    """A launch of the tiny preset on CPUs, every process of it marked by a tag in its environment.

    Attributes:
        output: the job's --output.
        log: what the launch printed, in a file beside it.
        process: the launcher.
    """

    def __init__(self, output: Path, ranks: int, arguments: Sequence[str]) -> None:
        self.output, self.ranks, self.tag = output, ranks, uuid.uuid4().hex
        self.log = output.with_suffix(f".{self.tag[:6]}.log")
        command = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(ranks)]
        command += ["--master_port", str(free_port()), "launch/pretrain.py", "--preset", "tiny", *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), TAG: self.tag}
        output.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                [*command, "--output", str(output)], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def step(self) -> int:
        """The newest step in the records, 0 before the first."""
        newest = 0
        with suppress(OSError, ValueError):  # a last line may be half there
            for line in (self.output / "metrics.jsonl").read_text().splitlines():
                newest = max(newest, json.loads(line).get("step", 0))
        return newest

    def rank_process(self, rank: int) -> psutil.Process:
        """Raises RuntimeError if there is none."""
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
                if process.environ().get(TAG) == self.tag and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_for(self, condition: Callable[[], bool], seconds: float, every: float = 0.1) -> None:
        """Raises RuntimeError if the launch ends, or so many seconds pass, before ``condition()`` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the job did not come that far; see {self.log}")
            time.sleep(every)

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            end_tree(self.process)
        for process in self.left():
            with suppress(psutil.Error):
                process.kill()
