"""Plain torch: the specification of every kernel, and the path of a device that has no other.

In place and in pieces on a CPU, so that no temporary is of size P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from deepspeed_scape.adams import Hyper, owner_update
from deepspeed_scape.decay import DecayHistory
from deepspeed_scape.encoding import ESCAPE, MaskCode, check_masks, pack_bits, unpack_bits
from deepspeed_scape.mask import Moments, infinite_if_nan, pending_moment, select_top, top_of_blocks, top_of_rows
from deepspeed_scape.residual import CHUNK, chunks

SQUARED = 16 * CHUNK  # elements; a call of torch for each CHUNK would cost twice what the squares do


def sum_squares(grads: Sequence[Tensor]) -> Tensor:
    """Pieces are summed in fp32 and their sums in fp64.

    Finite values too large for fp32 squares are done again in fp64, so that only a real inf or nan can cause a skipped
    step.
    """
    if grads[0].device.type == "cpu":
        sums = [part for grad in grads for part in _sums_of_pieces(grad.reshape(-1))]
        total = torch.cat(sums).sum(dtype=torch.float64)
        if torch.isfinite(total):
            return total
    return wide_sum_squares(grads)


def wide_sum_squares(grads: Sequence[Tensor]) -> Tensor:
    """In fp64 throughout."""
    squares = [torch.linalg.vector_norm(grad.reshape(-1), dtype=torch.float64).square() for grad in grads]
    return torch.stack(squares).sum()


def _sums_of_pieces(flat: Tensor) -> Iterator[Tensor]:  # (n,) any float dtype on a CPU
    """The squares of each CHUNK elements, summed: (pieces,) fp32 tensors."""
    for start in range(0, max(flat.numel(), 1), SQUARED):
        values = flat[start : start + SQUARED].float()
        whole = values.numel() // CHUNK * CHUNK
        if whole:  # one call for many dot products of CHUNK elements each
            rows = values[:whole].view(-1, 1, CHUNK)
            yield torch.bmm(rows, rows.transpose(1, 2)).view(-1)
        yield torch.dot(values[whole:], values[whole:]).view(1)


def accumulate(
    residual: Tensor,  # (P,) fp32 or bf16, updated
    grads: Sequence[Tensor],  # any shapes and float dtypes
    starts: Sequence[int],  # where each begins in the residual
    scale: float,  # clip coefficient / loss scale
) -> None:
    """Add scaled local gradients to the residual, in place and without a temporary of their size."""
    for grad, start in zip(grads, starts, strict=True):
        flat = grad.reshape(-1)
        whole = residual[start : start + flat.numel()]
        if whole.dtype == flat.dtype == torch.float32:
            whole.add_(flat, alpha=scale)
            continue
        for piece in chunks(flat.numel(), flat.device):
            target = whole[piece]
            if target.dtype == torch.float32:
                target.add_(flat[piece].float(), alpha=scale)
            else:  # a bf16 residual rounds once, after an fp32 sum
                target.copy_(torch.add(target.float(), flat[piece].float(), alpha=scale))


def prepare_accumulate(
    grads: Sequence[Tensor], starts: Sequence[int], device: torch.device
) -> Callable[[Tensor, float], None]:
    """There is nothing to prepare."""
    return lambda residual, scale: accumulate(residual, grads, starts, scale)


def pack(
    residual: Tensor,  # (P,) fp32 or bf16; the packed entries become 0
    position: Tensor,  # (W*K,) int64 places in the flat buffer, rank by rank
    out: Tensor,  # (W, K) value dtype, written, may be a slice of wider rows
) -> None:
    out.copy_(residual.index_select(0, position).view(out.shape))
    residual.index_fill_(0, position, 0.0)


def pack_bucket(
    bucket: Tensor,  # (n,) fp32 or bf16: a part of one owner's partition; the packed entries become 0
    start: int,  # where it begins in the flat buffer
    position: Tensor,  # (K,) int64 places in the flat buffer
    out: Tensor,  # (K,) value dtype, written where the place lies in the bucket
) -> None:
    """Without asking how many entries those are, for which the host would wait."""
    size = bucket.numel()
    place = position - start
    inside = (place >= 0) & (place < size)
    place.masked_fill_(~inside, size)
    padded = torch.cat([bucket, bucket.new_zeros(1)])  # one more, that all others may take
    out.copy_(torch.where(inside, padded.index_select(0, place).to(out.dtype), out))
    bucket.copy_(padded.index_fill_(0, place, 0.0)[:size])


def update(
    own: Tensor | None,  # (K,) int64: the mask; None for all S
    mean: Tensor,  # (K,) fp32
    step: int,
    states: tuple[Tensor, Tensor, Tensor],  # weight, exp_avg, exp_avg_sq (S,) fp32, updated
    last: Tensor,  # (S,) int32, updated
    decay: DecayHistory,
    hyper: Hyper,
    out: Tensor,  # (K,) any float dtype, written: the new weights
) -> None:
    at = [state if own is None else state.index_select(0, own) for state in (*states, last)]
    delay = at[3].to(torch.float32).neg_().add_(step)
    updated = owner_update(mean, delay, at[0], at[1], at[2], at[3] == 0, decay.since(at[3]), hyper)
    for state, new in zip(states, updated, strict=True):
        state.copy_(new) if own is None else state.index_copy_(0, own, new)
    last.fill_(step) if own is None else last.index_fill_(0, own, step)
    out.copy_(updated[0])


def scatter_params(
    flat: Tensor,  # (P,) model dtype, this rank's replica, updated
    position: Tensor,  # (W*K,) int64
    values: Tensor,  # (W, K) model dtype, may be a slice of wider rows
) -> None:
    flat.index_copy_(0, position, values.reshape(-1))


def top_k(moments: Moments, step: int, beta1: float, kept: int, seed: int) -> Tensor:
    """The definition; it needs a buffer of S scores, and waits for the device to learn that there are K of them."""
    return select_top(pending_moment(moments, step, beta1), kept)


def largest_of_rows(
    rows: Tensor,  # (n, S) fp32 or bf16
    kept: int,
) -> Tensor:  # (n, K) int64 ascending in each row
    """Waits for the device to learn that there are n*K of them."""
    index = top_of_rows(infinite_if_nan(rows.abs().float()), kept).view(rows.shape[0], kept)
    return index.sub_(torch.arange(rows.shape[0], device=rows.device).unsqueeze(1) * rows.shape[1])


def block_top_k(
    moments: Moments,
    step: int,
    beta1: float,
    code: MaskCode,
    out: Tensor,  # (nbytes,) uint8, written
) -> None:
    size, block = code.size, code.block_size
    tail_kept = code.kept - size // block * code.block_kept
    longest = max(1, CHUNK // block) * block if out.device.type == "cpu" else max(1, -(-size // block)) * block
    for start in range(0, size, longest):
        piece = slice(start, min(start + longest, size))
        score = pending_moment(moments[piece], step, beta1)
        index = top_of_blocks(score, block, code.block_kept, tail_kept)
        _write_offsets(index.unsqueeze(0), code, out.unsqueeze(0), start // block * code.block_kept)


def _write_offsets(index: Tensor, code: MaskCode, out: Tensor, first: int = 0) -> None:
    """Places in their blocks (n, k) as bytes, the first of them at byte ``first``; a high plane follows the low one."""
    offset = index % code.block_size
    stop = first + index.shape[1]
    out[:, first:stop].copy_(offset & 255)
    if out.shape[1] > code.kept:
        out[:, code.kept + first : code.kept + stop].copy_(offset >> 8)


def encode_masks(
    index: Tensor,  # (n, K) int64 ascending in [0, S) in each row
    code: MaskCode,
    out: Tensor,  # (n, nbytes) uint8, written
) -> None:
    if code.kind == "delta":
        gap = torch.diff(index, dim=1, prepend=index.new_full((index.shape[0], 1), -1)).sub_(1)
        escapes = gap // ESCAPE
        place = escapes.cumsum(1).add_(torch.arange(index.shape[1], device=index.device))
        out.fill_(ESCAPE).scatter_(1, place, (gap - escapes * ESCAPE).to(torch.uint8))
    elif code.kind == "bitmap":
        chosen = torch.zeros(index.shape[0], code.size, dtype=torch.uint8, device=index.device)
        out.copy_(pack_bits(chosen.scatter_(1, index, 1)))
    else:
        _write_offsets(index, code, out)


def decode_masks(
    encoded: Tensor,  # (W, nbytes) uint8: the masks of every owner
    code: MaskCode,
    faults: Tensor,  # not used: what is wrong raises here
) -> Tensor:  # (W, K) int64 ascending in each row
    if code.kind == "delta":
        taken = encoded != ESCAPE
        index = (encoded.to(torch.int64) + taken).cumsum(1).sub_(1)[taken]
    elif code.kind == "bitmap":
        index = unpack_bits(encoded, encoded.shape[1] * 8).nonzero()[:, 1]
    else:
        index = _decode_offset(encoded, code)
    return check_masks(index.reshape(-1), encoded.shape[0], code)


def _decode_offset(encoded: Tensor, code: MaskCode) -> Tensor:
    offset = encoded[:, : code.kept].to(torch.int64)
    if encoded.shape[1] > code.kept:
        offset += encoded[:, code.kept :].to(torch.int64) << 8
    block = torch.arange(code.kept, device=encoded.device) // max(code.block_kept, 1)
    # the tail block may keep more or fewer than the others: all beyond the full blocks belong to it
    block.clamp_(max=code.size // code.block_size)
    return offset + block * code.block_size
