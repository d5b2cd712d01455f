"""Which K elements of a partition are worth sending next: score and selection.

The score is the pending first moment: what AdamS would still move an element by if its unsent gradients were applied
now. Selection always returns the same K, sorted, ties broken by the lowest index, so that it is a function of the
scores alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepspeed_scape.adams import delay_tables
from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.kernels import loops_for, ops_for
from deepspeed_scape.layout import kept_of
from deepspeed_scape.residual import CHUNK, chunks

SAMPLE = 8192  # elements of the sample that finds the threshold: its rank is then known to ~11% at 1% density
AT_ONCE, AT_ONCE_GPU = 1 << 18, 1 << 22  # elements of partitions that are ranked together, see ``rows_together``
FEWEST = 8  # rows for which torch's passes over all of them are worth it
SHARED = 32768  # elements of one sum that torch shares among threads, and of two sums not: it would round otherwise
MANY = 8  # candidates are many where there is room for one in so many elements
DRIFT = 0.96  # the K-th score moves by about 1% a step (5% in the first ten); 4% lower are 1.1 K (90%) to 1.7 K (99%)


@dataclass(frozen=True, kw_only=True)
class Moments:
    """What an owner knows of its partition, all of one shape: (S,), or the part that is asked for."""

    gradient: Tensor  # r (S,) fp32 or bf16: the owner's own unsent gradients, with ballots all ranks' over W
    exp_avg: Tensor  # m (S,) fp32
    last: Tensor  # (S,) int32: the step of the last visit, 0 for none

    def __getitem__(self, piece: slice) -> Moments:
        return Moments(gradient=self.gradient[piece], exp_avg=self.exp_avg[piece], last=self.last[piece])

    def at(self, index: Tensor) -> Moments:
        """The elements at (n,) int64 places; index_select is several times as fast as indexing on a CPU."""
        parts = (self.gradient, self.exp_avg, self.last)
        gradient, exp_avg, last = (part.index_select(0, index) for part in parts)
        return Moments(gradient=gradient, exp_avg=exp_avg, last=last)


@dataclass
class LastThreshold:
    """What the K-th score of a partition was when it was last ranked: it spares the next selection its sample.

    It can make a selection faster, never another, so it belongs to no checkpoint.
    """

    smallest: float | None = None


def pending_moment(
    moments: Moments,
    step: int,  # t: the step whose update has just been applied
    beta1: float,
    scratch: Tensor | None = None,  # (3, >= n) fp32, overwritten; the result is a view of its first row
) -> Tensor:  # same shape, fp32, >= 0
    """Score |r + (m - r/D') c(D')| with D' = max(1, t - last) and c(D) = b1 (1 - b1^D)/(1 - b1) (DESIGN section 1)."""
    tables = delay_tables(beta1, 0.0, step, moments.exp_avg.device)
    count = moments.last.numel()
    if scratch is None:
        scratch = moments.exp_avg.new_empty(3, count)
    score, moved = scratch[0, :count], scratch[1, :count]
    delay = scratch[2, :count].view(torch.int32)
    torch.sub(step, moments.last, out=delay)
    torch.index_select(tables.share, 0, delay, out=score)
    torch.index_select(tables.moved, 0, delay, out=moved)
    score.mul_(moments.gradient.float())
    moved.mul_(moments.exp_avg)  # two products and a sum, as the compiled loop rounds them
    return score.add_(moved).abs_()


def select(
    moments: Moments, step: int, beta1: float, kept: int, options: ScapeOptions, before: LastThreshold | None = None
) -> Tensor:
    """Indices of the K elements to synchronise next.

    Args:
        before: of the same partition, updated; only a CPU has a use for it.

    Returns:
        (K,) int64, ascending, in [0, S).
    """
    if options.selection == "block":
        return select_block(pending_moment(moments, step, beta1), options.block_size, options.density)
    return select_partition(moments, step, beta1, kept, options.seed, before)


