"""The report's figures. Each takes runs and gives a matplotlib figure, or None where no run has what it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evals.report.runs import Run, smooth
from evals.report.style import DASHES, FAINT, PARTS, SERIES

WIDTH = 11.0  # inches; the page scales it


@dataclass(frozen=True)
class Axis:
    """An x axis: the key of the rows, a label with the unit, what a value is divided by."""

    key: str
    label: str
    unit: float = 1.0
    log: bool = False


STEPS = Axis("step", "optimizer steps")
WALL = Axis("wall_s", "time in training steps, min", 60.0)
BYTES = Axis("bytes_cumulative", "sent by a rank, MB", 1e6, log=True)


@dataclass(frozen=True)
class Look:
    """How a run is drawn: one colour a method, one dash for each of its runs."""

    colour: str
    dash: Any
    label: str


def looks(runs: Sequence[Run]) -> list[Look]:
    """The look of every run, in order. Methods beyond the colours share the last one."""
    colours, methods, seen = list(SERIES), list(dict.fromkeys(run.method for run in runs)), dict.fromkeys(SERIES, 0)
    found = []
    for run in runs:
        colour = colours[min(methods.index(run.method), len(colours) - 1)]
        found.append(Look(colour, DASHES[seen[colour] % len(DASHES)], label(run, runs)))
        seen[colour] += 1
    return found


def label(run: Run, runs: Sequence[Run]) -> str:
    """The method, with lr and seed where the runs differ in them; the run's name if that is not enough."""

    def describe(one: Run) -> str:
        parts = [one.method]
        if one.lr is not None and len({r.lr for r in runs}) > 1:
            parts.append(f"lr {one.lr:g}")
        if len({r.config.get("seed") for r in runs}) > 1:
            parts.append(f"seed {one.config.get('seed', '?')}")
        return ", ".join(parts)

    text = describe(run)
    return text if sum(describe(other) == text for other in runs) == 1 else run.name


def loss_curves(runs: Sequence[Run], drawn: list[Look]) -> Any:
    """Validation and training loss over steps, wall-clock and bytes sent."""
    import matplotlib.pyplot as plt

    keys = [(k, t) for k, t in (("val_loss", "validation loss"), ("loss", "training loss")) if _any(runs, k, STEPS)]
    axes = [axis for axis in (STEPS, WALL, BYTES) if any(_any(runs, key, axis) for key, _ in keys)]
    if not keys:
        return None
    rows = -(-len(runs) // 3)
    figure, grid = plt.subplots(
        len(keys), len(axes), figsize=(WIDTH, 3.1 * len(keys) + 0.24 * rows), sharey="row", squeeze=False
    )
    for row, (key, title) in zip(grid, keys, strict=True):
        for ax, axis in zip(row, axes, strict=True):
            _draw(ax, runs, drawn, key, axis)
        row[0].set_ylabel(f"{title}, nats/token")
        _limit(row[0], runs, key)
    for ax in [ax for row in grid for ax, axis in zip(row, axes, strict=True) if axis is STEPS]:
        _whole_steps(ax)
    handles = [plt.Line2D([], [], color=look.colour, linestyle=look.dash, label=look.label) for look in drawn]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(3, len(runs)), handlelength=2.8)
    return figure


def _whole_steps(ax: Any) -> None:
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    ax.locator_params(axis="x", nbins=5, integer=True)


def _any(runs: Sequence[Run], key: str, axis: Axis) -> bool:
    return any(run.points(key, axis.key)[0] for run in runs)


def _draw(ax: Any, runs: Sequence[Run], drawn: list[Look], key: str, axis: Axis) -> None:
    for run, look in zip(runs, drawn, strict=True):
        xs, ys = smooth(run.points(key, axis.key), 80)
        few = len(xs) <= 12
        ax.plot([x / axis.unit for x in xs], ys, color=look.colour, linestyle=look.dash, marker="o" if few else "",
                markersize=3.2)  # fmt: skip
    if axis.log and any(x > 0 for run in runs for x in run.points(key, axis.key)[0]):
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.6g}")
    elif not axis.log:
        ax.set_xlim(left=0)
    ax.set_xlabel(axis.label)


