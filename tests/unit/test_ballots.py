"""Ballots: their size, their content, and what an owner makes of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_scape import ballots as ballots_module
from deepspeed_scape import kernels, mask
from deepspeed_scape.ballots import BallotCode, ballot_code, cast_ballots, count_ballots, votes_of
from deepspeed_scape.config import ScapeConfigError, ScapeOptions, parse_options
from deepspeed_scape.group import ScapeGroup
from deepspeed_scape.layout import group_layout, kept_of
from deepspeed_scape.mask import Moments
from deepspeed_scape.optimizer import Scape
from tests.kernel_inputs import RARE
from tests.simulation import top_k
from tests.spies import MemorySpy


def known(size: int) -> Moments:
    """An owner's moments; a ballot must not depend on them."""
    generator = torch.Generator().manual_seed(9)
    last = torch.randint(0, 5, (size,), generator=generator, dtype=torch.int32)
    return Moments(gradient=torch.zeros(size), exp_avg=torch.randn(size, generator=generator), last=last)


def mean_of(own: torch.Tensor, ballots: torch.Tensor, rank: int, code: BallotCode) -> torch.Tensor:
    """What an owner scores with once it has counted."""
    count_ballots(own, ballots, rank, code, None)
    return own.float() / ballots.shape[0]


def cast(gradient: torch.Tensor, code: BallotCode) -> torch.Tensor:
    return cast_rows(gradient.unsqueeze(0), code)[0]


def cast_rows(gradients: torch.Tensor, code: BallotCode) -> torch.Tensor:
    """Into the middle of wider rows, whose rest must stay as it was."""
    wide = torch.full((gradients.shape[0], code.nbytes + 9), 77, dtype=torch.uint8)
    cast_ballots(gradients, known(gradients.shape[1]), 5, code, 0, wide[:, 3:-6])
    assert (wide[:, :3] == 77).all() and (wide[:, -6:] == 77).all()
    return wide[:, 3:-6]


def spelled_out(gradient: torch.Tensor, code: BallotCode) -> list[int]:
    """A ballot by its definition, element by element."""
    values = gradient.float()
    order = values.abs().nan_to_num(torch.inf, torch.inf).tolist()
    named = sorted(sorted(range(len(order)), key=lambda i: (-order[i], i))[: code.votes])
    scale = values[named].abs().mean().view(1).view(torch.uint8).tolist()
    if code.places.kind == "bitmap":
        places = np.packbits(np.isin(np.arange(len(order)), named), bitorder="little").tolist()
    else:
        places = []
        for before, place in zip([-1, *named], named, strict=False):
            escapes, rest = divmod(place - before - 1, 255)
            places += [255] * escapes + [rest]
        places += [255] * (code.places.nbytes - len(places))
    return scale + places + np.packbits((values[named] < 0).numpy(), bitorder="little").tolist()


def moved_out(gradient: torch.Tensor, code: BallotCode) -> torch.Tensor:
    """What is left of (S,) gradients: the mean magnitude of those that are named is taken off each of them."""
    values = gradient.float()
    named = top_k(values.abs().nan_to_num(torch.inf, torch.inf), code.votes)
    mean = values[named].abs().mean()
    left = values.clone()
    left[named] -= torch.where(values[named] < 0, -mean, mean)
    return torch.where(values == left, gradient, left.to(gradient.dtype))


