"""Accelerate on two ranks: the plugin's JSON alone switches SCAPE on; save_state and load_state are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks

pytest.importorskip("transformers", reason="the model is one of transformers")
pytest.importorskip("accelerate", reason="pip install 'deepspeed-scape[test]'")
pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("rank_accelerate.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("accelerate")
    return run_ranks(SCRIPT, 2, [folder], env={"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"})


@pytest.mark.parametrize("stage", ["1", "2"])
def test_autos_are_filled_and_steps_are_those_of_a_loop_by_hand(ranks: list[dict[str, Any]], stage: str) -> None:
    """accelerator.backward, accumulate and clip_grad_norm_, to the bit; stage 1 goes through engine.no_sync()."""
    for result in ranks:
        got = result["accumulated"][stage]
        assert [got[name] for name in ("micro", "accumulation", "total", "clip")] == [
            2,
            2,
            8,
            1.0 if stage == "1" else 0.2,
        ]
        assert [got["lr"], got["weight_decay"]] == [4e-3, 0.1]
        params = {"warmup_min_lr": 0, "warmup_max_lr": 4e-3, "warmup_num_steps": 2, "total_num_steps": 6}
        assert got["scheduler"] == params and got["final lr"] == pytest.approx([1e-3])
        assert got["applied"] == 6 and got["replicas"] and got["norms"] == [True] * 6
        assert got["by hand"] and (stage == "1" or 0 < got["clipped"] < 1)


def test_load_state_is_exact(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["resumed"] == {"same": True, "losses": True, "micro-steps": 5, "saved again": True}


def test_an_optimizer_object_without_json(ranks: list[dict[str, Any]]) -> None:
    assert all(result["clients"]["found"] == ["ScapeZeroOptimizer", 6, True] for result in ranks)


def test_what_cannot_be_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    said = [result["refused"] for result in ranks]
    assert said[0] == said[1]
    assert "optimizer.params.betas" in said[0]["betas"]  # Accelerate's own words
    assert said[0]["stage 3"].startswith("ScapeConfigError: zero_optimization.stage = 3")
    assert "managed_gradient_accumulation" in said[0]["unmanaged"]
    assert said[0]["plain"].startswith("ScapeConfigError: train_micro_batch_size_per_gpu = 'auto': nobody has filled")
    assert "Accelerate" in said[0]["plain"]
