"""Triton kernels against their plain-torch twins: copies exactly, arithmetic to a few roundings.

On the GPU where there is one, else in Triton's interpreter. What overflows on purpose makes numpy warn.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_scape import kernels
from deepspeed_scape.adams import Hyper
from deepspeed_scape.decay import DecayHistory
from deepspeed_scape.kernels import cpu, naive
from tests.kernel_inputs import DEVICE, FLOATS, RARE, few, random, small_blocks, sorted_places  # noqa: F401

pytest.importorskip("triton", reason="no Triton on this platform")
from deepspeed_scape.kernels import accumulate, gpu

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
EPS32 = 2.0**-24  # half a unit in the last place: the relative error of one rounding

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


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


def test_kept_tables_are_those_of_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (32, 128, 32):
        monkeypatch.setattr(accumulate, "BLOCK", size)
        residual = torch.zeros(90, device=DEVICE)
        gpu.accumulate(residual, [torch.ones(90, device=DEVICE)], [0], 1.0)
        assert torch.equal(residual, torch.ones(90, device=DEVICE))


# ---- pack and scatter ------------------------------------------------------------------------------------------------


@few
@given(
    world=st.integers(1, 3),
    size=st.integers(1, 100),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    dtypes=st.sampled_from([(a, b) for a in FLOATS[:2] for b in FLOATS[:2]]),
    rare=st.booleans(),
)
def test_pack_and_scatter(
    world: int, size: int, share: float, dtypes: tuple[torch.dtype, torch.dtype], rare: bool
) -> None:
    kept = int(share * size)
    position = torch.cat([sorted_places(size, kept, rank) + rank * size for rank in range(world)])
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


@few
@given(
    size=st.integers(0, 100),
    start=st.sampled_from([0, 1, 70, 2**33]),
    share=st.sampled_from([0.0, 0.1, 1.0]),
    dtypes=st.sampled_from([(a, b) for a in FLOATS[:2] for b in FLOATS[:2]]),
)
def test_pack_bucket(size: int, start: int, share: float, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Places before, in and behind the bucket; what is not in it stays as it was."""
    around = sorted_places(3 * 50 + size, int(share * (3 * 50 + size)), 3) + start - 50
    bucket = random(size, dtype=dtypes[0])
    bucket[: len(RARE)] = torch.tensor(RARE, device=DEVICE)[:size].to(dtypes[0])
    twin, before = bucket.clone(), bucket.clone()
    out, out_twin = (torch.full((around.numel(),), 9.0, dtype=dtypes[1], device=DEVICE) for _ in range(2))
    gpu.pack_bucket(bucket, start, around, out)
    naive.pack_bucket(twin, start, around, out_twin)
    assert same(bucket, twin) and same(out, out_twin)
    inside = (around >= start) & (around < start + size)
    places = around[inside] - start
    assert same(out[inside], before[places].to(dtypes[1])) and bool((out[~inside] == 9.0).all())
    before[places] = 0.0
    assert same(bucket, before)


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
