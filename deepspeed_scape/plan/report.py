"""The planner's answer as a table, as JSON and as a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from deepspeed_scape.plan.options import MAX_RANKS, PlanOptions
from deepspeed_scape.plan.step import Prediction, break_even, predict_all
from deepspeed_scape.plan.units import show_bandwidth, show_bytes

SWEEP_BANDWIDTHS = [1e6 * 10 ** (i / 4) for i in range(25)]  # 8 Mbit to 8 Tbit, bytes/s


def answer(options: PlanOptions) -> dict[str, Any]:
    """Everything the table shows, in seconds and bytes; a break-even of None means at every bandwidth."""
    work, cluster = options.workload(), options.cluster()
    rows = predict_all(work, cluster, options.sparsity)
    return {
        "options": options.model_dump(),
        "ranks": cluster.ranks,
        "rows": [_row(row, rows) for row in rows],
        "break_even_bytes_per_s": {
            f"{s:g}": {
                mode: None if math.isinf(x := break_even(work, cluster, s, mode)) else x
                for mode in ("deepspeed", "reduce-scatter")
            }
            for s in options.sparsity
        },
    }


def _row(row: Prediction, rows: Sequence[Prediction]) -> dict[str, Any]:
    return vars(row) | {"speedup": rows[0].step / row.step, "speedup_over_reduce_scatter": rows[1].step / row.step}


def show(options: PlanOptions, found: dict[str, Any], console: Console) -> None:
    """Print the table and the break-even bandwidths."""
    title = (
        f"{options.params:,} parameters, {found['ranks']} ranks, {options.dtype}, "
        f"{show_bandwidth(options.bandwidth)} between nodes"
    )
    console.print(title)
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "step", "compute", "local", "network", "hidden", "sent a rank", "held a rank", "speed-up"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in found["rows"]:
        times = [f"{row[key] * 1e3:,.1f} ms" for key in ("step", "compute", "local", "network", "hidden")]
        speedup = f"{row['speedup']:.2f}x / {row['speedup_over_reduce_scatter']:.2f}x"
        table.add_row(row["name"], *times, show_bytes(row["bytes_sent"]), show_bytes(row["memory"]), speedup)
    console.print(table)
    if pinned := found["rows"][-1]["host_memory"]:
        console.print(f"SCAPE also holds {show_bytes(pinned)} a rank in pinned host memory, and moves it in local work")
    console.print("speed-up: over ZeRO as DeepSpeed runs it / over ZeRO with a true reduce-scatter")
    for sparsity, modes in found["break_even_bytes_per_s"].items():
        said = " / ".join(_below(value) for value in modes.values())
        console.print(f"SCAPE {100 * float(sparsity):g}% is faster {said}")


def _below(value: float | None) -> str:
    if value is None:
        return "at every bandwidth"
    return "at no bandwidth" if value == 0 else f"below {show_bandwidth(value)}"


def sweep(options: PlanOptions, over: str) -> tuple[list[float], list[list[Prediction]]]:
    """Predictions along ``nodes`` (powers of two) or ``bandwidth`` (bytes/s)."""
    if over == "nodes":
        top = MAX_RANKS // options.gpus_per_node
        values: list[float] = [2**i for i in range(13) if 2**i <= top]
        plans = [options.model_copy(update={"nodes": int(v)}) for v in values]
    else:
        values = SWEEP_BANDWIDTHS
        plans = [options.model_copy(update={"bandwidth": v}) for v in values]
    return values, [predict_all(plan.workload(), plan.cluster(), plan.sparsity) for plan in plans]


def plot(options: PlanOptions, over: str, path: Path) -> None:
    """Draw step times along ``over`` into a PNG, SVG or PDF file.

    Raises:
        ValueError: matplotlib is not installed, or the ending is not one it writes.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--sweep draws with matplotlib: pip install 'matplotlib>=3.8,<4'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    values, rows = sweep(options, over)
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for i, first in enumerate(rows[0]):
        style = "--" if first.sparsity == 0 else "-"
        axes.plot([v * 8 / 1e9 if over == "bandwidth" else v for v in values],
                  [row[i].step * 1e3 for row in rows], style, label=first.name)  # fmt: skip
    axes.axhline(options.compute_ms, color="grey", linewidth=0.8, label="compute")
    axes.set(xscale="log", yscale="log", ylabel="step, ms",
             xlabel="nodes" if over == "nodes" else "bandwidth between nodes, Gbit/s")  # fmt: skip
    axes.set_title(f"{options.params:,} parameters, {options.dtype}", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    draft = path.with_name(f".draft-{path.name}")  # keeps its ending, which names the format
    figure.savefig(draft)
    pyplot.close(figure)
    draft.replace(path)