def select_partition(
    moments: Moments, step: int, beta1: float, kept: int, seed: int, before: LastThreshold | None = None
) -> Tensor:
    """The K largest pending moments of a whole partition: (K,) int64 ascending."""
    size = moments.last.numel()
    if moments.last.device.type != "cpu" or kept * 4 >= size or size <= SAMPLE:
        return ops_for(moments.last).top_k(moments, step, beta1, kept, seed)
    return _select_candidates(moments, step, beta1, kept, seed, before or LastThreshold())


def select_top(score: Tensor, kept: int) -> Tensor:
    """The K largest of (S,) scores, ties by the lowest index: (K,) int64 ascending. The reference selection."""
    return top_of_rows(infinite_if_nan(score).view(1, -1), kept)


def select_largest(
    rows: Tensor,  # (n, S) fp32 or bf16: gradients in n partitions
    known: Moments,  # of a partition of S elements; only its shape and device matter
    step: int,
    kept: int,
    seed: int,
) -> Tensor:  # (n, K) int64 ascending in each row
    """The K largest |gradients| of each partition, which without momentum are its largest pending moments."""
    if rows_together(rows, kept):
        return ops_for(rows).largest_of_rows(rows, kept)
    each = (Moments(gradient=row, exp_avg=known.exp_avg, last=known.last) for row in rows)
    return torch.stack([select_partition(moments, step, 0.0, kept, seed) for moments in each])


def rows_together(rows: Tensor, kept: int) -> int:
    """How many of (n, S) partitions are ranked together; 0 where each is ranked alone, since bytes are the cost there.

    A row alone costs some 0.3 ms of calls on a CPU. In that time torch ranks about 30,000 elements, and the compiled
    loop is faster than a sample and its threshold up to 200,000 (measured). On a GPU a row alone is some 30
    launches, 0.15 ms and more of the host; ``kernels/top_rows.py`` moves about 100 bytes an element, at 2 TB/s 0.03 ms
    for 524,288 (reckoned, not measured). Buffers are about 20 bytes an element: 5 MB on a CPU, 84 MB on a GPU.
    """
    count = (AT_ONCE if rows.device.type == "cpu" else AT_ONCE_GPU) // max(rows.shape[1], 1)
    compiled = rows.dtype == torch.float32 and loops_for(rows) is not None
    if rows.device.type == "cpu" and kept >= SHARED:
        count = min(count, 1)
    return count if compiled or count >= FEWEST else 0


def infinite_if_nan(score: Tensor) -> Tensor:
    """What is not a number has no order; as infinity it is sent, and seen, at the next step."""
    return score.nan_to_num(torch.inf, torch.inf)


def _select_candidates(
    moments: Moments, step: int, beta1: float, kept: int, seed: int, before: LastThreshold
) -> Tensor:
    """``select_top`` in one pass over S and no buffer of its size: a threshold leaves few candidates to rank.

    It lies a little below the last K-th score; where that is not known, or fewer than K reach it, a sample says; where
    fewer than K reach that too, every element is ranked. So the result depends on neither.
    """
    rank, capacity = _sample_rank(moments.last.numel(), kept)
    index, score = np.empty(0, np.int64), np.empty(0, np.float32)
    if before.smallest is not None:
        index, score = _candidates(moments, step, beta1, before.smallest * DRIFT, capacity)
    if index.size < kept:
        sample = pending_moment(moments.at(_sample_places(moments.last.numel(), seed)), step, beta1)
        threshold = float(torch.topk(sample, rank, sorted=False).values.min())
        index, score = _candidates(moments, step, beta1, threshold, capacity)
    if index.size < kept:
        before.smallest = None
        return select_top(pending_moment(moments, step, beta1), kept)
    smallest = np.partition(score, score.size - kept)[score.size - kept]
    before.smallest = float(smallest)
    chosen = score > smallest
    ties = np.flatnonzero(score == smallest)[: kept - np.count_nonzero(chosen)]
    chosen[ties] = True
    return torch.from_numpy(index[chosen])


