"""Where the time of a step goes."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Milliseconds of each part of a step. On a GPU it reads nothing, since the host runs ahead of the device."""

    def __init__(self, device: torch.device) -> None:
        self.enabled = device.type == "cpu"
        self.laps: dict[str, float] = {}
        self._since = 0.0

    def restart(self) -> None:
        """Forget the laps of the step before."""
        self.laps = {}
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        """Charge the time since the last call to ``name``."""
        if self.enabled:
            now = time.perf_counter()
            self.laps[name] = self.laps.get(name, 0.0) + (now - self._since) * 1e3
            self._since = now
