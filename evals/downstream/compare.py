"""Tables of downstream results: each checkpoint with standard errors, and paired differences to the first."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evals.downstream.harness import TaskResult

Results = dict[str, dict[str, TaskResult]]  # checkpoint -> task -> result
MEASURES = {"correct": "accuracy", "loglikelihood": "log-likelihood, nats"}


def mean_and_error(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean, and its standard error s / sqrt(n); the error of one item is not a number."""
    n = len(values)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan


def difference(ours: TaskResult, base: TaskResult, measure: str) -> tuple[float, float]:
    """Mean of the differences item by item, and its standard error.

    Raises ValueError if the two did not see the same number of items.
    """
    a, b = getattr(ours, measure), getattr(base, measure)
    if len(a) != len(b):
        raise ValueError(f"paired difference of {len(a)} and {len(b)} items; evaluate both on the same files")
    return mean_and_error(a - b)


def over_tasks(parts: list[tuple[float, float]]) -> tuple[float, float]:
    """The mean over tasks of (mean, standard error), tasks weighing the same."""
    return float(np.mean([m for m, _ in parts])), math.sqrt(sum(e * e for _, e in parts)) / len(parts)


def _cell(value: tuple[float, float], measure: str, *, signed: bool = False) -> str:
    scale, digits = (100, 1) if measure == "correct" else (1, 3)
    mean, error = value[0] * scale, value[1] * scale
    shown = f"{mean:{'+' if signed else ''}.{digits}f}"
    return shown if math.isnan(error) else f"{shown} ± {error:.{digits}f}"


def result_table(results: Results, measure: str) -> str:
    """One row a checkpoint, one column a task: mean ± standard error, accuracies in percent."""
    tasks = list(next(iter(results.values())))
    lines = [f"| {MEASURES[measure]} | {' | '.join(tasks)} | mean |", "|---" * (len(tasks) + 2) + "|"]
    for name, row in results.items():
        cells = [mean_and_error(getattr(row[task], measure)) for task in tasks]
        shown = [_cell(cell, measure) for cell in [*cells, over_tasks(cells)]]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def difference_table(results: Results, measure: str) -> str:
    """Every checkpoint but the first against the first, paired by item; bold where it is over two standard errors."""
    (first, base), *others = results.items()
    tasks = list(base)
    lines = [f"| {MEASURES[measure]} minus {first} | {' | '.join(tasks)} | mean |", "|---" * (len(tasks) + 2) + "|"]
    for name, row in others:
        cells = [difference(row[task], base[task], measure) for task in tasks]
        shown = []
        for cell in [*cells, over_tasks(cells)]:
            text = _cell(cell, measure, signed=True)
            shown.append(f"**{text}**" if abs(cell[0]) > 2 * cell[1] else text)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def harness_table(results: Results) -> str:
    """lm-eval's own metrics, as it names them."""
    lines = ["| checkpoint | task | items | metric | value | stderr | context cut |", "|---" * 7 + "|"]
    for name, row in results.items():
        for task, result in row.items():
            for metric in ("acc", "acc_norm", "perplexity"):
                if metric in result.metrics:
                    error = result.metrics.get(f"{metric}_stderr", math.nan)
                    shown = "" if math.isnan(error) else f"{error:.4f}"
                    value = (
                        f"{result.metrics[metric]:.4f}" if metric != "perplexity" else f"{result.metrics[metric]:.4g}"
                    )
                    lines.append(
                        f"| {name} | {task} | {len(result.correct)} | {metric} | {value} | {shown} | {result.cut:.0%} |"
                    )
    return "\n".join(lines)


def markdown(results: Results) -> str:
    """All tables, with what one has to know to read them."""
    parts = ["# Downstream tasks", "Zero-shot, lm-eval's metrics; mean ± standard error over items.", "## Accuracy, %"]
    parts += [result_table(results, "correct"), "## Log-likelihood of the right answer, nats"]
    parts += [result_table(results, "loglikelihood")]
    if len(results) > 1:
        note = (
            "Paired by item, so what is common to both checkpoints drops out. Bold: over two standard errors, which by "
            "chance alone happens in one comparison of twenty."
        )
        tables = [difference_table(results, measure) for measure in MEASURES]
        parts += ["## Differences to the first checkpoint", note, *tables]
    cut = "`context cut`: share of the requests longer than the model's window; their beginning is left out."
    return "\n\n".join([*parts, "## As lm-eval reports", harness_table(results), cut]) + "\n"


def plain(results: Results) -> dict[str, Any]:
    """The same for a JSON file, without the items."""
    return {
        name: {
            task: {
                "items": len(result.correct),
                "harness": {k: v for k, v in result.metrics.items() if math.isfinite(v)},
                "accuracy": mean_and_error(result.correct),
                "loglikelihood": mean_and_error(result.loglikelihood),
                "context_cut": result.cut,
            }
            for task, result in row.items()
        }
        for name, row in results.items()
    }
