"""A pass over host memory under every order of execution that its streams allow, not only the luckiest.

Fake streams put the in-place operations aside; then they run one by one, each time on a stream drawn at random among
those that need not wait. What differs from the order of the code in any of them is a race.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_scape.staging import Staging
from deepspeed_scape.streams import SideStream

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Queue:
    """A stream: operations and waits, in order."""

    def __init__(self) -> None:
        self.device = CUDA
        self.put: list[Callable[[], Any] | tuple[Queue, int]] = []
        self.done = 0

    def wait_stream(self, other: Queue) -> None:
        self.put.append((other, len(other.put)))

    @property
    def ready(self) -> bool:
        if self.done == len(self.put):
            return False
        task = self.put[self.done]
        return not isinstance(task, tuple) or task[0].done >= task[1]

    def advance(self) -> None:
        task = self.put[self.done]
        if not isinstance(task, tuple):
            task()
        self.done += 1


class Driver(TorchDispatchMode):
    """A device with streams: what changes memory is put on the current one."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = Queue()
        self.streams, self.now = [self.compute], [self.compute]

    def new(self, _: Any) -> Queue:
        self.streams.append(Queue())
        return self.streams[-1]

    @contextlib.contextmanager
    def entered(self, stream: Queue) -> Iterator[None]:
        self.now.append(stream)
        yield
        self.now.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        self.now[-1].put.append(lambda: func(*args, **(kwargs or {})))
        return args[0]

    def run(self, choose: Callable[[int], int]) -> None:
        """All that was put, in some order; ``choose`` draws below a number."""
        while waiting := [stream for stream in self.streams if stream.ready]:
            waiting[choose(len(waiting))].advance()
        assert all(stream.done == len(stream.put) for stream in self.streams), "streams wait for each other"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Driver]:
    def install() -> Driver:
        fake = Driver()
        monkeypatch.setattr(torch.cuda, "Stream", fake.new)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: fake.now[-1])
        monkeypatch.setattr(torch.cuda, "stream", fake.entered)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        return fake

    return install


def streamed() -> Staging:
    """Its copy streams are those of a GPU, its buffers CPU memory."""
    staging = Staging(CPU)
    staging.fetching, staging.returning = SideStream(CUDA), SideStream(CUDA)
    return staging


def two_passes(staging: Staging, pieces: list[torch.Tensor], seen: torch.Tensor, write_back: bool) -> None:
    def prepare(i: int) -> Callable[[torch.Tensor], None]:
        small = torch.zeros(())
        small.add_(float(i + 1))

        def work(values: torch.Tensor) -> None:
            values.add_(small)
            seen[i].copy_(values[0])
            values.mul_(3.0)

        return work

    staging.visit(pieces, prepare)
    staging.visit(pieces, prepare, write_back)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(0, 6), write_back=st.booleans(), seed=st.integers(0, 2**31))
def test_no_order_of_the_streams_changes_the_result(
    count: int, write_back: bool, seed: int, driver: Callable[[], Driver]
) -> None:
    sizes = [3 + i % 2 for i in range(count)]  # two that share a buffer are of different sizes
    first = [torch.full((size,), float(10 * i)) for i, size in enumerate(sizes)]
    expected, seen_expected = [piece.clone() for piece in first], torch.zeros(count)
    two_passes(Staging(CPU), expected, seen_expected, write_back)
    pieces, seen = [piece.clone() for piece in first], torch.zeros(count)
    fake = driver()
    staging = streamed()
    with fake:
        two_passes(staging, pieces, seen, write_back)
    generator = torch.Generator().manual_seed(seed)
    fake.run(lambda n: int(torch.randint(n, (), generator=generator)))
    assert torch.equal(seen, seen_expected)
    for piece, wanted in zip(pieces, expected, strict=True):
        assert torch.equal(piece, wanted)


def test_both_directions_and_the_compute_stream_work_at_the_same_time(driver: Callable[[], Driver]) -> None:
    """Piece 2 may come while piece 1 is worked on and piece 0 has just gone; it need not wait for piece 1."""
    fake = driver()
    staging = streamed()
    pieces = [torch.zeros(2) for _ in range(4)]
    with fake:
        staging.visit(pieces, lambda i: lambda values: values.add_(1.0))
    compute, fetching, returning = fake.streams
    busy = next(i for i, task in enumerate(compute.put) if not isinstance(task, tuple)) + 1

    def free() -> list[Queue]:  # the compute stream works on piece 1 and gets no further
        at_work = compute.done >= busy and not isinstance(compute.put[compute.done], tuple)
        return [stream for stream in fake.streams if stream.ready and not (stream is compute and at_work)]

    while some := free():
        some[0].advance()
    assert operations(compute) == 1 and operations(returning) == 1  # piece 0 was worked on, and is back
    assert operations(fetching) == 3


def operations(stream: Queue) -> int:
    """Operations, waits left out, that the stream has done."""
    return sum(not isinstance(task, tuple) for task in stream.put[: stream.done])


def test_the_host_reads_only_when_both_copy_streams_are_done() -> None:
    calls = []

    class Noted(SideStream):
        def __init__(self, name: str) -> None:
            self.name, self.stream = name, None

        def synchronize(self) -> None:
            calls.append(self.name)

    staging = Staging(CPU)
    staging.fetching, staging.returning = Noted("fetching"), Noted("returning")
    staging.settle()
    assert calls == ["fetching", "returning"]
