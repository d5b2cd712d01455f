"""Do what remains of the sweep: each run in a process of its own, a few at a time, for as long as the budget lasts."""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from evals.quality.groups import Entry
from evals.quality.results import Results
from evals.quality.spec import ROOT, RunSpec
from launch.children import end_tree
from launch.lifeline import die_with_parent

STOPPED = 3  # status of a run that was told to stop and has saved itself
KILLED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # told to stop before it could listen
POLL_S = 2.0
PATIENCE_S = 120.0  # for a run to finish its step and save, when the budget is over


@dataclass(kw_only=True)
class Sweep:
    """Arguments that every run shares.

    Attributes:
        entries: what is wanted, the most important first.
        key: of the token files in ``cache``.
        runs: where checkpoints and logs go.
        parallel: runs at a time.
        prefix: put before each run's command, such as a lock to hold.
        slice_minutes: a run saves itself and ends after so long, and is started again: it lets go of the lock.
    """

    entries: list[Entry]
    cache: Path
    key: str
    runs: Path
    parallel: int
    prefix: str = ""
    slice_minutes: float = math.inf

    def next_run(self, busy: set[str]) -> RunSpec | None:
        """The first run that remains, has not failed and is not under way."""
        results = Results()
        for entry in self.entries:
            for spec in results.remaining(entry):
                if spec.name not in busy:
                    return spec
        return None

    def start(self, spec: RunSpec) -> subprocess.Popen[bytes]:
        """Start one run; its output goes to RUNS/NAME.log."""
        command = [
            *shlex.split(self.prefix),
            *(sys.executable, "-m", "evals.quality.one", spec.model_dump_json(), "--key", self.key),
            *("--cache", str(self.cache), "--checkpoint", str(self.runs / f"{spec.name}.pt")),
            *("--minutes", str(self.slice_minutes)),
        ]
        self.runs.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
        with (self.runs / f"{spec.name}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the sweep, which has its runs save themselves
                preexec_fn=die_with_parent,  # not behind a thread: the sweep has none
            )

    def work(self, minutes: float, say: Callable[[str], None]) -> bool:
        """Run until nothing remains or the time is over. Returns whether every run that was started went well."""
        deadline = time.monotonic() + minutes * 60
        running: dict[str, subprocess.Popen[bytes]] = {}
        failed: set[str] = set()
        try:
            while time.monotonic() < deadline:
                self._reap(running, failed, say)
                while len(running) < self.parallel and (spec := self.next_run(set(running) | failed)):
                    say(f"starts {spec.name}")
                    running[spec.name] = self.start(spec)
                if not running:
                    break
                time.sleep(POLL_S)
        finally:
            _stop(running)
            self._reap(running, failed, say)
        return not failed

    def _reap(self, running: dict[str, subprocess.Popen[bytes]], failed: set[str], say: Callable[[str], None]) -> None:
        done = [name for name, process in running.items() if process.poll() is not None]
        for name in done:
            process = running.pop(name)
            if process.returncode in (STOPPED, *KILLED):
                say(f"stopped {name}; it goes on from its checkpoint")
            elif process.returncode:
                failed.add(name)
                say(f"FAILED {name} with status {process.returncode}; see {self.runs / f'{name}.log'}")
            else:
                say(f"done {name}")


def _stop(running: dict[str, subprocess.Popen[bytes]]) -> None:
    """Have every run save itself and end; one that has not begun to train, such as behind a lock, just ends."""
    for process in running.values():
        for member in _family(process):
            with suppress(psutil.NoSuchProcess):
                if member.name().startswith("python"):
                    member.terminate()
    deadline = time.monotonic() + PATIENCE_S
    for process in running.values():
        with suppress(subprocess.TimeoutExpired):
            if any(member.name().startswith("python") for member in _family(process)):
                process.wait(max(0.1, deadline - time.monotonic()))
        if process.poll() is None:
            end_tree(process)
            process.wait()


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """A started command and what it has started: a lock's process does not hand signals on."""
    try:
        first = psutil.Process(process.pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
