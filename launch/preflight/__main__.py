"""Check a launch before anything starts.

    python launch/preflight LAUNCHER [options] [SCRIPT ...]

The launch scripts call it: the report goes to standard error, and shell settings for the script to standard output.
Exits with status 2 if something is wrong.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("psutil") is None:  # DeepSpeed needs it too
    print(
        f"wrong        PYTHON={sys.executable}: it has no DeepSpeed; activate the environment that has, or set PYTHON",
        file=sys.stderr,
    )
    sys.exit(2)
sys.path[0] = str(Path(__file__).resolve().parents[2])  # run as a folder, which would be the first entry

from launch.preflight.findings import Findings  # noqa: E402
from launch.preflight.options import parse  # noqa: E402
from launch.preflight.plans import make_plan  # noqa: E402


def main() -> None:
    launcher, options = parse(sys.argv[1:])
    findings = Findings()
    settings = make_plan(launcher, options, findings)
    sys.stderr.write(findings.report())
    if findings.wrong:
        sys.exit(2)
    sys.stdout.write(settings.text())


if __name__ == "__main__":
    main()
