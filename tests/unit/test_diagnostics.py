"""Residual norm, mask overlap and visits against counts kept by hand, and that counting changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepspeed_scape import checkpoint, process_groups
from deepspeed_scape.diagnostics import VISIT_BINS, count_visits
from tests import bare

CPU = torch.device("cpu")
SIZES = [[400, 37, 16], [129]]
CASES = {
    "sparse": {"sparsity": 0.9},
    "block": {"sparsity": 0.9, "selection": "block", "block_size": 50},
    "warmup": {"sparsity": 0.9, "warmup_steps": 2},
    "dense": {"sparsity": 0.0},
}


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    bare.join_world_of_one(CPU)
    yield
    process_groups.destroy()


def run(steps: int, every: int, options: dict[str, Any], broken: int = 0) -> Any:
    """An optimizer that keeps, in `seen`, what a step's mask was and what the residual became; step `broken` skips."""
    optimizer = bare.build(SIZES, CPU, torch.float32, diagnostics_every=every, **options)
    optimizer.seen = []
    for step in range(1, steps + 1):
        bare.give_gradients(optimizer, step)
        if step == broken:
            optimizer.bit16_groups[0][0].grad_accum[3] = math.inf
        dense = optimizer._is_dense(optimizer.applied_steps + 1)
        optimizer.step()
        if not optimizer.overflow:
            masks = []
            for group in optimizer.scape_groups:  # `last` tells what this step visited
                masks.append((group.last == optimizer.applied_steps).nonzero().flatten().tolist())
            norm = math.sqrt(sum(float(g.residual.state().double().square().sum()) for g in optimizer.scape_groups))
            optimizer.seen.append((masks, norm, dense))
    return optimizer


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_counts_are_those_kept_by_hand(options: dict[str, Any]) -> None:
    optimizer = run(8, 6, options)
    latest = optimizer.diagnostics.latest
    assert latest["diagnosed_step"] == 6
    masks, norm, _ = optimizer.seen[5]
    assert latest["residual_norm"] == pytest.approx(norm, rel=1e-6)  # its partial sums are fp32
    before = optimizer.seen[4][0]
    common = sum(len(set(a) & set(b)) for a, b in zip(masks, before, strict=True))
    assert latest["mask_overlap"] == pytest.approx(common / sum(map(len, masks)))
    counts = [torch.zeros(group.layout.partition_size) for group in optimizer.scape_groups]
    for masks, _, dense in optimizer.seen[:6]:
        for count, mask in zip(counts, masks, strict=True):
            count[mask] += not dense
    visits = torch.cat([count[: sum(size)] for count, size in zip(counts, SIZES, strict=True)])
    for low, high in zip(VISIT_BINS, [*VISIT_BINS[1:], math.inf], strict=True):
        share = float(((visits >= low) & (visits < high)).double().mean())
        assert latest[f"visits_hist_{low}"] == pytest.approx(share, abs=1e-12)
    assert sum(v for k, v in latest.items() if k.startswith("visits_hist")) == pytest.approx(1)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_counting_changes_no_training(options: dict[str, Any]) -> None:
    for plain, counted in zip(bare.state(run(5, 0, options)), bare.state(run(5, 2, options)), strict=True):
        assert torch.equal(plain, counted)


def test_sparsity_and_visits_of_every_step() -> None:
    optimizer = run(5, 0, CASES["warmup"], broken=4)
    assert optimizer.applied_steps == 4 and optimizer.diagnostics.latest == {}
    density = sum(g.layout.kept for g in optimizer.scape_groups) / sum(g.layout.numel for g in optimizer.scape_groups)
    assert optimizer.visits == pytest.approx(2 * density)  # two were dense, and one was skipped
    assert optimizer.step_stats["sparsity"] == pytest.approx(1 - density)
    for step, sparsity in ((1, 0.0), (3, 1 - density)):
        assert run(step, 0, CASES["warmup"]).step_stats["sparsity"] == pytest.approx(sparsity)
    skipped = run(4, 0, CASES["warmup"], broken=4)
    assert skipped.step_stats["sparsity"] == 1 and skipped.step_stats["skipped"] == 1


def test_a_skipped_step_still_brings_the_terms_of_the_one_before() -> None:
    optimizer = run(3, 2, CASES["sparse"], broken=3)
    assert optimizer.overflow
    assert optimizer.diagnostics.latest["diagnosed_step"] == 2


def test_bytes_are_added_only_where_something_was_counted() -> None:
    plain, counted = run(3, 0, CASES["sparse"]), run(3, 2, CASES["sparse"])
    assert plain.diagnostics.take_terms() is None
    assert counted.diagnostics.take_terms() is None  # taken by step 3
    assert run(2, 2, CASES["sparse"]).diagnostics.take_terms().shape == (3 + len(VISIT_BINS),)


def test_visits_come_back_from_a_checkpoint() -> None:
    first, second = run(4, 2, CASES["sparse"]), run(1, 2, CASES["sparse"])
    first.finish_mask(), second.finish_mask()
    saved = checkpoint.save(first)
    checkpoint.restore(saved, second)
    assert second.visits == first.visits
    for ours, theirs in zip(second.scape_groups, first.scape_groups, strict=True):
        assert torch.equal(ours.visits, theirs.visits) and ours.visits.sum() > 0
    for group in saved["groups"]:  # as a run without diagnostics writes it
        del group["visits"]
    checkpoint.restore(saved, second)
    assert second.visits == first.visits
    assert all(group.visits.sum() == 0 for group in second.scape_groups)


def test_bins_of_the_histogram() -> None:
    visits = torch.tensor([0, 0, 1, 2, 3, 7, 8, 1 << 16, 1 << 20], dtype=torch.int32)
    counts = dict(zip(VISIT_BINS, count_visits(visits).tolist(), strict=True))
    assert counts[0] == 2 and counts[1] == counts[2] == counts[3] == 1
    assert counts[6] == 1 and counts[8] == 1 and counts[VISIT_BINS[-1]] == 2 and VISIT_BINS[-1] == 1 << 16
    assert sum(counts.values()) == len(visits)
    assert count_visits(torch.zeros(0, dtype=torch.int32)).sum() == 0