def _limit(ax: Any, runs: Sequence[Run], key: str) -> None:
    """Leave out the fall of the first steps, which would flatten everything after it."""
    curves = [smooth(run.points(key, "step"), 80)[1] for run in runs]
    curves = [ys for ys in curves if ys]
    low = min(min(ys) for ys in curves)
    high = max(max(ys[min(len(ys) // 20, len(ys) - 1) :]) for ys in curves)
    ax.set_ylim(low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1))


# name, colour, the keys whose times it adds up
SPLIT = (
    ("forward", ("ms_forward",)),
    ("backward", ("ms_backward",)),
    ("pack", ("scape/ms_accumulate", "scape/ms_pack")),
    ("update", ("scape/ms_update", "scape/ms_scatter")),
    ("select mask", ("scape/ms_select",)),
    ("wait for mask", ("scape/ms_mask_wait",)),
    ("reduce", ("scape/ms_norm", "scape/ms_reduce")),
    ("gather", ("scape/ms_gather",)),
)
REST = "not told apart"


def time_split(run: Run) -> dict[str, float]:
    """Typical milliseconds of each part of a step that the run tells of; the last is what no part accounts for."""
    parts = {name: sum(run.typical(key) or 0.0 for key in keys) for name, keys in SPLIT}
    parts = {name: ms for name, ms in parts.items() if ms > 0}
    whole = run.typical("step_ms")
    if whole is not None:
        parts[REST] = max(0.0, whole - sum(parts.values()))
    return parts


def time_bars(runs: Sequence[Run], drawn: list[Look]) -> Any:
    """One bar a run: where the time of a step goes."""
    import matplotlib.pyplot as plt

    splits = [time_split(run) for run in runs]
    if not any(splits):
        return None
    colours = dict(zip([*(name for name, _ in SPLIT), REST], PARTS, strict=True))
    figure, ax = plt.subplots(figsize=(WIDTH, 1.5 + 0.36 * len(runs)))
    left = [0.0] * len(runs)
    for name, colour in colours.items():
        widths = [split.get(name, 0.0) for split in splits]
        if any(widths):
            ax.barh(range(len(runs)), widths, left=left, color=colour, label=name, height=0.68)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, total in enumerate(left):
        ax.text(total, i, f" {total:.3g}", va="center", color=FAINT)
    ax.set_yticks(range(len(runs)), [look.label for look in drawn])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("median time of a step, ms")
    figure.legend(loc="outside upper center", ncols=9, handlelength=1.0, columnspacing=1.2)
    return figure


def visit_histograms(runs: Sequence[Run], drawn: list[Look]) -> Any:
    """How often elements were synchronised, run by run, on shared axes."""
    import matplotlib.pyplot as plt

    shown = [(run, look) for run, look in zip(runs, drawn, strict=True) if run.visit_bins()[0]]
    if not shown:
        return None
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(WIDTH, 0.4 + 2.5 * rows), sharex=True, sharey=True, squeeze=False
    )
    for ax, (run, look) in zip(grid.flat, shown, strict=False):
        _visits(ax, run, look)
    for ax in list(grid.flat)[len(shown) :]:
        ax.set_visible(False)
    for ax in grid[-1]:
        ax.set_xlabel("visits of an element")
    for row in grid:
        row[0].set_ylabel("share of elements, %")
    return figure


def _visits(ax: Any, run: Run, look: Look) -> None:
    lows, shares = run.visit_bins()
    last = max(i for i, share in enumerate(shares) if share > 0) if any(shares) else 0
    ax.bar(range(last + 1), [100 * share for share in shares[: last + 1]], width=0.86, color=look.colour)
    every = max(1, (last + 1) // 7)
    ax.set_xticks(range(0, len(lows[: last + 1]), every), [f"{low:,}" for low in lows[: last + 1 : every]])
    ax.grid(axis="x", visible=False)
    mean = run.visits
    ax.set_title(look.label + ("" if mean is None else f": mean {mean:.3g}"))


HEALTH = (
    ("scape/grad_norm", "gradient norm that clips", None),
    ("scape/grad_norm_rms", "gradient norm, rms of ranks", None),
    ("scape/residual_norm", "residual norm", None),
    ("scape/mask_overlap", "mask overlap with last step, %", 0.01),
)


def health(runs: Sequence[Run], drawn: list[Look]) -> Any:
    """Norms and mask overlap over steps, one panel a quantity."""
    import matplotlib.pyplot as plt

    panels = [panel for panel in HEALTH if _any(runs, panel[0], STEPS)]
    if not panels:
        return None
    figure, grid = plt.subplots(1, len(panels), figsize=(WIDTH, 2.7), squeeze=False)
    for ax, (key, title, unit) in zip(grid[0], panels, strict=True):
        for run, look in zip(runs, drawn, strict=True):
            xs, ys = smooth(run.points(key, "step"), 60)
            ax.plot(xs, [y / (unit or 1) for y in ys], color=look.colour, linestyle=look.dash)
        ax.set_title(title)
        ax.set_xlabel(STEPS.label)
        ax.set_ylim(0, 1.04 * ax.get_ylim()[1])
        ax.set_xlim(left=0)
        _whole_steps(ax)
    return figure


Maker = Callable[[Sequence[Run], list[Look]], Any]
FIGURES: tuple[tuple[str, str, str, Maker], ...] = (
    ("loss", "Loss over steps, wall-clock and bytes",
     "Lines are means over stretches of the run; the first fall is cut off. Further left is cheaper, lower is better.",
     loss_curves),
    ("time", "Where the time of a step goes",
     "Grey: the model. Orange: the optimizer's own work. Blue: waiting for other ranks. The palest part is what a run "
     "does not tell apart: a dense optimizer's whole step, in older records forward and backward too.", time_bars),
    ("visits", "Visits", "How often an element was synchronised; bins grow by a factor of 1.4.", visit_histograms),
    ("health", "Norms and masks",
     "The residual is what a rank has not sent yet. A mask that never changed would overlap by 100%, a random one by "
     "its density.", health),
)  # fmt: skip
