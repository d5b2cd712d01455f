"""The alpha-beta model: closed forms, orders between algorithms, and the limits of each."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_scape.plan.cluster import Cluster, Link

SLOW = Link(latency=1e-3, bandwidth=1e8)
FAST = Link(latency=1e-6, bandwidth=1e11)


def cluster(nodes: int, gpus: int = 1, **options: object) -> Cluster:
    return Cluster(nodes=nodes, gpus_per_node=gpus, inter=SLOW, intra=FAST, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [2, 3, 8, 4096])
def test_ring_all_reduce_is_two_one_pass_collectives(n: int) -> None:
    ring = cluster(n, algorithm="ring")
    b = 1e6
    assert ring.all_reduce(b) == pytest.approx(2 * (n - 1) * 1e-3 + 2 * (n - 1) / n * b / 1e8)
    assert ring.all_reduce(b) == pytest.approx(ring.reduce_scatter(b) + ring.all_gather(b))


def test_tree_wins_for_small_messages_on_many_ranks_and_ring_for_large_ones() -> None:
    ring, tree, best = (cluster(1024, algorithm=a) for a in ("ring", "tree", "best"))
    assert tree.all_reduce(24) == pytest.approx(20 * 1e-3 + 2 * 24 / 1e8)
    assert tree.all_reduce(24) < ring.all_reduce(24) / 50
    big = 1e13
    assert ring.all_reduce(big) < tree.all_reduce(big)
    for b in (24, big):
        assert best.all_reduce(b) == min(ring.all_reduce(b), tree.all_reduce(b))


def test_direct_exchange_has_one_latency() -> None:
    assert cluster(8, algorithm="direct").all_gather(8e6) == pytest.approx(1e-3 + 7e6 / 1e8)


def test_one_rank_sends_nothing() -> None:
    alone = cluster(1)
    assert alone.all_reduce(1e9) == alone.all_gather(1e9) == alone.reduce_scatter(1e9) == 0.0


def test_one_node_runs_at_the_inner_links() -> None:
    inside = cluster(1, 8, algorithm="ring")
    assert inside.all_gather(8e9) == pytest.approx(7 * 1e-6 + 7e9 / 1e11)


def test_two_levels_send_the_same_bytes_between_nodes_with_fewer_latencies() -> None:
    flat, best = cluster(4, 8, algorithm="ring"), cluster(4, 8)
    assert flat.all_gather(24) == pytest.approx(31e-3, rel=1e-3)
    assert best.all_gather(24) == pytest.approx(3e-3 + 7e-6, rel=1e-3)


def test_efficiency_takes_bandwidth_between_nodes_only() -> None:
    full, half = cluster(2, algorithm="ring"), cluster(2, algorithm="ring", efficiency=0.5)
    assert half.all_gather(2e8) - 1e-3 == pytest.approx(2 * (full.all_gather(2e8) - 1e-3))
    inside = cluster(1, 2, algorithm="ring", efficiency=0.5)
    assert inside.all_gather(2e8) == cluster(1, 2, algorithm="ring").all_gather(2e8)


@given(
    nodes=st.integers(1, 512),
    gpus=st.integers(1, 8),
    nbytes=st.floats(1, 1e12),
    algorithm=st.sampled_from(["best", "ring", "tree", "direct"]),
)
def test_more_bytes_and_slower_links_never_take_less(nodes: int, gpus: int, nbytes: float, algorithm: str) -> None:
    one = cluster(nodes, gpus, algorithm=algorithm)
    for call in ("all_reduce", "reduce_scatter", "all_gather"):
        time = getattr(one, call)(nbytes)
        assert math.isfinite(time) and time >= 0
        assert getattr(one, call)(2 * nbytes) >= time
        assert getattr(one.at_bandwidth(SLOW.bandwidth / 2), call)(nbytes) >= time
        slower = replace(one, inter=replace(SLOW, latency=1e-2))
        assert getattr(slower, call)(nbytes) >= time
