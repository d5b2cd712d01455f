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
from deepspeed_scape.kernels import ops_for
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
    return partition_code(size, kept)


def partition_code(size: int, kept: int) -> MaskCode:
    """The smaller of ``delta`` and ``bitmap`` for K of S elements anywhere."""
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
    encode_masks(index.unsqueeze(0), code, out.unsqueeze(0))


def encode_masks(
    index: Tensor,  # (n, K) int64 ascending in [0, S) in each row
    code: MaskCode,
    out: Tensor,  # (n, nbytes) uint8, written, may be a slice of wider rows
) -> None:
    """Write n masks of one code, each into its own row."""
    ops_for(index, out).encode_masks(index, code, out)


def decode_masks(
    encoded: Tensor,  # (W, nbytes) uint8: the masks of every owner
    code: MaskCode,
    faults: Tensor | None = None,  # (1,) int32 on the same device: counts what is wrong with a mask on a GPU
) -> Tensor:  # (W, K) int64 ascending in each row
    """Read the masks of all owners.

    Raises:
        RuntimeError: on a CPU, a mask does not hold exactly K elements inside the partition (damaged, or of other
            options). A GPU would have to be waited for, so there ``faults`` tells (see ``norms.py``).
    """
    if code.kept == 0:
        return torch.empty(encoded.shape[0], 0, dtype=torch.int64, device=encoded.device)
    if faults is None:
        faults = torch.zeros(1, dtype=torch.int32, device=encoded.device)
    return ops_for(encoded).decode_masks(encoded, code, faults)


def pack_bits(flags: Tensor) -> Tensor:  # (n, m) bool or uint8 of 0 and 1 -> (n, ceil(m/8)) uint8
    """Eight flags a byte, the first in the lowest bit."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.shape[1] % 8))
    return (padded.unflatten(1, (padded.shape[1] // 8, 8)) << _bits(flags.device)).sum(2, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:  # (n, >= ceil(m/8)) uint8 -> (n, m) bool
    """The first ``count`` = m flags of each row of :func:`pack_bits`."""
    bits = (packed.unsqueeze(2) >> _bits(packed.device)) & 1
    return bits.flatten(1)[:, :count].bool()


def _bits(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def check_masks(
    index: Tensor,  # (n,) int64: what was read, W*K if all is well
    world: int,
    code: MaskCode,
) -> Tensor:  # (W, K)
    """Refuse what is not W masks of K elements inside the partition.

    Raises:
        RuntimeError: see :func:`decode_masks`.
    """
    if index.numel() != world * code.kept:
        raise RuntimeError(f"a gathered mask holds {index.numel()} elements in all, not {world} x {code.kept}")
    if index.numel() and int(index.max()) >= code.size:
        raise RuntimeError(f"a gathered mask holds element {int(index.max())} of a partition of {code.size}")
    return index.view(world, code.kept)
