"""How much processor time others took while a block ran: a figure taken beside a busy neighbour is worth little."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

NICE = -15


def go_first(pid: int) -> None:
    """Let a process have the processors before whatever else runs here, as far as the kernel allows.

    Where the kernel groups processes by session, the niceness of the group decides and not that of the process.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, NICE)
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(NICE))


class Bystanders:
    """Share of the machine's processors that was used by anything but the ranks, between `start` and `share`.

    Counted is user time, of niced processes too, and what the hypervisor gave to other machines (steal). The kernel's
    own time is left out: most of it moves the ranks' packets.

    Args:
        pids: the ranks; this process counts with them.
        times, own: read the machine's and one process's times (a test may give others).
    """

    def __init__(
        self,
        pids: Sequence[int],
        times: Callable[[], Any] = psutil.cpu_times,
        own: Callable[[int], float] = lambda pid: psutil.Process(pid).cpu_times().user,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pids = [*pids, os.getpid()]
        self._times, self._own, self._clock = times, own, clock
        self._cores = os.cpu_count() or 1
        self.start()

    def start(self) -> None:
        """Count from now on."""
        self._begin = self._read()

    def share(self) -> float:
        """The share since `start`, 0 to 1."""
        busy, own, now = (new - old for new, old in zip(self._read(), self._begin, strict=True))
        return max(0.0, busy - own) / max(1e-9, now * self._cores)

    def _read(self) -> tuple[float, float, float]:
        times = self._times()
        busy = times.user + times.nice + getattr(times, "steal", 0.0)
        return busy, sum(self._own(pid) for pid in self._pids), self._clock()
