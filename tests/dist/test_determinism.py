"""One seed, one result: bit for bit over launches, and whatever buckets, overlap and buffers are set to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("rank_determinism.py")

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "again": {},
    "buckets of 1": {"zero": {"reduce_bucket_size": 1, "allgather_bucket_size": 1}},
    "buckets of 1e9": {"zero": {"reduce_bucket_size": 1_000_000_000, "allgather_bucket_size": 1_000_000_000}},
    "zero overlap_comm": {"zero": {"overlap_comm": True}},
    "no zero overlap_comm": {"zero": {"overlap_comm": False}},
    "contiguous": {"zero": {"contiguous_gradients": True}},
    "not contiguous": {"zero": {"contiguous_gradients": False}},
    "no reduce_scatter": {"zero": {"reduce_scatter": False, "allgather_partitions": False}},
    "no mask overlap": {"params": {"overlap_comm": False}},
    "other sample": {"params": {"seed": 12345}},
    "checked": {"params": {"check_replicas": 2, "timeout": 50}},
    "stage 1": {"stage": 1},
}


@pytest.fixture(scope="module", params=[pytest.param(2, id="W2"), pytest.param(3, id="W3", marks=pytest.mark.slow)])
def launches(request: pytest.FixtureRequest) -> list[list[dict[str, Any]]]:
    """The same ranks started twice."""
    first = run_ranks(SCRIPT, request.param, [json.dumps(list(VARIANTS.values()))])
    return [first, run_ranks(SCRIPT, request.param, [json.dumps([VARIANTS["plain"]])])]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_settings_do_not_change_a_bit(launches: Any, dtype: str, name: str) -> None:
    for rank in launches[0]:
        assert rank[dtype][list(VARIANTS).index(name)] == rank[dtype][0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_launches_are_equal(launches: Any, dtype: str) -> None:
    for first, second in zip(*launches, strict=True):
        assert first[dtype][0] == second[dtype][0]


def test_the_comparison_can_fail(launches: Any) -> None:
    """fp32 and bf16, and two ranks with data of their own, must differ in what the digests cover."""
    ranks = launches[0]
    assert ranks[0]["fp32"][0]["digest"] != ranks[0]["bf16"][0]["digest"]
    assert ranks[0]["fp32"][0]["digest"]["residual0"] != ranks[1]["fp32"][0]["digest"]["residual0"]
