"""One step on real ranks: order and number of collectives, replicas, skipped steps, accumulation, odd parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_ranks

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("rank_step.py")


@pytest.fixture(scope="module", params=[2, 3], ids=["W2", "W3"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(SCRIPT, request.param, ["all"])


@pytest.fixture(scope="module")
def long_run() -> list[dict[str, Any]]:
    return run_ranks(SCRIPT, 2, ["long"], timeout=550)


@pytest.mark.parametrize("groups", ["1-True", "4-True"])
def test_three_data_collectives_and_one_scalar_in_order(ranks: list[dict[str, Any]], groups: str) -> None:
    """The selection runs under the parameter gather. The mask gather is the last call of the step, in flight at its
    end, on its own group, and waited for before the next pack; on gloo each collective is one batch that posts its W-1
    receives before its W-1 sends."""
    swap = f"{len(ranks) - 1} irecv, {len(ranks) - 1} isend"
    for result in ranks:
        events = result["order"][groups]
        assert events == [
            "micro0", "step", "micro1", "step", "micro2", "step",
            "all_reduce:data:sync", "wait_mask", f"{swap}:data:waited", f"{swap}:data:waited",
            "select under 1", f"{swap}:mask:in flight", "end",
        ]  # fmt: skip


def test_ballots_are_in_the_batch_of_the_reduce_or_in_flight_beside_it(ranks: list[dict[str, Any]]) -> None:
    swap = f"{len(ranks) - 1} irecv, {len(ranks) - 1} isend"
    both = f"{2 * (len(ranks) - 1)} irecv, {2 * (len(ranks) - 1)} isend"
    for result in ranks:
        assert result["order"]["4-Truep2p"][-7:] == [
            "all_reduce:data:sync", "wait_mask", f"{both}:data:waited", f"{swap}:data:waited",
            "select under 1", f"{swap}:mask:in flight", "end",
        ]  # fmt: skip
        # torch has had three names for an all-gather into one tensor
        events = [event.replace("_into_tensor:", "_single:").replace("_tensor:", "_single:")
                  for event in result["order"]["4-Truenccl"][-8:]]  # fmt: skip
        assert events == [
            "all_reduce:data:sync", "wait_mask", "all_to_all_single:mask:async", "reduce_scatter_single:data:sync",
            "all_gather_single:data:async", "select under 0", "all_gather_single:mask:async", "end",
        ]  # fmt: skip


def test_without_overlap_the_gather_ends_inside_the_step(ranks: list[dict[str, Any]]) -> None:
    events = ranks[0]["order"]["1-False"]
    swap = f"{len(ranks) - 1} irecv, {len(ranks) - 1} isend"
    assert events[-5:] == [f"{swap}:data:waited", "select under 0", f"{swap}:mask:waited", "wait_mask", "end"]


def test_a_mask_is_used_one_step_after_it_was_made(ranks: list[dict[str, Any]]) -> None:
    assert all(result["late_mask"]["agree"] == [True] * 5 for result in ranks)


def test_check_replicas_names_rank_and_parameter_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    said = [result["corrupt"] for result in ranks]
    assert all(s == said[0] for s in said)
    assert "up.bias" in said[0]["replica"] and "rank" in said[0]["replica"]
    assert said[0]["master"].startswith("rank 1: 1 elements of ") and "master and replica" in said[0]["master"]
    if len(ranks) == 3:  # two ranks have no majority
        assert said[0]["replica"].startswith("rank 1 holds another up.bias")


def test_a_non_finite_gradient_on_one_rank_changes_nothing(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        for name, case in result["overflow"].items():
            assert case["kind"] == "ScapeZeroOptimizer", name  # stage 1 + bf16 + fp32 accumulation included
            assert case["untouched"] == [True, True], name
            assert case["skipped"] == [1, 2] and case["applied"] == 59, name
            assert case["losses"][1] < case["losses"][0] - 0.2, name
            assert case["scale_halved"] == name.startswith("fp16"), name
    assert ranks[0]["overflow"]["bf16-zero1-fp32"]["waiting"] == "torch.float32"


def test_a_gradient_too_large_to_square_does_not_poison_the_moments(ranks: list[dict[str, Any]]) -> None:
    """R^2/D overflowed in the normalizer while every gradient was finite, and nan moments followed for good."""
    for result in ranks:
        skipped, first, last = result["huge"]["0.0"]
        assert skipped == 1 and last < first + 0.5
        skipped, first, last = result["huge"]["1.0"]
        assert skipped == 0 and last < first + 0.5


def test_destroyed_engines_leave_no_process_group(ranks: list[dict[str, Any]]) -> None:
    assert all(result["leaked"] == 0 for result in ranks)


def test_four_micro_steps_equal_one(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["accumulation"]["fp32"]["difference"] < 1e-5
    assert ranks[0]["accumulation"]["bf16"]["difference"] < 2e-2  # bf16 gradients round differently


def test_learning_rates_follow_either_schedule(ranks: list[dict[str, Any]]) -> None:
    got = ranks[0]["schedules"]
    assert got["told"] == []  # torch's schedules saw the optimizer step
    assert got["deepspeed"][1:] == pytest.approx([min(1e-2, 1e-3 * n) for n in range(1, 12)], rel=1e-6, abs=1.1e-3)
    assert got["deepspeed"][-1] == pytest.approx(1e-2) and got["deepspeed"][1] < 5e-3
    assert got["torch"] == pytest.approx([3e-3, 1.5e-3, 1.5e-3, 1e-3])  # the skipped 2nd step did not count
    assert got["recorded"] == 3


def test_odd_parameters(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        dense, sparse = result["odd"]["0.0"], result["odd"]["0.9"]
        assert max(dense["differ"].values()) < 2e-5, dense["differ"]
        for case in (dense, sparse):
            assert case["frozen"] and case["equal"] and case["groups"] == 3 and case["shape"] == [0, 4]
            assert case["losses"][1] < case["losses"][0]
        assert sparse["unused"]


def test_debugging_views(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["gradients"]["grads"] < 1e-6
        assert result["gradients"]["doubled"] < 1e-6
        assert result["gradients"]["masters"] == 0.0
        assert result["gradients"]["everywhere"]  # a parameter set by hand, on every replica at once
        assert result["gradients"]["moment"] > 0
        assert "dense path reached" in result["gradients"]["dense"]


def test_deepspeeds_monitors_get_what_the_dict_holds(ranks: list[dict[str, Any]]) -> None:
    written = ranks[0]["monitors"]
    expected = {
        "bytes_scalar",
        "bytes_reduce",
        "bytes_params",
        "bytes_mask",
        "bytes_total",
        "grad_norm",
        "grad_norm_rms",
    }
    assert expected <= set(written) and written["bytes_total"] > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_replicas_after_1000_steps(long_run: list[dict[str, Any]], dtype: str) -> None:
    for result in long_run:
        case = result[dtype]
        assert case["equal"] and case["master"]
        assert case["applied"] + case["skipped"] == 1000 and case["skipped"] < 20
        assert case["last"] < case["first"] - 1.0
