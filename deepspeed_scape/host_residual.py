"""The residual in pinned host memory (``"residual_device": "cpu"``), but for this rank's own partition.

The own partition stays on the device, for the mask is made from it. The others are needed once a step: a step keeps its
gradients until the mask is there, and then one pass adds them and takes out the masked entries, bucket by bucket::

    host memory -> device: + gradients, masked entries -> message -> host memory

It moves 4 P (W-1)/W bytes each way (2 P of bf16); ``staging.py`` has the order of the streams. Every element sees the
same operations in the same order as on the device, so the results are the same to the bit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_scape.config import ScapeConfigError, ScapeOptions
from deepspeed_scape.layout import GroupLayout
from deepspeed_scape.pages import zeros
from deepspeed_scape.residual import DeviceResidual, Residual, pack_bucket, prepare_accumulate, sum_squares, take
from deepspeed_scape.staging import Staging

BUCKET = 1 << 23  # elements: 32 MiB of fp32, a millisecond of PCIe; torch rounds pinned memory up to a power of two
STAGE_ON_CPU = False  # tests set it: the pass, where all memory is the host's


def residual_for(layout: GroupLayout, options: ScapeOptions, rank: int, device: torch.device) -> Residual:
    """The residual where the options want it. That of a CPU is in host memory as it is."""
    dtype = options.residual_torch_dtype
    if options.residual_device == "cpu" and (device.type != "cpu" or STAGE_ON_CPU):
        return HostResidual(layout, dtype, rank, device)
    return DeviceResidual(layout, dtype, device)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A part of one owner's partition."""

    start: int  # in the flat buffer
    values: Tensor  # (n,) in pinned host memory

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Gradients that are still to be added, those of a step."""

    grads: list[Tensor]  # (n,) each
    starts: list[int]  # ascending
    scale: float

    def prepare(self, first: int, stop: int, device: torch.device) -> Callable[[Tensor], None]:
        """What adds the part that lies in [first, stop) of the flat buffer to those elements, on the device."""
        parts = list(self._within(first, stop))
        add = prepare_accumulate([grad for grad, _ in parts], [start for _, start in parts], device)
        return lambda values: add(values, self.scale)

    def _within(self, first: int, stop: int) -> Iterator[tuple[Tensor, int]]:
        """The parts of gradients in [first, stop), and where each begins there."""
        low = max(0, bisect_right(self.starts, first) - 1)
        high = bisect_left(self.starts, stop)
        for grad, start in zip(self.grads[low:high], self.starts[low:high], strict=True):
            part = grad[max(first - start, 0) : stop - start]
            if part.numel():
                yield part, max(start - first, 0)


class HostResidual:
    """Own partition (S,) on the device, P - S elements in pinned host memory.

    Raises:
        ScapeConfigError: there is not so much pinned memory to be had.
    """

    def __init__(self, layout: GroupLayout, dtype: torch.dtype, rank: int, device: torch.device) -> None:
        self.layout, self.rank = layout, rank
        self.own = zeros(layout.partition_size, dtype, device)
        self.buckets = _make_buckets(layout, dtype, rank, pinned=device.type == "cuda")
        self.staging = Staging(device)
        self._waiting: list[Waiting] = []  # not in the buckets yet

    def accumulate(self, grads: Sequence[Tensor], starts: Sequence[int], scale: float) -> None:
        """Into the own partition now, into the others with the pass of :meth:`pack`."""
        some = sorted((start, i) for i, start in enumerate(starts) if grads[i].numel())
        flat = [grads[i].reshape(-1) for _, i in some]
        step = Waiting(grads=flat, starts=[start for start, _ in some], scale=scale)
        step.prepare(self._own_start, self._own_start + self.own.numel(), self.own.device)(self.own)
        self._waiting.append(step)

    def pack(self, position: Tensor, out: Tensor) -> None:
        rows = position.view(out.shape)

        def work(part: Bucket, values: Tensor) -> None:
            owner = part.start // self.layout.partition_size
            pack_bucket(values, part.start, rows[owner], out[owner])

        if self.own.numel():
            work(Bucket(start=self._own_start, values=self.own), self.own)
        self._pass(work)

    def take(self, columns: slice, out: Tensor) -> None:
        """A dense step may ask piece by piece; gradients that wait are then added to all buckets before the first."""
        if self._waiting and columns != slice(0, self.layout.partition_size):
            self._pass(lambda bucket, values: None)

        def work(part: Bucket, values: Tensor) -> None:
            owner, first = divmod(part.start, self.layout.partition_size)
            first -= columns.start
            take(values, out[owner, first : first + values.numel()])

        for own in self._within(columns, [Bucket(start=self._own_start, values=self.own)]):
            work(own, own.values)
        self._pass(work, self._within(columns, self.buckets))

    def _within(self, columns: slice, buckets: Sequence[Bucket]) -> list[Bucket]:
        """The parts of buckets that lie in those columns of their partitions."""
        parts = []
        for bucket in buckets:
            first = bucket.start % self.layout.partition_size if self.layout.partition_size else 0
            values = bucket.values[max(columns.start - first, 0) : max(columns.stop - first, 0)]
            if values.numel():
                parts.append(Bucket(start=bucket.start + max(columns.start - first, 0), values=values))
        return parts

    def partition(self, owner: int) -> Tensor:
        return self.partitions(owner, owner + 1)[0]

    def partitions(self, first: int, stop: int) -> Tensor:
        for owner in range(first, stop):
            if owner != self.rank:
                raise RuntimeError(f"rank {self.rank} has the residual of owner {owner} in host memory, in buckets")
        return self.own.unsqueeze(0)

    def sum_squares(self) -> Tensor:
        """In a pass of its own, host to device."""
        sums = [sum_squares([self.own])]
        self._pass(lambda _, values: sums.append(sum_squares([values])), changes=False)
        return torch.stack(sums).sum()

    def state(self) -> Tensor:
        """(P,) on the CPU, a copy."""
        self._settle()
        parts = [(bucket.start, bucket.values) for bucket in self.buckets]
        parts.append((self._own_start, self.own.cpu()))
        return torch.cat([values for _, values in sorted(parts, key=lambda part: part[0])])

    def load(self, values: Tensor, start: int = 0) -> None:
        self._settle()
        _overlay(self.own, self._own_start, values, start)
        for bucket in self.buckets:
            _overlay(bucket.values, bucket.start, values, start)

    def zero(self) -> None:
        self._waiting.clear()
        self._settle()
        self.own.zero_()
        for bucket in self.buckets:
            bucket.values.zero_()

    @property
    def _own_start(self) -> int:
        return self.rank * self.layout.partition_size

    def _pass(
        self, work: Callable[[Bucket, Tensor], None], buckets: Sequence[Bucket] | None = None, changes: bool = True
    ) -> None:
        """Buckets once over the device: what waits is added, then ``work`` sees it, and may change it.

        Only where nothing waits may these be others than all of them.
        """
        waiting, self._waiting = self._waiting, []
        buckets = self.buckets if buckets is None else buckets

        def prepare(i: int) -> Callable[[Tensor], None]:
            bucket = buckets[i]
            adds = [step.prepare(bucket.start, bucket.stop, self.own.device) for step in waiting]

            def visit(values: Tensor) -> None:
                for add in adds:
                    add(values)
                work(bucket, values)

            return visit

        self.staging.visit([bucket.values for bucket in buckets], prepare, write_back=changes or bool(waiting))

    def _settle(self) -> None:
        """All that has been accumulated is in the buckets, and the host may read and write them."""
        if self._waiting:
            self._pass(lambda bucket, values: None)
        self.staging.settle()


def _make_buckets(layout: GroupLayout, dtype: torch.dtype, rank: int, pinned: bool) -> list[Bucket]:
    """The partitions of the other owners, in pieces of at most BUCKET elements, all zero."""
    size = layout.partition_size
    owners = [owner for owner in range(layout.world_size) if owner != rank]
    starts = [owner * size + first for owner in owners for first in range(0, size, BUCKET)]
    try:
        return [
            Bucket(start=start, values=torch.zeros(min(BUCKET, size - start % size), dtype=dtype, pin_memory=pinned))
            for start in starts
        ]
    except RuntimeError as error:
        problem = f"{len(owners) * size * dtype.itemsize:,} bytes of pinned host memory cannot be had ({error})"
        remedy = 'set it to "device", set residual_dtype to "bf16", or run fewer ranks on a node'
        raise ScapeConfigError("optimizer.params.residual_device", "cpu", problem, remedy) from error


def _overlay(
    part: Tensor,  # (n,), updated
    start: int,  # of ``part`` in the flat buffer
    values: Tensor,  # (m,)
    first: int,  # of ``values`` in the flat buffer
) -> None:
    """Copy what two stretches of the flat buffer have in common."""
    low, high = max(start, first), min(start + part.numel(), first + values.numel())
    if low < high:
        part[low - start : high - start].copy_(values[low - first : high - first])
