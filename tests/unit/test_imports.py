"""Every name that a file takes from another one of this repository exists there, also in functions and rank scripts.

A rank script is only imported by the ranks that run it, some of them in slow tests alone: a name that has moved would
be missed until then.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = ("deepspeed_scape", "launch", "evals", "tests")
FILES = sorted(str(path.relative_to(ROOT)) for folder in OWN for path in (ROOT / folder).rglob("*.py"))


def source(module: str) -> Path | None:
    """The file of the `module`, None without one: spelled as in the import, no module is run for it."""
    path = ROOT / module.replace(".", os.sep)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return path if path.is_dir() else None


@cache
def names(file: Path) -> frozenset[str]:
    """What stands at the top level of a module, whatever branch it stands in; not what a function or class holds."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(file.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        nodes += ast.iter_child_nodes(node)
    return frozenset(found)


def missing(text: str, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            wanted = [(module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            if module.partition(".")[0] not in OWN:
                continue
            file = source(module)
            if file is None:
                yield f"line {node.lineno}: no module {module}"
            elif name is not None and source(f"{module}.{name}") is None:
                lazy = file.is_file() and "__getattr__" in names(file)
                if not lazy and (file.is_dir() or name not in names(file)):
                    yield f"line {node.lineno}: {module} has no {name}"


def modules(tree: ast.Module, package: str) -> dict[str, Path]:
    """Files of this repository by the names under which they are imported, those with a second use left out."""
    found: dict[str, Path] = {}
    other: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                file = source(f"{module}.{alias.name}") if module.partition(".")[0] in OWN else None
                if file is not None and file.is_file():
                    found[alias.asname or alias.name] = file
        elif isinstance(node, ast.arg):
            other.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            other.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            other.add(node.id)
    return {name: file for name, file in found.items() if name not in other}


def missing_attributes(text: str, package: str) -> Iterator[str]:
    """What is asked of an imported module as ``module.name``, and is not there."""
    tree = ast.parse(text)
    known = modules(tree, package)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            file = known[node.value.id]
            beside = file.name == "__init__.py" and (file.parent / f"{node.attr}.py").is_file()
            if node.attr not in names(file) and not node.attr.startswith("__") and not beside:
                yield f"line {node.lineno}: {file.relative_to(ROOT)} has no {node.attr}"


@pytest.mark.parametrize("file", FILES)
def test_imported_names_exist(file: str) -> None:
    package = ".".join(Path(file).parent.parts)
    text = (ROOT / file).read_text()
    assert [*missing(text, package), *missing_attributes(text, package)] == []


@pytest.mark.parametrize(
    "line",
    ["from tests.launch import nowhere", "from tests import nowhere", "import evals.nowhere", "from .nowhere import a"],
)
def test_a_missing_name_is_found(line: str) -> None:
    assert len(list(missing(f"def f():\n    {line}", "tests.unit"))) == 1


def test_a_missing_attribute_is_found() -> None:
    text = "from tests import worker as w\nw.init()\ndef f():\n    return w.nowhere, w.__file__"
    assert list(missing_attributes(text, "tests.unit")) == ["line 4: tests/worker.py has no nowhere"]
    assert list(missing_attributes(f"{text}\ndef g(w):\n    pass", "tests.unit")) == []  # may mean another w
