"""Processes: joining the job, doing a thing once a node, and means over ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_scape import process_groups
from launch.ports import free_port

# what a launcher that is not torch's or DeepSpeed's calls the number of ranks it has started, and of those on this node
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
BUILD_TIMEOUT = timedelta(hours=24)  # tokenising a large data set; a collective's own time-out is far shorter


def on_cpu() -> bool:
    return get_accelerator().device_name() == "cpu"


def find_ranks() -> None:
    """Under a plain mpirun or srun: have DeepSpeed ask MPI, through mpi4py, which rank this is.

    MASTER_ADDR and MASTER_PORT are kept if they are set. Raises ValueError if MPI can't tell: every process would
    train alone, all of them into the same files.
    """
    started = max((int(os.environ.get(name, 1)) for name in SIZES), default=1)
    if "RANK" in os.environ or started < 2:
        return
    remedy = "install mpi4py for this MPI, or start the ranks through launch/as_rank.sh"
    asked = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
    try:
        # DeepSpeed takes the first address of `hostname -I`, and the default port
        deepspeed.comm.mpi_discovery(verbose=False)
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"{started} ranks were started, but can't ask MPI which this is: {error}; {remedy}") from None
    if (found := int(os.environ["WORLD_SIZE"])) != started:
        raise ValueError(f"{started} ranks were started, but mpi4py sees {found}: it is for another MPI; {remedy}")
    os.environ |= asked
    for name in LOCAL_SIZES:
        if name in os.environ:
            os.environ["LOCAL_WORLD_SIZE"] = os.environ[name]


def join_job(local_rank: int, *, timeout: float, force_fp16_cpu: bool = False) -> torch.device:
    """Start torch.distributed through DeepSpeed; without a launcher, as a job of one. Returns this rank's device.

    A collective fails when a rank does not come for `timeout` seconds.
    """
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    accelerator = get_accelerator()
    if on_cpu():
        # DeepSpeed would compile its shared-memory extension on the first start: minutes, for messages this small
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if "OMP_NUM_THREADS" not in os.environ:  # each rank would take every core
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    else:
        accelerator.set_device(local_rank)
    if force_fp16_cpu:
        accelerator.is_fp16_supported = lambda: True
    deepspeed.init_distributed(verbose=False, timeout=timedelta(seconds=timeout))
    return torch.device(accelerator.device_name(local_rank) if not on_cpu() else "cpu")


def once_per_node(build: Callable[[], str], local_rank: int) -> str:
    """Run `build` on one process of each node while the others wait, and return its result to all.

    Raises ValueError on every rank alike if it failed anywhere with ValueError or OSError, or if nodes disagree.
    """
    result: tuple[str | None, str | None] = (None, None)
    if local_rank == 0:
        try:
            result = (build(), None)
        except (ValueError, OSError) as error:
            result = (None, str(error))
    waiting_room = dist.new_group(backend="gloo", timeout=BUILD_TIMEOUT)
    results: list[tuple[str | None, str | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(results, result, group=waiting_room)
    process_groups.destroy(waiting_room)
    errors = [error for _, error in results if error is not None]
    if errors:
        raise ValueError(errors[0])
    built = sorted({value for value, _ in results if value is not None})
    if len(built) != 1:
        raise ValueError(f"--data: nodes disagree ({', '.join(built)}): give every node the same text")
    return built[0]


def mean_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """The mean of each value over all ranks, summed in fp64 by one all-reduce."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return [float(v) for v in sums / dist.get_world_size()]
