"""Where a parameter lies in the flat buffer, and how many elements of a partition one step sends.

DeepSpeed lays a parameter group out in one flat buffer of P elements (the parameters are views into it) and cuts it
into W partitions of S = P/W. All positions are read off the addresses of the views, so that round-robin order,
alignment padding and the layout of another DeepSpeed version need no code here::

    rank        0           1           2
    flat   |p0|p1 p1 p1|p1 p1|p2 p2 p2|p2|p3 pad|     P = 3 S
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from deepspeed_scape.config import ScapeOptions


@dataclass(frozen=True, kw_only=True)
class ParamSlot:
    """One parameter's place in its group's flat buffer."""

    name: str
    start: int  # first element in the flat buffer
    numel: int


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """One parameter group: P = world_size * partition_size elements, K kept of each partition."""

    world_size: int  # W
    partition_size: int  # S
    kept: int  # K
    slots: tuple[ParamSlot, ...]

    @property
    def numel(self) -> int:  # P, padding included
        return self.world_size * self.partition_size


def kept_of(count: int, density: float) -> int:
    """K for ``count`` elements: the nearest whole number to density * count, at least 1 unless there are none."""
    return min(count, max(1, int(density * count + 0.5)))


def kept_in_partition(partition_size: int, options: ScapeOptions) -> int:
    """K of a partition of S elements, for either selection; fixed for the whole run."""
    if options.selection == "partition" or options.sparsity == 0:
        return kept_of(partition_size, options.density)
    blocks, tail = divmod(partition_size, options.block_size)
    return blocks * kept_of(options.block_size, options.density) + kept_of(tail, options.density)


def locate(params: Sequence[Tensor], names: Sequence[str], flat: Tensor) -> tuple[ParamSlot, ...]:
    """Find each parameter in the flat buffer by its address.

    Args:
        params: views into ``flat``, one parameter group.
        names: their names, for messages.
        flat: (P,) the group's flat buffer.

    Raises:
        RuntimeError: a parameter is not a view into ``flat`` (something replaced its storage).
    """
    slots = []
    for param, name in zip(params, names, strict=True):
        offset, rest = divmod(param.data_ptr() - flat.data_ptr(), flat.element_size())
        if param.numel() == 0:
            offset, rest = 0, 0
        if rest or offset < 0 or offset + param.numel() > flat.numel():
            raise RuntimeError(f"parameter {name} does not lie in DeepSpeed's flat buffer; was its .data replaced?")
        slots.append(ParamSlot(name=name, start=offset, numel=param.numel()))
    return tuple(slots)


def group_layout(slots: tuple[ParamSlot, ...], numel: int, world_size: int, options: ScapeOptions) -> GroupLayout:
    """Describe a group of ``numel`` = P elements.

    Raises:
        RuntimeError: P is not a multiple of W, which DeepSpeed's alignment guarantees.
    """
    partition_size, rest = divmod(numel, world_size)
    if rest:
        raise RuntimeError(f"flat buffer of {numel} elements is not a multiple of {world_size} ranks")
    kept = kept_in_partition(partition_size, options)
    return GroupLayout(world_size=world_size, partition_size=partition_size, kept=kept, slots=slots)
