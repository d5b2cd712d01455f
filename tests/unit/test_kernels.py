"""Every Triton kernel against its plain-torch twin: choices and copies exactly, arithmetic to a few roundings.

On the GPU where there is one, else in Triton's interpreter, which is slow: blocks are made small so that small inputs
still meet several of them. What overflows on purpose makes numpy warn.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed_scape import kernels
from deepspeed_scape.adams import Hyper
from deepspeed_scape.config import ScapeOptions
from deepspeed_scape.decay import DecayHistory
from deepspeed_scape.encoding import MaskCode, choose_code, delta_nbytes
from deepspeed_scape.kernels import cpu, naive
from deepspeed_scape.layout import GroupLayout, kept_in_partition
from deepspeed_scape.mask import Moments, pending_moment
from tests import interpreter

pytest.importorskip("triton", reason="no Triton on this platform")
from deepspeed_scape.kernels import accumulate, block_top_k, gpu, mask_code, pack, scatter, top_k, update

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
EPS32 = 2.0**-24  # half a unit in the last place: the relative error of one rounding
RARE = [0.0, -0.0, 1e-45, -3e-39, 1.0, -1.0, 3e38, float("inf"), float("-inf"), float("nan")]

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
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


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, apart from which nan."""
    return bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def close(a: torch.Tensor, b: torch.Tensor, terms: torch.Tensor, roundings: int, dtype: torch.dtype) -> None:
    """|a - b| <= roundings in fp32 of terms of this size, and one unit of the last place in ``dtype``."""
    unit = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    bound = terms.double() * (roundings * EPS32) + b.double().abs() * unit + 1e-40
    worst = ((a.double() - b.double()).abs() / bound).max() if a.numel() else torch.zeros(())
    assert float(worst) <= 1, f"{float(worst)} times the bound"


def test_the_three_forms_have_the_same_signatures() -> None:
    for name, method in inspect.getmembers(kernels.Ops, inspect.isfunction):
        if name.startswith("_"):
            continue
        wanted = list(inspect.signature(method).parameters)[1:]
        for form in (naive, cpu, gpu):
            assert list(inspect.signature(getattr(form, name)).parameters) == wanted, (form.__name__, name)
    assert set(gpu.__all__) == set(cpu.__all__) == {n for n in vars(kernels.Ops) if not n.startswith("_")}


# ---- accumulate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual_dtype", FLOATS[:2], ids=["r-fp32", "r-bf16"])
@pytest.mark.parametrize("dtype", FLOATS, ids=["g-fp32", "g-bf16", "g-fp16"])
def test_accumulate(dtype: torch.dtype, residual_dtype: torch.dtype) -> None:
    """Parameters aligned and not, empty, of one element, of several blocks; not all of them have a gradient."""
    grads = [random(n, seed=n, dtype=dtype) for n in (75, 8, 0, 1, 96, 64)]
    starts = [3, 80, 96, 97, 104, 208]
    residual = random(300, dtype=residual_dtype)
    before, twin = residual.clone(), residual.clone()
    gpu.accumulate(residual, grads, starts, 0.37)
    naive.accumulate(twin, grads, starts, 0.37)
    terms = before.double().abs()
    for grad, start in zip(grads, starts, strict=True):
        terms[start : start + grad.numel()] += 0.37 * grad.double().abs()
    close(residual, twin, terms, 2, residual_dtype)
    touched = torch.zeros(300, dtype=torch.bool, device=DEVICE)
    for grad, start in zip(grads, starts, strict=True):
        touched[start : start + grad.numel()] = True
    assert torch.equal(residual[~touched], before[~touched])


def test_accumulate_takes_gradients_of_any_layout_and_of_two_dtypes() -> None:
    grads = [random(6, 10).t(), random(4, 5, dtype=torch.bfloat16)[:, 1:3], random(17)[1:]]
    starts = [0, 60, 68]
    residual, twin = random(90), random(90)
    gpu.accumulate(residual, grads, starts, 1.0)
    naive.accumulate(twin, grads, starts, 1.0)
    assert torch.equal(residual, twin)  # with a scale of 1 both round once


@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.values())
def test_sum_squares(dtype: torch.dtype) -> None:
    grads = [random(n, seed=n, dtype=dtype) for n in (75, 0, 1, 96)]
    exact = sum(float(grad.double().square().sum()) for grad in grads)
    assert float(gpu.sum_squares(grads)) == pytest.approx(exact, rel=accumulate.BLOCK * EPS32)
    assert float(gpu.sum_squares([random(0)])) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 40, 95])
def test_one_bad_element_is_not_missed_and_a_large_one_is_not_bad(bad: float, place: int) -> None:
    grad = torch.zeros(96, device=DEVICE)
    grad[place] = 1e30
    assert float(gpu.sum_squares([grad])) == pytest.approx(1e60, rel=1e-6)
    grad[place] = bad
    assert not torch.isfinite(gpu.sum_squares([grad]))


def test_one_pass_gives_both() -> None:
    grads, starts = [random(75), random(40)], [5, 100]
    residual, twin = random(200, seed=1), random(200, seed=1)
    squares = accumulate.accumulate_and_measure(residual, grads, starts, 0.5)
    gpu.accumulate(twin, grads, starts, 0.5)
    assert torch.equal(residual, twin) and torch.equal(squares, gpu.sum_squares(grads))


# ---- pack and scatter ------------------------------------------------------------------------------------------------


