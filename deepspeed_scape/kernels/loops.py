"""CPU loops, compiled by numba: one pass where torch would make ten, so that memory bandwidth is the only cost.

Floors, bytes through memory: candidates 12 S; large 4 S; largest_of_rows 8 S, or 4 S of rows that stay in the
cache; pack 2 cache lines for each of W K entries; update 8 for each of K; sum_squares 4 P.
All arithmetic is fp32 without contraction, in the order of the torch twins; only sum_squares adds in another order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

ONE = np.float32(1)
WORD = 64  # elements whose comparisons make one machine word
AHEAD = 64  # elements whose cache lines are fetched before they are worked on
BINS, BELOW_BIN = 2048, 20  # of a histogram by the upper 11 bits of a magnitude, which order it: 8 bins a power of two
LANES = 4  # histograms, so that equals in succession do not wait for one another
MAGNITUDE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)  # of the bits of fp32; what is not a number is above
SQUARED = 4096  # elements whose squares are summed in fp32, by the 8 or more lanes of a SIMD register


@njit(cache=True, error_model="numpy", fastmath={"reassoc"})  # any order: else one addition would wait for the other
def _squares_of(piece):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for i in range(piece.size):
        total += piece[i] * piece[i]
    return total


@njit(cache=True, error_model="numpy")
def sum_squares(values):  # type: ignore[no-untyped-def]
    """Sum of the squares of (n,) fp32: of each piece in fp32, of the pieces in fp64. inf or nan where one is."""
    total = 0.0
    for start in range(0, values.size, SQUARED):
        total += _squares_of(values[start : start + SQUARED])
    return total


@njit(cache=True, error_model="numpy")
def candidates(  # type: ignore[no-untyped-def]
    gradient,  # (S,) fp32
    exp_avg,  # (S,) fp32
    last,  # (S,) int32
    step,
    share,  # (more than step,) fp32: 1 - c(D)/D by delay
    moved,  # (more than step,) fp32: c(D)
    threshold,  # fp32
    index,  # (capacity,) int64, written
    score,  # (capacity,) fp32, written
):
    """Find every element whose pending first moment reaches the threshold. Returns how many; -1: no room for them.

    What is not a number counts as infinite.
    """
    found = 0
    for i in range(gradient.size):
        delay = np.uint32(step - last[i])  # unsigned: a signed index would be tested for wrapping round
        value = abs(share[delay] * gradient[i] + moved[delay] * exp_avg[i])
        if not value < threshold:  # seldom true, else see many_candidates; true of a nan
            if found == index.size:
                return -1
            index[found] = i
            score[found] = value if value == value else np.inf
            found += 1
    return found


@intrinsic
def _lowest_bit(typing_context: Any, word: Any) -> Any:
    """The place of the lowest set bit of a uint64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


@njit(cache=True, error_model="numpy")
def _note_reached(  # type: ignore[no-untyped-def]
    values,  # (WORD,) fp32: scores of the elements from ``start`` on
    count,  # how many of them are meant
    start,
    threshold,  # fp32
    index,  # (capacity,) int64, written from ``found`` on; so is the next
    score,  # (capacity,) fp32
    found,
):
    """Add those of up to 64 elements that reach the threshold. Returns how many there are now; -1: no room for them.

    A branch that is taken every tenth time is guessed wrong nearly as often, so the comparisons are gathered in a word
    and only its set bits visited. What is not a number counts as infinite.
    """
    reached = np.uint64(0)
    for j in range(count):
        reached |= np.uint64(not values[j] < threshold) << np.uint64(j)
    if found + count > index.size:
        return -1
    while reached != 0:
        j = _lowest_bit(reached)
        reached &= reached - np.uint64(1)
        index[found] = start + j
        score[found] = values[j] if values[j] == values[j] else np.inf
        found += 1
    return found


@njit(cache=True, error_model="numpy")
def many_candidates(  # type: ignore[no-untyped-def]
    gradient, exp_avg, last, step, share, moved, threshold, index, score
):
    """``candidates`` where they are many."""
    values = np.empty(WORD, np.float32)
    found = 0
    for start in range(0, gradient.size, WORD):
        count = min(WORD, gradient.size - start)
        for j in range(count):
            delay = np.uint32(step - last[start + j])
            values[j] = abs(share[delay] * gradient[start + j] + moved[delay] * exp_avg[start + j])
        found = _note_reached(values, count, start, threshold, index, score, found)
        if found < 0:
            break
    return found


@njit(cache=True, error_model="numpy")
def large(  # type: ignore[no-untyped-def]
    gradient,  # (S,) fp32
    threshold,  # fp32
    index,  # (capacity,) int64, written
    score,  # (capacity,) fp32, written
):
    """``many_candidates`` without momentum, where the score is |gradient|: a third of the bytes."""
    values = np.empty(WORD, np.float32)
    found = 0
    for start in range(0, gradient.size, WORD):
        count = min(WORD, gradient.size - start)
        for j in range(count):
            values[j] = abs(gradient[start + j])
        found = _note_reached(values, count, start, threshold, index, score, found)
        if found < 0:
            break
    return found


@njit(cache=True, error_model="numpy")
def _bin_of_last(  # type: ignore[no-untyped-def]
    gradient,  # (S,) fp32
    kept,  # K > 0
    heights,  # (LANES, BINS) int32, overwritten
):
    """The bin of the K-th magnitude, how many elements lie in it and above, and how many above."""
    heights[:] = 0
    bits = gradient.view(np.int32)
    for i in range(bits.size):
        heights[i % LANES, min(bits[i] & MAGNITUDE, INFINITE) >> BELOW_BIN] += 1
    last, reached, above = BINS, 0, 0
    while reached < kept:
        last -= 1
        above = reached
        for lane in range(LANES):
            reached += heights[lane, last]
    return last, reached, above


