"""The data order: a bijection, disjoint between ranks, once an epoch, and nothing but a function of its arguments."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.batches import BatchOrder, count_windows, eval_windows, permute, read_windows

orders = st.builds(
    lambda seed, windows_per_round, extra, world, micro_batch, accumulation: BatchOrder(
        seed=seed,
        windows=windows_per_round * world * micro_batch + extra % (world * micro_batch),
        world=world,
        micro_batch=micro_batch,
        accumulation=accumulation,
    ),
    st.integers(0, 2**40),
    st.integers(1, 12),
    st.integers(0, 100),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_permutation_is_fixed_for_good() -> None:
    """A changed constant would make old checkpoints resume on other data."""
    assert [permute(i, 10, 7) for i in range(10)] == [8, 0, 3, 5, 2, 4, 6, 7, 1, 9]


def test_permutation_refuses_what_is_outside() -> None:
    with pytest.raises(ValueError, match="outside range"):
        permute(5, 5, 0)


def epoch_windows(order: BatchOrder, epoch: int) -> list[int]:
    """All windows of all ranks in the rounds of one epoch, by (step, micro-step) as the loop asks for them."""
    seen = []
    for turn in range(epoch * order.rounds_per_epoch, (epoch + 1) * order.rounds_per_epoch):
        step, micro_step = divmod(turn, order.accumulation)
        assert order.epoch(step, micro_step) == epoch
        for rank in range(order.world):
            seen += order.windows_of(step, rank, micro_step)
    return seen


@given(orders, st.integers(0, 3))
def test_each_window_at_most_once_an_epoch_over_all_ranks(order: BatchOrder, epoch: int) -> None:
    seen = epoch_windows(order, epoch)
    assert len(seen) == order.rounds_per_epoch * order.world * order.micro_batch
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(order.windows))
    assert order.windows - len(seen) < order.world * order.micro_batch  # only the rest of a round is skipped


@given(orders, st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2)), max_size=6))
def test_order_has_no_state(order: BatchOrder, asked_before: list[tuple[int, int]]) -> None:
    expected = order.windows_of(17, 0, 0)
    for step, micro_step in asked_before:
        order.windows_of(step, 0, micro_step)
    assert order.windows_of(17, 0, 0) == expected


def test_seeds_and_epochs_differ() -> None:
    def first_epoch(seed: int, epoch: int) -> list[int]:
        return epoch_windows(BatchOrder(seed=seed, windows=64, world=2, micro_batch=2), epoch)

    assert first_epoch(0, 0) != first_epoch(1, 0)
    assert first_epoch(0, 0) != first_epoch(0, 1)
    assert first_epoch(0, 0) != list(range(64))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="3 windows, fewer than one micro-step of 2 ranks x micro-batch 2"):
        BatchOrder(seed=0, windows=3, world=2, micro_batch=2)


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3))
def test_eval_windows_are_disjoint_and_inside(windows: int, batches: int, world: int, micro_batch: int) -> None:
    if windows < world * micro_batch:
        with pytest.raises(ValueError, match="--val"):
            eval_windows(windows, batches, world, 0, micro_batch)
        return
    per_rank = [eval_windows(windows, batches, world, r, micro_batch) for r in range(world)]
    assert len({len(b) for b in per_rank}) == 1
    flat = [w for rank in per_rank for batch in rank for w in batch]
    assert len(set(flat)) == len(flat)
    assert all(0 <= w < windows for w in flat)


@given(st.integers(0, 500), st.integers(1, 40))
def test_every_window_lies_inside_the_file(tokens: int, seq: int) -> None:
    stream = np.arange(tokens, dtype=np.uint16)
    windows = count_windows(tokens, seq)
    for w in range(windows):
        read = read_windows(stream, [w], seq)
        assert read.shape == (1, seq + 1)
        assert read.dtype == np.int64
        assert read[0].tolist() == list(range(w * seq, w * seq + seq + 1))
    assert tokens <= (windows + 1) * seq  # no whole window is left over
