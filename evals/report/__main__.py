"""A report on training runs, in Markdown and as one HTML file that needs nothing else.

    python -m evals.report runs/first_result -o report/

RUNS are folders of launch/pretrain.py (or a folder of such folders), metrics.jsonl files, offline W&B runs
(wandb/offline-run-*), or what W&B exports: a run's history as CSV or JSON, a panel as CSV. Writes report.html,
report.md and figures/*.svg. docs/metrics.md tells the keys.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("matplotlib") is None:
    sys.exit("evals.report draws with matplotlib, which is not installed: pip install 'deepspeed-scape[plot]'")

from evals.report.page import Report, build, write
from evals.report.sources import read_runs


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evals.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS")
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), help="folder (default: report)")
    parser.add_argument("--title", default="Training runs")
    args = parser.parse_args(argv)
    try:
        report: Report = build(read_runs(args.runs), args.title)
        write(report, args.output)
    except (ValueError, OSError) as error:
        sys.exit(f"evals.report: error: {error}")
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    print(args.output / "report.html")


if __name__ == "__main__":
    main()
