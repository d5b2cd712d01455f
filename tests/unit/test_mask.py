"""Scores and selection: always the K largest, sorted, ties by the lowest index."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_scape import mask as mask_module
from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.layout import kept_in_partition, kept_of
from deepspeed_scape.mask import LastThreshold, Moments, pending_moment, select, select_block, select_top


def moments(size: int, seed: int = 0, step: int = 90, dtype: torch.dtype = torch.float32) -> Moments:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(size, generator=generator)
    return Moments(
        gradient=(torch.randn(size, generator=generator) * scale).to(dtype),
        exp_avg=torch.randn(size, generator=generator) * 0.1,
        last=torch.randint(step, (size,), generator=generator, dtype=torch.int32),
    )


def largest(score: torch.Tensor, kept: int) -> list[int]:
    """The definition, by sorting (score descending, index ascending)."""
    return sorted(sorted(range(score.numel()), key=lambda i: (-float(score[i]), i))[:kept])


def test_score_is_the_pending_first_moment() -> None:
    """|sum of the first moments that D' unapplied steps of gradient r/D' would have had|, element by element."""
    some = moments(200)
    score = pending_moment(some, 90, 0.9)
    for i in range(200):
        delay = max(1, 90 - int(some.last[i]))
        m, total = float(some.exp_avg[i]), 0.0
        for _ in range(delay):
            m = 0.9 * m + 0.1 * float(some.gradient[i]) / delay
            total += m
        assert float(score[i]) == pytest.approx(abs(total), rel=1e-4, abs=1e-6)


@given(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 1e-40, 3e38]), min_size=1, max_size=60), st.data())
def test_top_k_breaks_ties_by_index(values: list[float], data: st.DataObject) -> None:
    score = torch.tensor(values)
    kept = data.draw(st.integers(0, len(values)))
    assert select_top(score, kept).tolist() == largest(score, kept)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sparsity=st.sampled_from([0.8, 0.9, 0.99, 0.999]),  # the bound decides from about 0.97 on
    ties=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_sampled_threshold_changes_nothing(seed: int, sparsity: float, ties: bool, dtype: torch.dtype) -> None:
    size = mask_module.SAMPLE + 40_001
    some = moments(size, seed, dtype=dtype)
    if ties:  # most of the partition never gets a gradient, as unused embedding rows
        keep = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.05
        some = Moments(gradient=some.gradient * keep, exp_avg=some.exp_avg * keep, last=some.last)
    options = ScapeOptions(sparsity=sparsity, seed=seed)
    kept = kept_in_partition(size, options)
    expected = select_top(pending_moment(some, 90, 0.9), kept)
    assert torch.equal(select(some, 90, 0.9, kept, options), expected)


def test_a_misleading_sample_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the sample holds only large scores there are too few candidates, and the exact pass decides."""
    size = mask_module.SAMPLE + 40_001
    some = moments(size)
    options = ScapeOptions(sparsity=0.99)
    kept = kept_in_partition(size, options)
    top = select_top(pending_moment(some, 90, 0.9), 500)
    monkeypatch.setattr(mask_module, "_sample_places", lambda *_: top.repeat(70)[: mask_module.SAMPLE])
    assert torch.equal(select(some, 90, 0.9, kept, options), select_top(pending_moment(some, 90, 0.9), kept))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sparsity=st.sampled_from([0.8, 0.9, 0.99, 0.999]),
    smallest=st.sampled_from([None, 1e-30, 0.5, 1.0, 1.05, 3.0, 1e30]),  # of the K-th score
    ties=st.booleans(),
)
def test_the_last_threshold_changes_nothing(seed: int, sparsity: float, smallest: float | None, ties: bool) -> None:
    """Right, far too low (no room for the candidates), a little or far too high (too few of them), or unknown."""
    some = moments(mask_module.SAMPLE + 40_001, seed)
    if ties:
        some.gradient.mul_(4).round_()
        some.exp_avg.zero_()
        some.last.zero_()
    kept = kept_in_partition(some.last.numel(), ScapeOptions(sparsity=sparsity))
    score = pending_moment(some, 90, 0.9)
    expected = select_top(score, kept)
    before = LastThreshold(None if smallest is None else smallest * float(score[expected].min()))
    assert torch.equal(select(some, 90, 0.9, kept, ScapeOptions(sparsity=sparsity), before), expected)
    assert before.smallest == float(score[expected].min())


