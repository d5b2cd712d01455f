"""Finished runs on disk, and what follows from them: the tuned rate of an entry, and the runs that remain."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from evals.quality.groups import MOST_RATES, TUNING_SEED, Entry, rate
from evals.quality.spec import RESULTS, RunSpec
from launch.models import parameters_of_preset

Result = dict[str, Any]


def final_loss(result: Result) -> float:
    """Validation loss at the end, infinite for a diverged run."""
    return math.inf if result["diverged"] else float(result["val_loss"])


class Results:
    """All finished runs."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self._runs: dict[str, Result] = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}

    def get(self, spec: RunSpec) -> Result | None:
        """What a run gave, or None if it has not finished."""
        return self._runs.get(spec.name)

    def other_texts(self, key: str) -> list[str]:
        """Names of the runs that were made on another text than that of ``key``."""
        return [name for name, run in self._runs.items() if run["data_key"] != key]

    def tuning(self, entry: Entry) -> dict[float, float | None]:
        """Tuning loss of every rate of the entry that the rule of the grid asks for; None for one not run yet."""
        assert entry.middle is not None
        low, high = -1, 1
        while True:
            losses = {place: self._tuning_loss(entry, rate(entry.middle, place)) for place in range(low, high + 1)}
            known = {place: loss for place, loss in losses.items() if loss is not None}
            if len(known) < len(losses) or len(losses) >= MOST_RATES:
                break
            best = min(known, key=known.__getitem__)
            if low < best < high:
                break
            low, high = (low - 1, high) if best == low else (low, high + 1)
        return {rate(entry.middle, place): loss for place, loss in losses.items()}

    def _tuning_loss(self, entry: Entry, lr: float) -> float | None:
        result = self.get(entry.run(lr, TUNING_SEED))
        if result is None:
            return None
        return float("inf") if result["diverged"] else float(result["tuning_loss"])

    def chosen_rate(self, entry: Entry) -> float | None:
        """The best rate by the tuning loss, or None while the grid is not complete."""
        tuned = entry.tuned
        losses = {lr: loss for lr, loss in self.tuning(tuned).items() if loss is not None}
        if len(losses) < len(self.tuning(tuned)):
            return None
        return min(losses, key=losses.__getitem__)

    def remaining(self, entry: Entry) -> Iterator[RunSpec]:
        """Runs that can start now: the rest of the grid, or the seeds at the chosen rate."""
        chosen = self.chosen_rate(entry)
        if chosen is None:
            tuned = entry.tuned
            yield from (tuned.run(lr, TUNING_SEED) for lr, loss in self.tuning(tuned).items() if loss is None)
        else:
            yield from (run for seed in self._wanted(entry, chosen) if self.get(run := entry.run(chosen, seed)) is None)

    def _wanted(self, entry: Entry, lr: float) -> tuple[int, ...]:
        """The fresh seeds of an entry; the first alone until it says whether that is enough, and where it is."""
        if entry.rate_of is None or math.isinf(entry.far):
            return entry.seeds
        ours, theirs = (self.get(one.run(lr, entry.seeds[0])) for one in (entry, entry.rate_of))
        if ours is None or theirs is None or not final_loss(ours) <= final_loss(theirs) + entry.far:
            return entry.seeds[:1]
        return entry.seeds

    def finals(self, entry: Entry) -> list[Result]:
        """The finished runs of the fresh seeds at the chosen rate, by seed."""
        chosen = self.chosen_rate(entry)
        found = [] if chosen is None else [self.get(entry.run(chosen, seed)) for seed in entry.seeds]
        return [result for result in found if result is not None]

    def seconds(self, spec: RunSpec) -> float:
        """How long a run takes: as others of its shape did, or a guess from its size before there are any."""
        shape = ("preset", "world", "micro_batch", "seq")
        wanted = [getattr(spec, key) for key in shape]
        alike = [r["step_ms"] for r in self._runs.values() if [r["spec"][key] for key in shape] == wanted]
        work = self._parameters[spec.preset] * spec.micro_batch * spec.seq
        step_ms = statistics.median(alike) if alike else spec.world * (10 + 2.5e-7 * work)
        return step_ms * 1e-3 * spec.steps

    @cached_property
    def _parameters(self) -> dict[str, int]:
        from evals.quality.groups import GROUPS

        presets = {entry.setting.preset for entries in GROUPS.values() for entry in entries}
        return {preset: parameters_of_preset(preset) for preset in presets}