@few
@given(
    world=st.integers(1, 3),
    size=st.integers(1, 100),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    dtypes=st.sampled_from([(a, b) for a in FLOATS[:2] for b in FLOATS[:2]]),
    rare=st.booleans(),
    dense=st.booleans(),
)
def test_pack_and_scatter(
    world: int, size: int, share: float, dtypes: tuple[torch.dtype, torch.dtype], rare: bool, dense: bool
) -> None:
    kept = size if dense else int(share * size)
    rows = [sorted_places(size, kept, rank) + rank * size for rank in range(world)]
    position = None if dense else torch.cat(rows)
    residual = random(world * size, dtype=dtypes[0])
    if rare:
        residual[: len(RARE)] = torch.tensor(RARE, device=DEVICE)[: residual.numel()].to(dtypes[0])
    twin = residual.clone()
    wide, wide_twin = (torch.full((world, kept + 7), 9.0, dtype=dtypes[1], device=DEVICE) for _ in range(2))
    gpu.pack(residual, position, wide[:, 3 : 3 + kept])
    naive.pack(twin, position, wide_twin[:, 3 : 3 + kept])
    assert same(residual, twin) and same(wide, wide_twin)
    flat, flat_twin = (torch.zeros(world * size, dtype=dtypes[1], device=DEVICE) for _ in range(2))
    gpu.scatter_params(flat, position, wide[:, 3 : 3 + kept])
    naive.scatter_params(flat_twin, position, wide_twin[:, 3 : 3 + kept])
    assert same(flat, flat_twin)


# ---- the owner's update ----------------------------------------------------------------------------------------------


def history(steps: int, weight_decay: float) -> DecayHistory:
    decay = DecayHistory(torch.device(DEVICE))
    for step in range(1, steps + 1):
        decay.record(step, 1e-2 / step, weight_decay)
    return decay


@few
@given(
    size=st.integers(1, 90),
    share=st.sampled_from([0.05, 0.5, 1.0]),
    normalizer=st.sampled_from(["ema", "adams"]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    betas=st.sampled_from([(0.9, 0.95), (0.0, 0.5), (0.99, 0.999)]),
    step=st.sampled_from([1, 2, 16, 90, 70_000]),
    dense=st.booleans(),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_update(
    size: int,
    share: float,
    normalizer: str,
    weight_decay: float,
    betas: tuple[float, float],
    step: int,
    dense: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """The CPU loop to the bit (same tables, same roundings), the torch twin within a few roundings of its terms."""
    kept = size if dense else max(1, int(share * size))
    own = None if dense else sorted_places(size, kept, seed)
    states = [random(size, seed=seed), random(size, seed=seed + 1, scale=0.1), random(size, seed=seed + 2).square()]
    generator = torch.Generator().manual_seed(seed)
    last = torch.randint(max(0, step - 500), step, (size,), generator=generator, dtype=torch.int32).to(DEVICE)
    decay = history(min(step, 90), weight_decay)
    if step > 90:  # the decay of a long run, not recorded one by one
        decay.load(torch.linspace(0, -3.0 if weight_decay else 0.0, step + 1, dtype=torch.float64))
    hyper = Hyper(lr=1e-2, beta1=betas[0], beta2=betas[1], eps=1e-8, normalizer=normalizer)
    mean = random(kept, seed=seed + 3)
    results = {}
    for form in (gpu, naive, cpu):
        home = "cpu" if form is cpu else DEVICE
        mine = [state.to(home, copy=True) for state in states]
        visits, out = last.to(home, copy=True), torch.empty(kept, dtype=dtype, device=home)
        index = None if own is None else own.to(home)
        some = history(0, 0.0) if form is not cpu else DecayHistory(torch.device("cpu"))
        some.load(decay.state())
        form.update(index, mean.to(home), step, tuple(mine), visits, some, hyper, out)
        results[form] = [tensor.to(DEVICE) for tensor in (*mine, visits, out)]
    ours, twin, loop = (results[form] for form in (gpu, naive, cpu))
    assert torch.equal(ours[3], twin[3])
    if not dense:  # the loop takes masks only
        products = decay.products().numel() == 0 or DEVICE == "cpu"  # exp on a GPU rounds otherwise
        assert all(torch.equal(a, b) for a, b in zip(ours, loop, strict=True)) or not products
    at = slice(None) if own is None else own
    delay = (step - last[at]).double()
    total, moment = mean.double().abs(), states[1][at].double().abs()
    close(ours[1][at], twin[1][at], moment + total / delay, 40, torch.float32)
    close(
        ours[2][at], twin[2][at], states[2][at].double() + moment.square() + total.square() / delay, 40, torch.float32
    )
    root = twin[2][at].double().sqrt() * (1.0 if normalizer == "adams" else 0.3) + 1e-8  # at least so large a divisor
    length = 1e-2 * (total + (moment + total / delay) * betas[0] / (1 - betas[0])) / root
    slack = 1 + (states[2][at].double() + moment.square() + total.square() / delay) / twin[2][at].double().clamp(1e-30)
    close(ours[0][at], twin[0][at], states[0][at].double().abs() + length * slack, 100, torch.float32)
    close(ours[4], ours[0][at], ours[0][at].abs(), 0, dtype)


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
    for mask, row, row_twin in zip(masks, encoded, twin, strict=True):
        gpu.encode_mask(mask, code, row)
        naive.encode_mask(mask, code, row_twin)
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
    for mask, row in zip(index, again, strict=True):
        gpu.encode_mask(mask, code, row)
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
