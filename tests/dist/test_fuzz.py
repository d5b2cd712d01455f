"""Hundreds of configurations: each trains three steps on two ranks, or is refused by one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist import fuzz_configs
from tests.launch import run_ranks

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("rank_fuzz.py")
COUNT = 700


@pytest.fixture(scope="module")
def judged() -> list[tuple[dict[str, Any], ...]]:
    return list(zip(*run_ranks(SCRIPT, 2, [0, COUNT], timeout=500), strict=True))


def offenders(judged: Any, bad: Any) -> list[str]:
    return [
        f"{number}: {json.dumps(fuzz_configs.build(number))} -> {ranks}"
        for number, ranks in enumerate(judged)
        if any(bad(rank) for rank in ranks)
    ]


def test_nothing_but_our_own_error_reaches_the_user(judged: Any) -> None:
    assert not offenders(judged, lambda rank: "broken" in rank)


def test_all_ranks_are_told_the_same(judged: Any) -> None:
    apart = [number for number, ranks in enumerate(judged) if len({rank.get("refused") for rank in ranks}) > 1]
    assert not apart, [(fuzz_configs.build(number), judged[number]) for number in apart]


def test_each_refusal_names_key_and_remedy(judged: Any) -> None:
    def vague(rank: dict[str, Any]) -> bool:
        said = rank.get("refused")
        return said is not None and not (" = " in said.split(": ")[0] and ". Remedy: " in said)

    assert not offenders(judged, vague)


def test_what_is_not_refused_trains_with_equal_finite_replicas(judged: Any) -> None:
    def poor(rank: dict[str, Any]) -> bool:
        if "trained" not in rank:
            return False
        whole = rank["finite"] and rank["equal"] and rank["steps"] == 3
        ours = rank["trained"] != "ScapeZeroOptimizer" or rank["applied"] + rank["skipped"] == 3
        return not (whole and ours)

    assert not offenders(judged, poor)


def test_each_takes_seconds_at_most(judged: Any) -> None:
    assert not offenders(judged, lambda rank: rank["seconds"] > 10)


def test_both_kinds_are_common(judged: Any) -> None:
    """A generator that makes only bad configurations, or only good ones, would show nothing."""
    trained = sum("trained" in ranks[0] for ranks in judged)
    assert len(judged) == COUNT >= 500
    assert trained > COUNT // 5 and COUNT - trained > COUNT // 5