def gradients_of(kind: str, rows: int, size: int, seed: int) -> torch.Tensor:
    """(n, S) fp32; ``kind`` says what is odd about them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, size, generator=generator)
    if kind == "equals":
        values = (values * 2).round() / 2
    elif kind == "few":  # as unused embedding rows
        values *= torch.rand(rows, size, generator=generator) < 0.02
    elif kind == "denormal":
        values *= 1e-39
    elif kind == "escapes":  # nothing near the end is chosen, so gaps are long
        values[:, size // 8 :] *= 1e-3
    elif kind == "rare":
        places = torch.randint(rows * size, (max(1, rows * size // 3),), generator=generator)
        values.view(-1)[places] = torch.tensor(RARE)[places % len(RARE)]
    return values


@contextmanager
def path(name: str) -> Iterator[None]:
    """Choose how partitions are ranked: see ``PATHS``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask, "AT_ONCE", 0 if name == "alone" else 9000)
        if name == "torch":
            patch.setattr(mask, "FEWEST", 1)
            patch.setattr(kernels, "_compiled_loops", lambda: None)
        elif name == "gpu":
            from deepspeed_scape.kernels.top_rows import largest_of_rows

            patch.setattr(mask, "FEWEST", 1)
            patch.setattr(mask, "ops_for", lambda *_: SimpleNamespace(largest_of_rows=largest_of_rows))
        yield


