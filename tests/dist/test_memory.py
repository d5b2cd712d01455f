"""What docs/memory.md and the planner say a rank holds, against the tensors that are alive in a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspeed_scape.plan import memory
from tests.launch import run_ranks

pytestmark = pytest.mark.dist
WIDTH = {"fp32": 4, "bf16": 2}
CASES = ["fp32-0.9-fp32-device", "bf16-0.99-fp32-device", "bf16-0.99-bf16-device", "bf16-0.99-fp32-cpu"]


@pytest.fixture(scope="module", params=[2, 3], ids=["W2", "W3"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(Path(__file__).with_name("rank_memory.py"), request.param)


@pytest.mark.parametrize("case", CASES)
def test_scape_holds_what_is_planned(ranks: list[dict[str, Any]], case: str) -> None:
    dtype, sparsity, residual, place = case.split("-")
    wanted = memory.scape(1, len(ranks), 1 - float(sparsity), dtype, residual, place)
    wanted += memory.pinned(1, len(ranks), residual, place)  # a CPU has no other memory
    for result in ranks:
        held = result[case]
        # message buffers, K-sized and smaller, come on top
        assert wanted <= held["waiting"] <= wanted + 24 * (1 - float(sparsity)) + 0.2, (wanted, held)
        assert held["between"] == pytest.approx(held["waiting"] - WIDTH[dtype], abs=0.1)


def test_dense_zero_holds_what_is_planned_between_steps(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["bf16-dense"]["between"] == pytest.approx(memory.dense(1, len(ranks), "bf16") - 2, abs=0.3)
