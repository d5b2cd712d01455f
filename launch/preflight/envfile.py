""".deepspeed_env: variables for every rank, one NAME=VALUE a line, from the home folder and then from this one.

DeepSpeed reads it for pdsh and MPI only; the launch scripts obey it everywhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from launch.preflight.findings import Findings

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CHANGED_BY_SHELL = re.compile(r'["$`\\]')


def env_files() -> list[Path]:
    """The files that DeepSpeed would read, in its order; the later one wins."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    found: list[Path] = []
    for folder in (Path.home(), Path(".")):
        path = folder / name
        if path.is_file() and not any(path.samefile(other) for other in found):
            found.append(path)
    return found


def read_env(findings: Findings) -> dict[str, str]:
    """What the files say; lines on which DeepSpeed would fail, or pass on something else, are refused."""
    variables: dict[str, str] = {}
    for path in env_files():
        lines = path.read_text(errors="replace").split("\n")
        if lines[-1] == "":
            lines.pop()  # the end of the last line, not a line
        for number, line in enumerate(lines, 1):
            name, equals, value = line.partition("=")
            name, value = name.strip(), value.strip()
            where = f"{path}:{number} `{line}`"
            if not equals:
                findings.refuse(where, "DeepSpeed ends with a ValueError on a line without `=`", "delete the line")
            elif not NAME.fullmatch(name):
                findings.refuse(where, f"`{name}` is no variable's name", "write NAME=VALUE: no `export`, no comments")
            elif CHANGED_BY_SHELL.search(value):
                why = "DeepSpeed puts it between double quotes, where the other node's shell changes `\"`, `$`, `\\`"
                findings.refuse(where, why, "write the plain value")
            else:
                variables[name] = value
    return variables
