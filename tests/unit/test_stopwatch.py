"""Laps on a CPU, and on a GPU (with stand-ins for its events) only from steps that the device has finished."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_scape import stopwatch
from deepspeed_scape.stopwatch import Stopwatch


class Device:
    """Events that pass one after the other, 1 ms apart, when `done` says so."""

    def __init__(self) -> None:
        self.recorded, self.done = 0, 0

    def event(self) -> Any:
        self.recorded += 1
        return Event(self, self.recorded)


class Event:
    def __init__(self, device: Device, at: int) -> None:
        self.device, self.at = device, at

    def query(self) -> bool:
        return self.at <= self.device.done

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query(), "would raise on a GPU"
        return float(other.at - self.at)


def test_a_cpu_tells_the_running_step() -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.restart()
    for name in ("a", "b", "a"):
        watch.lap(name)
    assert list(watch.read()) == ["a", "b"] and all(ms >= 0 for ms in watch.read().values())
    watch.restart()
    assert watch.read() == {}


def test_a_gpu_tells_the_newest_finished_step_and_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(stopwatch, "_event", device.event)
    watch = Stopwatch(torch.device("cuda"))
    assert watch.read() == {}
    watch.restart()
    for name in ("norm", "pack", "norm"):
        watch.lap(name)
    assert watch.read() == {}  # nothing has passed yet
    device.done = device.recorded
    assert watch.read() == {"norm": 2.0, "pack": 1.0}
    watch.restart()
    watch.lap("reduce")
    assert watch.read() == {"norm": 2.0, "pack": 1.0}  # of the step before
    device.done = device.recorded
    assert watch.read() == {"reduce": 1.0}
    watch.restart()
    assert watch.read() == {"reduce": 1.0}
