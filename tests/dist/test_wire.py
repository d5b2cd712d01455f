"""The meter's formulas against the kernel's own counts, for every collective on 2 and 3 gloo ranks.

The ranks run in a network namespace of their own, where nothing else sends: what the loopback device transmitted is
what all of them sent together, and the kernel's TCP_INFO of a rank's sockets says who sent how much of it. Run as a
script (inside that namespace) this file is the ranks; one launch measures everything, and the tests read its report.
"""

import importlib.metadata
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "-n", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
MB = 1 << 20
REPEATS = 8
TOLERANCE = 0.05  # of the bytes predicted
PER_CALL = 2_000  # bytes of headers, acknowledgements and barrier messages allowed per call and rank

OPS = [
    "all_reduce", "all_reduce async", "all_reduce coalesced", "all_reduce of ranks 0 and 1", "reduce to 1",
    "broadcast from 0", "broadcast from 1", "all_gather", "all_gather_into_tensor", "gather to 1", "scatter from 1",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_to_all_single with splits",
    "send", "isend", "batch_isend_irecv", "all_gather_object", "broadcast_object_list",
    "deepspeed all_reduce", "deepspeed broadcast", "deepspeed all_gather_into_tensor",
    "deepspeed reduce_scatter_fn", "deepspeed all_to_all_single", "deepspeed reduce",
]  # fmt: skip


# ---- the tests --------------------------------------------------------------------------------------------------


