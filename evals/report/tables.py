"""The report's tables, as rows of texts: Markdown and HTML show the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evals.report.figures import Look
from evals.report.runs import Run

Table = tuple[list[str], list[list[str]]]
NONE = "–"


def _shown(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def best_dense(runs: Sequence[Run], steps: int) -> float | None:
    """The lowest final validation loss among the dense runs of as many steps, or None: others compare with nothing."""
    dense = [run for run in runs if run.optimizer.get("type") and not run.method.startswith("SCAPE")]
    losses = [final_val(run) for run in dense if run.steps == steps]
    return min((loss for loss in losses if loss is not None), default=None)


def final_val(run: Run) -> float | None:
    return run.last("val_loss")


def results(runs: Sequence[Run], drawn: Sequence[Look]) -> Table:
    """What came out of each run, and what it cost."""
    head = ["run", "val loss", "to best dense", "train loss", "steps", "tokens", "visits", "kB/step", "MB sent",
            "ms/step", "wall-clock, min"]  # fmt: skip
    rows = []
    for run, look in zip(runs, drawn, strict=True):
        val, wall, sent = final_val(run), run.last("wall_s"), run.last("bytes_cumulative")
        dense = best_dense(runs, run.steps)
        gap = None if val is None or dense is None else val / dense - 1
        rows.append([
            look.label, _shown(val, ".4f"), _shown(gap, "+.2%"), _shown(_tail(run), ".4f"), f"{run.steps:,}",
            _shown(run.last("tokens"), ",.0f"), _shown(run.visits, ",.4g"),
            _shown(_over(run.bytes_per_step, 1e3), ",.1f"), _shown(_over(sent, 1e6), ",.1f"),
            _shown(run.typical("step_ms"), ".1f"), _shown(_over(wall, 60), ".1f"),
        ])  # fmt: skip
    return head, rows


def _tail(run: Run) -> float | None:
    """Mean training loss over the last twentieth of the records: one batch says little."""
    losses = run.values("loss")
    return sum(losses[-max(1, len(losses) // 20) :]) / max(1, len(losses) // 20) if losses else None


def _over(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def settings(runs: Sequence[Run], drawn: Sequence[Look]) -> Table:
    """What each run was: the columns in which none has anything to say are left out."""

    def versions(run: Run) -> dict[str, str]:
        return run.config.get("versions") or {}

    columns: dict[str, Callable[[Run], object]] = {
        "folder or name": lambda r: r.name,
        "parameters": lambda r: f"{r.config['params']:,}" if isinstance(r.config.get("params"), int) else None,
        "ranks": lambda r: r.config.get("world_size"),
        "lr": lambda r: r.lr,
        "seed": lambda r: r.config.get("seed"),
        "ZeRO": lambda r: r.config.get("deepspeed", {}).get("zero_optimization", {}).get("stage"),
        "commit": lambda r: (r.config.get("git_commit") or "")[:7] + ("+" if r.config.get("git_dirty") else ""),
        "started": lambda r: r.config.get("started"),
        "device": lambda r: r.config.get("device"),
        "torch": lambda r: versions(r).get("torch"),
        "deepspeed": lambda r: versions(r).get("deepspeed"),
    }
    told = {name: [tell(run) for run in runs] for name, tell in columns.items()}
    kept = [name for name, values in told.items() if any(value not in (None, "") for value in values)]
    rows = [
        [look.label, *(str(told[name][i]) if told[name][i] not in (None, "") else NONE for name in kept)]
        for i, look in enumerate(drawn)
    ]
    return ["run", *kept], rows


def notes(runs: Sequence[Run], drawn: Sequence[Look]) -> list[str]:
    """One sentence for each thing a reader should know of a run."""
    return [f"{look.label} {note}." for run, look in zip(runs, drawn, strict=True) for note in run.notes]


def markdown(table: Table) -> str:
    """A Markdown table; the first column is text, others are numbers."""
    head, rows = table
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
