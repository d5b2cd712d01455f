"""The JSON switch on real ranks: shipped configurations, refused ones, and a script that is not edited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.rank_switch import bad_cases
from tests.launch import run_ranks

pytestmark = pytest.mark.dist
HERE = Path(__file__).parent
CONFIGS = sorted(path.stem for path in (HERE.parents[1] / "ds_configs").glob("*.json"))


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(HERE / "rank_switch.py", 2)


def test_there_are_24_configurations() -> None:
    assert len(CONFIGS) == 24


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configuration_trains(ranks: list[dict[str, Any]], name: str) -> None:
    stage, kind, dtype = name.split("_")
    for result in ranks:
        got = result["configs"][name]
        assert got["finite"] and got["equal"]
        assert got["stage"] == int(stage[-1])
        assert got["dtype"] == {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
        if kind.startswith("scape"):
            assert got["wrapper"] == "ScapeZeroOptimizer" and got["inner"] == "Scape"
        else:
            assert got["inner"] == {"adamw": "AdamW", "adams": "AdamS"}[kind]


@pytest.mark.parametrize("name", bad_cases())
def test_bad_configuration_is_refused_alike_on_all_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    said = [result["refused"][name] for result in ranks]
    assert said[0] == said[1]
    assert said[0].startswith("ScapeConfigError: ") and bad_cases()[name][1] in said[0] and "Remedy: " in said[0]


@pytest.mark.parametrize("name", ["client", "frozen", "scheduler", "experts", "pipeline"])
def test_bad_model_or_optimizer_is_refused_alike_on_all_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    said = [result["refused"][name] for result in ranks]
    assert said[0] == said[1]
    assert said[0].startswith("ScapeConfigError: ") and "Remedy: " in said[0]


def test_a_monitors_module_is_needed_on_rank_0_alone(ranks: list[dict[str, Any]]) -> None:
    """DeepSpeed imports it there only; a cluster may have it on its head node alone."""
    for result in ranks:
        assert "comet.enabled = True: comet_ml is not installed" in result["refused"]["module on rank 0"]
        assert result["refused"]["module on rank 1"] == "nothing"


def test_client_optimizer_of_ours_trains(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        ours, first, last = result["client"]
        assert ours and last < first


def test_unedited_script_through_run_module(tmp_path: Path) -> None:
    """`deepspeed --module deepspeed_scape.run train.py`: the launcher puts --local_rank before the script's name."""
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SCAPE", "params": {"lr": 1e-2, "sparsity": 0.9, "warmup_steps": 0}},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(settings))
    args = [HERE / "plain_script.py", "--steps", 30, "--deepspeed_config", path]
    for result in run_ranks("deepspeed_scape.run", 2, args, launcher="deepspeed", module=True):
        assert result["optimizer"] == "ScapeZeroOptimizer" and result["name"] == "__main__"
        assert 0 < result["bytes"] < 1700 and result["loss"] < 0.5
