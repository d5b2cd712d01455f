"""Fill the console examples of docs/planner.md: under each `$ command` stands what it prints.

python -m evals.docs            # writes
python -m evals.docs --check    # fails when the page says something else
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

from deepspeed_scape.plan.__main__ import main as plan

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planner.md"
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


def main() -> None:
    text = PAGE.read_text()
    if "--check" in sys.argv:
        sys.exit(None if filled(text) == text else f"{PAGE} is out of date: run python -m evals.docs")
    PAGE.write_text(filled(text))


if __name__ == "__main__":
    main()
