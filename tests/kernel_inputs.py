"""Inputs and the small blocks of the kernel tests: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
RARE = [0.0, -0.0, 1e-45, -3e-39, 1.0, -1.0, 3e38, float("inf"), float("-inf"), float("nan")]

few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """The interpreter is slow: with small blocks small inputs still meet several of them."""
    from deepspeed_scape.kernels import accumulate, block_top_k, mask_code, pack, scatter, top_k, update

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            interpreter.mend()
            for module in (accumulate, mask_code, pack, scatter, update):
                patch.setattr(module, "BLOCK", 32)
            for name, value in (("BLOCK", 32), ("SAMPLE", 32), ("ROWS", 2), ("COLS", 8), ("COPIES", 2)):
                patch.setattr(top_k, name, value)
            patch.setattr(block_top_k, "TILE", 64)
        yield


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def sorted_places(size: int, kept: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(size, generator=generator)[:kept].sort().values.to(DEVICE)
