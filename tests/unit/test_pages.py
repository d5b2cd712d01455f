"""State of the size of a partition: zeros, writable, in huge pages where Linux gives them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from deepspeed_scape.pages import zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("numel", [0, 1, 1001])
def test_zeros_of_every_dtype(dtype: torch.dtype, numel: int) -> None:
    made = zeros(numel, dtype, CPU)
    assert made.shape == (numel,) and made.dtype == dtype and not made.any()
    assert made.add_(1).eq(1).all()


def test_large_ones_are_in_pages_of_2_mib() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists() or np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("this kernel has no huge pages, or this numpy asks for none")
    made = zeros(4 << 20, torch.float32, CPU)
    middle = made.data_ptr() + made.nbytes // 2
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(x, 16) for x in mapping.split(" ", 1)[0].split("-"))
        if start <= middle < end:
            assert "hg" in mapping.rpartition("VmFlags:")[2].split()  # advised to be huge
            return
    raise AssertionError("the tensor is in no mapping")
