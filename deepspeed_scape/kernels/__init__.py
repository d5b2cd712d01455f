"""The passes that touch many elements, in three forms with the same names and signatures (see :class:`Ops`):

    naive   plain torch: the specification, on any device
    cpu     compiled loops where numba is installed, naive otherwise
    gpu     Triton, one file a kernel

:func:`ops_for` chooses by the device. Nothing else knows that numba or Triton exist.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepspeed_scape.adams import Hyper
    from deepspeed_scape.decay import DecayHistory
    from deepspeed_scape.encoding import MaskCode
    from deepspeed_scape.mask import Moments

logger = logging.getLogger("deepspeed_scape")


class Ops(Protocol):
    """What every form offers. Letters as in DESIGN: P flat elements, W ranks, S = P/W, K kept of each partition.

    No Triton kernel waits for the device. All tensors of a call are on one device.
    """

    def sum_squares(self, grads: Sequence[Tensor]) -> Tensor:
        """Sum of ||g||^2 over at least one gradient, 0-dim fp64; not finite exactly if some element is not."""

    def accumulate(self, residual: Tensor, grads: Sequence[Tensor], starts: Sequence[int], scale: float) -> None:
        """residual[start:start+n] += scale * grad, rounded once to the residual's dtype."""

    def prepare_accumulate(
        self, grads: Sequence[Tensor], starts: Sequence[int], device: torch.device
    ) -> Callable[[Tensor, float], None]:
        """:meth:`accumulate` in two parts: tables go to the device now, ``(residual, scale)`` starts the work."""

    def pack(self, residual: Tensor, position: Tensor, out: Tensor) -> None:
        """out (W, K) = the residual at ``position`` (W*K,); zeros stay there."""

    def pack_bucket(self, bucket: Tensor, start: int, position: Tensor, out: Tensor) -> None:
        """The same for those of one owner's ``position`` (K,) that lie in [start, start + n) of ``bucket`` (n,)."""

    def update(
        self,
        own: Tensor | None,
        mean: Tensor,
        step: int,
        states: tuple[Tensor, Tensor, Tensor],
        last: Tensor,
        decay: DecayHistory,
        hyper: Hyper,
        out: Tensor,
    ) -> None:
        """``adams.owner_update`` at ``own`` (K,), or everywhere: states and last (S,) in place, new weights to out."""

    def scatter_params(self, flat: Tensor, position: Tensor, values: Tensor) -> None:
        """flat (P,) at ``position`` (W*K,) = values (W, K)."""

    def top_k(self, moments: Moments, step: int, beta1: float, kept: int, seed: int) -> Tensor:
        """(K,) int64 ascending: the largest pending moments, ties by the lowest index, NaN as infinity."""

    def largest_of_rows(self, rows: Tensor, kept: int) -> Tensor:
        """(n, K) int64 ascending in each row: the largest magnitudes of (n, S) fp32 or bf16, ranked as ``top_k`` does.

        In a few operations over all rows, with buffers of their size.
        """

    def block_top_k(self, moments: Moments, step: int, beta1: float, code: MaskCode, out: Tensor) -> None:
        """The same in each block, written as the offsets of ``code``: (nbytes,) uint8."""

    def encode_masks(self, index: Tensor, code: MaskCode, out: Tensor) -> None:
        """(n, K) int64 ascending in each row to (n, nbytes) uint8, rows of ``out`` may be apart."""

    def decode_masks(self, encoded: Tensor, code: MaskCode, faults: Tensor) -> Tensor:
        """(W, nbytes) uint8, rows may be apart, to (W, K) int64 ascending.

        A damaged mask raises RuntimeError, or adds to ``faults`` (1,) int32 where that would wait for the device.
        """


def ops_for(*tensors: Tensor) -> Ops:
    """The fastest form for these tensors."""
    device = tensors[0].device.type
    if device == "cpu":
        return _form("cpu")
    if device == "cuda" and _triton_works():  # ROCm builds of torch call their devices cuda too
        return _form("gpu")
    return _form("naive")


@functools.cache
def _form(name: str) -> Ops:
    return cast(Ops, importlib.import_module(f"deepspeed_scape.kernels.{name}"))


@functools.cache
def _triton_works() -> bool:
    try:
        importlib.import_module("deepspeed_scape.kernels.gpu")
    except ImportError as error:
        logger.warning(f"SCAPE: Triton cannot be used ({error}); the torch twins are several times as slow")
        return False
    return True


@functools.cache
def _compiled_loops() -> ModuleType | None:
    try:
        return importlib.import_module("deepspeed_scape.kernels.loops")
    except ImportError:  # numba is optional: the torch twins do the same, more slowly
        return None
    except Exception as error:  # a broken installation, or no folder to cache in
        logger.warning(f"SCAPE: numba cannot compile the CPU loops ({error}); the torch twins are used")
        return None


def loops_for(*tensors: Tensor) -> ModuleType | None:
    """The compiled CPU loops if they can take these tensors (contiguous, on the CPU), else None."""
    if any(t.device.type != "cpu" or not t.is_contiguous() for t in tensors):
        return None
    return _compiled_loops()
