"""Bytes a rank holds for parameters, gradients and optimizer, without activations and without messages in flight.

dense ZeRO   weights P + gradients P (held whole until reduced) + (master + two moments) P/W
SCAPE        weights P + gradients P + residual P + (master + two moments + last) P/W + mask 8 B x density P

With ``residual_device: "cpu"`` the device keeps P/W of the residual, pinned host memory the rest.
"""

from __future__ import annotations

from deepspeed_scape.plan.messages import WIDTH


def dense(params: int, owners: int, dtype: str) -> float:
    """Dense ZeRO-1 (and DDP with one owner). At stage 2 the gradients of other owners leave as buckets are reduced."""
    width = WIDTH[dtype]
    return params * (width + width + 12 / owners)


def scape(
    params: int, ranks: int, density: float, dtype: str, residual_dtype: str, residual_device: str = "device"
) -> float:
    """SCAPE at either stage, on the device."""
    width, residual = WIDTH[dtype], float(WIDTH[residual_dtype])
    if residual_device == "cpu":
        residual /= ranks
    return params * (2 * width + residual + 16 / ranks + 8 * density * (density < 1))


def pinned(params: int, ranks: int, residual_dtype: str, residual_device: str) -> float:
    """SCAPE's pinned host memory, of one rank; a step moves as much each way."""
    return params * WIDTH[residual_dtype] * (1 - 1 / ranks) if residual_device == "cpu" else 0.0