def no_namespace() -> str | None:
    """Why a private network namespace can't be had here, or None."""
    if not all(map(shutil.which, ("unshare", "ip"))):
        return "unshare and ip (util-linux, iproute2) are needed for a private network namespace"
    probe = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True)
    return f"no private network namespace: {probe.stderr.strip()}" if probe.returncode else None


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, dict[str, Any]]:
    reason = no_namespace()
    if reason:
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("wire") / "report.json"
    env = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "TORCH_EXTENSIONS_DIR": str(path.parent)}
    done = subprocess.run(
        [*NAMESPACE, sys.executable, __file__, str(path)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


def skip_unsupported(seen: dict[str, Any]) -> None:
    """An older torch's gloo has not every collective; one of 2.13 must."""
    version = importlib.metadata.version("torch")
    if "unsupported" in seen and tuple(map(int, version.split(".")[:2])) < (2, 13):
        pytest.skip(f"torch {version}: {seen['unsupported']}")
    assert "unsupported" not in seen, seen


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("op", OPS)
def test_bytes_sent_are_what_the_kernel_sent(report, op, world_size):
    """Sum over the ranks within 5% of the loopback's TX bytes, and each rank within 5% of its own sockets'."""
    seen = report[f"{op}-W{world_size}"]
    skip_unsupported(seen)
    predicted = sum(seen["predicted"])
    assert predicted > MB
    assert abs(seen["loopback"] - predicted) <= TOLERANCE * predicted + PER_CALL * REPEATS * world_size, seen
    for predicted, sockets in zip(seen["predicted"], seen["sockets"], strict=True):
        if sockets is not None:  # a kernel before 4.19
            assert abs(sockets - predicted) <= TOLERANCE * predicted + PER_CALL * REPEATS, seen


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("op", [op for op in OPS if op.startswith("deepspeed")])
def test_deepspeed_calls_are_counted_once(report, op, world_size):
    """Also through the functions its backend took before the meter was installed."""
    seen = report[f"{op}-W{world_size}"]
    skip_unsupported(seen)
    assert seen["calls"] == [REPEATS] * world_size


# ---- the ranks --------------------------------------------------------------------------------------------------


def loopback_bytes() -> int:
    """TX bytes of lo, headers and acknowledgements included."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def socket_bytes() -> int | None:
    """Payload bytes sent on this process's TCP sockets: tcpi_bytes_sent, at byte 200 of linux/tcp.h's tcp_info."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:  # the listing's own descriptor
            continue
        if is_socket:
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    if len(info) < 208:
                        return None
                    total += struct.unpack_from("Q", info, 200)[0]
    return total


def make_calls(rank: int, n: int) -> dict[str, Callable[[], Any]]:
    """Each entry makes one collective of 1 to 4 MB."""
    import deepspeed.comm as ds
    import torch
    import torch.distributed as dist

    full, part = torch.ones(6 * MB // 8), torch.ones(2 * MB // 8)  # 3 MB, 1 MB of fp32
    parts = [torch.ones_like(part) for _ in range(n)]
    joint = torch.ones(n * part.numel())
    pair = dist.new_group([0, 1])
    right, left = (rank + 1) % n, (rank - 1) % n
    rows = [[(i + 2 * j) % 3 + 1 for j in range(n)] for i in range(n)]  # rows[i][j]: from rank i to rank j
    out_splits, in_splits = [row[rank] for row in rows], rows[rank]
    wide_in, wide_out = torch.ones(sum(in_splits), MB // 4), torch.ones(sum(out_splits), MB // 4)
    blob = bytes(MB)

    def coalesced() -> None:
        with dist.distributed_c10d._coalescing_manager():
            dist.all_reduce(full)
            dist.all_reduce(part)

    def send_or_recv(send: Callable[..., Any]) -> None:
        if rank == 0:
            work = send(full, 1)
            if work is not None:
                work.wait()
        elif rank == 1:
            dist.recv(full, 0)

    def exchange() -> None:
        ops = [dist.P2POp(dist.isend, part, right), dist.P2POp(dist.irecv, parts[0], left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_reduce async": lambda: dist.all_reduce(full, async_op=True).wait(),
        "all_reduce coalesced": coalesced,
        "all_reduce of ranks 0 and 1": lambda: dist.all_reduce(full, group=pair) if rank < 2 else None,
        "reduce to 1": lambda: dist.reduce(full, 1),
        "broadcast from 0": lambda: dist.broadcast(full, 0),
        "broadcast from 1": lambda: dist.broadcast(full, 1),
        "all_gather": lambda: dist.all_gather(parts, part),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(joint, part),
        "gather to 1": lambda: dist.gather(part, parts if rank == 1 else None, dst=1),
        "scatter from 1": lambda: dist.scatter(part, parts if rank == 1 else None, src=1),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, joint),
        "all_to_all": lambda: dist.all_to_all([torch.empty_like(part) for _ in range(n)], parts),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(joint), joint),
        "all_to_all_single with splits": lambda: dist.all_to_all_single(wide_out, wide_in, out_splits, in_splits),
        "send": lambda: send_or_recv(dist.send),
        "isend": lambda: send_or_recv(dist.isend),
        "batch_isend_irecv": exchange,
        "all_gather_object": lambda: dist.all_gather_object([None] * n, blob),
        "broadcast_object_list": lambda: dist.broadcast_object_list([blob if rank == 0 else None], src=0),
        "deepspeed all_reduce": lambda: ds.all_reduce(full),
        "deepspeed broadcast": lambda: ds.broadcast(full, 0),
        "deepspeed all_gather_into_tensor": lambda: ds.all_gather_into_tensor(joint, part),
        "deepspeed reduce_scatter_fn": lambda: ds.reduce_scatter_fn(part, joint),
        "deepspeed all_to_all_single": lambda: ds.all_to_all_single(torch.empty_like(joint), joint),
        "deepspeed reduce": lambda: ds.reduce(full, 1),
    }


def run_rank(rank: int, n: int, store: str, path: str) -> None:
    """One rank: every op REPEATS times between two readings of all counters; rank 0 writes the report."""
    import deepspeed
    import torch
    import torch.distributed as dist

    from deepspeed_scape.wire import WireMeter

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no JIT build: its lock hangs later starts
    deepspeed.init_distributed("gloo", init_method=f"file://{store}", rank=rank, world_size=n, auto_mpi_discovery=False)
    meter = WireMeter()  # not installed before DeepSpeed's backend took its references
    report: dict[str, dict[str, Any]] = {}
    calls = make_calls(rank, n)
    assert list(calls) == OPS
    for name, call in calls.items():
        try:
            call()  # connections are made
        except RuntimeError as error:  # torch 2.6's gloo: some collectives that later ones have, on no rank
            if "does not support" not in str(error):
                raise
            report[f"{name}-W{n}"] = {"unsupported": str(error).splitlines()[0]}
            continue
        dist.barrier()
        meter.reset()
        before = (loopback_bytes(), socket_bytes())
        dist.barrier()
        with meter:
            for _ in range(REPEATS):
                call()
        dist.barrier()
        after = (loopback_bytes(), socket_bytes())
        dist.barrier()
        known = before[1] is not None and after[1] is not None
        mine = (meter.bytes_sent, meter.calls, after[1] - before[1] if known else None, after[0] - before[0])
        everyone: list[Any] = [None] * n
        dist.all_gather_object(everyone, mine)
        report[f"{name}-W{n}"] = {
            "predicted": [entry[0] for entry in everyone],
            "calls": [entry[1] for entry in everyone],
            "sockets": [entry[2] for entry in everyone],
            "loopback": max(entry[3] for entry in everyone),
        }
    if rank == 0:
        Path(path).write_text(json.dumps(report))
    dist.barrier()
    os._exit(0)  # forked: nothing is to be given back


def main(path: str) -> None:
    """One world size after the other, since they share the loopback; forked, so that DeepSpeed is imported once."""
    os.environ["TORCH_WARM_POOL"] = "0"  # torch 2.6 would start threads, which no fork survives
    import deepspeed  # noqa: F401  (once, before the forks)
    import torch.multiprocessing as mp

    report: dict[str, Any] = {}
    for n in (2, 3):
        with tempfile.TemporaryDirectory() as folder:
            part = f"{folder}/report.json"
            mp.start_processes(run_rank, (n, f"{folder}/store", part), nprocs=n, start_method="fork")
            report |= json.loads(Path(part).read_text())
    Path(path).write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
