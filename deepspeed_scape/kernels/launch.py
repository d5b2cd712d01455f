"""What every Triton launcher shares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

# Products and sums are rounded one by one, as on a CPU: a fused multiply-add would give another mask there than here
EXACT = {"enable_fp_fusion": False}


def blocks(count: int, block: int) -> int:
    """Programs of ``block`` elements that cover ``count``."""
    return -(-count // block)


def tensor_of(argument: Any) -> Tensor | None:
    """The first tensor in an argument of a launcher: itself, in a list, or a field."""
    if isinstance(argument, Tensor):
        return argument
    if isinstance(argument, list | tuple) and argument:
        return tensor_of(argument[0])
    return getattr(argument, "exp_avg", None)


def on_its_device(launcher: F) -> F:
    """Run a launcher on its tensors' device: Triton takes the current one, which may be another."""

    @functools.wraps(launcher)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensor = next(t for t in map(tensor_of, args) if t is not None)
        scope: AbstractContextManager[Any] = torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
        with scope:
            return launcher(*args, **kwargs)

    return run  # type: ignore[return-value]
