"""The residual: nothing is lost between accumulate and pack, and only non-finite gradients stop a step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_scape import kernels
from deepspeed_scape.layout import GroupLayout
from deepspeed_scape.residual import CHUNK, DeviceResidual, accumulate, pack, scatter_params, sum_squares

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 17, CHUNK, CHUNK + 3])
def test_accumulate_adds_the_scaled_gradient_in_its_place(size: int, dtype: torch.dtype) -> None:
    residual = torch.randn(size + 10)
    grad = torch.randn(size).to(dtype)
    expected = residual.clone()
    expected[4 : 4 + size] += grad.float() * 0.25
    accumulate(residual, [grad.view(size, 1)], [4], 0.25)
    assert torch.equal(residual, expected)


def test_a_bf16_residual_rounds_the_sum_once() -> None:
    residual = torch.full((3,), 256.0, dtype=torch.bfloat16)
    accumulate(residual, [torch.full((3,), 3.0)], [0], 0.5)
    assert residual.tolist() == [258.0] * 3  # 257.5 is nearest to 258 in bf16; rounding 1.5 first would give 258 too
    accumulate(residual, [torch.full((3,), 0.9)], [0], 1.0)
    assert residual.tolist() == [258.0] * 3


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 50), st.data())
def test_pack_moves_every_entry_exactly_once(world: int, size: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, size))
    residual = torch.arange(1, world * size + 1, dtype=torch.float32)
    before = residual.clone()
    rows = [torch.randperm(size)[:kept].sort().values + rank * size for rank in range(world)]
    out = torch.empty(world, kept)
    pack(residual, torch.cat(rows), out)
    assert torch.equal(out, torch.stack([before[row] for row in rows]))
    assert float(out.sum() + residual.sum()) == float(before.sum())
    assert int((residual == 0).sum()) == world * kept


def test_columns_are_taken_of_every_partition() -> None:
    layout = GroupLayout(world_size=2, partition_size=4, kept=1, slots=())
    residual = DeviceResidual(layout, torch.float32, torch.device("cpu"))
    residual.load(torch.arange(1.0, 9.0))
    out = torch.empty(2, 2, dtype=torch.bfloat16)
    residual.take(slice(1, 3), out)
    assert out.tolist() == [[2, 3], [6, 7]] and residual.state().tolist() == [1, 0, 0, 4, 5, 0, 0, 8]


def test_scatter_writes_only_the_gathered_places() -> None:
    flat = torch.zeros(8, dtype=torch.bfloat16)
    scatter_params(flat, torch.tensor([1, 6]), torch.tensor([[2.0], [3.0]], dtype=torch.bfloat16))
    assert flat.tolist() == [0, 2, 0, 0, 0, 0, 3, 0]


@pytest.fixture(params=["compiled", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of a CPU's pass."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "_compiled_loops", lambda: None)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_squares(dtype: torch.dtype) -> None:
    grads = [torch.randn(CHUNK * 2 + 5).to(dtype), torch.randn(3, 5).to(dtype), torch.zeros(0).to(dtype)]
    expected = sum(float(g.double().square().sum()) for g in grads)
    assert float(sum_squares(grads)) == pytest.approx(expected, rel=1e-5)  # fp32 dot products of 65,536
    assert float(sum_squares([])) == 0.0
    assert float(sum_squares([torch.zeros(0).to(dtype)])) == 0.0
    turned = torch.randn(300, 7, requires_grad=True).t()  # as after backward(create_graph=True)
    expected = float(turned.detach().double().square().sum())
    assert float(sum_squares([turned]).detach()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("form")
def test_large_finite_gradients_are_finite() -> None:
    assert float(sum_squares([torch.full((4,), 1e30)])) == pytest.approx(4e60, rel=1e-6)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, CHUNK, 2 * CHUNK + 1])
def test_one_bad_element_is_not_missed(bad: float, place: int) -> None:
    grad = torch.zeros(2 * CHUNK + 2)
    grad[place] = bad
    assert not torch.isfinite(sum_squares([grad]))