@pytest.mark.parametrize("sparsity", [0.9, 0.99])
def test_a_known_threshold_spares_the_sample(sparsity: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that drift by 1% a step are ranked in one pass; after a jump the sample is asked again."""
    some = moments(mask_module.SAMPLE + 40_001)
    options, before = ScapeOptions(sparsity=sparsity), LastThreshold()
    asked: list[int] = []
    kept = kept_in_partition(some.last.numel(), options)
    places = mask_module._sample_places
    monkeypatch.setattr(mask_module, "_sample_places", lambda *a: asked.append(1) or places(*a))
    factors = [1, 1.01, 0.99, 0.99, 1.01, 0.5, 1, 3, 1]
    counts = []
    for factor in factors:
        some.gradient.mul_(factor)
        some.exp_avg.mul_(factor)
        chosen = select(some, 90, 0.9, kept, options, before)
        assert torch.equal(chosen, select_top(pending_moment(some, 90, 0.9), kept))
        counts.append(len(asked))
    assert counts == [1, 1, 1, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_a_threshold_that_says_nothing_is_forgotten(value: float) -> None:
    some = moments(mask_module.SAMPLE + 40_001)
    options, before = ScapeOptions(sparsity=0.99), LastThreshold(1.0)
    some.gradient[:], some.exp_avg[:] = value, 0.0
    kept = kept_in_partition(some.last.numel(), options)
    assert select(some, 90, 0.9, kept, options, before).tolist() == list(range(kept))
    assert before.smallest is None


@pytest.mark.parametrize("sparsity", [0.9, 0.99], ids=["many", "few"])
@pytest.mark.parametrize("compiled", [True, False], ids=["loops", "torch"])
@pytest.mark.parametrize("beta1", [0.9, 0.0], ids=["score", "ballot"])
def test_what_is_not_a_number_is_sent_first(
    beta1: float, sparsity: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(mask_module, "loops_for", lambda *_: None)
    some = moments(mask_module.SAMPLE + 40_001)
    some.gradient[[5, 20_000, 48_000]] = float("nan")
    options = ScapeOptions(sparsity=sparsity)
    kept = kept_in_partition(some.last.numel(), options)
    chosen = select(some, 90, beta1, kept, options)
    assert {5, 20_000, 48_000} <= set(chosen.tolist())
    assert torch.equal(chosen, select_top(pending_moment(some, 90, beta1), kept))


@given(st.integers(1, 400), st.integers(2, 60), st.sampled_from([0.5, 0.9, 0.99]), st.integers(0, 99))
def test_block_selection_takes_the_top_of_each_block(size: int, block: int, sparsity: float, seed: int) -> None:
    score = torch.randint(5, (size,), generator=torch.Generator().manual_seed(seed)).float()  # many ties
    density = 1 - sparsity
    expected = []
    for start in range(0, size, block):
        part = score[start : start + block]
        expected += [start + i for i in largest(part, kept_of(part.numel(), density))]
    assert select_block(score, block, density).tolist() == expected


@pytest.mark.parametrize("selection", ["partition", "block"])
@pytest.mark.parametrize("size", [0, 1, 2, 199, 200, 201, 5000])
def test_selection_has_the_size_that_the_layout_promises(selection: str, size: int) -> None:
    options = ScapeOptions(sparsity=0.99, selection=selection)
    kept = kept_in_partition(size, options)
    assert select(moments(size), 90, 0.9, kept, options).numel() == kept
