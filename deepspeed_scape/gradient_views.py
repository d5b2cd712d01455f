"""DeepSpeed's debugging views (``safe_get_full_grad``, ``safe_set_full_grad``, ``safe_set_full_fp32_param``).

Those of a gradient work between backward and step, on all ranks together. DeepSpeed's own look for reduced gradients on
the owner and raise there alone, which leaves the other ranks waiting.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import set_full_hp_param
from torch import Tensor


def attach(param: Any) -> None:
    """Give ``param`` the methods that DeepSpeed calls."""
    param.set_full_hp_param = types.MethodType(replace_param, param)
    param.get_full_hp_grad = types.MethodType(dense_average_gradient, param)
    param.set_full_hp_grad = types.MethodType(replace_gradient, param)


def replace_param(param: Any, value: Tensor, optim_state_key: str | None = None) -> None:
    """Set a master, or one of its states, and with a master every replica: the next gather is sparse and would not."""
    set_full_hp_param(param, value, optim_state_key)
    if optim_state_key is None:
        with torch.no_grad():
            param.copy_(value.view_as(param))


def dense_average_gradient(param: Any) -> Tensor:
    """Mean over the ranks of the gradient that waits for the step, still loss-scaled; all ranks must call it."""
    waiting = getattr(param, "grad_accum", None)
    average = torch.zeros_like(param, dtype=torch.float32)
    if waiting is not None:
        average.copy_(waiting)
    dist.all_reduce(average, group=param._dp_group)
    return average.div_(dist.get_world_size(param._dp_group))


def replace_gradient(param: Any, value: Tensor) -> None:
    """Let ``value`` be the mean gradient of the step to come: every rank that calls this holds it as its own."""
    param.grad_accum = value.detach().clone().view_as(param)
