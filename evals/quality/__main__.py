"""The quality proof: tuned dense training against SCAPE, ablations, ballots, a larger model (see evals/README.md).

    python -m evals.quality --corpus ../shared/data/corpus                    # all of it; goes on where it was
    python -m evals.quality --only main ballots --budget-minutes 60           # what fits into an hour, then saves
    python -m evals.quality --plan                                            # what remains, and how long it takes
    python -m evals.quality --table                                           # tables of what has finished

Finished runs are evals/results/quality/NAME.json; one that was stopped goes on from RUNS/NAME.pt on this machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from evals.files import write
from evals.quality.groups import GROUPS, MOST_RATES, Entry
from evals.quality.one import HELD_OUT, prepare
from evals.quality.results import Results
from evals.quality.spec import ROOT
from evals.quality.sweep import Sweep
from evals.quality.table import group_table

REPORT = ROOT / "evals" / "results" / "quality.md"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m evals.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", nargs="+", default=[str(ROOT.parent / "shared" / "data" / "corpus")])
    parser.add_argument(
        "--held-out", nargs="+", default=HELD_OUT, metavar="NAME", help="texts of the corpus that only the end reads"
    )
    parser.add_argument(
        "--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP", help=", ".join(GROUPS)
    )
    parser.add_argument("--budget-minutes", type=float, default=float("inf"), help="stop after so long; runs are saved")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--prefix", default="", help="command put before each run's, such as a lock to hold")
    parser.add_argument(
        "--slice-minutes", type=float, default=float("inf"), help="let go of the prefix's lock after so long"
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "quality", help="checkpoints and logs")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "cache", help="token files")
    parser.add_argument("--plan", action="store_true", help="list what remains and estimate the time; run nothing")
    parser.add_argument("--table", action="store_true", help="write the tables; run nothing")
    return parser.parse_args(argv)


def plan(groups: list[str], parallel: int) -> list[str]:
    """What remains of each group, with an estimate of the time; runs that two groups share are counted once."""
    results, lines, counted, total = Results(), [], set[str](), 0.0
    for group in groups:
        lines.append(f"{group}:")
        for entry in GROUPS[group]:
            runs, seconds = _remaining(entry, results, counted)
            total += seconds
            lines.append(f"  {entry.name:48} {len(results.finals(entry))}/{len(entry.seeds)} seeds   {runs}")
    lines.append(f"about {total / 3600 / parallel:.1f} h with {parallel} at a time ({total / 3600:.1f} h of one core)")
    return lines


def _remaining(entry: Entry, results: Results, counted: set[str]) -> tuple[str, float]:
    """Words and seconds for what an entry still needs; the seeds count too while the rate is being tuned."""
    ready = [spec for spec in results.remaining(entry) if spec.name not in counted]
    counted.update(spec.name for spec in ready)
    seconds = sum(results.seconds(spec) for spec in ready)
    if results.chosen_rate(entry) is not None:
        return (f"{len(ready)} runs, {seconds / 60:.0f} min" if ready else "done"), seconds
    later = len(entry.seeds) * results.seconds(entry.run(1.0, 1))
    seconds += later
    what = (
        f"rates {', '.join(f'{spec.lr:g}' for spec in ready)}"
        if ready
        else f"waits for {entry.rate_of.name}"
        if entry.rate_of
        else "tuning"
    )
    return f"{what} (of at most {MOST_RATES}), then the seeds: {seconds / 60:.0f} min", seconds


def write_tables(groups: list[str]) -> None:
    """evals/results/quality.md, and the same on the screen."""
    results = Results()
    parts, waiting = [], []
    for group in groups:
        if any(results.finals(entry) for entry in GROUPS[group]):
            parts += [f"## {group}", "", *group_table(group, results), ""]
        else:
            waiting.append(group)
    if waiting:
        parts += [f"No seed finished yet: {', '.join(waiting)} (`python -m evals.quality --plan`).", ""]
    text = "\n".join(["# Quality: `python -m evals.quality --table`", "", *parts])
    write(REPORT, text)
    print(text)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.plan:
        print("\n".join(plan(args.only, args.parallel)))
        return 0
    if args.table:
        write_tables(list(GROUPS))
        return 0
    try:
        key = prepare(args.corpus, args.held_out, args.cache)
    except (ValueError, OSError) as error:
        sys.exit(f"evals.quality: error: {error}")
    entries = [entry for group in args.only for entry in GROUPS[group]]
    if foreign := Results().other_texts(key):
        sys.exit(
            f"evals.quality: error: --corpus {' '.join(args.corpus)}: {len(foreign)} finished runs, such as "
            f"{foreign[0]}, are of another text. Remedy: move evals/results/quality away, or give the corpus they "
            "were made with"
        )
    sweep = Sweep(
        entries=entries,
        cache=args.cache,
        key=key,
        runs=args.runs,
        parallel=args.parallel,
        prefix=args.prefix,
        slice_minutes=args.slice_minutes,
    )
    well = sweep.work(args.budget_minutes, lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", flush=True))
    write_tables(list(GROUPS))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
