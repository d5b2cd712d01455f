"""Results on the disk, whole or not at all, and in a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)


def with_section(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between its marks ``<!-- name -->`` and ``<!-- /name -->``."""
    pattern = re.compile(rf"<!-- {name} -->\n.*?<!-- /{name} -->", re.DOTALL)
    return pattern.sub(lambda _: f"<!-- {name} -->\n{content}\n<!-- /{name} -->", text)


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
