"""Fast forms of the passes that touch many elements. Each has a plain-torch twin that is its specification.

``loops``: compiled loops for the CPU, used where numba is installed. Nothing else knows numba exists.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from deepspeed.utils import logger
from torch import Tensor


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
