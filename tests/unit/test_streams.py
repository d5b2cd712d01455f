"""The order of the two streams, with streams that only take notes: what waits for what, which buffers cross."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepspeed_scape import process_groups
from deepspeed_scape.exchange import Exchange
from deepspeed_scape.streams import SideStream
from tests import bare


class Noted:
    """A stream that says what is asked of it."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events, self.device = name, events, torch.device("cuda")

    def wait_stream(self, other: Noted) -> None:
        self.events.append(f"{self.name} waits for {other.name}")


class Buffer:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def record_stream(self, stream: Noted) -> None:
        self.events.append(f"{self.name} crosses to {stream.name}")

    def unsqueeze(self, _: int) -> Buffer:
        return self


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What happens, in order; the current stream is ``compute``, a new one ``side``."""
    log: list[str] = []
    now = [Noted("compute", log)]

    @contextlib.contextmanager
    def entered(stream: Noted) -> Iterator[None]:
        now.append(stream)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Noted("side", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: now[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    yield log


def test_gather_and_decoding_run_beside_compute(events: list[str]) -> None:
    bare.join_world_of_one(torch.device("cpu"))
    exchange = Exchange(torch.distributed.group.WORLD, torch.device("cpu"), overlap=True)
    exchange.side = SideStream(torch.device("cuda"))
    own, masks = Buffer("own", events), [Buffer("masks", events)]

    def decode(gathered: Any) -> Any:
        events.append(f"decoded on {torch.cuda.current_stream(None).name}")  # type: ignore[attr-defined]
        return masks

    exchange.start_mask_gather(own, decode)  # type: ignore[arg-type]
    assert events == ["side waits for compute", "own crosses to side", "decoded on side"]
    assert exchange.mask_in_flight and exchange.wait_mask() is masks
    assert events[3:] == ["compute waits for side", "masks crosses to compute"]
    process_groups.destroy()


def test_without_overlap_or_streams_everything_is_in_place(events: list[str]) -> None:
    for side in (SideStream(torch.device("cuda"), wanted=False), SideStream(torch.device("cpu"))):
        assert not side.exists
        with side.after_compute(torch.zeros(1)):
            events.append("body")
        side.join(torch.zeros(1))
    assert events == ["body", "body"]
