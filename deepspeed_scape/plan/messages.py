"""Bytes of each message of a step, and of memory that its local work moves; W ranks, S = P/W, K = density * S."""

from __future__ import annotations

from dataclasses import dataclass

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
SCALAR = 24  # three fp64: norm, and the two noise terms of the step before
LINE = 64  # bytes that one random access moves: a cache line, two sectors of a GPU's


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of whole messages, all owners together; a rank sends (W-1)/W of each."""

    reduce: float
    params: float
    mask: float
    ballots: float = 0.0


def mask_bytes(size: int, kept: int) -> int:
    """One encoded mask of K out of S elements: ``encoding.choose_code`` for partition selection."""
    return min(-(-size // 8), kept + max(-(-size // 256), (size - kept) // 255))


def ballot_bytes(size: int, kept: int) -> int:
    """One rank's ballot for one partition of S elements: ``ballots.ballot_code``."""
    votes = kept - kept // 64
    return 4 + mask_bytes(size, votes) + -(-votes // 8)


def scape(params: int, ranks: int, density: float, dtype: str, value_dtype: str, ballots: bool = False) -> Sizes:
    """The data messages of a SCAPE step, one parameter group."""
    size = -(-params // ranks)
    kept = min(size, max(1, int(density * size + 0.5)))
    return Sizes(
        reduce=ranks * kept * WIDTH[value_dtype],
        params=ranks * kept * WIDTH[dtype],
        mask=0 if density >= 1 else ranks * mask_bytes(size, kept),
        ballots=ranks * ballot_bytes(size, kept) if ballots and density < 1 and ranks > 1 else 0,
    )


def dense_traffic(params: int, owners: int, dtype: str) -> float:
    """Memory moved by clipping and AdamW: the norm, then gradient, master and two moments of the partition."""
    width = WIDTH[dtype]
    share = params / owners
    return share * (width + (width + 12) + (12 + width))  # norm; read g, w, m, v; write w, m, v and the model's copy


def scape_traffic(
    params: int, ranks: int, density: float, dtype: str, residual_dtype: str, ballots: bool = False
) -> float:
    """Memory moved between the messages of a SCAPE step."""
    width, held = WIDTH[dtype], WIDTH[residual_dtype]
    norm_and_accumulate = params * (2 * width + 2 * held)
    score = score_traffic(params, ranks, residual_dtype)
    pack = params * density * 2 * LINE
    update = params / ranks * density * 4 * 2 * LINE  # master, two moments, last
    scatter = params * density * 2 * LINE
    votes = 2 * params * held if ballots and density < 1 and ranks > 1 else 0  # threshold and collection, all owners
    return norm_and_accumulate + score + pack + update + scatter + votes


def score_traffic(params: int, ranks: int, residual_dtype: str) -> float:
    """The selection's part of it: residual, m and last, for the threshold and for the collection."""
    return params / ranks * (WIDTH[residual_dtype] + 4 + 4) * 2
