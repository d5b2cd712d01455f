"""A resumed run is bitwise the run that never stopped; what cannot be resumed is refused clearly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("rank_checkpoint.py")

CASES = [{"name": f"zero{s}-{d}", "stage": s, "dtype": d} for s in (1, 2) for d in ("fp32", "bf16", "fp16")] + [
    {"name": "mid-warmup", "stage": 2, "dtype": "fp32", "params": {"warmup_steps": 11}},
    {"name": "bf16-residual", "stage": 2, "dtype": "bf16", "params": {"residual_dtype": "bf16", "value_dtype": "bf16"}},
    {"name": "ballots", "stage": 2, "dtype": "fp32", "params": {"ballots": True}},
    {"name": "from-host", "stage": 2, "dtype": "fp16", "params": {"residual_device": "cpu"},
     "resume": {"residual_device": "device"}},
    {"name": "to-host", "stage": 2, "dtype": "bf16", "resume": {"residual_device": "cpu"}},
    {"name": "block-no-overlap", "stage": 1, "dtype": "fp32",
     "params": {"selection": "block", "block_size": 50, "overlap_comm": False}},
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    text = json.dumps(CASES)
    return {
        "save": run_ranks(SCRIPT, 2, ["save", folder, text]),
        "resume": run_ranks(SCRIPT, 2, ["resume", folder, text]),
        "convert": run_ranks(SCRIPT, 2, ["convert", folder, json.dumps(CASES[4:5])]),
    }


@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_resume_is_bitwise_exact(runs: dict[str, list[dict[str, Any]]], name: str) -> None:
    for saved, resumed in zip(runs["save"], runs["resume"], strict=True):
        assert resumed[name]["losses"] == saved[name]["losses"]
        assert resumed[name]["digest"] == saved[name]["digest"]


def test_a_residual_in_host_memory_changes_no_bit(runs: dict[str, list[dict[str, Any]]]) -> None:
    """With clipping and two accumulations a step; the resumes go from one place to the other."""
    for saved in runs["save"]:
        host, device = saved["from-host"], saved["zero2-fp16"]
        assert host["staged"] and not device["staged"]
        assert host["losses"] == device["losses"] and host["digest"] == device["digest"]
    for resumed in runs["resume"]:
        assert resumed["to-host"]["staged"] and not resumed["from-host"]["staged"]


def test_saving_mid_accumulation_is_refused(runs: dict[str, list[dict[str, Any]]]) -> None:
    for saved in runs["save"]:
        assert "gradient accumulation" in saved["zero2-fp32"]["mid"] and "Remedy" in saved["zero2-fp32"]["mid"]


@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_zero_to_fp32_exports_the_masters(runs: dict[str, list[dict[str, Any]]], name: str) -> None:
    masters = sum(saved[name]["masters"] for saved in runs["save"])
    export = runs["save"][0][name]["export"]
    assert export["names"] == 7
    assert export["sum"] == pytest.approx(masters, rel=1e-9)


def test_another_sparsity_goes_on(runs: dict[str, list[dict[str, Any]]]) -> None:
    for result in runs["convert"]:
        got = result["zero2-bf16"]
        assert got["applied"] == 16 and all(loss < 6 for loss in got["sparsity"])


def test_another_normalizer_is_refused(runs: dict[str, list[dict[str, Any]]]) -> None:
    for result in runs["convert"]:
        said = result["zero2-bf16"]["normalizer"]
        assert "optimizer.params.normalizer = 'adams'" in said and "load_optimizer_states=False" in said
        assert result["zero2-bf16"]["untouched"] and result["zero2-bf16"]["used"] and result["zero2-bf16"]["afresh"]
        assert all(loss < 6 for loss in result["zero2-bf16"]["weights"])


def test_another_optimizers_checkpoint_is_refused(runs: dict[str, list[dict[str, Any]]]) -> None:
    for result in runs["convert"]:
        assert "not written by SCAPE" in result["zero2-bf16"]["optimizer"]
        said = result["zero2-bf16"]["reverse"]
        assert (
            said.startswith("ScapeCheckpointError") and "was written by SCAPE" in said and "takes its weights" in said
        )
        assert result["zero2-bf16"]["reverse weights"]
