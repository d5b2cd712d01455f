"""Triton selection and mask codes against their plain-torch twins: the same indices and the same bytes.

On the GPU where there is one, else in Triton's interpreter. What overflows on purpose makes numpy warn.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.encoding import MaskCode, choose_code, delta_nbytes
from deepspeed_scape.kernels import cpu, naive
from deepspeed_scape.layout import GroupLayout, kept_in_partition
from deepspeed_scape.mask import Moments, pending_moment
from tests.kernel_inputs import DEVICE, FLOATS, RARE, few, small_blocks, sorted_places  # noqa: F401

pytest.importorskip("triton", reason="no Triton on this platform")
from deepspeed_scape.kernels import gpu, top_k

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


# ---- selection -------------------------------------------------------------------------------------------------------


def moments(size: int, seed: int, kind: str, dtype: torch.dtype, step: int) -> Moments:
    """An owner's knowledge of its partition; ``kind`` says what is odd about it."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(size, generator=generator) * torch.rand(size, generator=generator)
    exp_avg = torch.randn(size, generator=generator) * 0.1
    last = torch.randint(max(0, step - 100), step + 1, (size,), generator=generator, dtype=torch.int32)
    if kind == "equal":
        gradient, exp_avg, last = gradient * 0 + 0.5, exp_avg * 0, last * 0
    elif kind == "zero":
        gradient, exp_avg = gradient * 0, exp_avg * 0
    elif kind == "few":  # as unused embedding rows: most never had a gradient
        used = torch.rand(size, generator=generator) < 0.1
        gradient, exp_avg = gradient * used, exp_avg * used
    elif kind == "denormal":
        gradient, exp_avg = gradient * 1e-38, exp_avg * 1e-38
    elif kind == "rare":
        places = torch.randint(size, (size // 2,), generator=generator)
        gradient[places] = torch.tensor(RARE)[places % len(RARE)]
    return Moments(gradient=gradient.to(dtype).to(DEVICE), exp_avg=exp_avg.to(DEVICE), last=last.to(DEVICE))


def top_by_sorting(some: Moments, step: int, beta1: float, kept: int) -> list[int]:
    """The definition in numpy: score descending, index ascending; the same score on every device."""
    here = Moments(gradient=some.gradient.cpu(), exp_avg=some.exp_avg.cpu(), last=some.last.cpu())
    score = pending_moment(here, step, beta1).numpy()
    score = np.where(np.isnan(score), np.inf, score)
    return sorted(np.lexsort((np.arange(score.size), -score))[:kept].tolist())


KINDS = ["usual", "equal", "zero", "few", "denormal", "rare"]


@pytest.mark.parametrize("kind", KINDS)
@settings(few, max_examples=5)
@given(
    size=st.integers(1, 700),
    share=st.sampled_from(["none", "one", 0.01, 0.1, 0.2, 0.5, "all"]),
    dtype=st.sampled_from(FLOATS[:2]),
    beta1=st.sampled_from([0.9, 0.0]),
    step=st.sampled_from([1, 90, 70_000]),
    seed=st.integers(0, 99),
)
def test_top_k(
    kind: str, size: int, share: float | str, dtype: torch.dtype, beta1: float, step: int, seed: int
) -> None:
    kept = {"none": 0, "one": 1, "all": size}.get(share) if isinstance(share, str) else int(share * size)
    some = moments(size, seed, kind, dtype, step)
    index = gpu.top_k(some, step, beta1, kept, seed)
    assert index.tolist() == top_by_sorting(some, step, beta1, kept)
    assert torch.equal(index, naive.top_k(some, step, beta1, kept, seed))


@pytest.mark.parametrize("kind", KINDS)
@settings(few, max_examples=8)
@given(
    size=st.integers(1, 700),
    share=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    dtype=st.sampled_from(FLOATS[:2]),
    seed=st.integers(0, 99),
)
def test_largest_of_rows(kind: str, size: int, share: float, dtype: torch.dtype, seed: int) -> None:
    each = [moments(size, seed + row, kind, dtype, 90) for row in range(3)]
    rows = torch.stack([some.gradient for some in each])
    kept = int(share * size)
    index = gpu.largest_of_rows(rows, kept)
    assert index.tolist() == [top_by_sorting(some, 90, 0.0, kept) for some in each]
    assert torch.equal(index, naive.largest_of_rows(rows, kept))
    assert torch.equal(index.cpu(), cpu.largest_of_rows(rows.cpu(), kept))


def test_a_misleading_sample_is_noticed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample holds only large scores, so that fewer than K reach the threshold: the second pass must decide."""
    monkeypatch.setattr(top_k, "SAMPLE", 32)
    some = moments(600, 0, "usual", torch.float32, 90)
    best = torch.tensor(top_by_sorting(some, 90, 0.9, 32), device=DEVICE)
    monkeypatch.setattr(top_k, "_places", lambda *_: best)
    assert gpu.top_k(some, 90, 0.9, 100, 0).tolist() == top_by_sorting(some, 90, 0.9, 100)


def code_of(size: int, **options: object) -> MaskCode:
    chosen = ScapeOptions(selection="block", **options)  # type: ignore[arg-type]
    layout = GroupLayout(world_size=1, partition_size=size, kept=kept_in_partition(size, chosen), slots=())
    return choose_code(layout, chosen)


@pytest.mark.parametrize("kind", KINDS)
@settings(few, max_examples=4)
@given(
    size=st.integers(1, 700),
    block=st.sampled_from([(64, 0.75), (200, 0.99), (50, 0.9), (300, 0.99), (2, 0.5)]),
    dtype=st.sampled_from(FLOATS[:2]),
    seed=st.integers(0, 99),
)
def test_block_top_k(kind: str, size: int, block: tuple[int, float], dtype: torch.dtype, seed: int) -> None:
    code = code_of(size, block_size=block[0], sparsity=block[1])
    some = moments(size, seed, kind, dtype, 90)
    out, twin = (torch.full((code.nbytes,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    gpu.block_top_k(some, 90, 0.9, code, out)
    naive.block_top_k(some, 90, 0.9, code, twin)
    assert torch.equal(out, twin)


def test_a_block_too_wide_for_the_kernel_is_selected_too() -> None:
    code = code_of(9000, block_size=5000, sparsity=0.99)
    out, twin = (torch.zeros(code.nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    some = moments(9000, 0, "usual", torch.float32, 90)
    gpu.block_top_k(some, 90, 0.9, code, out)
    naive.block_top_k(some, 90, 0.9, code, twin)
    assert torch.equal(out, twin)


# ---- mask codes ------------------------------------------------------------------------------------------------------


@few
@given(
    size=st.integers(1, 3000),
    share=st.sampled_from([0.0, "one", 0.003, 0.01, 0.1, "all"]),
    kind=st.sampled_from(["delta", "bitmap"]),
    where=st.sampled_from(["spread", "front", "back"]),
    seed=st.integers(0, 99),
)
def test_mask_codes(size: int, share: float | str, kind: str, where: str, seed: int) -> None:
    kept = {"one": 1, "all": size}[share] if isinstance(share, str) else int(share * size)
    kept = min(kept, 200)  # the interpreter's time
    size = min(size, 400) if kind == "bitmap" or share == "all" else size
    kept = min(kept, size)
    masks = [sorted_places(size, kept, seed + rank) for rank in range(2)]
    if where != "spread":
        start = 0 if where == "front" else size - kept
        masks[0] = torch.arange(start, start + kept, device=DEVICE)
    nbytes = delta_nbytes(size, kept) if kind == "delta" else -(-size // 8)
    code = MaskCode(kind=kind, size=size, kept=kept, nbytes=nbytes)  # type: ignore[arg-type]
    encoded = torch.full((2, nbytes + 5), 7, dtype=torch.uint8, device=DEVICE)[:, 2 : 2 + nbytes]
    twin = torch.zeros(2, nbytes, dtype=torch.uint8, device=DEVICE)
    gpu.encode_masks(torch.stack(masks), code, encoded)
    naive.encode_masks(torch.stack(masks), code, twin)
    assert torch.equal(encoded, twin)
    faults = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert torch.equal(gpu.decode_masks(encoded, code, faults), torch.stack(masks)) and int(faults) == 0


@pytest.mark.parametrize("block", [(50, 0.9), (300, 0.99)], ids=["1-byte", "2-byte"])
@pytest.mark.parametrize("size", [7, 300, 340])
def test_offset_code(block: tuple[int, float], size: int) -> None:
    code = code_of(size, block_size=block[0], sparsity=block[1])
    encoded = torch.zeros(2, code.nbytes, dtype=torch.uint8, device=DEVICE)
    for row in encoded:
        naive.block_top_k(moments(size, int(row.data_ptr() % 97), "usual", torch.float32, 90), 90, 0.9, code, row)
    faults = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    index = gpu.decode_masks(encoded, code, faults)
    assert torch.equal(index, naive.decode_masks(encoded, code, faults)) and int(faults) == 0
    again = torch.zeros_like(encoded)
    gpu.encode_masks(index, code, again)
    assert torch.equal(again, encoded)


@pytest.mark.parametrize("kind", ["delta", "bitmap", "offset"])
@pytest.mark.parametrize("damage", ["random", "ones", "zeros"])
def test_a_damaged_mask_is_told_and_stays_inside(kind: str, damage: str) -> None:
    """No index leaves [0, S), whatever the bytes say, and unless they happen to be a mask the fault is counted."""
    if kind == "offset":
        code = code_of(340, block_size=300, sparsity=0.99)
    else:
        nbytes = delta_nbytes(340, 40) if kind == "delta" else -(-340 // 8)
        code = MaskCode(kind=kind, size=340, kept=40, nbytes=nbytes)  # type: ignore[arg-type]
    encoded = {
        "random": torch.randint(256, (2, code.nbytes), generator=torch.Generator().manual_seed(0), dtype=torch.uint8),
        "ones": torch.full((2, code.nbytes), 255, dtype=torch.uint8),
        "zeros": torch.zeros(2, code.nbytes, dtype=torch.uint8),
    }[damage].to(DEVICE)
    faults = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    index = gpu.decode_masks(encoded, code, faults)
    assert index.shape == (2, code.kept) and int(index.min()) >= 0 and int(index.max()) < code.size
    if (kind, damage) != ("offset", "zeros"):
        assert int(faults) > 0
