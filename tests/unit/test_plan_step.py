"""Step times, bytes and memory of the planner against the package's own sizes and state."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from deepspeed_scape.ballots import ballot_code
from deepspeed_scape.buffers import WireBuffers
from deepspeed_scape.layout import kept_of
from deepspeed_scape.plan import Cluster, Workload, break_even, messages, predict, predict_all
from deepspeed_scape.plan.cluster import Link
from deepspeed_scape.plan.memory import scape as planned_memory
from deepspeed_scape.plan.messages import scape as message_sizes
from deepspeed_scape.plan.step import predict_dense, predict_scape
from evals.overhead import LocalStep, group_of

WORK = Workload(params=100_000_000, compute=0.5, dtype="bf16", dense_local=0.01, scape_local=0.02)


def slow(nodes: int = 8, bandwidth: float = 1e8) -> Cluster:
    link = Link(latency=0.0, bandwidth=bandwidth)
    return Cluster(nodes=nodes, gpus_per_node=1, inter=link, intra=link, algorithm="ring")


@pytest.mark.parametrize("sparsity", [0.99, 0.9, 0.5])
@pytest.mark.parametrize(("params", "ranks"), [(10_000, 2), (1_000_002, 3), (130_000, 4)])
def test_messages_are_what_the_package_sends(params: int, ranks: int, sparsity: float) -> None:
    step = LocalStep(group_of([("p", params)], sparsity, ranks), ranks)
    group, buffers = step.group, WireBuffers([step.group], ranks, torch.float32)
    found = message_sizes(group.layout.numel, ranks, 1 - sparsity, "fp32", "fp32")
    packed, _ = buffers.send_buffer(None)
    own, _ = buffers.param_buffer(None)
    assert found.reduce == packed.nbytes
    assert found.params == own.nbytes * ranks
    assert found.mask == group.code.nbytes * ranks


@pytest.mark.parametrize("sparsity", [0.99, 0.9, 0.5])
@pytest.mark.parametrize(("params", "ranks"), [(10_000, 2), (1_000_002, 3)])
def test_ballots_are_what_the_package_sends(params: int, ranks: int, sparsity: float) -> None:
    size = -(-params // (2 * ranks)) * 2
    found = message_sizes(size * ranks, ranks, 1 - sparsity, "bf16", "fp32", ballots=True)
    assert found.ballots == ranks * ballot_code(size, kept_of(size, 1 - sparsity)).nbytes
    assert message_sizes(size * ranks, ranks, 1 - sparsity, "bf16", "fp32").ballots == 0
    without, with_ballots = (predict_scape(replace(WORK, ballots=on), slow(), sparsity) for on in (False, True))
    assert with_ballots.bytes_sent > without.bytes_sent and with_ballots.step > without.step


@pytest.mark.parametrize("sparsity", [0.99, 0.9])
@pytest.mark.parametrize("ranks", [2, 4])
def test_memory_is_what_the_state_holds(sparsity: float, ranks: int) -> None:
    """As in DESIGN: weights, gradients, residual and mask on every rank, four tensors on the owner."""
    params = 1_000_000
    step = LocalStep(group_of([("p", params)], sparsity, ranks), ranks)
    grad = torch.randn(params)
    step.run([grad])
    group = step.group
    moments = [group.moments["exp_avg"], group.moments["exp_avg_sq"]]
    assert group.position is not None
    state = [group.flat, group.residual.state(), group.position, group.master, group.last, *moments, grad]
    planned = planned_memory(params, ranks, 1 - sparsity, "fp32", "fp32")
    assert sum(tensor.nbytes for tensor in state) == pytest.approx(planned, rel=1e-3)


def test_dense_modes_send_three_and_two_passes() -> None:
    dense, scattered = predict_all(WORK, slow(), [])
    size = 2 * WORK.params
    assert dense.bytes_sent == pytest.approx(3 * size * 7 / 8)
    assert scattered.bytes_sent == pytest.approx(2 * size * 7 / 8)
    assert dense.network == pytest.approx(dense.bytes_sent / 1e8)
    assert dense.step == pytest.approx(0.5 + 0.01 + dense.network)
    assert predict(WORK, slow()) == dense


def test_a_dense_reduction_hides_under_the_backward_at_most() -> None:
    overlapped = replace(WORK, dense_overlap=1.0)
    gap = predict_dense(WORK, slow()).step - predict_dense(overlapped, slow()).step
    assert gap == pytest.approx(0.5 * 2 / 3)
    quick = slow(bandwidth=1e12)
    assert predict_dense(overlapped, quick).network == pytest.approx(quick.all_gather(2 * WORK.params))


def test_the_mask_hides_under_the_compute_and_the_parameters_under_the_selection_at_most() -> None:
    sizes = message_sizes(WORK.params, 8, 0.01, "bf16", "fp32")
    mask, gather = slow().all_gather(sizes.mask), slow().all_gather(sizes.params)
    quick = replace(WORK, scape_local=10 * gather)  # more than half of it is the selection, so all is hidden
    exposed = replace(quick, mask_overlap=False)
    assert mask < WORK.compute and selection(quick) > gather
    assert predict_scape(quick, slow(), 0.99).hidden == pytest.approx(mask + gather)
    gap = predict_scape(exposed, slow(), 0.99).step - predict_scape(quick, slow(), 0.99).step
    assert gap == pytest.approx(mask + gather)
    crawl = slow(bandwidth=1e5)
    assert predict_scape(quick, crawl, 0.99).hidden == pytest.approx(WORK.compute + selection(quick))
    assert predict_scape(exposed, crawl, 0.99).hidden == 0.0
    assert predict_scape(quick, crawl, 0.0).hidden == 0.0  # nothing is selected


def selection(work: Workload) -> float:
    """Seconds of the local work at 99%, 8 ranks."""
    assert work.scape_local is not None
    whole = messages.scape_traffic(work.params, 8, 0.01, work.dtype, work.residual_dtype)
    return work.scape_local * messages.score_traffic(work.params, 8, work.residual_dtype) / whole


def test_break_even_is_where_the_steps_are_equal() -> None:
    found = break_even(WORK, slow(), 0.99)
    at = slow(bandwidth=found)
    assert predict_dense(WORK, at).step == pytest.approx(predict_scape(WORK, at, 0.99).step, rel=1e-6)
    assert (
        predict_scape(WORK, slow(bandwidth=found / 2), 0.99).step < predict_dense(WORK, slow(bandwidth=found / 2)).step
    )


def test_break_even_at_no_and_at_every_bandwidth() -> None:
    assert break_even(replace(WORK, scape_local=0.0), slow(), 0.99) == math.inf
    dense = replace(WORK, compute=1e9, dense_overlap=1.0, scape_local=1e9)
    assert break_even(dense, slow(), 0.99) == 0.0


def test_local_work_follows_the_memory_bandwidth() -> None:
    free = replace(WORK, scape_local=None, dense_local=None)
    twice = replace(free, memory_bandwidth=2 * free.memory_bandwidth)
    for sparsity in (None, 0.9, 0.99):
        assert predict(free, slow(), sparsity).local == pytest.approx(2 * predict(twice, slow(), sparsity).local)
    assert predict(free, slow(), 0.9).local > predict(free, slow(), 0.99).local > 0


def test_a_residual_in_host_memory_crosses_the_link_once_a_step_and_way() -> None:
    here = replace(WORK, scape_local=None)
    there = replace(here, residual_device="cpu", host_link=1e9)
    on, off = predict_scape(here, slow(), 0.99), predict_scape(there, slow(), 0.99)
    moved = 4 * WORK.params * 7 / 8
    assert off.local - on.local == pytest.approx(moved / 1e9) and off.network == on.network
    assert off.host_memory == on.memory - off.memory == pytest.approx(moved) and on.host_memory == 0
    assert predict_scape(replace(there, scape_local=0.02), slow(), 0.99).local == 0.02  # as measured
