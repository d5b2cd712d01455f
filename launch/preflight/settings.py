"""What a launch script is told, as lines for its shell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


class Settings:
    """Variables, arrays and exports of a bash script."""

    def __init__(self, dry_run: bool) -> None:
        self._variables: dict[str, str | Sequence[str]] = {}
        self._exports: dict[str, str] = {}
        self.set("dry_run", "true" if dry_run else "false")

    def set(self, name: str, value: str | int | Sequence[str]) -> None:
        """A variable, or an array if it is a sequence of words."""
        self._variables[name] = str(value) if isinstance(value, int) else value

    def export(self, name: str, value: str) -> None:
        """A variable for the ranks."""
        self._exports[name] = value

    def text(self) -> str:
        """The lines, each safe to be evaluated."""
        lines = []
        for name, value in self._variables.items():
            lines.append(f"{name}={shlex.quote(value)}" if isinstance(value, str) else f"{name}=({shlex.join(value)})")
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self._exports.items()]
        # what `env` needs to show a dry run's environment
        lines.append(f"exported=({shlex.join(f'{name}={value}' for name, value in self._exports.items())})")
        return "".join(f"{line}\n" for line in lines)
