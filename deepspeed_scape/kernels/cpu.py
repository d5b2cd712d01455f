"""The CPU form: the compiled loops of ``loops`` where numba is installed and takes the dtypes, else the torch twins.

The exact top-K of a large partition is ``mask.select``'s own affair: it ranks few candidates instead of S scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepspeed_scape.adams import Hyper, delay_tables, ema_scale, momentum_sum
from deepspeed_scape.decay import DecayHistory
from deepspeed_scape.encoding import MaskCode, check_masks
from deepspeed_scape.kernels import loops_for, naive
from deepspeed_scape.kernels.naive import (
    accumulate,
    block_top_k,
    pack_bucket,
    prepare_accumulate,
    scatter_params,
    top_k,
)

__all__ = [
    "accumulate",
    "block_top_k",
    "decode_masks",
    "encode_masks",
    "largest_of_rows",
    "pack",
    "pack_bucket",
    "prepare_accumulate",
    "scatter_params",
    "sum_squares",
    "top_k",
    "update",
]


def sum_squares(grads: Sequence[Tensor]) -> Tensor:
    flat = [grad.detach().reshape(-1) for grad in grads]
    loops = loops_for(*flat) if all(grad.dtype == torch.float32 for grad in flat) else None
    if loops is None:
        return naive.sum_squares(grads)
    total = sum(loops.sum_squares(grad.numpy()) for grad in flat)
    return torch.tensor(total, dtype=torch.float64) if math.isfinite(total) else naive.wide_sum_squares(grads)


def pack(residual: Tensor, position: Tensor, out: Tensor) -> None:
    if residual.dtype == out.dtype == torch.float32 and (loops := loops_for(residual, position)):
        loops.pack(residual.numpy(), position.numpy(), out.numpy())
    else:
        naive.pack(residual, position, out)


def update(
    own: Tensor | None,
    mean: Tensor,
    step: int,
    states: tuple[Tensor, Tensor, Tensor],
    last: Tensor,
    decay: DecayHistory,
    hyper: Hyper,
    out: Tensor,
) -> None:
    loops = None if own is None else loops_for(own, mean, *states, last)
    if loops is None:
        naive.update(own, mean, step, states, last, decay, hyper, out)
        return
    tables = delay_tables(hyper.beta1, hyper.beta2, step, mean.device)
    new = out if out.dtype == torch.float32 and out.is_contiguous() else torch.empty_like(mean)
    loops.update(
        *(tensor.numpy() for tensor in (own, mean)),  # type: ignore[union-attr]
        step,
        *(tensor.numpy() for tensor in (*states, last, tables.forgotten, tables.keep)),
        decay.products().numpy(),
        *(np.float32(x) for x in (hyper.lr, hyper.eps, momentum_sum(hyper.beta1), hyper.beta2)),
        np.float32(ema_scale(hyper.beta1, hyper.beta2)),
        hyper.normalizer == "ema",
        new.numpy(),
    )
    if new is not out:
        out.copy_(new)


def largest_of_rows(rows: Tensor, kept: int) -> Tensor:
    values = rows.float()
    loops = loops_for(values) if kept else None
    if loops is None:
        return naive.largest_of_rows(rows, kept)
    index = torch.empty(rows.shape[0], kept, dtype=torch.int64)
    loops.largest_of_rows(values.numpy(), index.numpy())
    return index


def encode_masks(index: Tensor, code: MaskCode, out: Tensor) -> None:
    loops = loops_for(index) if code.kind == "delta" and out.stride(1) == 1 else None
    loops.encode_delta(index.numpy(), out.numpy()) if loops else naive.encode_masks(index, code, out)


def decode_masks(encoded: Tensor, code: MaskCode, faults: Tensor) -> Tensor:
    if code.kind != "delta" or encoded.stride(1) != 1 or not (loops := loops_for(encoded[0])):
        return naive.decode_masks(encoded, code, faults)
    index = torch.empty(encoded.shape[0], code.kept, dtype=torch.int64)
    found = loops.decode_delta(encoded.numpy(), index.numpy())
    return check_masks(index if found == index.numel() else index.new_empty(found), encoded.shape[0], code)
