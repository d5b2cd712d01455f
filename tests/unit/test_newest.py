"""The norm of a mean gradient, told by each owner from its own newest one."""

from __future__ import annotations

import pytest
import torch

from deepspeed_scape.newest import NewestGradient
from deepspeed_scape.norms import GradientNorms
from deepspeed_scape.residual import sum_squares


def told(signal: float, world: int, dtype: torch.dtype, made: bool, longest: int = 199) -> tuple[float, float]:
    """Estimated and true ||mean g|| / rms in a step of W ranks whose gradients are signal + noise of variance 1."""
    size, kept = 40_000, 4_000
    generator = torch.Generator().manual_seed(world)
    delay = torch.randint(1, longest + 1, (kept,), generator=generator)
    own = torch.randperm(size, generator=generator)[:kept].sort().values
    mean = torch.randn(kept, generator=generator) * signal

    def gathered(steps: torch.Tensor) -> torch.Tensor:
        return mean * steps + torch.randn(kept, generator=generator) * steps.float().sqrt()

    newest = [gathered(torch.ones(kept)) for _ in range(world)]
    past = [gathered(delay - 1) for _ in range(world)]
    received = torch.stack([old + new for old, new in zip(past, newest, strict=True)]).mean(0)
    norms = GradientNorms(world)
    sums = []
    for old, new in zip(past, newest, strict=True):  # as if each owned these elements
        residual = torch.zeros(size, dtype=dtype)
        residual[own] = old.to(dtype)
        before = NewestGradient(residual, own if made else None)
        residual[own] += new.to(dtype)
        before.take(residual, own)
        sums.append(before.squares(received, delay, world))
    norms.note_newest(sums)
    total = sum(float(new.double().square().sum()) for new in newest)
    terms = norms.terms([torch.tensor(total, dtype=torch.float64)], torch.device("cpu"))
    norms.learn(terms)
    true = torch.stack(newest).mean(0).double().square().sum().sqrt()
    return norms.estimate / norms.rms, float(true) / (total / world) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [2, 4, 16])
@pytest.mark.parametrize("signal", [0.0, 0.1, 0.5, 3.0])
def test_the_estimate_is_the_norm_of_the_mean(signal: float, world: int, dtype: torch.dtype) -> None:
    for made in (True, False):
        estimate, true = told(signal, world, dtype, made)
        assert estimate == pytest.approx(true, rel=0.05 if dtype == torch.float32 else 0.15)


@pytest.mark.parametrize("longest", [1, 2])
@pytest.mark.parametrize("signal", [0.0, 0.5, 3.0])
def test_nor_is_it_too_low_where_visits_are_frequent(signal: float, longest: int) -> None:
    estimate, true = told(signal, 2, torch.float32, True, longest)
    assert estimate == pytest.approx(true, rel=0.03)


@pytest.mark.parametrize("delay", [1, 2, 50])
def test_equal_gradients_have_a_share_of_one(delay: int) -> None:
    gradient, own = torch.randn(90, generator=torch.Generator().manual_seed(0)).double().float(), torch.arange(90)
    newest = NewestGradient(torch.zeros(90), own)
    newest.take(gradient, own)
    mean, squares = newest.squares(gradient * delay, torch.full((90,), delay), 3)
    assert float(mean) == pytest.approx(float(squares) / 3, rel=1e-6)


def test_one_owners_sums_are_as_the_formula_says() -> None:
    newest = NewestGradient(torch.tensor([1.0, 5.0, 2.0]), torch.tensor([0, 2]))
    newest.take(torch.tensor([3.0, 9.0, 1.0]), torch.tensor([0, 2]))  # g = 2 and -1
    mean_square, squares = newest.squares(torch.tensor([6.0, -8.0]), torch.tensor([3, 4]), 4)
    signal = (2 * 6 - 4 / 4) / (3 - 1 / 4) + (1 * 8 - 1 / 4) / (4 - 1 / 4)
    assert float(squares) == 4 * 5 and float(mean_square) == pytest.approx(signal * 3 / 4 + 5 / 4)


def test_nothing_is_told_by_no_elements() -> None:
    newest = NewestGradient(torch.zeros(0), None)
    none = torch.zeros(0, dtype=torch.int64)
    newest.take(torch.zeros(0), none)
    norms = GradientNorms(4)
    norms.note_newest([newest.squares(torch.zeros(0), none, 4)])
    norms.learn(norms.terms([sum_squares([torch.ones(9)])], torch.device("cpu")))
    assert norms.signal_share == 1.0 and norms.estimate == pytest.approx((9 / 4) ** 0.5)


def test_the_sums_of_all_groups_are_noted() -> None:
    norms = GradientNorms(2)
    norms.note_newest([(torch.tensor(1.0).double(), torch.tensor(4.0).double()) for _ in range(3)])
    assert norms.state()["noted"] == [3.0, 12.0]
