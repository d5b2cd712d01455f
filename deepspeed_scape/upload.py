"""From the host to the device without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """``values``, on the CPU, as a tensor on ``device``.

    A copy from ordinary memory would wait for all that the device still has to do; torch keeps the pinned copy until
    the transfer is over.
    """
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
