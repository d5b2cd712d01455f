"""Check a launch before anything starts.

    python launch/preflight LAUNCHER [options] [SCRIPT ...]

The launch scripts call it: the report goes to standard error, and shell settings for the script to standard output.
Exits with status 2 if something is wrong.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # run as a folder, which would be the first entry

from launch.preflight.options import parse  # noqa: E402

BEGUN = "checking     job, options, configuration, programs, nodes; on a busy machine up to a minute\n"


def main() -> None:
    launcher, options = parse(sys.argv[1:])  # whose --help needs Python alone
    if find_spec("psutil") is None:  # DeepSpeed needs it too
        remedy = "activate the environment that has, or set PYTHON"
        print(f"wrong        PYTHON={sys.executable}: it has no DeepSpeed; {remedy}", file=sys.stderr)
        sys.exit(2)
    from launch.preflight.findings import Findings
    from launch.preflight.plans import make_plan

    sys.stderr.write(BEGUN)
    findings = Findings()
    settings = make_plan(launcher, options, findings)
    sys.stderr.write(findings.report())
    if findings.wrong:
        sys.exit(2)
    sys.stdout.write(settings.text())


if __name__ == "__main__":
    main()
