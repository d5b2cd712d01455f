"""Where each parameter group lies inside the messages of a step.

One message carries all groups. Rows belong to owners; within a row the groups follow each other:

    reduce   (W, sum K) value dtype        params   (W, B) uint8, wider dtypes first        mask   (W, B) uint8
    ballots  (W, B) uint8, where they are on
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from deepspeed_scape.encoding import decode_masks
from deepspeed_scape.group import ScapeGroup

PIECE = 1 << 25  # elements of a dense step's message: 128 MiB of fp32 are sent, and as much received

Piece = tuple[slice, ...]  # some columns of every group's partitions


class WireBuffers:
    """Builds and takes apart the messages of a step: K of each partition, or a :data:`Piece` of a dense step."""

    def __init__(self, groups: list[ScapeGroup], world_size: int, value_dtype: torch.dtype) -> None:
        self.groups, self.world_size, self.value_dtype = groups, world_size, value_dtype
        self.device = groups[0].flat.device
        self.mask_faults = torch.zeros(1, dtype=torch.int32, device=self.device)  # of masks decoded on a GPU
        # a wider dtype first keeps every group aligned to its own element size
        self._param_order = sorted(range(len(groups)), key=lambda i: -groups[i].flat.element_size())

    def dense_pieces(self) -> list[Piece]:
        """All columns of all groups, in messages of at most PIECE elements; at least one."""
        sizes = [group.layout.partition_size for group in self.groups]
        ends = list(itertools.accumulate(sizes))
        longest = max(1, PIECE // self.world_size)
        return [
            tuple(
                slice(min(max(start - end + size, 0), size), min(max(start + longest - end + size, 0), size))
                for size, end in zip(sizes, ends, strict=True)
            )
            for start in range(0, max(1, ends[-1]), longest)
        ]

    def _kept(self, piece: Piece | None) -> list[int]:
        """Elements of one partition of each group that a message carries."""
        if piece is None:
            return [group.kept(dense=False) for group in self.groups]
        return [columns.stop - columns.start for columns in piece]

    def send_buffer(self, piece: Piece | None) -> tuple[Tensor, list[Tensor]]:
        """An empty reduce message (W, sum K) and each group's part of it (W, K)."""
        kept = self._kept(piece)
        packed = torch.empty(self.world_size, sum(kept), dtype=self.value_dtype, device=self.device)
        return packed, list(packed.split(kept, dim=1))

    def split_mean(self, mean: Tensor, piece: Piece | None) -> list[Tensor]:
        """Each group's part (K,) of the reduced row (sum K,)."""
        return list(mean.split(self._kept(piece)))

    def param_buffer(self, piece: Piece | None) -> tuple[Tensor, list[Tensor]]:
        """An empty row (B,) uint8 of the parameter gather and each group's part of it, (K,) in the model's dtype."""
        spans, size = self._param_spans(piece)
        own = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return own, [own[a:b].view(group.flat.dtype) for (a, b), group in zip(spans, self.groups, strict=True)]

    def split_params(self, gathered: Tensor, piece: Piece | None) -> list[Tensor]:
        """Each group's part (W, K), model dtype, of the gathered rows (W, B) uint8."""
        spans, _ = self._param_spans(piece)
        return [gathered[:, a:b].view(group.flat.dtype) for (a, b), group in zip(spans, self.groups, strict=True)]

    def _param_spans(self, piece: Piece | None) -> tuple[list[tuple[int, int]], int]:
        spans = [(0, 0)] * len(self.groups)
        kept, end = self._kept(piece), 0
        for i in self._param_order:
            start, end = end, end + kept[i] * self.groups[i].flat.element_size()
            spans[i] = (start, end)
        widest = self.groups[self._param_order[0]].flat.element_size()
        return spans, -(-end // widest) * widest  # rows must start aligned too

    def encode_next_masks(self, step: int) -> Tensor:
        """(B,) uint8: what this owner selects for the next step."""
        own = torch.empty(sum(self._mask_sizes()), dtype=torch.uint8, device=self.device)
        for group, part in zip(self.groups, own.split(self._mask_sizes()), strict=True):
            group.encode_next_mask(step, part)
        return own

    def decode_masks(self, gathered: Tensor) -> list[Tensor]:
        """Each group's masks of all owners (W, K) int64 from the gathered rows (W, B) uint8.

        Raises:
            RuntimeError: on a CPU, a mask is damaged; on a GPU ``mask_faults`` tells.
        """
        parts = gathered.split(self._mask_sizes(), dim=1)
        pairs = zip(self.groups, parts, strict=True)
        return [decode_masks(part, group.code, self.mask_faults) for group, part in pairs]

    @property
    def votes(self) -> bool:
        """Whether ballots are sent: they are on, and there is another rank."""
        return any(group.ballot is not None for group in self.groups)

    def cast_ballots(self, step: int) -> Tensor:
        """(W, B) uint8: this rank's ballots for every owner; its own row is zero."""
        sizes = self._ballot_sizes()
        own = torch.zeros(self.world_size, sum(sizes), dtype=torch.uint8, device=self.device)
        for group, part in zip(self.groups, own.split(sizes, dim=1), strict=True):
            group.cast_ballots(step, part)
        return own

    def count_ballots(self, received: Tensor) -> None:
        """Hand every group the ballots (W, B) uint8 that all ranks cast for this owner."""
        for group, part in zip(self.groups, received.split(self._ballot_sizes(), dim=1), strict=True):
            group.count_ballots(part, self.mask_faults)

    def _ballot_sizes(self) -> list[int]:
        return [0 if group.ballot is None else group.ballot.nbytes for group in self.groups]

    def _mask_sizes(self) -> list[int]:
        return [group.code.nbytes for group in self.groups]
