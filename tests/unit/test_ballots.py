"""Ballots: their size, their content, and what an owner makes of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_scape.ballots import (
    BallotCode,
    ballot_code,
    cast_ballot,
    count_ballots,
    pack_signs,
    unpack_signs,
    votes_of,
)
from deepspeed_scape.config import ScapeConfigError, ScapeOptions, parse_options
from deepspeed_scape.layout import kept_of
from deepspeed_scape.mask import Moments
from tests.simulation import top_k


def known(size: int) -> Moments:
    """An owner's moments; a ballot must not depend on them."""
    generator = torch.Generator().manual_seed(9)
    last = torch.randint(0, 5, (size,), generator=generator, dtype=torch.int32)
    return Moments(gradient=torch.zeros(size), exp_avg=torch.randn(size, generator=generator), last=last)


def cast(gradient: torch.Tensor, code: BallotCode) -> torch.Tensor:
    out = torch.full((code.nbytes,), 77, dtype=torch.uint8)
    cast_ballot(gradient, known(gradient.numel()), 5, code, 0, out)
    return out


@pytest.mark.parametrize("size", [100_000, 1_000_000, 10_000_019])
def test_below_0015_bytes_an_element_at_99_percent(size: int) -> None:
    code = ballot_code(size, kept_of(size, 0.01))
    assert code.nbytes <= 0.015 * size + 8
    assert code.votes > 0.98 * kept_of(size, 0.01)


@given(votes=st.integers(0, 70), rows=st.integers(1, 4), seed=st.integers(0, 99))
def test_signs_survive(votes: int, rows: int, seed: int) -> None:
    signs = torch.rand(rows, votes, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = torch.stack([pack_signs(row) for row in signs])
    assert packed.shape == (rows, -(-votes // 8))
    assert torch.equal(unpack_signs(packed, votes), signs)


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
    ballots = torch.stack([cast(residual, code) for residual in residuals])
    ballots[rank] = 0  # nobody sends one to itself
    before = residuals.clone()
    got = count_ballots(residuals[rank], ballots, rank, code, None)
    want = residuals[rank].clone()
    for other in range(world):
        if other != rank:
            named = top_k(residuals[other].abs(), votes_of(kept_of(size, density)))
            want[named] += residuals[other][named].sign() * residuals[other][named].abs().mean()
    torch.testing.assert_close(got, want / world if world > 1 else want)
    assert torch.equal(residuals, before)  # counting is not sending


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [50_000, 200_000])  # sampled selection
def test_a_large_partition_names_the_largest(size: int, dtype: torch.dtype) -> None:
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    code = ballot_code(size, kept_of(size, 0.01))
    ballots = torch.stack([torch.zeros(code.nbytes, dtype=torch.uint8), cast(gradient, code)])
    got = count_ballots(torch.zeros(size), ballots, 0, code, None)
    named = top_k(gradient.float().abs(), code.votes)
    assert torch.equal(got.nonzero().squeeze(1), named)
    assert torch.equal(got[named].sign(), gradient.float()[named].sign())


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
    cast_ballot(torch.zeros(0), known(0), 1, code, 0, out[0])
    assert count_ballots(torch.zeros(0), out, 1, code, None).numel() == 0


def test_ballots_without_a_mask_are_refused() -> None:
    with pytest.raises(ScapeConfigError, match="ballots = true needs a mask"):
        parse_options({"sparsity": 0.0, "ballots": True}, ScapeOptions)
    assert parse_options({"ballots": True}, ScapeOptions).ballots
    assert ScapeOptions().ballots is False
