"""Start one rank on every host, ask all of them the same thing, and end them whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from evals.network.bystanders import go_first
from evals.network.hosts import Hosts, address
from evals.network.worker import CONTROL
from launch.lifeline import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
PORT = "29500"  # the hosts' own: nothing else is in their namespaces
TAIL = 3000


class RankFailed(RuntimeError):
    """A rank ended, raised, or gave no answer in time; holds the end of what it said."""


class Ranks:
    """One process per host, rank = host number, as a context manager.

    Args:
        hosts: where they run; has to be open for as long as they live.
        logs: folder of each rank's output.
        timeout: seconds that any one answer may take.
    """

    def __init__(self, hosts: Hosts, logs: Path, timeout: float = 300) -> None:
        self.hosts, self.logs, self.timeout = hosts, logs, timeout
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controls: list[Connection] = []

    def __enter__(self) -> Ranks:
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            for rank in range(self.hosts.count):
                self._start(rank)
        except BaseException:
            self.close()
            raise
        return self

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        command = self.hosts.command(rank, [sys.executable, "-m", "evals.network.worker"])
        env = rank_environment(rank, self.hosts.count) | {CONTROL: str(theirs.fileno())}
        with theirs, (self.logs / f"rank{rank}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    preexec_fn=die_with_parent,
                    start_new_session=True,
                )
            )
        go_first(self._processes[-1].pid)
        self._controls.append(Connection(ours.detach()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.ask({"do": "leave"})
        self.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request to all ranks; returns their replies by rank.

        Raises:
            RankFailed: one raised, ended or took longer than the timeout.
        """
        for rank, control in enumerate(self._controls):
            try:
                control.send(request)
            except OSError:
                raise RankFailed(f"rank {rank} has ended\n{self._tail(rank)}") from None
        replies: list[dict[str, Any] | None] = [None] * len(self._controls)
        deadline = time.monotonic() + self.timeout
        while waiting := [c for c, reply in zip(self._controls, replies, strict=True) if reply is None]:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [rank for rank, reply in enumerate(replies) if reply is None]
                raise RankFailed(f"no answer to {request} from ranks {late} after {self.timeout:.0f} s")
            for control in ready:
                rank = self._controls.index(control)  # type: ignore[arg-type]
                replies[rank] = self._receive(rank)
        return [reply for reply in replies if reply is not None]

    def _receive(self, rank: int) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = self._controls[rank].recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self._processes[rank].wait(1)
            status = self._processes[rank].poll()
            raise RankFailed(f"rank {rank} ended with status {status}\n{self._tail(rank)}") from None
        if "error" in reply:
            raise RankFailed(f"rank {rank} failed\n{reply['error']}")
        return reply

    def _tail(self, rank: int) -> str:
        path = self.logs / f"rank{rank}.log"
        return f"--- the end of {path}\n{path.read_text(errors='replace')[-TAIL:]}"

    def close(self) -> None:
        """End every rank that still lives, and return when they are gone."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # each leads a group of its own: whatever it started goes too
        for process in self._processes:
            process.wait()
        for control in self._controls:
            control.close()
        self._processes, self._controls = [], []


def rank_environment(rank: int, world: int, threads: int = 1) -> dict[str, str]:
    """What a rank finds in its environment; this process's own Python path goes along."""
    path: Sequence[str] = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address(0),
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": str(threads),
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }
