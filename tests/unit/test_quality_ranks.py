"""The simulated ranks of evals.quality against tests/simulation.py, which shares no code with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deepspeed_scape import buffers
from deepspeed_scape.config import ScapeOptions
from evals.quality.job import Job
from evals.quality.ranks import DenseRanks, ScapeRanks, dense_optimizer
from evals.quality.rules import RULES, Rules
from evals.quality.spec import RunSpec
from launch.tokens import TokenData
from tests.simulation import GroupSpec, Simulation

SHAPES = [(40, 30), (30,), (30, 50), (7,)]
STEPS = 40
CASES: dict[str, dict[str, Any]] = {
    "plain": {"sparsity": 0.9},
    "ballots": {"sparsity": 0.9, "ballots": True},
    "ballots-sparse": {"sparsity": 0.99, "ballots": True},
    "ballots-block-warm": {
        "sparsity": 0.9,
        "ballots": True,
        "selection": "block",
        "block_size": 50,
        "warmup_steps": 4,
    },
    "dense": {"sparsity": 0.0, "normalizer": "adams"},
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(params: list[Tensor], step: int, world: int) -> list[list[Tensor]]:
    """Every rank's own: a pull to zero and a noise of its own."""
    generator = torch.Generator().manual_seed(step)
    return [[0.5 * p.detach() + torch.randn(p.shape, generator=generator) for p in params] for _ in range(world)]


def ranks_of(world: int, rules: Rules = RULES[""], **options: Any) -> tuple[list[nn.Parameter], ScapeRanks]:
    params = parameters()
    parsed = ScapeOptions(**{"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 0, **options})
    return params, ScapeRanks(params, parsed, world, 1.0, rules)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_simulation(name: str, world: int) -> None:
    params, ranks = ranks_of(world, **CASES[name])
    spec = GroupSpec(params=[p.detach().clone() for p in params], lr=1e-2, weight_decay=0.1)
    simulation = Simulation([spec], world, clip_grad=1.0, **CASES[name])
    start = [p.detach().clone() for p in params]
    for step in range(STEPS):
        grads = gradients(list(params), step, world)
        lr = 1e-2 / (1 + step)
        ranks.step(grads, lr)
        happened = simulation.step([[own] for own in grads], [lr])
        used = happened["masks"][0]
        assert ranks.stats["grad_norm"] == pytest.approx(happened["norm"], rel=1e-5)
        visited = torch.cat([rank.group.last for rank in ranks.ranks]) == step + 1
        places = (used + torch.arange(world).unsqueeze(1) * simulation.partition_size(0)).flatten()
        assert set(visited.nonzero().flatten().tolist()) == set(places.tolist())
    for got, want in zip(params, simulation.parameters(0), strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=1e-4, atol=1e-6)
    assert any((got - first).abs().max() > 1e-3 for got, first in zip(params, start, strict=True))


@pytest.mark.parametrize("world", [1, 3])
def test_dense_steps_in_pieces_are_the_same_steps(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    finals = []
    for most in (buffers.PIECE, 500):
        monkeypatch.setattr(buffers, "PIECE", most)
        params, ranks = ranks_of(world, sparsity=0.9, warmup_steps=6)
        assert len(ranks.ranks[0].wire.dense_pieces()) == (1 if most > 500 else 6)
        for step in range(10):
            ranks.step(gradients(list(params), step, world), 1e-2)
        finals.append([*(p.detach().clone() for p in params), ranks.visits, *(r.group.last for r in ranks.ranks)])
        signal = ranks.ranks[0].norms.signal_share
        sent = ranks.stats["bytes_reduce"]
        finals[-1].append(torch.tensor([signal, sent]))
    for ours, theirs in zip(*finals, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # the clip norm is summed in another order


def test_ballots_change_the_masks_of_several_ranks_and_of_one_nothing() -> None:
    for world, differs in ((1, False), (4, True)):
        finals = []
        for ballots in (False, True):
            params, ranks = ranks_of(world, sparsity=0.9, ballots=ballots)
            for step in range(10):
                ranks.step(gradients(list(params), step, world), 1e-2)
            finals.append(torch.cat([p.detach().flatten() for p in params]))
            assert ("bytes_ballots" in ranks.stats) == (ballots and world > 1)
        assert torch.equal(*finals) != differs


def test_ballots_find_what_only_other_ranks_see() -> None:
    """An element whose gradient is large on every rank but its owner is sent with ballots, and not without."""
    world = 4
    for ballots in (False, True):
        params, ranks = ranks_of(world, sparsity=0.99, ballots=ballots)
        generator = torch.Generator().manual_seed(0)
        for _ in range(6):
            grads = [[0.01 * torch.randn(p.shape, generator=generator) for p in params] for _ in range(world)]
            for rank in range(1, world):
                grads[rank][0].view(-1)[3] = 1.0  # of the partition of rank 0
            ranks.step(grads, 1e-3)
        assert bool(ranks.visits[3] > 1) == ballots


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule])
def test_every_rule_changes_the_training_and_still_trains(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed_scape import adams

    floor = adams.EMA_FLOOR
    finals = []
    try:
        for name in ("", rule):
            if (prepare := RULES[name].prepare) is not None:
                prepare()
            values = "bf16" if rule == "kept rounding" else "fp32"
            warm = 8 if rule == "first real visit" else 0
            params, ranks = ranks_of(2, RULES[name], sparsity=0.9, value_dtype=values, warmup_steps=warm)
            for step in range(STEPS):
                grads = gradients(list(params), step, 2)
                if step < 8:
                    for own in grads:
                        own[1].zero_()  # not seen in the warm-up
                ranks.step(grads, 1e-2)
            finals.append(torch.cat([p.detach().flatten() for p in params]))
    finally:
        adams.EMA_FLOOR = floor
        adams._delay_tables.cache_clear()
    assert not torch.equal(*finals) and bool(finals[1].isfinite().all())
    assert finals[1].norm() < torch.cat([p.detach().flatten() for p in parameters()]).norm()


def job_of(world: int, preset: str = "tiny") -> Job:
    draw = np.random.default_rng(0)
    train, val = (draw.integers(512, size=20_000, dtype=np.uint16) for _ in range(2))
    data = TokenData(train=train, val=val, meta={"vocab": 512, "key": "none"})
    return Job(
        RunSpec(method="", config="zero2_scape90_fp32", preset=preset, seq=32, world=world, micro_batch=2, lr=1e-3),
        data,
    )


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_gradients_of_all_ranks_at_once_are_those_one_by_one(preset: str) -> None:
    job = job_of(4, preset)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(512, size=(4, 2, 33)))
    (apart, loss_apart), (together, loss_together) = job.one_by_one(tokens), job.at_once(tokens)
    assert loss_together == pytest.approx(loss_apart, rel=1e-6)
    for ours, theirs in zip(together, apart, strict=True):
        for got, expected in zip(ours, theirs, strict=True):
            assert got is not None and expected is not None
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-6 * float(expected.abs().max()))


def test_two_ranks_have_passes_of_their_own_and_more_ranks_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("one_by_one", "at_once"):
        monkeypatch.setattr(Job, way, lambda job, tokens, way=way: (way, tokens.shape))
    ways = [job_of(world).gradients() for world in (1, 2, 4)]
    assert ways == [("one_by_one", (1, 2, 33)), ("one_by_one", (2, 2, 33)), ("at_once", (4, 2, 33))]


def test_kept_rounding_loses_nothing() -> None:
    params, ranks = ranks_of(2, RULES["kept rounding"], sparsity=0.9, value_dtype="bf16")
    group = ranks.ranks[0].group
    group.residual.load(torch.randn(group.layout.numel))
    group.use_masks(torch.stack([torch.arange(5, 5 + group.layout.kept)] * 2))
    before = group.residual.state().clone()
    packed, (part,) = ranks.ranks[0].wire.send_buffer(None)
    group.pack(part)
    assert group.position is not None
    after = group.residual.state().clone()
    after[group.position] += packed.flatten().float()
    torch.testing.assert_close(after, before, rtol=0, atol=1e-7)
    assert 0 < float(group.residual.state()[group.position].abs().max()) < 0.02


def test_a_first_visit_without_a_gradient_does_not_make_the_next_step_long() -> None:
    """What the candidate rule is about: v = 0 counts as visited, and the next step is sqrt(1/(1-B)) times too long."""
    moved = {}
    for rule in ("", "first real visit"):
        params, ranks = ranks_of(1, RULES[rule], sparsity=0.5, warmup_steps=3)
        start = params[3].detach().clone()
        for step in range(2):
            grads = [[torch.ones(p.shape) for p in params]]
            if step == 0:
                grads[0][3].zero_()
            ranks.step(grads, 1e-3)
        moved[rule] = float((params[3].detach() - start * (1 - 1e-4) ** 2).abs().mean())
    assert moved[""] > 3 * moved["first real visit"]


@pytest.mark.parametrize(("kind", "extra"), [("AdamW", {"torch_adam": True}), ("AdamS", {})])
def test_dense_ranks_take_the_mean_gradient(kind: str, extra: dict[str, Any]) -> None:
    options = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, **extra}
    one, many = parameters(), parameters()
    alone = DenseRanks(one, dense_optimizer(kind, one, options), 1, 0.0)
    shared = DenseRanks(many, dense_optimizer(kind, many, options), 3, 0.0)
    for step in range(10):
        grads = gradients(list(many), step, 3)
        mean = [sum(parts) / 3 for parts in zip(*grads, strict=True)]
        alone.step([mean], 1e-2)
        shared.step(grads, 1e-2)
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(a, b)
    assert all(p.grad is None for p in many)  # or the next backward would add to it
    shared.step([[torch.full(p.shape, torch.nan) for p in many]] * 3, 1e-2)
    assert all(p.grad is None for p in many)
    assert shared.skipped == 1 and all(bool(p.isfinite().all()) for p in many)


def test_ballots_beside_a_fresh_mask_are_refused() -> None:
    """The newest gradient would be looked at through one mask before and another after."""
    with pytest.raises(ValueError, match="ballots = true is not made for the rule of a fresh mask"):
        ranks_of(2, RULES["fresh mask"], sparsity=0.9, ballots=True)
