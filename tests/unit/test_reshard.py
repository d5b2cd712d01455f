"""State re-cut for another world size: the mean gradient, visit times and noise terms are what they were."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_scape import reshard
from deepspeed_scape.layout import GroupLayout, ParamSlot


class Group:
    """What ``overlap`` needs of a parameter group on one rank."""

    def __init__(self, layout: GroupLayout, rank: int) -> None:
        self.layout, self.rank = layout, rank


def lay_out(sizes: list[int], world: int, align: int = 2) -> GroupLayout:
    """Parameters one after the other, the end padded as DeepSpeed does."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    unit = world * align
    size = math.ceil(sum(sizes) / unit) * unit // world
    slots = tuple(ParamSlot(name=f"p{i}", start=s, numel=n) for i, (s, n) in enumerate(zip(starts, sizes, strict=True)))
    return GroupLayout(world_size=world, partition_size=size, kept=1, slots=slots)


def states_of(layouts: list[GroupLayout], generator: torch.Generator) -> list[dict[str, Any]]:
    world = layouts[0].world_size
    parameters = [[[slot.name, slot.start, slot.numel] for slot in layout.slots] for layout in layouts]
    return [
        {
            "version": 2, "step": 9, "world_size": world, "rank": rank, "options": {}, "parameters": parameters,
            "visits": 0.9,
            "norms": {"signal_share": 0.5, "noted": [1.0 + rank, 4.0 + rank]},
            "groups": [
                {"residual": torch.randn(layout.numel, generator=generator),
                 "last": torch.randint(9, (layout.partition_size,), generator=generator, dtype=torch.int32),
                 "visits": torch.randint(99, (layout.partition_size,), generator=generator, dtype=torch.int32),
                 "masks": None, "decay": torch.zeros(10, dtype=torch.float64)}
                for layout in layouts
            ],
        }
        for rank in range(world)
    ]  # fmt: skip


sizes = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(lambda s: sum(s) > 0)


@pytest.mark.parametrize("key", ["last", "visits"])
@given(sizes=sizes, old=st.integers(1, 5), new=st.integers(1, 5), seed=st.integers(0, 10))
def test_every_element_arrives_once(key: str, sizes: list[int], old: int, new: int, seed: int) -> None:
    before, after = lay_out(sizes, old), lay_out(sizes, new)
    states = states_of([before], torch.Generator().manual_seed(seed))
    residual = torch.stack([state["groups"][0]["residual"] for state in states]).double()
    owned = torch.cat([state["groups"][0][key] for state in states])
    found = dict(reshard.split(states))
    total = sum(sizes)
    arrived = torch.full((after.numel,), -1, dtype=torch.int32)
    for slot in after.slots:
        mean = residual.mean(0)[slot.start : slot.start + slot.numel]
        torch.testing.assert_close(found[slot.name]["residual"].double(), mean, rtol=1e-6, atol=1e-9)
        for rank in range(new):
            here, there = reshard.overlap(slot, Group(after, rank))  # type: ignore[arg-type]
            part = found[slot.name][key][there]
            assert part.numel() == here.stop - here.start
            target = arrived[rank * after.partition_size : (rank + 1) * after.partition_size][here]
            assert (target == -1).all()  # no element twice
            target.copy_(part)
    assert torch.equal(arrived[:total], owned[:total])  # and none left out
    assert (arrived[total:] == -1).all()


def test_visits_that_one_rank_did_not_count_are_left_out() -> None:
    states = states_of([lay_out([5, 3], 2)], torch.Generator().manual_seed(1))
    del states[1]["groups"][0]["visits"]
    assert all(set(state) == {"residual", "last"} for _, state in reshard.split(states))


def test_groups_keep_their_own_places() -> None:
    layouts = [lay_out([5, 3], 3), lay_out([1], 3)]
    for i, layout in enumerate(layouts):
        for slot in layout.slots:
            object.__setattr__(slot, "name", f"g{i}.{slot.name}")
    states = states_of(layouts, torch.Generator().manual_seed(1))
    found = dict(reshard.split(states))
    assert list(found) == ["g0.p0", "g0.p1", "g1.p0"]
    mean = torch.stack([state["groups"][1]["residual"] for state in states]).double().mean(0)[:1]
    torch.testing.assert_close(found["g1.p0"]["residual"].double(), mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2), (2, 3), (4, 1), (1, 2)])
def test_the_noise_ratio_is_what_it_was(old: int, new: int) -> None:
    """rho = sum of owners' squares / (sum of senders' squares / W), before and after."""
    states = states_of([lay_out([7], old)], torch.Generator())
    noted = [state["norms"]["noted"] for state in states]
    before = sum(n[0] for n in noted) / (sum(n[1] for n in noted) / old)
    share = reshard._share_norms(reshard.summarise(states), new)
    after = new * share["noted"][0] / (new * share["noted"][1] / new)
    assert after == pytest.approx(before) and share["signal_share"] == 0.5


def test_a_checkpoint_before_the_first_step_has_no_noise_terms() -> None:
    states = states_of([lay_out([7], 2)], torch.Generator())
    states[0]["norms"]["noted"] = None
    assert reshard._share_norms(reshard.summarise(states), 3)["noted"] is None
