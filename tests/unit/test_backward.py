"""Gradients on their way from backward to the step: shares, dtypes, and those that nobody has seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_scape.backward import divide_at_parameters, keep_gradient, refuse_unseen


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_shares_add_up_in_the_waiting_dtype(dtype: torch.dtype, share: float) -> None:
    param: Any = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    for _ in range(4):
        param.grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16)
        keep_gradient(param, dtype, share)
        assert param.grad is None
    assert param.grad_accum.dtype == dtype
    assert param.grad_accum.tolist() == [4 * share, -8 * share, 2 * share]


def test_a_shared_gradient_is_not_scaled_in_place() -> None:
    """Autograd may hand one tensor to two parameters."""
    grad = torch.ones(2)
    for _ in range(2):
        param: Any = torch.nn.Parameter(torch.zeros(2))
        param.grad = grad
        keep_gradient(param, torch.float32, 0.5)
        assert param.grad_accum.tolist() == [0.5, 0.5]


def test_only_a_direct_backward_is_divided_and_only_at_the_parameters() -> None:
    engine: Any = SimpleNamespace(
        _backward_prologue_per_tensor=lambda grad: grad / 4,
        _running_engine_backward=False,
        gradient_accumulation_steps=lambda: 4,
    )
    optimizer: Any = SimpleNamespace(_backward_active_depth=0)
    divide_at_parameters(engine, optimizer)
    assert engine._backward_prologue_per_tensor(8.0) == 8.0
    assert optimizer.backward_share() == 1.0  # outside of any backward, as a loss that computes gradients in forward
    optimizer._backward_active_depth = 1
    assert optimizer.backward_share() == 0.25
    engine._running_engine_backward = True
    assert optimizer.backward_share() == 1.0


def test_a_deepspeed_without_direct_backward_is_left_alone() -> None:
    engine: Any = SimpleNamespace()
    divide_at_parameters(engine, SimpleNamespace())  # type: ignore[arg-type]
    assert vars(engine) == {}


def test_unseen_gradients_are_refused_with_a_remedy() -> None:
    with pytest.raises(RuntimeError, match=r"engine\.module\(\.\.\.\).*Remedy: engine\.backward"):
        refuse_unseen()
