"""The collectives of ``deepspeed_scape.exchange`` between ranks that live in one process.

Each takes what every rank would give, in rank order, and counts what one of them would send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


class InProcessExchange:
    """Sums in rank order, as the owners of the gloo exchange do, so that two ranks give the same bits as a launch."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.sent: Counter[str] = Counter()  # bytes one rank has sent, by purpose, since the last take

    def take_sent(self) -> dict[str, int]:
        """Bytes one rank has sent since the last call, by purpose."""
        sent = dict(self.sent)
        self.sent.clear()
        return sent

    def sum_scalars(self, terms: Sequence[Tensor]) -> Tensor:  # W x (n,) fp64 -> (n,)
        self._count("scalar", 2 * terms[0].nbytes / self.world_size)
        return torch.stack(list(terms)).sum(0)

    def reduce_mean(self, packed: Sequence[Tensor]) -> list[Tensor]:  # W x (W, K) value dtype -> W x (K,) fp32
        self._count("reduce", packed[0].nbytes / self.world_size)
        received = torch.stack(list(packed))  # (rank, owner, K)
        if self.world_size == 1:
            return [received[0, 0].float()]
        return [received[:, owner].sum(0, dtype=torch.float32).div_(self.world_size) for owner in range(len(packed))]

    def all_to_all(self, own: Sequence[Tensor], purpose: str) -> list[Tensor]:  # W x (W, B) uint8 -> W x (W, B)
        self._count(purpose, own[0].nbytes / self.world_size)
        return list(torch.stack(list(own)).transpose(0, 1))

    def all_gather(self, own: Sequence[Tensor], purpose: str) -> Tensor:  # W x (B,) uint8 -> (W, B)
        self._count(purpose, own[0].nbytes)
        return torch.stack(list(own))

    def _count(self, purpose: str, nbytes_per_peer: float) -> None:
        self.sent[purpose] += int(nbytes_per_peer * (self.world_size - 1))
