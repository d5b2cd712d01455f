"""The time of one step, dense and sparse, from what it computes and what it sends.

    dense    forward + backward | reduce (part of it under the backward) | AdamW on 1/W | parameter gather
    SCAPE    forward + backward | scalar all-reduce | local work | reduce | update | parameter gather
             `-------- mask gather of the step before, waited for here -----'         `--- selection --'

Local work is bound by memory: its bytes (DESIGN section 4) over the memory bandwidth, unless given. With the residual
in host memory pack also waits until that has crossed the link to the host, both ways at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from deepspeed_scape.plan import memory, messages
from deepspeed_scape.plan.cluster import Cluster

Dense = Literal["deepspeed", "reduce-scatter", "ddp"]
BACKWARD_SHARE = 2 / 3  # of forward + backward: two matrix products against one
LOWEST, HIGHEST = 1e3, 1e15  # bytes/s: where a break-even is looked for


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a rank computes and how its numbers are stored.

    Attributes:
        params: P.
        compute: seconds of forward and backward of all micro-steps, without the optimizer.
        dtype: of the model and so of gradients and gathered parameters.
        value_dtype: of SCAPE's reduced values.
        memory_bandwidth: bytes a second, for the local work.
        dense_local, scape_local: seconds of clipping, optimizer and copies, measured; None: from the memory bandwidth.
        residual_device: SCAPE's option of that name; "cpu" is meant for GPUs.
        host_link: bytes a second between host and device memory, each way.
        dense_overlap: share of the backward under which the dense reduction can hide (0: none of it).
        ballots: SCAPE's option of that name.
        mask_overlap: whether SCAPE's mask gather runs under forward and backward and its parameter gather under the
            selection (``overlap_comm``).
    """

    params: int
    compute: float
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    value_dtype: Literal["fp32", "bf16"] = "fp32"
    residual_dtype: Literal["fp32", "bf16"] = "fp32"
    residual_device: Literal["device", "cpu"] = "device"
    memory_bandwidth: float = 2e12
    host_link: float = 25e9
    dense_local: float | None = None
    scape_local: float | None = None
    dense_overlap: float = 0.0
    mask_overlap: bool = True
    ballots: bool = False


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One row: seconds of a step and of its parts, bytes a rank sends, bytes it holds on the device and pinned."""

    name: str
    sparsity: float  # 0: dense
    step: float
    compute: float
    local: float
    network: float  # what the step waits for
    hidden: float  # what runs under the compute
    bytes_sent: float
    memory: float
    host_memory: float = 0.0


def predict_dense(work: Workload, cluster: Cluster, mode: Dense = "deepspeed") -> Prediction:
    """DeepSpeed ZeRO as it runs (bucket all-reduce, then gather), with a true reduce-scatter, or DDP."""
    w, size = cluster.ranks, messages.WIDTH[work.dtype] * work.params
    reduce = cluster.reduce_scatter(size) if mode == "reduce-scatter" else cluster.all_reduce(size)
    gather = 0.0 if mode == "ddp" else cluster.all_gather(size)
    passes = {"deepspeed": 3, "reduce-scatter": 2, "ddp": 2}[mode]
    hidden = min(reduce, work.dense_overlap * BACKWARD_SHARE * work.compute)
    owned = 1 if mode == "ddp" else w
    local = work.dense_local
    if local is None:
        local = messages.dense_traffic(work.params, owned, work.dtype) / work.memory_bandwidth
    network = reduce + gather - hidden
    names = {"deepspeed": "ZeRO, as DeepSpeed runs it", "reduce-scatter": "ZeRO, true reduce-scatter", "ddp": "DDP"}
    return Prediction(
        name=names[mode],
        sparsity=0.0,
        step=work.compute + local + network,
        compute=work.compute,
        local=local,
        network=network,
        hidden=hidden,
        bytes_sent=passes * size * (w - 1) / w,
        memory=memory.dense(work.params, owned, work.dtype),
    )


def predict_scape(work: Workload, cluster: Cluster, sparsity: float) -> Prediction:
    """SCAPE at one sparsity; density 1 (sparsity 0) sends no mask."""
    w = cluster.ranks
    sizes = messages.scape(work.params, w, 1 - sparsity, work.dtype, work.value_dtype, work.ballots)
    traffic = messages.scape_traffic(work.params, w, 1 - sparsity, work.dtype, work.residual_dtype, work.ballots)
    local = work.scape_local
    if local is None:
        local = traffic / work.memory_bandwidth
    mask, gather = cluster.all_gather(sizes.mask), cluster.all_gather(sizes.params)
    hidden = 0.0
    if work.mask_overlap:
        selection = local * messages.score_traffic(work.params, w, work.residual_dtype) / traffic
        hidden = min(mask, work.compute) + (min(gather, selection) if sparsity > 0 else 0.0)
    host_memory = memory.pinned(work.params, w, work.residual_dtype, work.residual_device)
    if work.scape_local is None:
        local += host_memory / work.host_link
    network = cluster.all_reduce(messages.SCALAR) + cluster.reduce_scatter(sizes.reduce + sizes.ballots)
    network += gather + mask - hidden
    return Prediction(
        name=f"SCAPE {100 * sparsity:g}%",
        sparsity=sparsity,
        step=work.compute + local + network,
        compute=work.compute,
        local=local,
        network=network,
        hidden=hidden,
        bytes_sent=(sizes.reduce + sizes.ballots + sizes.params + sizes.mask + 2 * messages.SCALAR) * (w - 1) / w,
        memory=memory.scape(work.params, w, 1 - sparsity, work.dtype, work.residual_dtype, work.residual_device),
        host_memory=host_memory,
    )


def predict(work: Workload, cluster: Cluster, sparsity: float | None = None) -> Prediction:
    """One row: SCAPE at a sparsity, or for None ZeRO as DeepSpeed runs it."""
    return predict_dense(work, cluster) if sparsity is None else predict_scape(work, cluster, sparsity)


def predict_all(work: Workload, cluster: Cluster, sparsities: Sequence[float]) -> list[Prediction]:
    """Both dense modes, then SCAPE at each sparsity."""
    modes: tuple[Dense, ...] = ("deepspeed", "reduce-scatter")
    dense = [predict_dense(work, cluster, mode) for mode in modes]
    return dense + [predict_scape(work, cluster, s) for s in sparsities]


def break_even(work: Workload, cluster: Cluster, sparsity: float, mode: Dense = "deepspeed") -> float:
    """Bandwidth between the nodes, bytes/s, below which SCAPE's step is the shorter one.

    Returns 0 where it never is, and infinity where it is at every bandwidth.
    """

    def gain(bandwidth: float) -> float:
        at = cluster.at_bandwidth(bandwidth)
        return predict_dense(work, at, mode).step - predict_scape(work, at, sparsity).step

    return _last_positive(gain)


def _last_positive(gain: Callable[[float], float]) -> float:
    """Where ``gain``, positive at low bandwidth, becomes negative; by bisection of the logarithm."""
    if gain(LOWEST) <= 0:
        return 0.0
    if gain(HIGHEST) > 0:
        return math.inf
    low, high = math.log(LOWEST), math.log(HIGHEST)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(math.exp(middle)) > 0 else (low, middle)
    return math.exp(low)
