"""How many dense steps come first, against how long the rate warms up: the training loss of a run's first steps.

    python -m evals.quality.early --corpus ../shared/data/corpus

A run that goes off does so in its first 500 steps and keeps the distance to its end (evals/results/quality.md), so
1,500 steps of each cell tell: 8 min on 2 cores. One seed, which is not the tuning one; evals/results/early.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from pathlib import Path

import torch

from evals.files import grid, write
from evals.provenance import provenance
from evals.quality.groups import ADAMS, SCAPE90, SCAPE99, SEEDS, Entry
from evals.quality.job import Job
from evals.quality.one import HELD_OUT, prepare
from evals.quality.spec import ROOT, RunSpec
from launch.tokens import open_tokens

STEPS, LAST = 1500, 500
LR_WARMUPS = (10, 100, 400, 1000)
Cell = tuple[str, int, RunSpec]  # row, steps over which the rate warms up, the run


def cells() -> list[Cell]:
    """What is run, row by row."""

    def row(title: str, entry: Entry, lr: float, **options: int) -> list[Cell]:
        spec = entry.run(lr, SEEDS[0])
        spec = spec.model_copy(update={"overrides": {**spec.overrides, **options}})
        return [(f"{title}, lr {lr:g}", warm_up, spec) for warm_up in LR_WARMUPS]

    found = row("AdamS", ADAMS, 7.07e-4)
    for steps in (0, 25, 100):
        found += row(f"SCAPE 99%, {steps} dense steps first", SCAPE99, 7.07e-4, warmup_steps=steps)
    for steps in (0, 10, 20, 100):
        found += row(f"SCAPE 90%, {steps} dense steps first", SCAPE90, 1e-3, warmup_steps=steps)
    return found


def loss_of(cell: Cell, cache: Path, key: str) -> float:
    """Mean training loss of the last LAST of STEPS steps."""
    torch.set_num_threads(1)
    _, warm_up, spec = cell
    job = Job(spec, open_tokens(cache, key), lr_warmup=warm_up)
    job.train(eval_every=spec.steps, stop=lambda: job.step >= STEPS)
    return statistics.fmean(job.history.losses[-LAST:]) if not job.diverged else float("inf")


def table(found: dict[str, dict[int, float]]) -> list[str]:
    """Markdown: a row for each number of dense steps, a column for each warm-up of the rate."""
    rows = [(title, *(f"{losses[n]:.3f}" for n in LR_WARMUPS)) for title, losses in found.items()]
    return grid(("", *(f"{n} steps" for n in LR_WARMUPS)), rows).splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m evals.quality.early", description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", nargs="+", default=[str(ROOT.parent / "shared" / "data" / "corpus")])
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "cache", help="token files")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, one thread each")
    args = parser.parse_args()
    key, every = prepare(args.corpus, HELD_OUT, args.cache), cells()
    found: dict[str, dict[int, float]] = {}
    with multiprocessing.get_context("spawn").Pool(args.parallel) as pool:
        runs = [pool.apply_async(loss_of, (cell, args.cache, key)) for cell in every]
        for (title, warm_up, _), run in zip(every, runs, strict=True):
            found.setdefault(title, {})[warm_up] = loss = run.get()
            print(f"{title}, rate warms up over {warm_up}: {loss:.3f}", flush=True)
    facts = provenance()
    head = f"Training loss, nats a token, mean of steps {STEPS - LAST + 1:,} to {STEPS:,}, by the warm-up of the rate."
    made = f"`python -m evals.quality.early`, commit {facts['commit']}, {facts['date']}, {facts['hardware']}."
    foot = f"`small`, 2 ranks, seed {SEEDS[0]}. {made}"
    results = ROOT / "evals" / "results"
    write(results / "early.json", json.dumps({"found": found, "provenance": facts}, indent=1) + "\n")
    write(results / "early.md", "\n".join([head, "", *table(found), "", foot, ""]))


if __name__ == "__main__":
    main()
