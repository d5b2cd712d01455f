"""A mask as bytes of a fixed size, near its entropy.

Every size follows from (S, K) alone, so no collective needs a round trip to learn it. Three codes:

- ``delta``: the gap to the previous index as one byte; 255 means "255 further, nothing chosen here yet". Unused bytes
  at the end are 255 too. The gaps add up to at most S - K, hence at most (S - K)/255 escapes, and for K >= S/256 they
  fit K + ceil(S/256) bytes.
- ``bitmap``: one bit an element, where that is smaller (density above about 12%).
- ``offset``: for block selection, the place inside the block, one byte (two for blocks above 256).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.kernels import loops_for
from deepspeed_scape.layout import GroupLayout, kept_of

ESCAPE = 255


@dataclass(frozen=True, kw_only=True)
class MaskCode:
    """How the masks of one parameter group travel: the code and the sizes it needs."""

    kind: Literal["delta", "bitmap", "offset"]
    size: int  # S
    kept: int  # K
    nbytes: int  # of one encoded mask
    block_size: int = 0
    block_kept: int = 0


def delta_nbytes(size: int, kept: int) -> int:
    """Bytes of the delta code: K + ceil(S/256), or what the escapes need when K < S/256."""
    return kept + max(-(-size // 256), (size - kept) // 255)


def choose_code(layout: GroupLayout, options: ScapeOptions) -> MaskCode:
    """The smallest code for this group; the same on every rank, since it depends on sizes and options only."""
    size, kept = layout.partition_size, layout.kept
    if options.selection == "block":
        width = 1 if options.block_size <= 256 else 2
        block_kept = kept_of(options.block_size, options.density)
        return MaskCode(
            kind="offset",
            size=size,
            kept=kept,
            nbytes=kept * width,
            block_size=options.block_size,
            block_kept=block_kept,
        )
    bitmap = -(-size // 8)
    delta = delta_nbytes(size, kept)
    kind: Literal["delta", "bitmap"] = "bitmap" if bitmap < delta else "delta"
    return MaskCode(kind=kind, size=size, kept=kept, nbytes=min(bitmap, delta))


def encode_mask(
    index: Tensor,  # (K,) int64 ascending in [0, S)
    code: MaskCode,
    out: Tensor,  # (nbytes,) uint8, written
) -> None:
    """Write one mask into its fixed-size buffer."""
    if code.kind == "delta":
        loops = loops_for(index, out)
        loops.encode_delta(index.numpy(), out.numpy()) if loops else _encode_delta(index, out)
    elif code.kind == "bitmap":
        bits = torch.zeros(code.nbytes * 8, dtype=torch.uint8, device=index.device)
        bits[index] = 1
        out.copy_((bits.view(-1, 8) << _bit_places(index.device)).sum(1, dtype=torch.uint8))
    else:
        offset = index % code.block_size
        out[: code.kept].copy_(offset & 255)
        if out.numel() > code.kept:
            out[code.kept :].copy_(offset >> 8)


def decode_masks(
    encoded: Tensor,  # (W, nbytes) uint8: the masks of every owner
    code: MaskCode,
) -> Tensor:  # (W, K) int64 ascending in each row
    """Read the masks of all owners.

    Raises:
        RuntimeError: a mask does not hold exactly K elements inside the partition (damaged, or of other options).
    """
    if code.kept == 0:
        return torch.empty(encoded.shape[0], 0, dtype=torch.int64, device=encoded.device)
    if code.kind == "delta":
        index = _decode_delta(encoded, code)
    elif code.kind == "bitmap":
        bits = (encoded.unsqueeze(2) >> _bit_places(encoded.device)) & 1
        index = bits.view(encoded.shape[0], -1).nonzero()[:, 1]
    else:
        index = _decode_offset(encoded, code)
    if index.numel() != encoded.shape[0] * code.kept:
        raise RuntimeError(
            f"a gathered mask holds {index.numel()} elements in all, not {encoded.shape[0]} x {code.kept}"
        )
    if index.device.type == "cpu" and int(index.max()) >= code.size:  # on a GPU this would wait for the device
        raise RuntimeError(f"a gathered mask holds element {int(index.max())} of a partition of {code.size}")
    return index.view(encoded.shape[0], code.kept)


def _encode_delta(index: Tensor, out: Tensor) -> None:
    gap = torch.diff(index, prepend=index.new_full((1,), -1)).sub_(1)
    escapes = gap // ESCAPE
    place = escapes.cumsum(0).add_(torch.arange(index.numel(), device=index.device))
    out.fill_(ESCAPE)
    out[place] = (gap - escapes * ESCAPE).to(torch.uint8)


def _decode_delta(encoded: Tensor, code: MaskCode) -> Tensor:
    if encoded.stride(1) == 1 and (loops := loops_for(encoded[0])):
        index = torch.empty(encoded.shape[0], code.kept, dtype=torch.int64)
        found = loops.decode_delta(encoded.numpy(), index.numpy())
        return index if found == index.numel() else index.new_empty(found)
    taken = encoded != ESCAPE
    return (encoded.to(torch.int64) + taken).cumsum(1).sub_(1)[taken]


def _decode_offset(encoded: Tensor, code: MaskCode) -> Tensor:
    offset = encoded[:, : code.kept].to(torch.int64)
    if encoded.shape[1] > code.kept:
        offset += encoded[:, code.kept :].to(torch.int64) << 8
    block = torch.arange(code.kept, device=encoded.device) // max(code.block_kept, 1)
    # the tail block may keep more or fewer than the others: all beyond the full blocks belong to it
    block.clamp_(max=code.size // code.block_size)
    return offset + block * code.block_size


def _bit_places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
