"""A build of an extension is announced before it begins, where it will begin and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension

from deepspeed_scape import build_locks, register
from deepspeed_scape.build_locks import NEEDED, is_built

REGISTER = sys.modules["deepspeed_scape.register"]


class Builder(OpBuilder):
    """Of an extension whose build is torch's stand-in below."""

    def absolute_name(self) -> str:
        return self.name

    def sources(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        return True


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged and built, in order; builds go into an empty folder."""
    lines: list[str] = []
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(REGISTER.logger, "warning", lines.append)
    monkeypatch.setattr(cpp_extension, "verify_ninja_availability", lambda: None)
    monkeypatch.setattr(cpp_extension, "load", lambda name, **_: lines.append(f"build {name}"))
    return lines


def load(name: str = NEEDED) -> None:
    register()
    OpBuilder._loaded_ops.pop(name, None)
    Builder(name).load()
    OpBuilder._loaded_ops.pop(name, None)


@pytest.mark.skipif(get_accelerator().device_name() != "cpu", reason="of builds on CPUs")
@pytest.mark.parametrize("name", [NEEDED, "fused_adam"])
def test_a_build_is_announced_first(name: str, said: list[str]) -> None:
    load(name)
    assert said == [f"SCAPE: {build_locks.to_come(name)}", f"build {name}"]


@pytest.mark.parametrize("why", ["built", "another rank", "a GPU"])
def test_where_nothing_is_to_come_nothing_is_said(
    why: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "built":
        (tmp_path / NEEDED).mkdir()
        (tmp_path / NEEDED / f"{NEEDED}.so").touch()
    elif why == "another rank":
        monkeypatch.setenv("LOCAL_RANK", "1")
    else:
        monkeypatch.setattr(type(get_accelerator()), "device_name", lambda *_: "cuda")
    load()
    assert said == [f"build {NEEDED}"]


def test_a_build_is_looked_for_where_torch_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place: Any = cpp_extension._get_build_directory(NEEDED, False)
    other = Path(place).parents[1] / "py27_cpu" / NEEDED
    other.mkdir(parents=True)
    for folder in (other, Path(place)):
        assert not is_built(NEEDED)
        (folder / f"{NEEDED}.so").touch()
    assert is_built(NEEDED)
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    assert not is_built(NEEDED)