PATHS = ["alone", "compiled", "torch", "gpu"]  # one by one; together: compiled, plain torch, what a GPU does


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("kind", ["usual", "equals", "few", "denormal", "escapes", "rare"])
@settings(deadline=None, max_examples=40)
@given(
    size=st.one_of(st.integers(1, 60), st.integers(1, 3000)),
    density=st.sampled_from([0.001, 0.003, 0.01, 0.1, 0.3, 1.0]),
    rows=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_each_byte_is_as_spelled_out(
    name: str, kind: str, size: int, density: float, rows: int, dtype: torch.dtype, seed: int
) -> None:
    gradients = gradients_of(kind, rows, size, seed).to(dtype)
    before = gradients.clone()
    code = ballot_code(size, kept_of(size, density))
    with path(name):
        got = cast_rows(gradients, code)
    assert got.tolist() == [spelled_out(row, code) for row in before]
    want = torch.stack([moved_out(row, code) for row in before])
    torch.testing.assert_close(gradients, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [9000, 40_000, 131_072, 300_000])
@pytest.mark.parametrize("density", [0.01, 0.4], ids=["few", "many"])
def test_together_they_are_what_each_is_alone(size: int, density: float, dtype: torch.dtype) -> None:
    """On two threads too, which share one long sum and not two."""
    gradients = gradients_of("usual", 3, size, 0).to(dtype)
    code = ballot_code(size, kept_of(size, density))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        rows, more = gradients.clone(), gradients.clone()
        together = cast_rows(rows, code)
        assert torch.equal(together, torch.stack([cast(row, code) for row in gradients.clone()]))
        with path("alone"):
            assert torch.equal(together, cast_rows(more, code))
        assert torch.equal(rows, more)
    finally:
        torch.set_num_threads(threads)


def test_no_owner_no_ballot() -> None:
    code = ballot_code(100, 10)
    assert cast_rows(torch.zeros(0, 100), code).shape == (0, code.nbytes)


@pytest.mark.parametrize("name", ["compiled", "torch"])
def test_buffers_are_bounded_however_many_owners_there_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = ballot_code(20_000, 200)
    gradients = gradients_of("usual", 100, 20_000, 0)
    if name == "torch":
        monkeypatch.setattr(kernels, "_compiled_loops", lambda: None)
    spy = MemorySpy(limit=8 * mask.AT_ONCE + 1)
    with spy:
        cast_rows(gradients, code)  # whatever is compiled or imported is so now
    tracemalloc.start()  # numpy's arrays
    cast_rows(gradients, code)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert spy.found == [] and peak < 8 * mask.AT_ONCE


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_votes_in_every_partition_but_its_own(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ScapeOptions(sparsity=0.9, ballots=True)
    layout = group_layout((), 4 * 50, 4, options)
    master = torch.zeros(50)
    optimizer = Scape([master], **options.model_dump())
    optimizer.state[master] = {"exp_avg": torch.zeros(50)}
    group = ScapeGroup(
        layout=layout, options=options, optimizer=optimizer, number=0, flat=torch.zeros(200), master=master, rank=rank
    )
    residual = gradients_of("usual", 4, 50, 3)
    group.residual.load(residual.clone().view(-1))
    assert group.ballot is not None
    out = torch.full((4, group.ballot.nbytes), 77, dtype=torch.uint8)
    monkeypatch.setattr(ballots_module, "rows_together", lambda *_: 2)  # so that an owner is left over
    group.cast_ballots(5, out)
    for owner in range(4):
        assert out[owner].tolist() == (
            [77] * group.ballot.nbytes if owner == rank else spelled_out(residual[owner], group.ballot)
        )


@pytest.mark.parametrize("size", [100_000, 1_000_000, 10_000_019])
def test_below_0015_bytes_an_element_at_99_percent(size: int) -> None:
    code = ballot_code(size, kept_of(size, 0.01))
    assert code.nbytes <= 0.015 * size + 8
    assert code.votes > 0.98 * kept_of(size, 0.01)


@given(
    size=st.integers(1, 400),
    density=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    world=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_an_owner_counts_what_the_others_name(size: int, density: float, world: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    residuals = torch.randn(world, size, generator=generator)
    code = ballot_code(size, kept_of(size, density))
    rank = seed % world
    before = residuals.clone()
    ballots = torch.stack(
        [cast(residuals[i], code) if i != rank else torch.zeros(code.nbytes, dtype=torch.uint8) for i in range(world)]
    )  # nobody sends one to itself
    got = mean_of(residuals[rank], ballots, rank, code)
    want = before[rank].clone()
    for other in range(world):
        if other != rank:
            named = top_k(before[other].abs(), votes_of(kept_of(size, density)))
            want[named] += before[other][named].sign() * before[other][named].abs().mean()
    torch.testing.assert_close(got, want / world if world > 1 else want)
    torch.testing.assert_close(residuals[rank], want)
    torch.testing.assert_close(residuals.sum(0), before.sum(0), atol=1e-5, rtol=1e-5)  # nothing is lost or invented


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [50_000, 200_000])  # sampled selection
def test_a_large_partition_names_the_largest(size: int, dtype: torch.dtype) -> None:
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    code = ballot_code(size, kept_of(size, 0.01))
    ballots = torch.stack([torch.zeros(code.nbytes, dtype=torch.uint8), cast(gradient.clone(), code)])
    got = mean_of(torch.zeros(size), ballots, 0, code)
    named = top_k(gradient.float().abs(), code.votes)
    assert torch.equal(got.nonzero().squeeze(1), named)
    assert torch.equal(got[named].sign(), gradient.float()[named].sign())


def test_what_is_moved_to_a_bf16_residual_stays_there() -> None:
    code = ballot_code(1000, 100)
    ballots = torch.stack([torch.zeros(code.nbytes, dtype=torch.uint8), cast(torch.ones(1000), code)])
    own = torch.zeros(1000, dtype=torch.bfloat16)
    count_ballots(own, ballots, 0, code, None)
    assert own.tolist() == [1.0] * code.votes + [0.0] * (1000 - code.votes)


def test_a_damaged_ballot_is_refused() -> None:
    code = ballot_code(1000, 100)
    ballots = torch.stack([cast(torch.randn(1000), code) for _ in range(3)])
    ballots[2, 4:20] = 255
    with pytest.raises(RuntimeError, match="mask holds"):
        count_ballots(torch.zeros(1000), ballots, 0, code, None)


def test_an_empty_partition_has_empty_ballots() -> None:
    code = ballot_code(0, 0)
    assert code.nbytes == 0
    out = torch.zeros(3, 0, dtype=torch.uint8)
    cast_ballots(torch.zeros(3, 0), known(0), 1, code, 0, out)
    assert mean_of(torch.zeros(0), out, 1, code).numel() == 0


def test_ballots_without_a_mask_are_refused() -> None:
    with pytest.raises(ScapeConfigError, match="ballots = true needs a mask"):
        parse_options({"sparsity": 0.0, "ballots": True}, ScapeOptions)
    assert parse_options({"ballots": True}, ScapeOptions).ballots
    assert ScapeOptions().ballots is False
