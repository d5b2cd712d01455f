"""One training run as the report sees it, wherever it was read from."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Points = tuple[list[float], list[float]]

WARMUP_STEPS = 10  # left out of times


@dataclass
class Run:
    """Rows by step, with the keys of docs/metrics.md; `notes` are what a reader of the report should know of it."""

    name: str
    rows: list[Row]
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = sorted((row for row in self.rows if _number(row.get("step"))), key=lambda row: row["step"])
        _add_sent_bytes(self.rows)

    @property
    def optimizer(self) -> dict[str, Any]:
        section = self.config.get("deepspeed", {}).get("optimizer", {})
        return section if isinstance(section, dict) else {}

    @property
    def method(self) -> str:
        """AdamW, AdamS, SCAPE 99%; the run's own name where no configuration is known."""
        kind, params = self.optimizer.get("type"), self.optimizer.get("params", {})
        if kind is None:
            return self.name
        if str(kind).lower() == "scape":
            return f"SCAPE {100 * params.get('sparsity', 0.99):.4g}%"
        return str(kind)

    @property
    def lr(self) -> float | None:
        return self.optimizer.get("params", {}).get("lr")

    @property
    def steps(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    def values(self, key: str) -> list[float]:
        return [row[key] for row in self.rows if _number(row.get(key))]

    def points(self, key: str, axis: str) -> Points:
        """(x, y) of the rows that have both."""
        pairs = [(row[axis], row[key]) for row in self.rows if _number(row.get(key)) and _number(row.get(axis))]
        return [x for x, _ in pairs], [y for _, y in pairs]

    def last(self, key: str) -> float | None:
        values = self.values(key)
        return values[-1] if values else None

    def typical(self, key: str) -> float | None:
        """Median over the rows after the first steps."""
        values = [r[key] for r in self.rows if r["step"] > WARMUP_STEPS and _number(r.get(key))] or self.values(key)
        return statistics.median(values) if values else None

    @property
    def bytes_per_step(self) -> float | None:
        told = self.summary.get("bytes_per_step")
        sent = self.last("bytes_cumulative")
        if _number(told):
            return float(told)
        return sent / self.steps if sent is not None and self.steps else None

    @property
    def visits(self) -> float | None:
        """Mean visits an element has had: recorded, or steps x density of a run that did not record them."""
        recorded = self.last("scape/visits")
        if recorded is not None or not self.optimizer.get("type"):
            return recorded
        if str(self.optimizer["type"]).lower() != "scape":  # dense: every element, every step
            return float(self.steps)
        params = self.optimizer.get("params", {})
        warm = min(self.steps, params.get("warmup_steps", 0))
        return warm + (self.steps - warm) * (1 - params.get("sparsity", 0.99))

    def visit_bins(self) -> tuple[list[int], list[float]]:
        """(lower ends, shares) of the newest histogram of visits; empty if none was recorded."""
        prefix = "scape/visits_hist_"
        for row in reversed(self.rows):
            bins = {int(k.removeprefix(prefix)): v for k, v in row.items() if k.startswith(prefix) and _number(v)}
            if bins:
                return sorted(bins), [bins[low] for low in sorted(bins)]
        return [], []


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _add_sent_bytes(rows: list[Row]) -> None:
    """`bytes_cumulative` of older records: `bytes_sent` is the mean over the steps since the record before."""
    total, before = 0.0, 0
    for row in rows:
        if _number(row.get("bytes_cumulative")):
            total = row["bytes_cumulative"]
        elif _number(row.get("bytes_sent")):
            total += row["bytes_sent"] * (row["step"] - before)
            row["bytes_cumulative"] = total
        before = row["step"]


def smooth(points: Points, count: int) -> Points:
    """Means over so many stretches of equal length; the points themselves where there are fewer."""
    xs, ys = points
    if len(xs) <= count:
        return points
    edges = [round(i * len(xs) / count) for i in range(count + 1)]
    pieces = list(zip(edges, edges[1:], strict=False))
    return [statistics.fmean(xs[a:b]) for a, b in pieces], [statistics.fmean(ys[a:b]) for a, b in pieces]
