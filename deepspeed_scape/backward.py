"""Gradients of a backward pass, whoever starts it: ``engine.backward(loss)``, or the script with ``loss.backward()``.

The second way is divided by gradient_accumulation_steps by DeepSpeed, at every output of the model. An output that
another one was computed from, as the logits beside the loss of a transformers model, is divided twice, and all layers
below it learn from gradients that are too small. SCAPE takes gradients parameter by parameter and divides there, once.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from deepspeed_scape.zero import ScapeZeroOptimizer


def keep_gradient(param: Any, dtype: torch.dtype, share: float = 1.0) -> None:
    """Add ``share`` of ``param.grad`` to ``param.grad_accum``, which waits in ``dtype`` for the boundary step."""
    grad, kept = param.grad, getattr(param, "grad_accum", None)
    if kept is not None:
        kept.add_(grad, alpha=share)
    else:
        param.grad_accum = grad.to(dtype) if share == 1.0 else grad.to(dtype) * share
    param.grad = None


def divide_at_parameters(engine: Any, optimizer: ScapeZeroOptimizer) -> None:
    """Take the division of ``loss.backward()`` from the engine; a DeepSpeed before 0.18.3 knows no such backward."""
    if not hasattr(engine, "_backward_prologue_per_tensor"):
        _divide_in_no_sync(engine)
        return
    engine._backward_prologue_per_tensor = _as_it_is

    def share() -> float:
        direct = optimizer._backward_active_depth > 0 and not engine._running_engine_backward
        return 1.0 / engine.gradient_accumulation_steps() if direct else 1.0

    optimizer.backward_share = share
    optimizer.backward_of_engine = lambda: engine._running_engine_backward


def _divide_in_no_sync(engine: Any) -> None:
    """Such a DeepSpeed leaves out the division by the micro-steps inside ``engine.no_sync()``; later ones do not.

    Accelerate counts on it there, at stage 1: without it every micro-step but the last would weigh that much more.
    """
    stock = engine._backward_prologue

    @functools.wraps(stock)
    def prologue(*args: Any, **kwargs: Any) -> Any:
        inside, engine.inside_no_sync_ctxt = engine.inside_no_sync_ctxt, False
        try:
            return stock(*args, **kwargs)
        finally:
            engine.inside_no_sync_ctxt = inside

    engine._backward_prologue = prologue


def _as_it_is(grad: Any) -> Any:
    return grad


def refuse_unseen() -> None:
    """Gradients came, but neither loss scale nor accumulation can have been applied to them.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "step() found gradients of a backward pass that DeepSpeed has not seen: of engine.module(...) instead of "
        "engine(...), of loss.backward() in fp16 without engine.scale(loss), or of loss.backward() under a DeepSpeed "
        "that knows engine.backward(loss) only. Remedy: engine.backward(loss), with the loss of engine(...)"
    )
