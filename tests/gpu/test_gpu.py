"""What only a GPU can show: offsets beyond 32 bits, one wait a step by the driver's word, overlap, a CPU's bits.

The kernels against their twins are in tests/unit/test_kernels*.py, which take the GPU where there is one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepspeed_scape import host_residual, process_groups
from deepspeed_scape.kernels import naive, ops_for
from deepspeed_scape.layout import GroupLayout
from deepspeed_scape.mask import Moments, pending_moment, select_top
from deepspeed_scape.residual import DeviceResidual
from tests import bare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda")
CASES = {
    "partition": {"sparsity": 0.99},
    "bitmap": {"sparsity": 0.8},
    "block": {"sparsity": 0.99, "selection": "block"},
    "bf16": {"sparsity": 0.9, "residual_dtype": "bf16", "value_dtype": "bf16", "normalizer": "adams"},
    "no-overlap": {"sparsity": 0.9, "overlap_comm": False},
    "dense": {"sparsity": 0.0},
}
SIZES = [[300_000, 77_777, 16], [129]]


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    bare.join_world_of_one(CUDA)
    yield
    process_groups.destroy()


def test_a_gpu_takes_the_triton_kernels() -> None:
    assert ops_for(torch.zeros(1, device=CUDA)).__name__.endswith(".gpu")


@pytest.mark.parametrize("kind", ["usual", "few", "equal"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_top_k_of_a_large_partition(kind: str, density: float) -> None:
    """20 million elements and a few; the same indices as the definition on this GPU and on a CPU."""
    size = 20_000_003
    generator = torch.Generator(CUDA).manual_seed(1)
    gradient = torch.randn(size, generator=generator, device=CUDA)
    exp_avg = torch.randn(size, generator=generator, device=CUDA) * 0.1
    last = torch.randint(200, (size,), generator=generator, device=CUDA, dtype=torch.int32)
    if kind == "few":
        used = torch.rand(size, generator=generator, device=CUDA) < 0.05
        gradient, exp_avg = gradient * used, exp_avg * used
    elif kind == "equal":
        gradient, exp_avg, last = gradient * 0 + 0.5, exp_avg * 0, last * 0
    some = Moments(gradient=gradient, exp_avg=exp_avg, last=last)
    kept = int(size * density)
    index = ops_for(gradient).top_k(some, 200, 0.9, kept, 0)
    assert torch.equal(index, naive.top_k(some, 200, 0.9, kept, 0))
    if density == 0.01:
        here = Moments(gradient=gradient.cpu(), exp_avg=exp_avg.cpu(), last=last.cpu())
        assert torch.equal(index.cpu(), select_top(pending_moment(here, 200, 0.9), kept))


def test_offsets_beyond_32_bits() -> None:
    size = (1 << 31) + 4096
    residual = torch.zeros(size, dtype=torch.bfloat16, device=CUDA)
    grad = torch.ones(4096, dtype=torch.bfloat16, device=CUDA)
    ops = ops_for(residual)
    ops.accumulate(residual, [grad], [size - 4096], 2.0)
    position = torch.tensor([5, size - 4096, size - 1], device=CUDA)
    out = torch.empty(1, 3, dtype=torch.float32, device=CUDA)
    ops.pack(residual, position, out)
    assert out.tolist() == [[0.0, 2.0, 2.0]]
    ops.scatter_params(residual, position, torch.full((1, 3), 7.0, dtype=torch.bfloat16, device=CUDA))
    assert residual[[5, size - 4096, size - 2, size - 1]].tolist() == [7.0, 7.0, 2.0, 7.0]


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_a_step_waits_for_one_scalar(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver raises at any other wait."""
    optimizer = bare.build(SIZES, CUDA, **options)
    waits = []
    tolist = torch.Tensor.tolist

    def allowed(tensor: torch.Tensor) -> Any:
        waits.append(tensor.numel())
        torch.cuda.set_sync_debug_mode("default")
        try:
            return tolist(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    for step in range(1, 5):
        bare.give_gradients(optimizer, step)
        if step <= 2:  # tables and samples are uploaded, kernels compiled
            optimizer.step()
            continue
        monkeypatch.setattr(torch.Tensor, "tolist", allowed)
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            monkeypatch.undo()
    assert waits == [4, 4]


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_the_same_model_as_on_a_cpu(options: dict[str, Any]) -> None:
    """Without clipping and decay every operation is rounded alike on both: equal to the bit, masks among it."""
    states = []
    for device in (CUDA, torch.device("cpu")):
        if device.type == "cpu":
            process_groups.destroy()
            bare.join_world_of_one(device)
        optimizer = bare.build(SIZES, device, torch.float32, **options)
        optimizer.clip_grad = 0.0
        for group in optimizer.optimizer.param_groups:
            group["weight_decay"] = 0.0
        for step in range(1, 7):
            bare.give_gradients(optimizer, step)
            optimizer.step()
        states.append(bare.state(optimizer))
    exact = options.get("sparsity") != 0.0  # a dense step takes torch's own powers on a CPU, not the tables
    for ours, theirs in zip(*states, strict=True):
        if exact or not ours.dtype.is_floating_point:
            assert torch.equal(ours, theirs)
        else:
            assert torch.allclose(ours.float(), theirs.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_residual_in_host_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of one on the device, though the compute stream is slow, and without a wait by the driver's word."""
    monkeypatch.setattr(host_residual, "BUCKET", 1 << 16)
    layout = GroupLayout(world_size=4, partition_size=300_001, kept=3_000, slots=())
    here = host_residual.HostResidual(layout, dtype, 1, CUDA)
    there = DeviceResidual(layout, dtype, CUDA)
    assert all(bucket.values.is_pinned() for bucket in here.buckets) and len(here.buckets) == 3 * 5
    for step in range(5):
        generator = torch.Generator(CUDA).manual_seed(step)
        grads = [torch.randn(n, generator=generator, device=CUDA) for n in (700_000, 5, 77_777)]
        rows = [torch.randperm(300_001, generator=generator, device=CUDA)[:3_000].sort().values for _ in range(4)]
        position = torch.cat([row + 300_001 * owner for owner, row in enumerate(rows)])
        outs = [torch.empty(4, 3_000, device=CUDA) for _ in range(2)]
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")  # kernels are compiled by then
        try:
            torch.cuda._sleep(50_000_000)
            for residual, out in ((here, outs[0]), (there, outs[1])):
                residual.accumulate(grads, [3, 700_003, 900_000], 0.3)
                residual.pack(position, out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(*outs)
    assert torch.equal(here.state(), there.state().cpu())
    torch.testing.assert_close(here.sum_squares(), there.sum_squares(), rtol=1e-6, atol=0)


def test_the_mask_is_decoded_while_the_compute_stream_is_busy() -> None:
    """After a step the next forward is enqueued; gather and decoding must not stand in line behind it."""
    optimizer = bare.build(SIZES, CUDA, sparsity=0.9)
    for step in (1, 2):
        bare.give_gradients(optimizer, step)
        optimizer.step()
    torch.cuda.synchronize()
    side = optimizer.exchange.side.stream
    assert side is not None and optimizer.exchange.mask_in_flight
    gathered = optimizer.wire.encode_next_masks(2)
    optimizer.finish_mask()
    torch.cuda.synchronize()
    optimizer.exchange.start_mask_gather(gathered, optimizer.wire.decode_masks)
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second of "forward"
    busy.record()
    deadline = time.perf_counter() + 0.5
    while not side.query() and time.perf_counter() < deadline:
        time.sleep(0.001)
    assert side.query() and not busy.query()
    optimizer.finish_mask()
    torch.cuda.synchronize()
    assert int(optimizer.wire.mask_faults) == 0
