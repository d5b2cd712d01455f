"""Where the time of a step goes."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Milliseconds of each part of a step, without ever making the host wait.

    On a CPU the laps are those of the running step. On a GPU, where the host runs ahead, each lap is an event in the
    compute stream, and :meth:`read` tells the newest step whose events have all passed: usually the one before.

    Attributes:
        laps: on a CPU, ms of each part so far; empty on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled = device.type == "cpu"
        self.laps: dict[str, float] = {}
        self._since = 0.0
        self._timed = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []  # events of this step, the first at its start
        self._before: list[tuple[str, Any]] = []  # of the step before

    def restart(self) -> None:
        """Forget the laps of the step before."""
        self.laps = {}
        if self._timed:
            self._before, self._marks = self._marks, [("", _event())]
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        """Charge the time since the last call to ``name``."""
        if self._timed and self._marks:
            self._marks.append((name, _event()))
        if self.enabled:
            now = time.perf_counter()
            self.laps[name] = self.laps.get(name, 0.0) + (now - self._since) * 1e3
            self._since = now

    def read(self) -> dict[str, float]:
        """Milliseconds of each part of the newest step that the device has finished; asks, and does not wait."""
        for marks in (self._marks, self._before):
            if len(marks) > 1 and marks[-1][1].query():
                laps: dict[str, float] = {}
                for (_, start), (name, stop) in zip(marks, marks[1:], strict=False):
                    laps[name] = laps.get(name, 0.0) + start.elapsed_time(stop)
                return laps
        return dict(self.laps)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