@njit(cache=True, error_model="numpy")
def largest_of_rows(  # type: ignore[no-untyped-def]
    rows,  # (n, S) fp32
    index,  # (n, K) int64, K > 0, written
):
    """The K largest magnitudes of each row, ascending by place. Buffers hold no more than the K-th's bin and above."""
    kept = index.shape[1]
    heights = np.empty((LANES, BINS), np.int32)
    for row in range(rows.shape[0]):
        last, reached, above = _bin_of_last(rows[row], kept, heights)
        low_end = np.full(1, last << BELOW_BIN, np.int32).view(np.float32)[0]
        place, score = np.empty(reached + WORD, np.int64), np.empty(reached + WORD, np.float32)
        score = score[: large(rows[row], low_end, place, score)]
        within = score[score.view(np.int32) >> BELOW_BIN == last]
        rank = within.size - (kept - above)
        smallest = np.partition(within, rank)[rank]
        room = kept - above - np.count_nonzero(within > smallest)  # for equals of the smallest
        k = 0
        for j in range(score.size):
            tie = score[j] == smallest
            if score[j] > smallest or (tie and room > 0):
                index[row, k] = place[j]
                room -= tie
                k += 1


@njit(cache=True, error_model="numpy")
def pack(  # type: ignore[no-untyped-def]
    residual,  # (P,) fp32; the packed entries become 0
    position,  # (W*K,) int64
    out,  # (W, K) fp32, may be a slice of wider rows
):
    """Take the masked entries out of the residual, leaving zeros."""
    world, kept = out.shape
    for rank in range(world):
        for k in range(kept):
            place = position[rank * kept + k]
            out[rank, k] = residual[place]
            residual[place] = 0


@njit(cache=True, error_model="numpy")
def update(  # type: ignore[no-untyped-def]
    own,  # (K,) int64: the mask
    mean,  # (K,) fp32: R
    step,
    weight,  # (S,) fp32, updated; so are the next three
    exp_avg,  # (S,) fp32
    exp_avg_sq,  # (S,) fp32
    last,  # (S,) int32
    forgotten,  # (more than step,) fp32: 1 - b1^D by delay
    keep,  # (more than step,) fp32: max(b2^D, floor)
    decay,  # (t+1,) fp32: product of (1 - lr wd) since each step; empty without weight decay
    lr,
    eps,
    momentum_sum,
    beta2,
    ema_scale,
    ema,  # bool: the normalizer
    out,  # (K,) fp32, written: the new weights
):
    """``adams.owner_update`` on the masked elements of a partition, gathered, updated and written back in one pass."""
    near = np.float32(0)
    for start in range(0, own.size, AHEAD):
        stop = min(start + AHEAD, own.size)
        for k in range(start, stop):  # touch what comes next: misses overlap here, and would not between divisions
            near += weight[own[k]] + exp_avg[own[k]] + exp_avg_sq[own[k]] + last[own[k]]
        for k in range(start, stop):
            i = own[k]
            delay = np.uint32(step - last[i])
            gradient = mean[k] / np.float32(delay)
            toward = gradient - exp_avg[i]
            second = mean[k] * gradient
            if ema:
                square = second if last[i] == 0 else second + keep[delay] * (exp_avg_sq[i] - second)
                normalizer = np.sqrt(square * ema_scale)
            else:
                square = exp_avg[i] * exp_avg[i] * beta2 + (ONE - beta2) * second
                normalizer = np.sqrt(square)
            moment = mean[k] - momentum_sum * (toward * forgotten[delay])
            decayed = weight[i] if decay.size == 0 else weight[i] * decay[last[i]]
            value = decayed - lr * (moment / (normalizer + eps))
            exp_avg[i] += toward * forgotten[delay]
            exp_avg_sq[i] = square
            weight[i] = value
            last[i] = step
            out[k] = value
    return near


@njit(cache=True, error_model="numpy")
def encode_delta(  # type: ignore[no-untyped-def]
    index,  # (n, K) int64 ascending in each row
    out,  # (n, nbytes) uint8, written, may be a slice of wider rows
):
    """The delta code of ``encoding``: gaps, with 255 for "255 further"."""
    masks, kept = index.shape
    for mask in range(masks):
        place = 0
        behind = -1
        for k in range(kept):
            gap = index[mask, k] - behind - 1
            behind = index[mask, k]
            while gap >= 255:
                out[mask, place] = 255
                gap -= 255
                place += 1
            out[mask, place] = gap
            place += 1
        out[mask, place:] = 255


@njit(cache=True, error_model="numpy")
def decode_delta(  # type: ignore[no-untyped-def]
    encoded,  # (W, nbytes) uint8, may be a slice of wider rows
    index,  # (W, K) int64, written
):
    """Read the masks of all owners. Returns how many elements they hold in all, which must be W*K."""
    world, kept = index.shape
    total = 0
    for rank in range(world):
        at = 0
        found = 0
        for j in range(encoded.shape[1]):
            byte = encoded[rank, j]
            at += byte
            if byte != 255:
                if found < kept:
                    index[rank, found] = at
                found += 1
                at += 1
        total += found
    return total
