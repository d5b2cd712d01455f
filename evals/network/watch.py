"""What runs when inside a step of one rank: spans of time, and the flight of the mask gather.

Seconds of `time.perf_counter`, which all processes of a machine share, so that ranks can be drawn side by side.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

Span = tuple[str, float, float]  # name, begin, end


class FlyingWork:
    """A work of torch.distributed, waited for by a thread of its own, which notes when it has ended."""

    def __init__(self, work: Any, landed: Any) -> None:
        self._work, self._landed = work, landed
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._landed(time.perf_counter())

    def wait(self, *args: Any) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


class StepWatch:
    """Notes forward, backward, every lap of the optimizer's stopwatch and each mask gather, of one SCAPE engine."""

    def __init__(self, engine: Any) -> None:
        self.spans: list[Span] = []
        self.gathers: list[dict[str, float]] = []  # begin, landed, asked (wait entered), got (wait left)
        self._optimizer = engine.optimizer
        self._watch_laps()
        self._watch_mask()

    def span(self, name: str) -> Any:
        """Context manager around a part of the step."""
        return _Timed(name, self.spans)

    def _watch_laps(self) -> None:
        watch, stock = self._optimizer.stopwatch, self._optimizer.stopwatch.lap

        def lap(name: str) -> None:
            begin = watch._since
            stock(name)
            self.spans.append((name, begin, watch._since))

        watch.lap = lap

    def _watch_mask(self) -> None:
        exchange = self._optimizer.exchange
        start, wait = exchange.start_mask_gather, exchange.wait_mask

        def start_mask_gather(own: Any) -> None:
            gather = {"begin": time.perf_counter(), "landed": 0.0, "pending": 0.0}
            start(own)
            works, gathered = exchange._in_flight
            gather["pending"] = len(works)

            def landed(when: float) -> None:
                gather["landed"] = max(gather["landed"], when)

            exchange._in_flight = ([FlyingWork(work, landed) for work in works], gathered)
            self.gathers.append(gather)

        def wait_mask() -> Any:
            asked = time.perf_counter()
            received = wait()
            self.gathers[-1] |= {"asked": asked, "got": time.perf_counter()}
            return received

        exchange.start_mask_gather, exchange.wait_mask = start_mask_gather, wait_mask


class _Timed:
    def __init__(self, name: str, spans: list[Span]) -> None:
        self.name, self.spans, self.record = name, spans, record_function(name)

    def __enter__(self) -> None:
        self.record.__enter__()
        self.begin = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        self.spans.append((self.name, self.begin, time.perf_counter()))
        self.record.__exit__(*error)


def profiler(trace: Path | None) -> AbstractContextManager[Any]:
    """torch's profiler on the CPU, or nothing."""
    return profile(activities=[ProfilerActivity.CPU]) if trace is not None else nullcontext()
