"""The compiled CPU loops against their torch twins: choices and copies exactly, arithmetic to fp32 rounding."""

import numpy as np
import pytest
import torch

from deepspeed_scape import kernels
from deepspeed_scape.kernels import cpu, naive
from deepspeed_scape.mask import _candidates, _candidates_by_torch
from tests.unit.test_mask import moments
from tests.unit.test_parts import group


def test_the_loops_are_in_use_here() -> None:
    assert kernels.loops_for(torch.zeros(1)) is not None  # numba is in the [test] extra
    assert kernels.loops_for(torch.zeros(4, 4).t()) is None
    assert kernels.loops_for(torch.zeros(1, device="meta")) is None
    assert kernels.ops_for(torch.zeros(1)) is cpu and kernels.ops_for(torch.zeros(1, device="meta")) is naive


@pytest.mark.parametrize("step", [90, 70_000], ids=["usual", "longer-than-the-tables"])
@pytest.mark.parametrize(
    ("threshold", "capacity"),
    [(0.0, 100_003), (0.3, 100_003), (1e9, 100_003), (3.0, 2000), (1e9, 64)],
    ids=["all", "many", "many-none", "few", "few-none"],
)
def test_candidates_are_the_same_to_the_bit(step: int, threshold: float, capacity: int) -> None:
    some = moments(100_003)
    index, score = _candidates(some, step, 0.9, threshold, capacity)
    index2, score2 = _candidates_by_torch(some, step, 0.9, threshold)
    assert index2.size <= capacity and (index2.size > 0) == (threshold < 1e9)
    assert np.array_equal(index, index2) and np.array_equal(score, score2)


@pytest.mark.parametrize("capacity", [10, 4999], ids=["few", "many"])
def test_too_many_candidates_are_told(capacity: int) -> None:
    assert _candidates(moments(5000), 90, 0.9, 0.0, capacity)[0].size == 0


def test_pack() -> None:
    residual = torch.randn(3000)
    twin = residual.clone()
    position = torch.cat([torch.randperm(1500)[:40].sort().values + 1500 * rank for rank in range(2)])
    wide, wide_twin = torch.zeros(2, 50), torch.zeros(2, 50)
    cpu.pack(residual, position, wide[:, 3:43])
    naive.pack(twin, position, wide_twin[:, 3:43])
    assert torch.equal(residual, twin) and torch.equal(wide, wide_twin)


@pytest.mark.parametrize("normalizer", ["ema", "adams"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_update(normalizer: str, weight_decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    options = {"sparsity": 0.9, "normalizer": normalizer, "weight_decay": weight_decay, "lr": 1e-2}
    loop, twin = group(4000, torch.float32, **options), group(4000, torch.float32, **options)
    for step in range(1, 60):
        index = torch.stack([torch.randperm(2000)[:200].sort().values] * 2)
        mean = torch.randn(200)
        results = []
        for one in (loop, twin):
            one.use_masks(index)
            if one is twin:
                monkeypatch.setattr("deepspeed_scape.group.ops_for", lambda *_: naive)
            results.append(one.update(mean, step))
            monkeypatch.undo()
        assert torch.allclose(*results, rtol=2e-6, atol=2e-6)
    assert torch.equal(loop.last, twin.last) and loop.moments["step"] == 59
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.allclose(loop.moments[name], twin.moments[name], rtol=1e-5, atol=1e-6)
    assert torch.allclose(loop.master, twin.master, rtol=1e-6, atol=2e-5)
