"""The first result: `small` on public-domain novels, dense AdamW and AdamS against SCAPE 90% and 99%.

    python -m evals.first_result --corpus ../shared/data/corpus        # about an hour on 2 cores; goes on where it was
    python -m evals.first_result --table                               # only the table, from finished runs

Every run is a real `deepspeed` launch of launch/pretrain.py on 2 CPU ranks: same model, seed, data order and number of
steps. Each method's learning rate is chosen by the training loss over the last quarter of the run. No window of text is
seen twice within those steps, so that is a loss on unseen text, and the held-out novels are never used for the choice.
Reported: the validation loss on two held-out novels at the chosen rate. Writes evals/results/first_result.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.provenance import provenance
from launch.children import run_command
from launch.metrics import read_metrics
from launch.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evals" / "results"
RANKS = 2
HELD_OUT = ("pride-and-prejudice", "the-adventures-of-sherlock-holmes")


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table: a shipped configuration and the learning rates tried, the likeliest first."""

    name: str
    config: str
    rates: tuple[float, ...]
    density: float = 1.0


METHODS = (  # the likeliest rate first
    Method(name="AdamW, dense ZeRO-2", config="zero2_adamw_fp32", rates=(2e-3, 1e-3, 4e-3)),
    Method(name="AdamS, dense ZeRO-2", config="zero2_adams_fp32", rates=(5e-4, 2.5e-4, 1e-3)),
    Method(name="SCAPE 90%", config="zero2_scape90_fp32", rates=(5e-4, 1e-3, 2e-3), density=0.1),
    Method(name="SCAPE 99%", config="zero2_scape99_fp32", rates=(5e-4, 1e-3, 2.5e-4), density=0.01),
)


def in_order() -> list[tuple[Method, float]]:
    """Every method at its likeliest rate, then the other rates: dense methods first, then the sparsest."""
    others = [(method, rate) for method in METHODS for rate in method.rates[1:]]
    others.sort(key=lambda run: (run[0].density < 1, run[0].density))
    return [(method, method.rates[0]) for method in METHODS] + others


def folder_of(method: Method, rate: float, args: argparse.Namespace) -> Path:
    return args.runs / f"{method.config}-{rate:g}-seed{args.seed}"


def train(method: Method, rate: float, args: argparse.Namespace) -> None:
    """One run, unless it has finished before; a killed one resumes from its checkpoint."""
    output = folder_of(method, rate, args)
    if summary_of(output):
        return
    print(f"{method.name}, lr {rate:g} -> {output}", flush=True)
    command = [
        str(Path(sys.executable).with_name("deepspeed")),
        *("--num_gpus", str(RANKS), "--master_port", str(free_port())),
        str(ROOT / "launch" / "pretrain.py"),
        *("--deepspeed_config", str(ROOT / "ds_configs" / f"{method.config}.json")),
        *("--preset", args.preset, "--data", str(args.corpus), "--val", *HELD_OUT),
        *("--steps", str(args.steps), "--lr", str(rate), "--lr-schedule", "cosine", "--lr-warmup", "100"),
        *("--eval-every", "1000", "--eval-batches", "200", "--log-every", "4", "--save-every", "2000"),
        *("--seed", str(args.seed), "--output", str(output)),
        *(("--set", "optimizer.params.warmup_steps=0") if method.density < 1 else ()),  # as when it was measured
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    status = run_command(command, env, output / "log.txt")
    if status or not summary_of(output):
        sys.exit(f"{method.name}, lr {rate:g} ended with status {status}; see {output / 'log.txt'}")


def summary_of(output: Path) -> dict[str, Any] | None:
    path = output / "metrics.jsonl"
    return read_metrics(path)[2] if path.exists() else None


def measured(method: Method, rate: float, args: argparse.Namespace) -> dict[str, Any] | None:
    """What one finished run says, or None."""
    path = folder_of(method, rate, args) / "metrics.jsonl"
    if not path.exists():
        return None
    config, steps, summary = read_metrics(path)
    if summary is None:
        return None
    last_quarter = [s["loss"] for s in steps if s["step"] > 0.75 * summary["steps"]]
    validations = [s for s in steps if s.get("val_loss") is not None]
    return {
        "method": method.name,
        "lr": rate,
        "tuning_loss": statistics.fmean(last_quarter),
        "val_loss": summary["final_val_loss"],
        "best_val_loss": summary["best_val_loss"],
        "bytes_per_step": summary["bytes_per_step"],
        "step_ms": summary["step_ms"],
        "steps": summary["steps"],
        "visits": summary["steps"] * method.density,
        "params": summary["params"],
        "tokens": summary["tokens"],
        "curve": [[s["step"], s["val_loss"]] for s in validations],
        "commit": config.get("git_commit"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The chosen run of each method, in Markdown."""
    best = {row["method"]: row for row in sorted(rows, key=lambda r: -r["tuning_loss"])}  # the lowest comes last
    dense = min(row["val_loss"] for name, row in best.items() if "dense" in name)
    adamw = next((row["bytes_per_step"] for name, row in best.items() if name.startswith("AdamW")), None)
    lines = [
        "| method | lr (of those tried) | val loss, nats/token | to the better dense run | visits | bytes/step/rank |",
        "|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        row = best.get(method.name)
        if row is None:
            continue
        tried = ", ".join(f"{r['lr']:g}" for r in sorted(rows, key=lambda r: r["lr"]) if r["method"] == method.name)
        share = "" if adamw is None else f" ({row['bytes_per_step'] / adamw:.1%})"
        lines.append(
            f"| {method.name} | {row['lr']:g} ({tried}) | {row['val_loss']:.4f} | {row['val_loss'] / dense - 1:+.2%} | "
            f"{row['visits']:.0f} | {row['bytes_per_step']:,.0f}{share} |"
        )
    return "\n".join(lines)


def write(args: argparse.Namespace) -> None:
    rows = [row for m in METHODS for rate in m.rates if (row := measured(m, rate, args))]
    if not rows:
        return
    RESULTS.mkdir(exist_ok=True)
    result = {"provenance": provenance(), "arguments": {k: str(v) for k, v in vars(args).items()}, "runs": rows}
    stem = "first_result" if args.seed == 0 else f"first_result-seed{args.seed}"
    (RESULTS / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / f"{stem}.md").write_text(table(rows) + "\n")
    print(table(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=ROOT.parent / "shared" / "data" / "corpus")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "first_result")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="write the table of what has finished, and train nothing")
    args = parser.parse_args()
    if not args.table:
        for method, rate in in_order():
            train(method, rate, args)
            write(args)
    write(args)


if __name__ == "__main__":
    main()
