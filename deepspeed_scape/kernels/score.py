"""The pending first moment as an integer that sorts as the score does.

score = |share(D) r + moved(D) m|,  D = t - last      (``mask.pending_moment``: two products and a sum, no fused one)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score_key(
    gradient,  # r, fp32
    exp_avg,  # m, fp32
    delay,  # D, int32 >= 0
    share,  # (more than step,) fp32 table
    moved,  # (more than step,) fp32 table
    mask,
):
    """31 bits, int32 >= 0, ascending with the score; 0 where ``mask`` is false."""
    moment = tl.load(share + delay, mask=mask, other=0.0) * gradient
    moment = moment + tl.load(moved + delay, mask=mask, other=0.0) * exp_avg
    bits = moment.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # the absolute value
    return tl.where(mask, tl.minimum(bits, 0x7F800000), 0)  # the bits of inf: what is not a number counts as infinite
