"""Run a `deepspeed` command and leave no process behind, whatever ends it.

The launcher starts a launcher that starts the ranks; orphaned ranks would keep the port and two cores busy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

GRACE_S = 5.0
WATCH_S = 20.0


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process, its descendants and its process group; kill what is left after a few seconds."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sent)  # the child leads its own group, see run_command
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(sent)  # psutil looks at the start time: never a stranger with the same id
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if process.poll() is not None and not any(m.is_running() for m in family):
                return
            time.sleep(0.1)


def run_command(command: list[str], env: dict[str, str], log: Path, watch: Callable[[], None] | None = None) -> int:
    """Run to the end with all output in `log`; returns the exit status. On an exception (Ctrl-C) ends all of it.

    `watch` is called every 20 seconds in the meantime.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(WATCH_S if watch is not None else None)
                if watch is not None:
                    watch()
        finally:
            if process.poll() is None:
                end_tree(process)
