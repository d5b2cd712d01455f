"""Bytes per step against the budget of DESIGN section 2, the wire meter and the kernel's interface counters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("rank_bytes.py")

# (sparsity, value dtype, selection[, ballots]) -> bytes x P x (W-1)/W, with a bf16 model
BUDGET = {
    (0.99, "fp32", "partition"): 0.075,
    (0.99, "bf16", "partition"): 0.055,
    (0.9, "fp32", "partition"): 0.71,
    (0.9, "bf16", "partition"): 0.51,
    (0.99, "fp32", "block"): 0.0701,
    (0.99, "fp32", "partition", "ballots"): 0.075 + 0.015,
}


@pytest.fixture(scope="module", params=[2, 3], ids=["W2", "W3"])
def measured(request: pytest.FixtureRequest) -> list[list[dict[str, Any]]]:
    cases = [{"sparsity": s, "value_dtype": v, "selection": b, "ballots": bool(more)} for s, v, b, *more in BUDGET]
    return run_ranks(SCRIPT, request.param, [json.dumps(cases)], netns=True)


@pytest.mark.parametrize("case", range(len(BUDGET)), ids=["-".join(map(str, key)) for key in BUDGET])
def test_bytes_per_step(measured: list[list[dict[str, Any]]], case: int) -> None:
    world = len(measured)
    budget = list(BUDGET.values())[case]
    for rank in measured:
        result = rank[case]
        total = result["counted"]["bytes_total"]
        assert total <= budget * result["numel"] * (world - 1) / world
        assert (
            total > 0.9 * budget * result["numel"] * (world - 1) / world
        )  # a counter that forgets would pass the above
        assert result["meter"] == pytest.approx(total, rel=1e-3)
    counted = sum(rank[case]["counted"]["bytes_total"] for rank in measured)
    kernel = measured[0][case]["kernel"]
    assert counted * 0.95 <= kernel <= counted * 1.05 + 40_000  # headers and acknowledgements of some 100 segments


def test_ballots_cost_less_than_a_sixtieth_byte_an_element(measured: list[list[dict[str, Any]]]) -> None:
    world = len(measured)
    for rank in measured:
        *others, voting = rank
        assert all(result["counted"]["bytes_ballots"] == 0 for result in others)
        extra = voting["counted"]["bytes_ballots"] / voting["numel"] / ((world - 1) / world)
        assert 0.0145 < extra <= 0.015
