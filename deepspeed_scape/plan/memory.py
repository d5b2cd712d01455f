"""Bytes a rank holds for parameters, gradients and optimizer, without activations and without messages in flight.

dense ZeRO   weights P + gradients P (held whole until reduced) + (master + two moments) P/W
SCAPE        weights P + gradients P + residual P + (master + two moments + last) P/W + mask 8 B x density P
"""

from __future__ import annotations

from deepspeed_scape.plan.messages import WIDTH


def dense(params: int, owners: int, dtype: str) -> float:
    """Dense ZeRO-1 (and DDP with one owner). At stage 2 the gradients of other owners leave as buckets are reduced."""
    width = WIDTH[dtype]
    return params * (width + width + 12 / owners)


def scape(params: int, ranks: int, density: float, dtype: str, residual_dtype: str) -> float:
    """SCAPE at either stage."""
    width = WIDTH[dtype]
    return params * (2 * width + WIDTH[residual_dtype] + 16 / ranks + 8 * density * (density < 1))
