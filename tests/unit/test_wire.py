"""The meter without a network: what it wraps, how it leaves, and the formulas' sums."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed_scape import process_groups
from deepspeed_scape.wire import WireMeter, bytes_to_send

NOT_COUNTED = {  # methods of ProcessGroup that send no tensors
    "recv", "recv_anysource", "barrier", "monitored_barrier", "rank", "size", "name", "abort", "shutdown",
    "get_group_store", "split_group", "merge_remote_group", "set_timeout", "boxed", "unbox", "group_name",
    "group_desc", "bound_device_id", "use_pg_for_symm_mem_rendezvous",
}  # fmt: skip


@pytest.fixture
def one_rank(tmp_path):
    """A gloo group of one: every call is made, no byte is sent."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    process_groups.destroy()


def methods() -> dict:
    return {name: value for name, value in vars(dist.ProcessGroup).items() if not name.startswith("__")}


def test_every_collective_is_wrapped_and_put_back_exactly():
    """A collective that a later torch adds to ProcessGroup must be counted or listed here."""
    before = methods()
    with WireMeter():
        wrapped = {name for name, value in methods().items() if value is not before[name]}
    after = methods()
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    public = {name for name in before if name[0] != "_" and name[0].islower()}
    assert public - wrapped - NOT_COUNTED == set()
    assert {"_allgather_base", "_reduce_scatter_base"} & set(before) <= wrapped


def test_install_and_remove_are_idempotent_and_nest(one_rank):
    original = vars(dist.ProcessGroup)["allreduce"]
    outer, inner = WireMeter(), WireMeter(keep_records=True, max_records=2)
    assert outer.install() is outer and outer.install() is outer
    dist.all_reduce(torch.ones(3))
    with inner:
        for _ in range(3):
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        outer.remove()  # not the order they came in
        assert vars(dist.ProcessGroup)["allreduce"] is not original
        dist.all_reduce(torch.ones(5))
    inner.remove()
    assert vars(dist.ProcessGroup)["allreduce"] is original
    dist.all_reduce(torch.ones(3))
    assert (outer.calls, inner.calls) == (4, 4)
    said = hasattr(dist.AllreduceOptions(), "asyncOp")  # torch 2.6 does not tell who waits
    assert [(r.op, r.group_size, r.tensor_bytes, r.bytes_sent, r.async_op) for r in inner.records] == [
        ("all_reduce", 1, 12, 0, True if said else None),
        ("all_reduce", 1, 20, 0, False if said else None),
    ]
    inner.reset()
    assert (inner.calls, inner.bytes_sent, inner.records) == (0, 0, [])


def test_a_call_that_raises_is_not_counted(one_rank):
    with WireMeter() as meter, pytest.raises((RuntimeError, ValueError)):
        dist.group.WORLD.allreduce([torch.ones(2), torch.ones(3)])
    assert meter.calls == 0


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_sums_over_the_ranks(n, backend):
    """What all ranks send together is what all must receive, on whichever road."""
    b = 1 << 20
    for root in {0, 1, n - 1}:
        total = {
            op: sum(bytes_to_send(op, b, n, rank, root, backend) for rank in range(n))
            for op in ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast", "gather", "scatter")
        }
        chunk = (n - 1) * b
        expected = dict.fromkeys(total, chunk)
        expected["all_gather"] = n * chunk
        expected["all_reduce"] = 2 * chunk
        if backend == "gloo":
            expected["reduce_scatter"] = 2 * chunk  # an all-reduce inside
            expected["reduce"] = chunk + chunk // n  # reduce-scatter, then a gather
        assert all(abs(total[op] - expected[op]) <= n for op in total), (total, expected)
    with pytest.raises(ValueError, match="op='all_sum'"):
        bytes_to_send("all_sum", b, n, 0, 0, backend)


def test_wire_does_not_import_deepspeed():
    wire = Path(__file__).parents[2] / "deepspeed_scape" / "wire.py"
    code = f"import runpy, sys; runpy.run_path({str(wire)!r}); sys.exit('deepspeed' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
