"""What SCAPE would do on your cluster: step time, bytes, memory, and the bandwidth where it stops to pay.

    python -m deepspeed_scape.plan --params 1.8e9 --gpus-per-node 1 --nodes 32 --bandwidth 200Gbit --latency 5us \\
        --compute-ms 900 --dtype bf16
    python -m deepspeed_scape.plan --from-run runs/mine/metrics.jsonl --nodes 8 --bandwidth 10Gbit --json
    python -m deepspeed_scape.plan ... --sweep bandwidth --plot plan.png

docs/planner.md tells what the model assumes and how it was checked.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

try:
    from rich.console import Console

    from deepspeed_scape.plan.measured import read_run
    from deepspeed_scape.plan.options import add_arguments, checked
    from deepspeed_scape.plan.report import answer, plot, show
except ModuleNotFoundError as error:
    missing = str(error.name).partition(".")[0]
    if missing not in ("rich", "pydantic"):
        raise
    needed = "pip install 'rich>=13,<16' 'pydantic>=2,<3'"  # as in setup.cfg; all that the planner needs
    sys.exit(f"deepspeed_scape.plan: {sys.executable} has no {missing}. Remedy: {needed}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed_scape.plan",
        usage="%(prog)s --params N --nodes N --bandwidth B --compute-ms T [options]; --help lists them",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.add_argument("--from-run", type=Path, metavar="FILE", help="params, dtype, compute time from metrics.jsonl")
    parser.add_argument("--json", action="store_true", help="print JSON (seconds, bytes) instead of the table")
    parser.add_argument("--sweep", choices=["nodes", "bandwidth"], help="draw step times along it")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help="default: plan-nodes.png and so on")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    given = vars(parser.parse_args(argv))
    run, as_json, over, path = (given.pop(name) for name in ("from_run", "json", "sweep", "plot"))
    try:
        if path is not None and over is None:
            raise ValueError(f"--plot {path}: goes with --sweep nodes or --sweep bandwidth")
        measured = read_run(run, given["compute_ms"] is not None) if run else {}
        options = checked(measured | {name: value for name, value in given.items() if value is not None})
        found = answer(options)
        if over:
            path = path or Path(f"plan-{over}.png")
            plot(options, over, path)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        show(options, found, Console(width=None if sys.stdout.isatty() else 140))
        if over:
            print(f"{path} drawn")


if __name__ == "__main__":
    main()
