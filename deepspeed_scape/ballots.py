"""Ballots: every rank's say in the next mask, so that it stays good on many ranks (DESIGN section 6).

An owner scores with its own residual, one rank's view of the mean. With ballots each other rank tells it the places of
its largest unsent gradients there, their signs, and their mean magnitude a. A vote is a transfer: sign * a leaves the
residual of who casts it and joins the owner's, so that the sum over the ranks, which is all that an update sees, stays
what it was; nothing is told twice; and what has been told is remembered until the element is visited, without memory
of its own. It is sign compression with error feedback, of what the mask has left. The owner's estimate of the mean

    Rhat = r_own / W

takes the place of r_own in the score. A ballot is fresh: cast once this step's gradients are in the residual and the
mask's entries taken out, on its way with the reduce of the same step, counted when the next mask is made. A bf16
residual rounds on both sides of a transfer, as it does whenever gradients are added.

One ballot, of a size that follows from (S, K) alone:

    a (4 bytes, fp32)   places (the smallest mask code for V of S)   signs (V bits, 1 for negative)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_scape.encoding import MaskCode, decode_masks, encode_masks, pack_bits, partition_code, unpack_bits
from deepspeed_scape.mask import Moments, rows_together, select_largest

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


def cast_ballots(
    gradients: Tensor,  # (n, S) fp32 or bf16, updated: this rank's residual in the partitions of n other owners
    known: Moments,  # of a partition of the same size; only its shape and device matter
    step: int,
    code: BallotCode,
    seed: int,
    out: Tensor,  # (n, nbytes) uint8, written, may be a slice of wider rows
) -> None:
    """Write a ballot for each owner, of the V largest unsent gradients of its partition, and take out what it moves.

    Small partitions are taken together, as many as bounded buffers hold (see ``rows_together``). On a CPU the bytes are
    those of each alone; a GPU may round the scale otherwise.
    """
    if code.nbytes == 0 or gradients.shape[0] == 0:
        return
    count = max(1, rows_together(gradients, code.votes))
    for rows, ballots in zip(gradients.split(count), out.split(count), strict=True):
        index = select_largest(rows, known, step, code.votes, seed)
        values = rows.gather(1, index).float()  # (n, V)
        mean = values.abs().mean(1, keepdim=True)
        scale, places, signs = _parts(ballots, code)
        scale.copy_(mean.view(torch.uint8))
        encode_masks(index, code.places, places)
        negative = values < 0
        signs.copy_(pack_bits(negative))
        rows.scatter_(1, index, values.sub_(torch.where(negative, -mean, mean)).to(rows.dtype))


def count_ballots(
    own: Tensor,  # (S,) fp32 or bf16, updated: the owner's residual in its own partition
    ballots: Tensor,  # (W, nbytes) uint8: what every rank sent; the owner's own row is not read
    rank: int,
    code: BallotCode,
    faults: Tensor | None,  # (1,) int32: see ``decode_masks``
) -> None:
    """Add what the others have moved here.

    Ranks are counted one after another: their places are distinct within one ballot only, and a sum of atomics would
    not be the same twice.

    Raises:
        RuntimeError: on a CPU, a ballot is damaged.
    """
    world = ballots.shape[0]
    if code.nbytes == 0 or world == 1:
        return
    total = own.float()  # itself if it is fp32
    rows = torch.cat([ballots[:rank], ballots[rank + 1 :]])  # (W-1, nbytes)
    scale, places, signs = _parts(rows, code)
    index = decode_masks(places, code.places, faults)
    scale = scale.reshape(-1).clone().view(torch.float32).view(-1, 1)  # (W-1, 1), aligned by the clone
    votes = torch.where(unpack_bits(signs, code.votes), -scale, scale)  # (W-1, V)
    for named, vote in zip(index, votes, strict=True):
        total.index_add_(0, named, vote)
    if total is not own:
        own.copy_(total)


def _parts(
    ballots: Tensor,  # (n, nbytes) uint8
    code: BallotCode,
) -> tuple[Tensor, ...]:  # views (n, 4), (n, bytes of the places), (n, ceil(V/8))
    """Scale, places and signs."""
    return ballots.split([SCALE_BYTES, code.places.nbytes, code.nbytes - SCALE_BYTES - code.places.nbytes], dim=1)
