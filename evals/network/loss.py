"""Wall-clock to one validation loss on a slow link: ZeRO-2 AdamW, PowerSGD, SCAPE 90% and 99%.

All four train side by side in one set of processes, block by block, so that whatever else the machine does hits all
alike; only the steps' own time counts, not the evaluations. The target is what ZeRO-2 reaches in `--steps` steps; who
has not reached it by then goes on, up to `LONGEST` times as many. Learning rates are constant after a warm-up, so that
a run's length does not shape its curve; each was chosen by the training loss (evals/first_result.py), not by the
held-out novels that are evaluated here.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, field
from typing import Any

from evals.files import grid, write
from evals.first_result import HELD_OUT
from evals.network.hosts import Hosts
from evals.network.measure import Say, order_of, speed
from evals.network.methods import METHODS
from evals.network.ranks import Ranks
from launch.corpus import from_files
from launch.models import PRESETS
from launch.tokens import prepare_tokens

RATES = {"zero2": 2e-3, "powersgd": 2e-3, "scape90": 5e-4, "scape99": 5e-4}
PRESET, MICRO_BATCH, MBIT, HOSTS = "small", 2, 200.0, 2
BLOCK, EVAL_BATCHES, WARMUP = 100, 50, 100
LONGEST = 3
SEEDS_SAVING = 0.433


@dataclass
class Curve:
    """One method's validation loss along its own training time."""

    method: str
    lr: float
    points: list[tuple[int, float, float]] = field(default_factory=list)  # step, seconds of training, loss

    def reached(self, target: float) -> tuple[int, float] | None:
        """(steps, seconds) to ``target``, interpolated between the two evaluations around it; None: not reached."""
        before: tuple[int, float, float] | None = None
        for step, seconds, loss in self.points:
            if loss <= target:
                if before is None or before[2] <= loss:
                    return step, seconds
                share = (before[2] - target) / (before[2] - loss)
                return round(before[0] + share * (step - before[0])), before[1] + share * (seconds - before[1])
            before = (step, seconds, loss)
        return None


def advance(ranks: Ranks, curve: Curve) -> None:
    """Train one block and evaluate."""
    replies = ranks.ask({"do": "train", "method": curve.method, "steps": BLOCK, "warmup": WARMUP})
    seconds = max(reply["seconds"] for reply in replies) + (curve.points[-1][1] if curve.points else 0.0)
    losses = ranks.ask({"do": "evaluate", "method": curve.method, "batches": EVAL_BATCHES})
    curve.points.append((replies[0]["step"], seconds, statistics.fmean(reply["loss"] for reply in losses)))


def train_all(ranks: Ranks, steps: int, say: Say) -> tuple[list[Curve], float]:
    """Everybody to ``steps`` steps, then the slower learners on. Returns the curves and the target loss."""
    curves = {name: Curve(name, lr) for name, lr in RATES.items()}
    for number in range(-(-steps // BLOCK)):
        for name in order_of(list(curves), number):
            advance(ranks, curves[name])
        say(f"step {(number + 1) * BLOCK}: " + ", ".join(f"{n} {c.points[-1][2]:.3f}" for n, c in curves.items()))
    target = curves["zero2"].points[-1][2]
    for number in range((LONGEST - 1) * (steps // BLOCK)):
        late = [name for name, curve in curves.items() if curve.reached(target) is None]
        if not late:
            break
        for name in late:
            advance(ranks, curves[name])
        say(f"step {steps + (number + 1) * BLOCK}: " + ", ".join(f"{n} {curves[n].points[-1][2]:.3f}" for n in late))
    return list(curves.values()), target


def table(curves: list[Curve], target: float) -> str:
    """Markdown: steps and seconds to the target, and the saving against ZeRO-2."""
    dense = next(curve for curve in curves if curve.method == "zero2").reached(target)
    cells = []
    for curve in curves:
        step, seconds, _ = curve.points[-1]
        rate, ms, found = f"{curve.lr:g}", f"{seconds / step * 1e3:.0f}", curve.reached(target)
        title = METHODS[curve.method].title
        if found is None or dense is None:
            cells.append((title, rate, f"not within {step:,}", f"> {seconds:,.0f}", ms, "-"))
        else:
            saved = "-" if curve.method == "zero2" else f"{1 - found[1] / dense[1]:.1%}"
            cells.append((title, rate, f"{found[0]:,}", f"{found[1]:,.0f}", ms, saved))
    return grid(("method", "lr", "steps", "s", "ms a step", "wall-clock saved against ZeRO-2"), cells)


def run_loss(args: argparse.Namespace, where: dict[str, str], say: Say) -> None:
    """Train, then write loss.json and loss.md.

    Raises:
        ValueError: the corpus has no such folder or held-out novels.
    """
    cache, preset, steps = args.runs / "tokens", PRESETS[PRESET], args.steps or 2000
    key = prepare_tokens(from_files([str(args.corpus)], list(HELD_OUT)), preset.vocab, cache)
    with Hosts(HOSTS) as hosts, Ranks(hosts, args.runs / "logs" / "loss") as ranks:
        start: dict[str, Any] = {"do": "start", "preset": PRESET, "seq": preset.seq, "micro_batch": MICRO_BATCH}
        ranks.ask(start | {"cache": str(cache.resolve()), "tokens_key": key})
        for name, lr in RATES.items():
            ranks.ask({"do": "build", "method": name, "lr": lr, "dense_first": True})
        hosts.shape(MBIT)
        curves, target = train_all(ranks, steps, say)
    result = {"provenance": where, "target": target, "mbit": MBIT, "curves": [vars(curve) for curve in curves]}
    write(args.output / "loss.json", json.dumps(result, indent=1) + "\n")
    note = (
        f"To a validation loss of {target:.4f} nats a token, which ZeRO-2 has after {steps:,} steps; {PRESET}, "
        f"{HOSTS} hosts at {speed(MBIT)}, {MICRO_BATCH} x {preset.seq} tokens a rank and step, one seed. SCAPE's paper "
        f"reported {SEEDS_SAVING:.1%} on its cluster. `{where['command']}`, commit {where['commit']}, "
        f"{where['date']}, {where['hardware']}."
    )
    write(args.output / "loss.md", f"{table(curves, target)}\n\n{note}\n")
    print(table(curves, target))
