"""Command line and configuration: overrides land where they should, and wrong ones are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from launch.options import parse_options
from launch.settings import apply_override, parse_override, resolve_config

BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "SCAPE", "params": {"lr": 1e-3, "sparsity": 0.9}},
}


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BASE))
    return str(path)


@pytest.mark.parametrize(
    ("text", "keys", "value"),
    [
        ("optimizer.params.sparsity=0.99", ["optimizer", "params", "sparsity"], 0.99),
        ("optimizer.params.torch_adam=true", ["optimizer", "params", "torch_adam"], True),
        ("optimizer.params.betas=[0.9,0.95]", ["optimizer", "params", "betas"], [0.9, 0.95]),
        ("optimizer.type=AdamS", ["optimizer", "type"], "AdamS"),
        ('optimizer.type="AdamS"', ["optimizer", "type"], "AdamS"),
        ("gradient_clipping=1", ["gradient_clipping"], 1),
        ("scheduler=null", ["scheduler"], None),
    ],
)
def test_override_values_are_json(text: str, keys: list[str], value: object) -> None:
    assert parse_override(text) == (keys, value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer.params.sparsity", "expected KEY.KEY=VALUE"),
        ("optimizer..lr=1", "expected KEY.KEY=VALUE"),
        ("optimizer.params.torch_adam=True", "write optimizer.params.torch_adam=true"),
        ("optimizer.params.betas=[0.9", "is not valid JSON"),
        ("optimiser.params.lr=1", "no section optimiser; the file has gradient_accumulation_steps"),
        ("optimizer.parms.lr=1", "no section optimizer.parms"),
        ("optimizer.params.lr.x=1", "no section optimizer.params.lr"),
    ],
)
def test_wrong_overrides_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_override(json.loads(json.dumps(BASE)), text)


def test_an_override_may_add_a_section_of_deepspeed(config_file: str) -> None:
    config = resolve_config(config_file, ["bf16.enabled=true"], lr=None, micro_batch=None)
    assert config["bf16"] == {"enabled": True}


def test_lr_and_micro_batch_come_last(config_file: str) -> None:
    config = resolve_config(config_file, ["optimizer.params.lr=5"], lr=2e-3, micro_batch=3)
    assert config["optimizer"]["params"] == {"lr": 2e-3, "sparsity": 0.9}
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert config["gradient_accumulation_steps"] == 2
    assert "train_batch_size" not in config
    assert json.loads(Path(config_file).read_text()) == BASE


def test_auto_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "auto.json"
    path.write_text(json.dumps(BASE | {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}))
    with pytest.raises(ValueError, match=r'optimizer\.params\.lr is "auto"'):
        resolve_config(str(path), [], lr=None, micro_batch=None)
    assert resolve_config(str(path), [], lr=1e-3, micro_batch=None)["optimizer"]["params"]["lr"] == 1e-3


def test_defaults(config_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    args, config = parse_options(["--local_rank=1", "--deepspeed_config", config_file])
    assert (args.local_rank, args.preset, args.seq_len, args.vocab_size) == (1, "tiny", 64, 512)
    assert args.data == ["embedded"]
    assert args.save_dir == args.output / "checkpoints"
    assert config["optimizer"]["type"] == "SCAPE"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preset", "huge"], "--preset huge: there is no such preset; take one of tiny, small"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--micro-batch", "-2"], "--micro-batch -2: must be at least 1"),
        (["--vocab-size", "100"], "--vocab-size 100: must be at least 257"),
        (["--lr", "-1"], "--lr -1.0: must be a positive number"),
        (["--lr", "nan"], "--lr nan: must be a positive number"),
        (["--lr-floor", "2"], "--lr-floor 2.0: a share"),
        (["--data", "/nowhere"], "--data /nowhere: no such file"),
        (["--data", "embedded", "/tmp"], "--data embedded /tmp: embedded can't be mixed"),
        (["--val", "x"], "--val x: holds out files, and --data embedded has none"),
        (["--max-documents", "5"], "--max-documents 5: only for `datasets` sources"),
        (["--resume", "step9"], "--resume step9: no such checkpoint in runs/pretrain/checkpoints; it has none"),
        (["--deepspeed_config", "/nowhere.json"], "--deepspeed_config /nowhere.json: No such file"),
        (["--set", "a.b=1"], "--set a.b=1: there is no section a"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_bad_arguments_exit_with_the_reason(
    argv: list[str], message: str, config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_options(["--deepspeed_config", config_file, *argv])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_two_schedules_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BASE | {"scheduler": {"type": "WarmupLR", "params": {}}}))
    parse_options(["--deepspeed_config", str(path)])
    with pytest.raises(SystemExit):
        parse_options(["--deepspeed_config", str(path), "--lr-schedule", "cosine"])
    assert "--lr-schedule cosine: " in capsys.readouterr().err


def test_missing_wandb_is_an_error_only_when_asked_for(
    config_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    parse_options(["--deepspeed_config", config_file])
    with pytest.raises(SystemExit):
        parse_options(["--deepspeed_config", config_file, "--wandb"])
    assert "pip install wandb" in capsys.readouterr().err
