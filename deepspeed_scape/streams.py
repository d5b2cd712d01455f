"""Work beside the compute stream, ordered by events; on a device without streams it is done in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class SideStream:
    """A second stream of a GPU. The host waits for nothing here.

    Attributes:
        exists: there is such a stream; otherwise everything runs in the order of the code.
    """

    def __init__(self, device: torch.device, wanted: bool = True) -> None:
        self.stream = torch.cuda.Stream(device) if wanted and device.type == "cuda" else None

    @property
    def exists(self) -> bool:
        return self.stream is not None

    @contextlib.contextmanager
    def after_compute(self, *inputs: Tensor) -> Iterator[None]:
        """Run the body on the side stream, once the compute stream has made ``inputs``."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        for tensor in inputs:
            tensor.record_stream(self.stream)  # else its memory could be given away while it is still read here
        with torch.cuda.stream(self.stream):
            yield

    def join(self, *outputs: Tensor) -> None:
        """Let the compute stream wait for the side stream, whose ``outputs`` it will use."""
        if self.stream is None:
            return
        compute = torch.cuda.current_stream(self.stream.device)
        compute.wait_stream(self.stream)
        for tensor in outputs:
            tensor.record_stream(compute)

    def after(self, other: SideStream) -> None:
        """Let this stream wait for what the other has been given so far."""
        if self.stream is not None and other.stream is not None:
            self.stream.wait_stream(other.stream)

    def synchronize(self) -> None:
        """Let the host wait for all that the stream has been given."""
        if self.stream is not None:
            self.stream.synchronize()


def wait_for_compute(device: torch.device) -> None:
    """Let the host wait for all that the compute stream has been given; a device without streams has done it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
