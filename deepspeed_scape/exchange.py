"""The collectives of one step, their overlap, and the count of what they carry.

Three data collectives (reduce, parameter gather, mask gather) and one fp64 scalar all-reduce a step, whatever the
number of parameters and groups; with ballots an all-to-all beside the reduce. The mask gather has a process group of
its own, so that it may be in flight under the next forward and backward while user code talks on the other groups.

On gloo the three are batches of point-to-point messages with every receive posted before any send. Its own all-to-all
and all-gather send first and then receive at 2 ranks, so half of a full-duplex link stays idle (4 MiB at 100 Mbit/s:
344 ms against 175), and its reduce-scatter is an all-reduce inside: twice the bytes.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import irecv, isend

from deepspeed_scape import process_groups
from deepspeed_scape.streams import SideStream

PURPOSES = ("scalar", "reduce", "ballots", "params", "mask")


class Exchange:
    """Collectives over the W data-parallel ranks, with a byte counter.

    Args:
        group: the data-parallel process group.
        device: where the tensors are; it decides on the backend.
        overlap: leave the gathers in flight until somebody needs what they bring; otherwise each ends where it is
            started.
        patience: seconds to wait for a message of gloo; None: as long as torch does.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, overlap: bool, patience: float | None = None
    ) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.mask_group = dist.new_group(self._ranks())
        self.overlap = overlap
        self.point_to_point = group._get_backend(device).name() == "gloo"
        # gloo's collectives keep to the limit of their group, its messages only to one that is given
        self.patience = patience if self.point_to_point else None
        # under torch 2.6 gloo's collectives keep to the limit that their group was made with, and to no later one
        limit = None if self.patience is None else timedelta(seconds=self.patience)
        self.scalar_group = group if limit is None else dist.new_group(self._ranks(), timeout=limit)
        self.sent: Counter[str] = Counter()  # bytes this rank has put on the wire, by purpose, since the last take
        self.side = SideStream(device, overlap)  # of the mask gather and its decoding
        self._in_flight: tuple[list[dist.Work], Callable[[], list[Tensor]]] | None = None

    def take_sent(self) -> dict[str, int]:
        """Bytes sent since the last call, for each of PURPOSES; the counter starts again at 0."""
        sent = {name: self.sent[name] for name in PURPOSES}
        self.sent.clear()
        return sent

    def sum_scalars(self, values: Tensor) -> Tensor:
        """Sum (n,) fp64 over the ranks; every rank gets the same bits."""
        if self.world_size > 1:
            dist.all_reduce(values, group=self.scalar_group)
            self._count("scalar", 2 * values.nbytes / self.world_size)
        return values

    def reduce_mean(
        self,
        packed: Tensor,  # (W, K) value dtype: what this rank sends to each owner
    ) -> Tensor:  # (K,) fp32: mean over the ranks for this owner
        """The ONE reduce-scatter. On gloo each row goes to its owner, who sums in rank order: the same bytes."""
        if self.world_size == 1:
            return packed[0].float()
        self._count("reduce", packed.nbytes / self.world_size)
        if self.point_to_point:
            received = torch.empty_like(packed)
            wait_all(self._swap([(list(packed), received)], self.group), self.patience)
            return self._mean_of(received)
        return self._reduce_scatter(packed)

    def reduce_with_ballots(
        self,
        packed: Tensor,  # (W, K) value dtype: what this rank sends to each owner
        ballots: Tensor,  # (W, B) uint8: its ballots for each owner
    ) -> tuple[Tensor, Tensor]:  # (K,) fp32 as from reduce_mean, and (W, B) uint8: every rank's ballots for this owner
        """The reduce, and beside it the ballots: in the same batch on gloo, else an all-to-all on the mask's group."""
        if self.world_size == 1:
            return self.reduce_mean(packed), ballots
        self._count("ballots", ballots.nbytes / self.world_size)
        received = torch.empty_like(ballots)
        if self.point_to_point:
            self._count("reduce", packed.nbytes / self.world_size)
            values = torch.empty_like(packed)
            wait_all(self._swap([(list(packed), values), (list(ballots), received)], self.group), self.patience)
            return self._mean_of(values), received
        work = dist.all_to_all_single(received, ballots, group=self.mask_group, async_op=True)
        mean = self.reduce_mean(packed)
        wait_all([work])  # by the stream, not by the host
        return mean, received

    def _mean_of(self, received: Tensor) -> Tensor:  # (W, K) -> (K,) fp32, summed in rank order
        return received.sum(0, dtype=torch.float32).div_(self.world_size)

    def _reduce_scatter(self, packed: Tensor) -> Tensor:
        total = torch.empty_like(packed[0])
        reduce_scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")
        reduce_scatter(total, packed.view(-1), group=self.group)
        return total.float().div_(self.world_size)

    def start_param_gather(
        self,
        own: Tensor,  # (B,) uint8: this owner's new parameters, in the model's dtypes
    ) -> Callable[[], Tensor]:  # waits, and returns (W, B) uint8
        """Start the all-gather of the parameters that have changed; without overlap it also ends here."""
        gathered, works = self._all_gather(own, "params", self.group, async_op=self.overlap)

        def finish() -> Tensor:
            wait_all(works, self.patience)
            works.clear()
            return gathered

        if not self.overlap:
            finish()
        return finish

    def start_mask_gather(
        self,
        own: Tensor,  # (B,) uint8: this owner's encoded masks of every parameter group
        decode: Callable[[Tensor], list[Tensor]],  # (W, B) uint8 to the masks of every parameter group
    ) -> None:
        """Start the all-gather of the next masks on their own process group.

        On a GPU gather and decoding run on a stream of their own under the next forward and backward; without streams
        the gather alone is in flight, and :meth:`wait_mask` decodes.

        Raises:
            RuntimeError: the one before has not been waited for.
        """
        if self._in_flight is not None:
            raise RuntimeError("a mask gather is already in flight")
        with self.side.after_compute(own):
            gathered, works = self._all_gather(own, "mask", self.mask_group, async_op=self.overlap)
            if not self.side.exists:
                self._in_flight = (works, lambda: decode(gathered))
                return
            wait_all(works)  # by the side stream, not by the host
            masks = decode(gathered)
        self._in_flight = ([], lambda: masks)

    @property
    def mask_in_flight(self) -> bool:
        return self._in_flight is not None

    def wait_mask(self) -> list[Tensor]:
        """Wait for the gather in flight and return the decoded masks of all owners.

        Raises:
            RuntimeError: none is in flight.
        """
        if self._in_flight is None:
            raise RuntimeError("no mask gather is in flight")
        works, masks = self._in_flight
        self._in_flight = None
        wait_all(works, self.patience)
        decoded = masks()
        self.side.join(*decoded)
        return decoded

    def close(self, patience: float = 10.0) -> None:
        """End a gather in flight when the run ends: a process must not go while its transport still sends.

        Args:
            patience: seconds to wait for peers, which may have ended for another reason.
        """
        if self._in_flight is not None:
            works, self._in_flight = self._in_flight[0], None
            with contextlib.suppress(RuntimeError):  # a peer is gone: what it would have sent is of no use any more
                wait_all(works, patience)

    def destroy(self) -> None:
        """Give the process groups of its own back. Not for the end of a process, when peers may be gone."""
        process_groups.destroy(self.mask_group)
        if self.scalar_group is not self.group:
            process_groups.destroy(self.scalar_group)

    def _ranks(self) -> list[int]:
        return list(dist.get_process_group_ranks(self.group))

    def _all_gather(
        self, own: Tensor, purpose: str, group: dist.ProcessGroup, async_op: bool
    ) -> tuple[Tensor, list[dist.Work]]:
        if self.world_size == 1:
            return own.unsqueeze(0), []
        gathered = own.new_empty(self.world_size, own.numel())
        self._count(purpose, own.nbytes)
        if self.point_to_point:
            return gathered, self._swap([([own] * self.world_size, gathered)], group)
        all_gather = _newest("all_gather_single", "all_gather_into_tensor")
        work = all_gather(gathered.view(-1), own, group=group, async_op=async_op)
        return gathered, [work] if async_op else []

    def _swap(
        self,
        messages: Sequence[tuple[Sequence[Tensor], Tensor]],  # each: W tensors (n,) that go to each rank, and (W, n),
        # written: what came from each rank, this one's own row included
        group: dist.ProcessGroup,
    ) -> list[dist.Work]:
        """Start sending one row of each message to every peer and receiving one; the first peer is the next rank."""
        peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        receives, sends = [], []
        for tag, (rows, received) in enumerate(messages):
            received[self.rank].copy_(rows[self.rank])
            receives += [(irecv, received[peer], peer, tag) for peer in reversed(peers)]
            sends += [(isend, rows[peer], peer, tag) for peer in peers]
        batch = [
            dist.P2POp(op, tensor, dist.get_global_rank(group, peer), group, tag)
            for op, tensor, peer, tag in receives + sends
        ]
        return list(dist.batch_isend_irecv(batch))

    def _count(self, purpose: str, nbytes_per_peer: float) -> None:
        self.sent[purpose] += int(nbytes_per_peer * (self.world_size - 1))


def wait_all(works: Sequence[dist.Work], patience: float | None = None) -> None:
    """Wait for each of ``works``, ``patience`` seconds at most if given.

    Raises:
        RuntimeError: a peer is gone, or the time is over.
    """
    deadline = None if patience is None else time.monotonic() + patience
    for work in works:
        if deadline is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))


def _newest(name: str, old_name: str) -> Callable[..., Any]:
    """A torch collective under its newest name (torch 2.13 renamed two), looked up at the call so it can be traced."""
    return getattr(dist, name, None) or getattr(dist, old_name)
