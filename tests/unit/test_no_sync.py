"""A step makes the host wait once, for the one scalar, and on a CPU makes nothing of the size of the model."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from deepspeed_scape import ballots, encoding, group, host_residual, mask, process_groups, residual
from deepspeed_scape.kernels import loops, ops_for
from deepspeed_scape.layout import GroupLayout
from tests import bare, interpreter
from tests.spies import MemorySpy, SyncSpy

CPU = torch.device("cpu")
MODULES = (encoding, group, mask, residual)


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    bare.join_world_of_one(CPU)
    yield
    process_groups.destroy()


@pytest.fixture
def triton_path(monkeypatch: pytest.MonkeyPatch) -> SyncSpy:
    """Steps take the Triton kernels, in the interpreter; a spy that does not look into the interpreter."""
    pytest.importorskip("triton")
    from triton.runtime import interpreter as stock

    from deepspeed_scape.kernels import gpu, top_k

    interpreter.mend()
    for module in MODULES:
        monkeypatch.setattr(module, "ops_for", lambda *_: gpu)
    for name, value in (("BLOCK", 64), ("SAMPLE", 32), ("ROWS", 2), ("COLS", 16), ("COPIES", 2)):
        monkeypatch.setattr(top_k, name, value)
    spy = SyncSpy()
    run = stock.GridExecutor.__call__

    def unwatched(self: Any, *args: Any, **kwargs: Any) -> None:
        spy.paused = True
        try:
            run(self, *args, **kwargs)
        finally:
            spy.paused = False

    monkeypatch.setattr(stock.GridExecutor, "__call__", unwatched)
    return spy


CASES = {
    "partition": {"sparsity": 0.99},
    "bitmap": {"sparsity": 0.8},
    "block": {"sparsity": 0.9, "selection": "block", "block_size": 50},
    "bf16": {"sparsity": 0.9, "residual_dtype": "bf16", "value_dtype": "bf16", "normalizer": "adams"},
    "no-overlap": {"sparsity": 0.9, "overlap_comm": False},
    "dense": {"sparsity": 0.0},
    "diagnosed": {"sparsity": 0.9, "diagnostics_every": 1},
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu asks the driver itself")
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_a_step_waits_for_one_scalar(options: dict[str, Any], triton_path: SyncSpy) -> None:
    optimizer = bare.build([[400, 37, 16], [129]], CPU, **options)
    for step in range(1, 4):
        bare.give_gradients(optimizer, step)
        if step == 2:  # tables and samples are there; the mask of step 1 is in flight
            with triton_path.watching():
                optimizer.step()
        else:
            optimizer.step()
    assert triton_path.seen > 50
    assert dict(triton_path.found) == {"tolist": 1}
    assert not optimizer.overflow and optimizer.applied_steps == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not on")
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("clip", [0.0, 1.0], ids=["unclipped", "clipped"])
def test_both_paths_train_the_same_model(
    options: dict[str, Any], clip: float, triton_path: SyncSpy, monkeypatch: Any
) -> None:
    """The Triton kernels and the CPU loops, for four steps, an overflow among them.

    Without clipping to the bit. With it the scale is no power of two, and the interpreter has no fused multiply-add:
    masks exactly all the same on these numbers, values to a few roundings.
    """
    states = []
    for ops in (None, ops_for):
        if ops is not None:
            for module in MODULES:
                monkeypatch.setattr(module, "ops_for", ops)
        optimizer = bare.build([[400, 37, 16], [129]], CPU, torch.float32, **options)
        optimizer.clip_grad = clip
        for step in range(1, 5):
            bare.give_gradients(optimizer, step)
            if step == 3:
                optimizer.bit16_groups[0][0].grad_accum[7] = float("nan")
            optimizer.step()
            assert optimizer.overflow == (step == 3)
        states.append(bare.state(optimizer))
    for ours, twin in zip(*states, strict=True):
        if ours.dtype.is_floating_point and (clip or options["sparsity"] == 0):  # dense: torch's powers, not the tables
            tolerance = 2**-7 if ours.dtype == torch.bfloat16 else 1e-5
            assert torch.allclose(ours.float(), twin.float(), rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(ours, twin)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not on")
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("kept", [30, 500], ids=["delta", "bitmap"])
@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
def test_ballots_wait_for_nothing(together: bool, kept: int, triton_path: SyncSpy, monkeypatch: Any) -> None:
    size, world, rank = 2000, 3, 1
    monkeypatch.setattr(mask, "AT_ONCE", 1 << 18 if together else 0)
    code = ballots.ballot_code(size, kept)
    residuals = torch.randn(world, size, generator=torch.Generator().manual_seed(0))
    known = mask.Moments(gradient=residuals[rank], exp_avg=torch.randn(size), last=torch.ones(size, dtype=torch.int32))
    faults = torch.zeros(1, dtype=torch.int32)

    def vote(moved: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(world, code.nbytes, dtype=torch.uint8)
        ballots.cast_ballots(moved, known, 3, code, 0, rows)
        ballots.count_ballots(moved[rank], rows, rank, code, faults)
        return moved[rank] / world

    vote(residuals.clone())  # tables and samples
    copy = residuals.clone()
    with triton_path.watching():
        estimate = vote(copy)
    assert triton_path.seen > 20 and dict(triton_path.found) == {}
    assert int(faults) == 0
    for module in MODULES:
        monkeypatch.setattr(module, "ops_for", ops_for)
    assert torch.allclose(estimate, vote(residuals.clone()), rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not on")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_pass_over_host_memory_waits_for_nothing(
    dtype: torch.dtype, triton_path: SyncSpy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does with the Triton kernels what it does with the torch twins, to the bit."""
    monkeypatch.setattr(host_residual, "BUCKET", 70)
    layout = GroupLayout(world_size=3, partition_size=200, kept=20, slots=())
    grads = [torch.randn(150), torch.randn(300), torch.randn(90)]
    position = torch.cat([torch.randperm(200)[:20].sort().values + 200 * owner for owner in range(3)])

    def steps() -> list[torch.Tensor]:
        ours = host_residual.HostResidual(layout, dtype, 1, CPU)
        seen = []
        for dense in (False, True, False):
            ours.accumulate(grads, [0, 150, 500], 0.5)
            seen.append(torch.empty(3, 200 if dense else 20))
            ours.take(slice(0, 200), seen[-1]) if dense else ours.pack(position, seen[-1])
            seen.append(ours.sum_squares())
        return [*seen, ours]  # type: ignore[list-item]

    with triton_path.watching():
        *seen, ours = steps()
    assert triton_path.seen > 100 and dict(triton_path.found) == {}
    for module in MODULES:
        monkeypatch.setattr(module, "ops_for", ops_for)
    *twins, theirs = steps()
    assert torch.equal(ours.state(), theirs.state())  # type: ignore[attr-defined]
    for mine, twin in zip(seen, twins, strict=True):
        assert torch.equal(mine, twin) if mine.dim() else torch.allclose(mine, twin, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        (lambda: torch.rand(3)[torch.tensor([True, False, True])], {"index": 1}),
        (lambda: float(torch.rand(1)), {"_local_scalar_dense": 1}),
        (lambda: torch.rand(2).tolist(), {"tolist": 1}),
        (lambda: torch.rand(3).add_(1), {}),
        # the torch twin of the selection waits for the device: this is what the Triton one is there for
        (lambda: mask.select_top(torch.rand(100), 5), {"_local_scalar_dense": 1, "nonzero": 1}),
    ],
    ids=["index", "float", "tolist", "add", "select_top"],
)
def test_the_spy_sees_what_waits(call: Callable[[], object], seen: dict[str, int]) -> None:
    spy = SyncSpy()
    with spy.watching():
        call()
    assert dict(spy.found) == seen


@pytest.mark.parametrize(
    "options", [CASES["partition"], {"sparsity": 0.99, "selection": "block"}], ids=["partition", "block"]
)
def test_nothing_of_the_size_of_the_model_is_made_on_a_cpu(options: dict[str, Any]) -> None:
    size = 1 << 21
    optimizer = bare.build([[size // 2, size // 2 - 5, 5]], CPU, torch.float32, **options)
    for step in (1, 2):
        bare.give_gradients(optimizer, step)
        if step == 1:
            optimizer.step()
    spy = MemorySpy(limit=size)  # a quarter of the residual
    tracemalloc.start()  # numpy's arrays
    with spy:
        optimizer.step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert spy.found == []
    assert peak < size, peak


def test_the_loops_are_not_parallel() -> None:
    """One thread a rank: ranks share the cores already."""
    for name in ("candidates", "decode_delta", "encode_delta", "large", "largest_of_rows", "pack", "update"):
        assert not getattr(loops, name).targetoptions.get("parallel")
