"""Ballots: every rank's say in the next mask, so that it stays good on many ranks (DESIGN section 6).

An owner scores with its own residual, one rank's view of the mean. With ballots each other rank tells it the places of
its largest unsent gradients there, their signs, and their mean magnitude a. The owner's estimate of the mean residual

    Rhat = (r_own + sum over the other ranks of sign * a at the places they name) / W

takes the place of r_own in the score. A ballot is fresh: cast once this step's gradients are in the residual and the
mask's entries taken out, on its way with the reduce of the same step, counted when the next mask is made.

One ballot, of a size that follows from (S, K) alone:

    a (4 bytes, fp32)   places (the smallest mask code for V of S)   signs (V bits, 1 for negative)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_scape.encoding import MaskCode, decode_masks, encode_mask, partition_code
from deepspeed_scape.mask import Moments, select_partition

SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class BallotCode:
    """How one parameter group's ballots travel."""

    places: MaskCode  # of V elements of a partition
    nbytes: int  # of one ballot

    @property
    def votes(self) -> int:  # V
        return self.places.kept


def votes_of(kept: int) -> int:
    """V: K less a sixty-fourth, so that at 99% a ballot stays below 0.015 bytes an element, escapes included."""
    return kept - kept // 64


def ballot_code(partition_size: int, kept: int) -> BallotCode:
    """The code for partitions of S elements of which a mask keeps K; the same on every rank."""
    votes = votes_of(kept)
    places = partition_code(partition_size, votes)
    nbytes = SCALE_BYTES + places.nbytes + -(-votes // 8) if votes else 0
    return BallotCode(places=places, nbytes=nbytes)


def cast_ballot(
    gradient: Tensor,  # (S,) fp32 or bf16: this rank's residual in the partition of another owner
    known: Moments,  # of a partition of the same size; only its shape and device matter
    step: int,
    code: BallotCode,
    seed: int,
    out: Tensor,  # (nbytes,) uint8, written
) -> None:
    """Write one ballot: the V largest unsent gradients of a partition."""
    if code.nbytes == 0:
        return
    unsent = Moments(gradient=gradient, exp_avg=known.exp_avg, last=known.last)
    index = select_partition(unsent, step, 0.0, code.votes, seed)  # without momentum the score is |gradient|
    values = gradient.index_select(0, index).float()
    out[:SCALE_BYTES].copy_(values.abs().mean().view(1).view(torch.uint8))
    encode_mask(index, code.places, out[SCALE_BYTES : SCALE_BYTES + code.places.nbytes])
    out[SCALE_BYTES + code.places.nbytes :].copy_(pack_signs(values < 0))


def count_ballots(
    own: Tensor,  # (S,) fp32 or bf16: the owner's residual in its own partition
    ballots: Tensor,  # (W, nbytes) uint8: what every rank sent; the owner's own row is not read
    rank: int,
    code: BallotCode,
    faults: Tensor | None,  # (1,) int32: see ``decode_masks``
) -> Tensor:  # (S,) fp32: Rhat
    """The owner's estimate of the mean residual.

    Ranks are counted one after another: their places are distinct within one ballot only, and a sum of atomics would
    not be the same twice.

    Raises:
        RuntimeError: on a CPU, a ballot is damaged.
    """
    world = ballots.shape[0]
    estimate = own.float() if own.dtype != torch.float32 else own.clone()
    if code.nbytes == 0 or world == 1:
        return estimate
    rows = torch.cat([ballots[:rank], ballots[rank + 1 :]])  # (W-1, nbytes)
    index = decode_masks(rows[:, SCALE_BYTES : SCALE_BYTES + code.places.nbytes], code.places, faults)
    scale = rows[:, :SCALE_BYTES].reshape(-1).clone().view(torch.float32).view(-1, 1)  # (W-1, 1), aligned by the clone
    negative = unpack_signs(rows[:, SCALE_BYTES + code.places.nbytes :], code.votes)
    votes = torch.where(negative, -scale, scale)  # (W-1, V)
    for named, vote in zip(index, votes, strict=True):
        estimate.index_add_(0, named, vote)
    return estimate.div_(world)


def pack_signs(negative: Tensor) -> Tensor:  # (V,) bool -> (ceil(V/8),) uint8
    """Eight signs a byte, the first in the lowest bit."""
    padded = torch.nn.functional.pad(negative.to(torch.uint8), (0, -negative.numel() % 8))
    return (padded.view(-1, 8) << _bits(negative.device)).sum(1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, votes: int) -> Tensor:  # (n, ceil(V/8)) uint8 -> (n, V) bool
    """The signs of n ballots."""
    bits = (packed.unsqueeze(2) >> _bits(packed.device)) & 1
    return bits.reshape(packed.shape[0], -1)[:, :votes].bool()


def _bits(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
