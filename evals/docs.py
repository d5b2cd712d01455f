"""Fill what a program knows into docs/: under each `$ command` of planner.md what it prints; the table of memory.md;
the measurements of tuning.md.

python -m evals.docs            # writes
python -m evals.docs --check    # fails when the page says something else
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import statistics
import sys
from pathlib import Path

from deepspeed_scape.plan import memory
from deepspeed_scape.plan.__main__ import main as plan
from evals.files import grid, with_section
from evals.quality.groups import COLD99, GROUPS
from evals.quality.results import Results, final_loss

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, MEMORY, TUNING = DOCS / "planner.md", DOCS / "memory.md", DOCS / "tuning.md"
EARLY = DOCS.parent / "evals" / "results" / "early.md"
RANKS = (2, 8, 32)
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
PREFIX = "$ python -m deepspeed_scape.plan "


def printed(command: str) -> str:
    """What the planner prints for a command line, without trailing blanks."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        plan(shlex.split(command.removeprefix(PREFIX)))
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def filled(text: str) -> str:
    """``text`` with every console block run again."""

    def block(match: re.Match[str]) -> str:
        commands = [line for line in match.group(1).splitlines() if line.startswith(PREFIX)]
        return "```console\n" + "\n\n".join(f"{c}\n{printed(c)}" for c in commands) + "\n```"

    return BLOCK.sub(block, text)


def memory_table() -> str:
    """Bytes a parameter and rank, dense and sparse, from the planner."""
    lines = [f"| | {' | '.join(f'W = {ranks}' for ranks in RANKS)} |", "|---|" + "---|" * len(RANKS)]
    for dtype in ("fp32", "bf16"):
        dense = [memory.dense(1, ranks, dtype) for ranks in RANKS]
        lines.append(_line(f"AdamW, ZeRO-1, {dtype}", dense))
        for sparsity in (0.9, 0.99):
            for residual, place in (("fp32", "device"), ("bf16", "device"), ("fp32", "cpu")):
                held = [memory.scape(1, ranks, 1 - sparsity, dtype, residual, place) for ranks in RANKS]
                where = " in host memory" if place == "cpu" else ""
                lines.append(_line(f"SCAPE {sparsity:.0%}, {dtype}, residual in {residual}{where}", held))
    return "\n".join(lines)


def _line(name: str, values: list[float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |"


def dense_steps_table() -> str:
    """Validation loss of SCAPE 99% at one rate by the number of dense steps first, over the fresh seeds."""
    results = Results()
    entries = [entry for entry in GROUPS["warm-up"] if entry.tuned is COLD99]
    finals = {entry.overrides["warmup_steps"]: results.finals(entry) for entry in entries}
    shown = {steps: statistics.fmean(map(final_loss, found)) for steps, found in finals.items() if found}
    losses = ("validation loss", *(f"{loss:.4f}" for loss in shown.values()))
    return grid(("dense steps first", *map(str, shown)), [losses])


def pages() -> dict[Path, str]:
    """Every page that is filled, as it should be."""
    tuning = with_section(TUNING.read_text(), "dense steps", dense_steps_table())
    return {
        PAGE: filled(PAGE.read_text()),
        MEMORY: with_section(MEMORY.read_text(), "memory", memory_table()),
        TUNING: with_section(tuning, "early", EARLY.read_text().strip()) if EARLY.exists() else tuning,
    }


def main() -> None:
    for page, text in pages().items():
        if "--check" not in sys.argv:
            page.write_text(text)
        elif page.read_text() != text:
            sys.exit(f"{page} is out of date: run python -m evals.docs")


if __name__ == "__main__":
    main()
