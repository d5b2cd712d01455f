"""Gradients on their way from backward to the step: shares, dtypes, and those that nobody has seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_scape.backward import divide_at_parameters, keep_gradient, refuse_unseen
from deepspeed_scape.zero import ScapeZeroOptimizer


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


def test_a_deepspeed_without_direct_backward_divides_in_no_sync_too() -> None:
    """Before 0.18.3 it does not, and Accelerate's micro-steps at stage 1 weigh more than the last one."""

    def prologue(loss: float, scale_wrt_gas: bool = True) -> float:
        if loss < 0:
            raise ValueError(loss)
        return loss / 4 if scale_wrt_gas and not engine.inside_no_sync_ctxt else loss

    engine: Any = SimpleNamespace(_backward_prologue=prologue, inside_no_sync_ctxt=False)
    optimizer: Any = SimpleNamespace()
    divide_at_parameters(engine, optimizer)
    for inside in (False, True):
        engine.inside_no_sync_ctxt = inside
        assert engine._backward_prologue(8.0) == 2.0
        assert engine._backward_prologue(8.0, scale_wrt_gas=False) == 8.0
        with pytest.raises(ValueError, match="-1"):
            engine._backward_prologue(-1.0)
        assert engine.inside_no_sync_ctxt is inside
    assert vars(optimizer) == {}  # there is no other backward to take a share of


def test_unseen_gradients_are_refused_with_a_remedy() -> None:
    with pytest.raises(RuntimeError, match=r"engine\.module\(\.\.\.\).*Remedy: engine\.backward"):
        refuse_unseen()


@pytest.mark.parametrize(
    ("of_engine", "dtype", "before", "waits"),
    [
        (True, torch.float32, None, True),
        (False, torch.float32, None, False),  # a second direct backward of one forward has no epilogue
        (True, torch.bfloat16, None, False),  # another dtype, which may hold more: parts must not be summed before
        (True, torch.float32, 1.0, False),  # of a further micro-step: two whole sets of gradients would be held
    ],
)
def test_a_gradient_waits_in_place_only_for_an_epilogue_that_is_certain(
    of_engine: bool, dtype: torch.dtype, before: float | None, waits: bool
) -> None:
    optimizer: Any = SimpleNamespace(
        gradient_accumulation_dtype=torch.float32,
        backward_share=lambda: 0.5,
        backward_of_engine=lambda: of_engine,
        _gradients_taken=False,
    )
    param: Any = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    param.grad_accum = None if before is None else torch.full((2,), before)
    optimizer.bit16_groups = [[param]]
    optimizer._keep = lambda param: ScapeZeroOptimizer._keep(optimizer, param)
    param.grad = grad = torch.ones(2, dtype=dtype)
    ScapeZeroOptimizer.process_gradients(optimizer, param, 0)
    assert optimizer._gradients_taken and (param.grad is grad) is waits
    ScapeZeroOptimizer.backward_epilogue(optimizer)
    assert param.grad is None and param.grad_accum.dtype == torch.float32
    assert param.grad_accum.tolist() == [0.5 + (before or 0.0)] * 2
