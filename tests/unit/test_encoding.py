"""Mask codes: round trips, fixed sizes, the smaller of two codes, damaged masks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.encoding import (
    MaskCode,
    choose_code,
    decode_masks,
    delta_nbytes,
    encode_mask,
    encode_masks,
    pack_bits,
    unpack_bits,
)
from deepspeed_scape.kernels import naive, ops_for
from deepspeed_scape.layout import GroupLayout, kept_in_partition
from deepspeed_scape.mask import select_block


def round_trip(masks: list[torch.Tensor], code: MaskCode) -> torch.Tensor:
    encoded = torch.full((len(masks), code.nbytes), 7, dtype=torch.uint8)  # the buffer's old content must not matter
    for mask, row in zip(masks, encoded, strict=True):
        encode_mask(mask, code, row)
    return decode_masks(encoded, code)


@st.composite
def subsets(draw: st.DrawFn) -> tuple[int, list[torch.Tensor]]:
    """Two masks of one size; clustered at either end or spread, so that gaps are long and short."""
    size = draw(st.integers(1, 5000))
    kept = draw(st.integers(0, min(size, 300)))
    masks = []
    for _ in range(2):
        place = draw(st.sampled_from(["spread", "front", "back"]))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
        index = torch.randperm(size, generator=generator)[:kept].sort().values
        masks.append({"spread": index, "front": torch.arange(kept), "back": torch.arange(size - kept, size)}[place])
    return size, masks


@settings(deadline=None)
@given(subsets())
def test_delta_and_bitmap_round_trip(case: tuple[int, list[torch.Tensor]]) -> None:
    size, masks = case
    kept = masks[0].numel()
    for code in (
        MaskCode(kind="delta", size=size, kept=kept, nbytes=delta_nbytes(size, kept)),
        MaskCode(kind="bitmap", size=size, kept=kept, nbytes=-(-size // 8)),
    ):
        assert torch.equal(round_trip(masks, code), torch.stack(masks))


@settings(deadline=None)
@given(subsets(), st.booleans())
def test_many_masks_are_written_as_each_alone(case: tuple[int, list[torch.Tensor]], compiled: bool) -> None:
    size, masks = case
    kept = masks[0].numel()
    ops = ops_for(masks[0]) if compiled else naive
    for code in (
        MaskCode(kind="delta", size=size, kept=kept, nbytes=delta_nbytes(size, kept)),
        MaskCode(kind="bitmap", size=size, kept=kept, nbytes=-(-size // 8)),
    ):
        alone = torch.zeros(2, code.nbytes, dtype=torch.uint8)
        for mask, row in zip(masks, alone, strict=True):
            encode_mask(mask, code, row)
        wide = torch.full((2, code.nbytes + 5), 7, dtype=torch.uint8)  # as the places within ballots
        ops.encode_masks(torch.stack(masks), code, wide[:, 3:-2])
        assert torch.equal(wide[:, 3:-2], alone)
        assert (wide[:, :3] == 7).all() and (wide[:, -2:] == 7).all()
    encode_masks(torch.empty(0, kept, dtype=torch.int64), code, alone[:0])  # of no owner


@given(count=st.integers(0, 70), rows=st.integers(0, 4), seed=st.integers(0, 99))
def test_bits_survive(count: int, rows: int, seed: int) -> None:
    flags = torch.rand(rows, count, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = pack_bits(flags)
    assert np.array_equal(packed.numpy(), np.packbits(flags.numpy(), axis=1, bitorder="little"))
    assert torch.equal(unpack_bits(packed, count), flags)


@given(st.integers(1, 10**10), st.data())
def test_delta_size_is_k_plus_s_over_256_unless_k_is_tiny(size: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, size))
    nbytes = delta_nbytes(size, kept)
    assert nbytes >= kept + (size - kept) // 255  # room for every escape
    if kept >= size / 256:
        assert nbytes == kept + -(-size // 256)


@settings(deadline=None)
@given(st.integers(1, 3000), st.sampled_from([(200, 0.99), (50, 0.9), (300, 0.99), (1000, 0.99)]), st.integers(0, 99))
def test_offset_round_trip(size: int, block: tuple[int, float], seed: int) -> None:
    options = ScapeOptions(sparsity=block[1], selection="block", block_size=block[0])
    layout = GroupLayout(world_size=2, partition_size=size, kept=kept_in_partition(size, options), slots=())
    code = choose_code(layout, options)
    assert code.nbytes == layout.kept * (1 if block[0] <= 256 else 2)
    scores = torch.rand(2, size, generator=torch.Generator().manual_seed(seed))
    masks = [select_block(score, block[0], options.density) for score in scores]
    assert torch.equal(round_trip(masks, code), torch.stack(masks))


@pytest.mark.parametrize(
    ("sparsity", "kind", "per_element"), [(0.99, "delta", 0.0139063), (0.9, "delta", 0.1039063), (0.5, "bitmap", 0.125)]
)
def test_the_smaller_code_is_chosen(sparsity: float, kind: str, per_element: float) -> None:
    options = ScapeOptions(sparsity=sparsity)
    size = 1_000_000
    layout = GroupLayout(world_size=2, partition_size=size, kept=kept_in_partition(size, options), slots=())
    code = choose_code(layout, options)
    assert code.kind == kind and code.nbytes / size == pytest.approx(per_element, rel=1e-4)


def test_a_damaged_mask_is_noticed() -> None:
    code = MaskCode(kind="delta", size=100, kept=10, nbytes=delta_nbytes(100, 10))
    encoded = torch.zeros(1, code.nbytes, dtype=torch.uint8)
    encode_mask(torch.arange(0, 100, 10), code, encoded[0])
    encoded[0, 3] = 255
    with pytest.raises(RuntimeError, match="9 elements"):
        decode_masks(encoded, code)
    encoded[0, 3] = 200
    with pytest.raises(RuntimeError, match="of a partition of 100"):
        decode_masks(encoded, code)


@pytest.mark.parametrize("compiled", [True, False], ids=["loops", "torch"])
def test_both_forms_of_the_delta_code_agree(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    size, kept = 200_000, 1500  # gaps on either side of 255
    masks = [torch.randperm(size)[:kept].sort().values for _ in range(3)]
    code = MaskCode(kind="delta", size=size, kept=kept, nbytes=delta_nbytes(size, kept))
    reference = torch.zeros(3, code.nbytes, dtype=torch.uint8)
    for mask, row in zip(masks, reference, strict=True):
        encode_mask(mask, code, row)
    if not compiled:
        monkeypatch.setattr("deepspeed_scape.encoding.ops_for", lambda *_: naive)
    wide = torch.zeros(3, code.nbytes + 7, dtype=torch.uint8)  # as one group of several in a message
    for mask, row in zip(masks, wide, strict=True):
        encode_mask(mask, code, row[: code.nbytes])
    assert torch.equal(wide[:, : code.nbytes], reference)
    assert torch.equal(decode_masks(wide[:, : code.nbytes], code), torch.stack(masks))
