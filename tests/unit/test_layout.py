"""Places in the flat buffer and the number of elements kept."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.layout import group_layout, kept_in_partition, kept_of, locate


def test_parameters_are_found_by_address_in_any_order() -> None:
    flat = torch.zeros(20)
    params = [flat[8:14].view(2, 3), flat[0:5], flat[5:6], torch.zeros(0, 4)]
    slots = locate(params, ["a", "b", "c", "empty"], flat)
    assert [(s.name, s.start, s.numel) for s in slots] == [("a", 8, 6), ("b", 0, 5), ("c", 5, 1), ("empty", 0, 0)]


def test_a_parameter_outside_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"parameter lost does not lie"):
        locate([torch.zeros(3)], ["lost"], torch.zeros(10))


def test_partitions_must_come_out_even() -> None:
    with pytest.raises(RuntimeError, match="not a multiple of 3"):
        group_layout((), 10, 3, ScapeOptions())


@given(st.integers(0, 10**9), st.floats(0, 1, exclude_min=True))
def test_kept_is_near_the_density_and_never_empty(count: int, density: float) -> None:
    kept = kept_of(count, density)
    assert 0 <= kept <= count and (count == 0 or kept >= 1)
    assert kept <= max(1, density * count + 0.5)


def test_kept_examples() -> None:
    assert kept_in_partition(1000, ScapeOptions(sparsity=0.99)) == 10  # 1 - 0.99 is a little above 0.01 in binary
    assert kept_in_partition(1000, ScapeOptions(sparsity=0.9)) == 100
    assert kept_in_partition(1000, ScapeOptions(sparsity=0.0)) == 1000
    assert kept_in_partition(1050, ScapeOptions(sparsity=0.99, selection="block")) == 5 * 2 + 1
