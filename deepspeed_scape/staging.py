"""One pass over tensors in pinned host memory, one after another through two buffers on the device.

    fetching    |  0  |  1  |  2  |  3  |                 host to device
    compute           | 0|  | 1|  | 2|  | 3|              what the caller does with it
    returning            |  0  |  1  |  2  |  3  |        device to host

Each tensor crosses the bus once each way; both directions are busy at the same time. The streams wait for each other,
the host for nothing. On a device without streams all happens in the order of the code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepspeed_scape.streams import SideStream


class Staging:
    """The two copy streams of a device, and the passes over host memory that run on them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.fetching, self.returning = SideStream(device), SideStream(device)

    def visit(
        self,
        pieces: Sequence[Tensor],  # (n,) each, in pinned host memory; changed where ``write_back``
        prepare: Callable[[int], Callable[[Tensor], None]],  # takes the number of a piece; what it returns, its copy
        write_back: bool = True,
    ) -> None:
        """Work on a copy (n,) of every piece on the device, in order; what is left in it replaces the piece.

        ``prepare`` may send small things to the device: they arrive while the copy is still under way, and before the
        next one is. What it returns does the work. The buffers are borrowed for the pass, when activations need no
        memory.
        """
        if not pieces:
            return
        longest = max(piece.numel() for piece in pieces)
        buffers = [torch.empty(longest, dtype=piece.dtype, device=self.device) for piece in pieces[:2]]
        coming = self._fetch(pieces[0], buffers[0])
        for i, piece in enumerate(pieces):
            work, here = prepare(i), coming
            self.fetching.join(here)  # before the next fetch is started, or it would wait for that one too
            if i + 1 < len(pieces):
                coming = self._fetch(pieces[i + 1], buffers[(i + 1) % 2])
            work(here)
            if write_back:
                with self.returning.after_compute(here):
                    piece.copy_(here, non_blocking=True)

    def _fetch(self, piece: Tensor, buffer: Tensor) -> Tensor:
        # what the buffer held before is back by then, and so is what the pass before has made of this piece
        self.fetching.after(self.returning)
        here = buffer[: piece.numel()]
        with self.fetching.after_compute(buffer):
            here.copy_(piece, non_blocking=True)
        return here

    def settle(self) -> None:
        """Let the host wait until the pieces are as the last pass leaves them: it may read and write them then."""
        self.fetching.synchronize()
        self.returning.synchronize()
