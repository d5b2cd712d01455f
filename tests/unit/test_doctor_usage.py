"""The command lines of `deepspeed_scape.run` and its doctor: help, and what would otherwise be ignored in silence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed_scape import doctor, run


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    """Status, output and errors of the doctor."""
    try:
        status: Any = doctor.main(list(arguments))
    except SystemExit as end:
        status = end.code
    told = capsys.readouterr()
    return status, told.out, told.err


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help(word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run", word])
    with pytest.raises(SystemExit) as end:
        run.main()
    said = capsys.readouterr().out
    assert end.value.code == 0 and said.startswith("usage: deepspeed ") and "\n    deepspeed --num_gpus" in said
    assert "--doctor [--deepspeed_config JSON" in said


@pytest.mark.parametrize("words", [["--params", "1e9"], ["--ranks", "8"], ["--refusals"]], ids=lambda words: words[0])
def test_what_needs_a_configuration_says_so(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ask(capsys, *words)
    assert status == 2 and out == "" and f"{words[0]}: " in err and "--deepspeed_config" in err.splitlines()[-1]


def test_costs_are_of_scape_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    status, out, _ = ask(capsys, "--deepspeed_config", str(config), "--params", "1e9")
    assert status == 0 and "--params: no costs are told, they are SCAPE's" in out
    assert "--params" not in ask(capsys, "--deepspeed_config", str(config))[1]


def test_a_folder_is_called_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ask(capsys, "--deepspeed_config", str(tmp_path))
    assert status == 1 and out.endswith(f"{tmp_path}: is a folder; give the JSON file itself\n")
    status, out, _ = ask(capsys, "--deepspeed_config", str(tmp_path / "none.json"))
    assert status == 1 and out.endswith(f"{tmp_path / 'none.json'}: there is no such file\n")
