"""Downstream tasks on checkpoints, offline, with lm-eval's names and metrics.

    python -m evals.downstream runs/adamw runs/scape99 --data ../shared/data/evals -o runs/downstream

A checkpoint is a run's folder of launch/pretrain.py, its checkpoints folder, one tag of it, or exported fp32 weights
(DeepSpeed's zero_to_fp32.py). The first is what the others are compared with. `evals/tasks/README.md` tells the files.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from evals.downstream import compare, harness
from evals.downstream.checkpoints import Checkpoint, find, load_model, load_tokenizer
from evals.downstream.tasks import FILES, prepare
from evals.provenance import provenance

ROOT = Path(__file__).resolve().parents[2]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m evals.downstream", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "evals", help="the task files")
    parser.add_argument("--tasks", nargs="+", default=list(FILES), choices=list(FILES), metavar="TASK")
    parser.add_argument("--limit", type=int, help="only so many items of each task")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("-o", "--output", type=Path, help="folder for downstream.md and downstream.json")
    parser.add_argument("--preset", help="the model, where the checkpoint does not say")
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: from the run's token cache)")
    parser.add_argument("--cache-dir", type=Path, help="the run's --cache-dir, if it has moved")
    args = parser.parse_args(argv)
    for name in ("limit", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    return args


def named(checkpoints: list[Checkpoint]) -> dict[str, Checkpoint]:
    """The checkpoints by name, numbered where two have the same."""
    names: dict[str, Checkpoint] = {}
    for checkpoint in checkpoints:
        count = sum(name.split(" #")[0] == checkpoint.name for name in names)
        names[checkpoint.name + (f" #{count + 1}" if count else "")] = checkpoint
    return names


def run(args: argparse.Namespace) -> compare.Results:
    """Evaluate every checkpoint. Raises ValueError for what can't be evaluated, before the first one starts."""
    harness.require()
    checkpoints = named([find(path, args) for path in args.checkpoints])
    with tempfile.TemporaryDirectory(prefix="downstream-") as folder:
        harness.go_offline(Path(folder))
        prepare(args.data, args.tasks, Path(folder))
        results: compare.Results = {}
        for name, checkpoint in checkpoints.items():
            print(f"{name}: {checkpoint.preset}, {', '.join(args.tasks)}", file=sys.stderr, flush=True)
            model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
            results[name] = harness.evaluate(
                model,
                tokenizer,
                Path(folder),
                args.tasks,
                seq=checkpoint.seq,
                limit=args.limit,
                batch_size=args.batch_size,
            )
    return results


def write(results: compare.Results, output: Path, args: argparse.Namespace) -> None:
    """downstream.md and downstream.json, each written beside its name and then renamed."""
    output.mkdir(parents=True, exist_ok=True)
    told = {
        "provenance": {**provenance(), "lm_eval": _version()},
        "limit": args.limit,
        "results": compare.plain(results),
    }
    for name, text in (("downstream.md", compare.markdown(results)), ("downstream.json", json.dumps(told, indent=1))):
        unfinished = output / f".{name}"
        unfinished.write_text(text)
        unfinished.replace(output / name)


def _version() -> str:
    from evals.provenance import installed

    return installed("lm_eval")


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    try:
        results = run(args)
    except ValueError as error:
        sys.exit(f"evals.downstream: error: {error}")
    print(compare.markdown(results))
    if args.output:
        write(results, args.output, args)


if __name__ == "__main__":
    main()