def _sample_rank(size: int, kept: int) -> tuple[int, int]:
    """Which of the sample's scores is the threshold, 4 standard deviations low, and room for twice as many and more.

    In a run's first steps the K-th score rises by 10% a step, and what lay below it with it.
    """
    expected = kept * SAMPLE / size
    rank = min(SAMPLE, int(expected + 4 * expected**0.5) + 8)
    return rank, 2 * int(rank + 6 * rank**0.5) * size // SAMPLE


@functools.lru_cache(maxsize=64)
def _sample_places(size: int, seed: int) -> Tensor:
    """(SAMPLE,) int64 random places, ascending; a stride would fall into step with the rows of a weight matrix."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(size, (SAMPLE,), generator=generator).sort().values


def _candidates(
    moments: Moments, step: int, beta1: float, threshold: float, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """Every element with a score >= threshold: its index (int64, ascending) and its score (fp32).

    ``capacity`` is a guess of how many there are; none at all are returned where it proves far too small.
    """
    loops = loops_for(moments.gradient, moments.exp_avg, moments.last)
    if loops is None or moments.gradient.dtype != torch.float32:
        return _candidates_by_torch(moments, step, beta1, threshold)
    index, score = _room(capacity)
    if beta1 == 0:  # ballots
        found = loops.large(moments.gradient.numpy(), np.float32(threshold), index, score)
        return index[: max(found, 0)], score[: max(found, 0)]
    tables = delay_tables(beta1, 0.0, step, moments.exp_avg.device)
    arrays = (t.numpy() for t in (moments.gradient, moments.exp_avg, moments.last))
    collect = loops.many_candidates if capacity * MANY > moments.last.numel() else loops.candidates
    found = collect(*arrays, step, tables.share.numpy(), tables.moved.numpy(), np.float32(threshold), index, score)
    return index[: max(found, 0)], score[: max(found, 0)]


@functools.lru_cache(maxsize=16)
def _room(capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Kept from step to step: fresh memory would cost a page fault every 4 KiB, a third of the pass at 90%."""
    return np.empty(capacity, np.int64), np.empty(capacity, np.float32)


def _candidates_by_torch(moments: Moments, step: int, beta1: float, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    found, scores = [], []
    scratch = torch.empty(3, CHUNK)  # an allocation for each piece would cost page faults, not arithmetic
    for piece in chunks(moments.last.numel(), moments.last.device):
        score = infinite_if_nan(pending_moment(moments[piece], step, beta1, scratch)).numpy()
        local = np.flatnonzero(score >= np.float32(threshold))
        scores.append(score[local])
        local += piece.start
        found.append(local)
    return np.concatenate(found), np.concatenate(scores)


def select_block(score: Tensor, block_size: int, density: float) -> Tensor:
    """The top k of every block of ``block_size`` scores, ties by the lowest index: (K,) int64 ascending.

    The last block may be shorter; it keeps its own share, at least one element.
    """
    tail_kept = kept_of(score.numel() % block_size, density)
    return top_of_blocks(score, block_size, kept_of(block_size, density), tail_kept)


def top_of_blocks(score: Tensor, block_size: int, kept: int, tail_kept: int) -> Tensor:
    """The top ``kept`` of every block of (S,) scores and the top ``tail_kept`` of a shorter last one: (K,) int64."""
    score = infinite_if_nan(score)
    full = score.numel() // block_size * block_size
    parts = [top_of_rows(score[:full].view(-1, block_size), kept)]
    if full < score.numel():
        parts.append(top_of_rows(score[full:].view(1, -1), tail_kept) + full)
    return torch.cat(parts)


def top_of_rows(rows: Tensor, kept: int) -> Tensor:
    """Flat indices of the top ``kept`` of each row of (N, B), row by row, ascending: (N*kept,) int64."""
    if kept == 0 or rows.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device=rows.device)
    smallest = rows.topk(kept, dim=1, sorted=False).values.amin(1, keepdim=True)
    chosen = rows >= smallest
    if int(chosen.sum()) > rows.shape[0] * kept:  # equals of the smallest for which there is no room
        chosen = rows > smallest
        ties = rows == smallest
        chosen |= ties & (ties.cumsum(1) <= kept - chosen.sum(1, keepdim=True))
    return chosen.view(-1).nonzero().squeeze(1)
