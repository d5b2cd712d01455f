"""The Hugging Face Trainer on two ranks: the JSON alone switches SCAPE on, and a resume is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks

pytest.importorskip("transformers", reason="the Trainer is part of transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate; pip install 'deepspeed-scape[test]'")
pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("rank_trainer.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trainer")
    return run_ranks(SCRIPT, 2, [folder], env={"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"})


def test_the_shipped_configuration_trains(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        got = result["shipped"]
        assert got["optimizer"] == "ScapeZeroOptimizer" and got["sparsity"] == 0.99 and got["applied"] == 8
        assert got["dtype"] == "torch.bfloat16" and got["equal"]
        assert all(0 < norm < 100 for norm in got["logged"]) and len(got["logged"]) == 8


def test_every_auto_is_filled_from_the_arguments(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        got = result["filled"]
        assert [got[name] for name in ("micro", "accumulation", "total", "clip")] == [2, 2, 8, 0.5]
        assert [got[name] for name in ("lr", "betas", "eps", "weight_decay")] == [4e-3, [0.9, 0.95], 1e-8, 0.1]
        params = {"warmup_min_lr": 0, "warmup_max_lr": 4e-3, "warmup_num_steps": 2, "total_num_steps": 8}
        assert got["scheduler"] == ["WarmupDecayLR", params] and got["final lr"] == pytest.approx([4e-3 / 6])
        assert got["bf16"] is False


def test_accumulation_and_clipping_are_those_of_a_loop_by_hand(ranks: list[dict[str, Any]]) -> None:
    """To the bit, the shorter last step of an epoch included."""
    for result in ranks:
        assert result["filled"]["by hand"] and 0 < result["filled"]["clipped"] < 1


@pytest.mark.parametrize(
    "case", ["trainer's schedule", "deepspeed's schedule", "bf16", "recomputing", "optimizer class"]
)
def test_resume_from_a_checkpoint_is_exact(ranks: list[dict[str, Any]], case: str) -> None:
    """Weights, moments, residuals, masks, losses and rates, with dropout, in the middle of an epoch."""
    for result in ranks:
        got = result["resumed"][case]
        assert got["same"] and got["losses"] and got["replicas"]
        assert got["rest"] == 7 and got["moved"]  # micro-steps of steps 5 to 8: 2 + 1 + 2 + 2
        assert got["steps"] == got["applied"] == 8
        assert got["rates"][0] == got["rates"][1] and len(set(got["rates"][0])) > 4
        if case == "optimizer class":  # the Trainer's own groups: no decay for biases and norms
            assert [decay for decay, _ in got["groups"]] == [0.1, 0.0]


def test_weights_for_others(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        got = result["weights"]
        assert got["best loaded"] and got["replicas"] and got["saved"]
        assert got["best"] == f"checkpoint-{got['best step']}"
        assert got["only model"] == ["model.safetensors"]
        assert "Can't find a valid checkpoint" in got["resume only model"]


def test_what_cannot_be_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    said = [result["refused"] for result in ranks]
    assert said[0] == said[1]
    assert "optimizer.params.sparsity" in said[0]["unfilled"] and "auto" in said[0]["unfilled"]
    assert "ds optimizer.params.lr=1.0 vs hf learning_rate=0.004" in said[0]["contrary"]
    assert said[0]["stage 3"].startswith("ScapeConfigError: zero_optimization.stage = 3")
