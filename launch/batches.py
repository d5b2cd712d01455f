"""Which windows of the token file a rank reads: a pure function of (seed, step, rank, micro-step).

There is no sampler state, so resuming at step t needs nothing but t. One micro-step of all ranks is a *round*; an epoch
is the rounds that fit into one pass over the windows (the few left over are skipped, other ones each epoch). Within an
epoch every window comes at most once, on one rank only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MASK64 = (1 << 64) - 1
_FEISTEL_ROUNDS = 4


def _mix64(x: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014): a bijection of 64-bit integers that spreads every bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Where `index` lies in the pseudo-random permutation of range(size) that `key` names.

    A Feistel network on the next even power of two, walked until it lands inside (format-preserving encryption): O(1)
    memory and the same on every machine and library version, which numpy's generators don't promise.
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is outside range({size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = [_mix64(key + (r << 56)) for r in range(_FEISTEL_ROUNDS)]
    while True:
        left, right = index >> half, index & mask
        for k in keys:
            left, right = right, left ^ (_mix64(right ^ k) & mask)
        index = (left << half) | right
        if index < size:
            return index


def count_windows(tokens: int, seq: int) -> int:
    """Windows of seq inputs and seq targets in a stream of `tokens`; neighbours share the token on their border."""
    return max(0, (tokens - 1) // seq)


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """The training order over `windows` windows for `world` ranks of `micro_batch` samples a micro-step.

    Raises ValueError if one round needs more windows than there are.
    """

    seed: int
    windows: int
    world: int
    micro_batch: int
    accumulation: int = 1

    def __post_init__(self) -> None:
        if self.rounds_per_epoch < 1:
            raise ValueError(
                f"the training text has {self.windows} windows, fewer than one micro-step of {self.world} ranks x "
                f"micro-batch {self.micro_batch} needs: lower --micro-batch or --seq-len, or give more --data"
            )

    @property
    def rounds_per_epoch(self) -> int:
        return self.windows // (self.world * self.micro_batch)

    def epoch(self, step: int, micro_step: int = 0) -> int:
        return (step * self.accumulation + micro_step) // self.rounds_per_epoch

    def windows_of(self, step: int, rank: int, micro_step: int = 0) -> list[int]:
        """The micro_batch windows that `rank` trains on in micro-step `micro_step` of optimizer step `step`, from 0."""
        epoch, turn = divmod(step * self.accumulation + micro_step, self.rounds_per_epoch)
        first = (turn * self.world + rank) * self.micro_batch
        key = _mix64(_mix64(self.seed & _MASK64) ^ epoch)
        return [permute(first + j, self.windows, key) for j in range(self.micro_batch)]


def eval_windows(windows: int, batches: int, world: int, rank: int, micro_batch: int) -> list[list[int]]:
    """This rank's validation batches: fixed windows spread evenly over the held-out text, disjoint between ranks.

    At most `batches` of them, fewer if the text is short (the same number on every rank). Raises ValueError for none.
    """
    batches = min(batches, windows // (world * micro_batch))
    if batches < 1:
        raise ValueError(
            f"the validation text has {windows} windows, fewer than {world} ranks x micro-batch {micro_batch}: "
            "hold out more text with --val, or lower --micro-batch or --seq-len"
        )
    total = batches * world * micro_batch
    firsts = [(b * world + rank) * micro_batch for b in range(batches)]
    return [[(first + j) * windows // total for j in range(micro_batch)] for first in firsts]


def read_windows(
    tokens: NDArray[np.unsignedinteger],  # (N,) uint16 or uint32, usually memory-mapped
    windows: list[int],
    seq: int,
) -> NDArray[np.int64]:  # (len(windows), seq + 1)
    """The tokens of some windows, each with the one token more that is its last target."""
    return np.stack([tokens[w * seq : w * seq + seq + 1] for w in windows]).astype(np.int64)
