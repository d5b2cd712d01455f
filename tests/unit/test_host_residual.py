"""The residual in host memory against the one on the device, to the bit, for whatever layout, mask and gradients.

The pass runs on CPU tensors here, in the order of the code; test_staging.py has the order of the streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed_scape import host_residual, process_groups
from deepspeed_scape.config import ScapeConfigError, ScapeOptions, parse_options
from deepspeed_scape.host_residual import HostResidual, residual_for
from deepspeed_scape.layout import GroupLayout
from deepspeed_scape.residual import DeviceResidual, Residual
from evals.quality.ranks import ScapeRanks
from evals.quality.rules import RULES
from tests import bare
from tests.spies import SyncSpy

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(host_residual, "BUCKET", 7)
    yield monkeypatch


@dataclass(frozen=True, kw_only=True)
class Case:
    world: int
    rank: int
    size: int  # S
    bucket: int
    piece: int  # columns of a dense step's message
    kept: int  # K
    dtype: torch.dtype  # of the residual
    out_dtype: torch.dtype
    sizes: list[int]  # of the parameters, in the flat buffer one after another
    seed: int

    @property
    def layout(self) -> GroupLayout:
        return GroupLayout(world_size=self.world, partition_size=self.size, kept=self.kept, slots=())

    @property
    def starts(self) -> list[int]:
        return [sum(self.sizes[:i]) for i in range(len(self.sizes))]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world, size = draw(st.integers(1, 4)), draw(st.integers(0, 40))
    sizes: list[int] = []
    left = world * size
    while left > 0 and len(sizes) < 8:
        sizes.append(draw(st.integers(0, left)))
        left -= sizes[-1]
    return Case(
        world=world,
        rank=draw(st.integers(0, world - 1)),
        size=size,
        bucket=draw(st.sampled_from([1, 3, 7, 16, 40, 1000])),
        piece=draw(st.sampled_from([1, 4, 16, 1000])),
        kept=draw(st.sampled_from([0, min(1, size), size // 3, size])),
        dtype=draw(st.sampled_from(FLOATS[:2])),
        out_dtype=draw(st.sampled_from(FLOATS[:2])),
        sizes=sizes,
        seed=draw(st.integers(0, 1000)),
    )


def positions(case: Case, generator: torch.Generator) -> Tensor:
    rows = [torch.randperm(case.size, generator=generator)[: case.kept].sort().values for _ in range(case.world)]
    return torch.cat([row + owner * case.size for owner, row in enumerate(rows)])


def gradients(case: Case, generator: torch.Generator, dtype: torch.dtype) -> list[Tensor | None]:
    """Some are missing; one that is not contiguous among them."""
    found: list[Tensor | None] = []
    for i, size in enumerate(case.sizes):
        grad = torch.randn(size, 2, generator=generator).to(dtype)[:, 0] if i % 3 else torch.randn(
            size, 1, generator=generator
        ).to(dtype)  # fmt: skip
        found.append(None if torch.rand((), generator=generator) < 0.2 else grad)
    return found


def train(residual: Residual, case: Case) -> Iterator[Tensor]:
    """Some steps, dense, sparse and with two accumulations; all that can be seen on the way."""
    generator = torch.Generator().manual_seed(case.seed)
    for step, dense in enumerate((False, True, False, False)):
        for repeat in range(2 if step == 2 else 1):
            dtype = FLOATS[(case.seed + step + repeat) % 3]
            pairs = zip(gradients(case, generator, dtype), case.starts, strict=True)
            some = [(g, start) for g, start in pairs if g is not None]
            some.reverse()  # no order is promised
            residual.accumulate([g for g, _ in some], [start for _, start in some], 0.3 + step)
        yield residual.partition(case.rank).clone()
        wide = torch.full((case.world, (case.size if dense else case.kept) + 5), 9.0, dtype=case.out_dtype)
        position = positions(case, generator)
        if dense:
            for start in range(0, case.size, case.piece):
                stop = min(start + case.piece, case.size)
                residual.take(slice(start, stop), wide[:, 2 + start : 2 + stop])
        else:
            residual.pack(position, wide[:, 2:-3])
        yield wide
        if step != 1:  # a checkpoint between two steps changes nothing, and neither does its absence
            yield residual.state().clone()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_equal_to_the_device_to_the_bit(case: Case, small_buckets: pytest.MonkeyPatch) -> None:
    small_buckets.setattr(host_residual, "BUCKET", case.bucket)
    ours = HostResidual(case.layout, case.dtype, case.rank, CPU)
    theirs = DeviceResidual(case.layout, case.dtype, CPU)
    for mine, twin in zip(train(ours, case), train(theirs, case), strict=True):
        assert mine.dtype == twin.dtype and torch.equal(mine, twin)
    assert torch.allclose(ours.sum_squares(), theirs.sum_squares(), rtol=1e-6)
    assert all(bucket.values.numel() <= case.bucket for bucket in ours.buckets)
    held = sum(bucket.values.numel() for bucket in ours.buckets) + ours.own.numel()
    assert held == case.layout.numel and ours.own.numel() == case.size


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), data=st.data())
def test_load_zero_and_what_still_waits(case: Case, data: st.DataObject, small_buckets: pytest.MonkeyPatch) -> None:
    """A slice loaded between accumulate and pack, as between any other two calls."""
    small_buckets.setattr(host_residual, "BUCKET", case.bucket)
    start = data.draw(st.integers(0, case.layout.numel))
    values = torch.randn(data.draw(st.integers(0, case.layout.numel - start)))
    both = (HostResidual(case.layout, case.dtype, case.rank, CPU), DeviceResidual(case.layout, case.dtype, CPU))
    for residual in both:
        for _ in train(residual, case):
            pass
        whole = [torch.ones(size) for size in case.sizes]
        residual.accumulate(whole, case.starts, 0.5)
        residual.load(values, start)
        residual.accumulate(whole, case.starts, 0.5)
    assert torch.allclose(both[0].sum_squares(), both[1].sum_squares(), rtol=1e-6)
    assert torch.equal(both[0].state(), both[1].state())
    for residual in both:
        residual.accumulate(whole, case.starts, 0.5)
        residual.zero()
        assert not residual.state().any()
        residual.take(slice(0, case.size), torch.empty(case.world, case.size))
        assert not residual.state().any()


def test_a_checkpoint_goes_from_one_to_the_other(small_buckets: pytest.MonkeyPatch) -> None:
    layout = GroupLayout(world_size=3, partition_size=20, kept=2, slots=())
    saved = torch.randn(60)
    for make in (HostResidual(layout, torch.float32, 1, CPU), DeviceResidual(layout, torch.float32, CPU)):
        make.load(saved)
        assert torch.equal(make.state(), saved) and torch.equal(make.partition(1), saved[20:40])


def test_only_the_own_partition_can_be_seen() -> None:
    layout = GroupLayout(world_size=3, partition_size=20, kept=2, slots=())
    with pytest.raises(RuntimeError, match="owner 2 in host memory"):
        HostResidual(layout, torch.float32, 1, CPU).partition(2)
    with pytest.raises(RuntimeError, match="owner 0 in host memory"):
        HostResidual(layout, torch.float32, 1, CPU).partitions(0, 2)


def test_the_torch_twins_wait_for_nothing() -> None:
    layout = GroupLayout(world_size=3, partition_size=20, kept=4, slots=())
    residual = HostResidual(layout, torch.float32, 1, CPU)
    position = torch.cat([torch.arange(4) + 20 * owner for owner in range(3)])
    out = torch.empty(3, 4)
    spy = SyncSpy()
    with spy.watching():
        residual.accumulate([torch.ones(30)], [15], 0.5)
        residual.pack(position, out)
        residual.accumulate([torch.ones(30)], [15], 0.5)
        residual.take(slice(0, 20), torch.empty(3, 20))
    assert spy.seen > 100 and dict(spy.found) == {}


def test_a_cpu_keeps_it_where_it_is(small_buckets: pytest.MonkeyPatch) -> None:
    layout = GroupLayout(world_size=2, partition_size=20, kept=2, slots=())
    options = ScapeOptions(residual_device="cpu")
    assert isinstance(residual_for(layout, options, 0, CPU), DeviceResidual)
    small_buckets.setattr(host_residual, "STAGE_ON_CPU", True)
    assert isinstance(residual_for(layout, options, 0, CPU), HostResidual)
    assert isinstance(residual_for(layout, ScapeOptions(), 0, CPU), DeviceResidual)


def test_memory_that_cannot_be_pinned_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = torch.zeros

    def zeros(*args: Any, pin_memory: bool | None = None, **kwargs: Any) -> Tensor:
        if pin_memory is not None:
            raise RuntimeError("CUDA error: out of memory")
        return stock(*args, **kwargs)

    layout = GroupLayout(world_size=3, partition_size=20, kept=2, slots=())
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(ScapeConfigError, match=r"residual_device = 'cpu': 160 bytes .*out of memory.*Remedy"):
        HostResidual(layout, torch.float32, 1, CPU)


def test_ballots_need_it_on_the_device() -> None:
    with pytest.raises(ScapeConfigError, match="ballots to false or residual_device"):
        parse_options({"ballots": True, "residual_device": "cpu"}, ScapeOptions)


@pytest.mark.parametrize("selection", ["partition", "block"])
def test_a_world_of_one_has_nothing_to_move(selection: str, small_buckets: pytest.MonkeyPatch) -> None:
    small_buckets.setattr(host_residual, "STAGE_ON_CPU", True)
    bare.join_world_of_one(CPU)
    states = []
    for place in ("cpu", "device"):
        optimizer = bare.build([[40, 60], [30]], CPU, sparsity=0.9, selection=selection, block_size=10,
                               residual_device=place)  # fmt: skip
        for step in range(1, 4):
            bare.give_gradients(optimizer, step)
            optimizer.step()
        states.append(bare.state(optimizer))
    process_groups.destroy()
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


STEPS_OF: dict[str, dict[str, Any]] = {
    "partition": {"sparsity": 0.9},
    "block": {"sparsity": 0.9, "selection": "block", "block_size": 50},
    "bf16-warm": {"sparsity": 0.99, "residual_dtype": "bf16", "value_dtype": "bf16", "warmup_steps": 2},
    "dense": {"sparsity": 0.0},
}


@pytest.mark.parametrize("name", STEPS_OF)
def test_four_ranks_train_the_same_model(name: str, small_buckets: pytest.MonkeyPatch) -> None:
    """Whole steps of the simulated ranks, with clipping, a missing gradient and a skipped step."""
    small_buckets.setattr(host_residual, "STAGE_ON_CPU", True)
    small_buckets.setattr(host_residual, "BUCKET", 300)
    states = []
    for place in ("cpu", "device"):
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (1500, 30, 1700)]
        options = ScapeOptions(**{"lr": 1e-2, "residual_device": place, "warmup_steps": 0, **STEPS_OF[name]})
        ranks = ScapeRanks(params, options, 4, 1.0, RULES[""])
        for step in range(6):
            grads = [[torch.randn(p.shape, generator=generator) for p in params] for _ in range(4)]
            grads[0][0][0] = math.inf if step == 3 else 0.0
            ranks.step([[None if (step + i) % 4 == 0 else g for i, g in enumerate(own)] for own in grads], 1e-2)
        assert (ranks.step_count, ranks.skipped) == (5, 1)
        residuals = [rank.group.residual for rank in ranks.ranks]
        assert all(isinstance(residual, HostResidual) == (place == "cpu") for residual in residuals)
        states.append([*(p.detach().clone() for p in params), *(residual.state() for residual in residuals)])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert name == "dense" or all(residual.any() for residual in states[0][3:])
