"""A checkpoint resumed on another number of ranks through ``deepspeed_scape.universal``: no element is lost."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_scape.universal import convert
from tests.dist.rank_world import FULL, HALF
from tests.launch import ROOT, run_ranks

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("rank_world.py")

CASES: list[dict[str, Any]] = [
    {"name": "zero2-fp32", "stage": 2, "dtype": "fp32", "params": {"sparsity": 0.9}},
    {"name": "zero1-bf16-host", "stage": 1, "dtype": "bf16", "params": {"sparsity": 0.9, "residual_device": "cpu"}},
    {"name": "fp16-skips", "stage": 2, "dtype": "fp16", "params": {"sparsity": 0.8}, "poison": True},
    # the norm that clipping estimates depends on the number of ranks, so this one goes without
    {"name": "dense", "stage": 2, "dtype": "fp32", "params": {"sparsity": 0.0}, "top": {"gradient_clipping": 0.0}},
    {"name": "mid-warmup", "stage": 1, "dtype": "fp32", "params": {"sparsity": 0.9, "warmup_steps": 20}},
    {"name": "bf16-residual", "stage": 2, "dtype": "bf16",
     "params": {"sparsity": 0.9, "residual_dtype": "bf16", "value_dtype": "bf16"}},
    {"name": "block-adams", "stage": 2, "dtype": "fp32",
     "params": {"sparsity": 0.9, "selection": "block", "block_size": 10, "normalizer": "adams"}},
]  # fmt: skip
NAMES = [case["name"] for case in CASES]
CHANGES = [(2, 4), (4, 2), (2, 3), (4, 1), (1, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Runs at 1, 2 and 4 ranks, each case's checkpoint converted; the command itself for one of them."""
    runs = {}
    for world in (1, 2, 4):
        root = folder / str(world)
        root.mkdir()
        runs[world] = run_ranks(SCRIPT, world, ["save", root, json.dumps(CASES)])
        for name in NAMES:
            if (world, name) != (2, "zero2-fp32"):
                convert(root / name / "half", root / name / "universal")
    path = folder / "2" / "zero2-fp32"
    command = [sys.executable, "-m", "deepspeed_scape.universal", path / "half", path / "universal", "--workers", "2"]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, timeout=120)
    return runs


@pytest.fixture(scope="module", params=CHANGES, ids=[f"{a}to{b}" for a, b in CHANGES])
def change(request: pytest.FixtureRequest, folder: Path, saved: Any) -> tuple[int, int, list[dict[str, Any]]]:
    old, new = request.param
    return old, new, run_ranks(SCRIPT, new, ["resume", folder / str(old), json.dumps(CASES)])


def states(folder: Path, change: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    path = folder / str(change[0]) / name
    before, after = torch.load(path / "saved.pt"), torch.load(path / f"loaded{change[1]}.pt")
    return before, after


@pytest.mark.parametrize("name", NAMES)
def test_every_element_survives(folder: Path, change: Any, name: str) -> None:
    before, after = states(folder, change, name)
    assert before["parameters"].keys() == after["parameters"].keys()
    seen = set()
    for parameter, old in before["parameters"].items():
        new = after["parameters"][parameter]
        for key in ("master", "m", "v", "last", "replica"):
            assert torch.equal(old[key], new[key]), f"{key} of {parameter}"
            seen |= {key} if old[key].any() else set()
        # what a reduce over all ranks would bring: the mean of the residuals
        step = torch.finfo(torch.bfloat16).eps if name == "bf16-residual" else torch.finfo(torch.float32).eps
        torch.testing.assert_close(new["residual"], old["residual"], rtol=step, atol=1e-30)
        seen |= {"residual"} if old["residual"].any() else set()
    dense = name in ("dense", "mid-warmup")
    assert seen == {"master", "m", "v", "last", "replica"} | (set() if dense else {"residual"})


@pytest.mark.parametrize("name", NAMES)
def test_counters_scales_and_schedules_survive(folder: Path, change: Any, name: str) -> None:
    before, after = states(folder, change, name)
    assert after["plain"] == {**before["plain"], "noise_ratio": pytest.approx(before["plain"]["noise_ratio"])}
    skipped = 1 if name == "fp16-skips" else 0
    assert before["plain"]["skipped_steps"] >= skipped
    assert before["plain"]["step"] == HALF - before["plain"]["skipped_steps"]
    for result in change[2]:
        assert result[name]["client"] == [1, "two"]


@pytest.mark.parametrize("name", NAMES)
def test_frozen_weights_tied_weights_and_buffers_survive(folder: Path, change: Any, name: str) -> None:
    before, after = states(folder, change, name)
    assert before["module"].keys() == after["module"].keys()
    for key, value in before["module"].items():
        assert torch.equal(value, after["module"][key]), key
    assert torch.equal(after["module"]["embed.weight"], after["module"]["decode.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_goes_on(saved: Any, change: Any, name: str) -> None:
    old, new, results = change
    whole = saved[old][0][name]["losses"]
    for result in results:
        assert result[name]["replicas_equal"]
        resumed = result[name]["losses"]
        assert all(map(math.isfinite, resumed)) and len(resumed) == FULL - HALF
        if name == "dense":  # the same sums in another order
            assert resumed == pytest.approx(whole, rel=2e-4)
        assert sum(resumed[-10:]) == pytest.approx(sum(whole[-10:]), rel=0.04)


@pytest.mark.parametrize("name", NAMES)
def test_another_world_size_is_refused_with_the_command(change: Any, name: str) -> None:
    old, new, results = change
    for result in results:
        said = result[name]["refused"]
        assert f"a checkpoint of {old} ranks loaded on {new} ranks" in said
        assert "python -m deepspeed_scape.universal CHECKPOINT FOLDER/TAG" in said and "load_universal" in said
