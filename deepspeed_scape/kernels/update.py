"""The owner's update of its K masked elements, gathered, updated and written back in one kernel.

The formula is ``adams.owner_update`` (DESIGN section 1); powers of the decay rates come from ``adams.delay_tables``, as
in the CPU loops, and every operation is rounded as there, so that both give the same bits.

Floor, bytes for each of K entries: 8 (mask) + 4 (mean) + e_out + 8 sectors of 32 bytes (weight, two moments and the
time of the last visit, read and written), or 32 S where that is less. A dense step: 36 + e_out an element.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from deepspeed_scape.adams import Hyper, delay_tables, ema_scale, momentum_sum
from deepspeed_scape.decay import DecayHistory
from deepspeed_scape.kernels.launch import EXACT, blocks, on_its_device

BLOCK = 1024


@triton.jit(do_not_specialize=["step"])
def _update(
    own,  # (K,) int64: the mask
    mean,  # (K,) fp32: R
    weight,  # (S,) fp32, updated; so are the next three
    exp_avg,  # (S,) fp32
    exp_avg_sq,  # (S,) fp32
    last,  # (S,) int32
    forgotten,  # (more than step,) fp32: 1 - b1^D by delay
    keep,  # (more than step,) fp32: max(b2^D, floor)
    decay,  # (t+1,) fp32: product of (1 - lr wd) since each step
    out,  # (K,) model dtype, written: the new weights
    kept,  # K
    step,
    lr,
    eps,
    momentum_sum,
    beta2,
    beta2_rest,  # 1 - beta2 in fp32
    ema_scale,
    EMA: tl.constexpr,  # the normalizer
    DECAYS: tl.constexpr,
    DENSE: tl.constexpr,  # all S elements: own is not read
    BLOCK: tl.constexpr,
):
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = k < kept
    if DENSE:
        i = k
    else:
        i = tl.load(own + k, mask=inside, other=0)
    total = tl.load(mean + k, mask=inside, other=0.0)
    before = tl.load(last + i, mask=inside, other=0)
    moment = tl.load(exp_avg + i, mask=inside, other=0.0)
    value = tl.load(weight + i, mask=inside, other=0.0)
    delay = tl.where(inside, step - before, 1)
    gone = tl.load(forgotten + delay, mask=inside, other=0.0)

    gradient = tl.div_rn(total, delay.to(tl.float32))
    toward = gradient - moment
    second = total * gradient
    if EMA:
        square = tl.load(exp_avg_sq + i, mask=inside, other=0.0)
        memory = tl.load(keep + delay, mask=inside, other=0.0)
        square = tl.where(before == 0, second, second + memory * (square - second))
        normalizer = tl.sqrt_rn(square * ema_scale)
    else:
        square = moment * moment * beta2 + beta2_rest * second
        normalizer = tl.sqrt_rn(square)
    if DECAYS:
        value = value * tl.load(decay + before, mask=inside, other=0.0)
    pull = toward * gone
    value = value - lr * tl.div_rn(total - momentum_sum * pull, normalizer + eps)

    tl.store(exp_avg + i, moment + pull, mask=inside)
    tl.store(exp_avg_sq + i, square, mask=inside)
    tl.store(weight + i, value, mask=inside)
    tl.store(last + i, tl.zeros([BLOCK], tl.int32) + step, mask=inside)
    tl.store(out + k, value.to(out.dtype.element_ty), mask=inside)


@on_its_device
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
    if not mean.numel():
        return
    tables = delay_tables(hyper.beta1, hyper.beta2, step, mean.device)
    products = decay.products()
    _update[(blocks(mean.numel(), BLOCK),)](
        last if own is None else own,
        mean,
        *states,
        last,
        tables.forgotten,
        tables.keep,
        products if products.numel() else mean,
        out,
        mean.numel(),
        step,
        hyper.lr,
        hyper.eps,
        momentum_sum(hyper.beta1),
        hyper.beta2,
        _rest(hyper.beta2),
        ema_scale(hyper.beta1, hyper.beta2),
        EMA=hyper.normalizer == "ema",
        DECAYS=products.numel() > 0,
        DENSE=own is None,
        BLOCK=BLOCK,
        num_warps=4,
        **EXACT,
    )


def _rest(beta2: float) -> float:
    """1 - beta2 as fp32 arithmetic gives it, which is what the CPU loop computes."""
    return float(np.float32(1) - np.float32(beta2))
