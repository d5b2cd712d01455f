"""What the planner is asked, checked: every value with its unit, range and meaning."""

from __future__ import annotations

import argparse
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from deepspeed_scape.plan.cluster import Cluster, Link
from deepspeed_scape.plan.step import Workload
from deepspeed_scape.plan.units import bandwidth, count, milliseconds, seconds

MAX_RANKS = 4096


def _read(parse: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


Bandwidth = Annotated[float, _read(bandwidth), Field(gt=0)]
Seconds = Annotated[float, _read(seconds), Field(ge=0)]
Milliseconds = Annotated[float, _read(milliseconds)]


class PlanOptions(BaseModel):
    """Options of ``python -m deepspeed_scape.plan``; in Python, bandwidths are bytes/s and times seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    params: Annotated[int, _read(count)] = Field(ge=1, description="parameters of the model: 1.8e9, 500M")
    nodes: int = Field(ge=1, le=MAX_RANKS, description="nodes")
    gpus_per_node: int = Field(default=1, ge=1, le=64, description="ranks of a node")
    bandwidth: Bandwidth = Field(description="between nodes, of a whole node, each way: 200Gbit, 25GB/s")
    latency: Seconds = Field(default=5e-6, description="between nodes: 5us")
    intra_bandwidth: Bandwidth = Field(default=450e9, description="inside a node, of each rank: 450GB/s (NVLink 4)")
    intra_latency: Seconds = Field(default=2e-6, description="inside a node: 2us")
    efficiency: float = Field(
        default=0.9, gt=0, le=1, description="share of the bandwidth between nodes that is payload"
    )
    algorithm: Literal["best", "ring", "tree", "direct"] = Field(
        default="best", description="of the collectives; direct: what this package does on gloo"
    )
    compute_ms: Milliseconds = Field(
        gt=0, description="forward and backward of one step, all micro-steps, without the optimizer: 223, 0.2s"
    )
    dtype: Literal["fp32", "bf16", "fp16"] = Field(default="bf16", description="of the model")
    value_dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="SCAPE's option of that name")
    residual_dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="SCAPE's option of that name")
    residual_device: Literal["device", "cpu"] = Field(default="device", description="SCAPE's option of that name")
    host_link: Bandwidth = Field(
        default=25e9, description="between host and device, each way, for residual_device cpu: 25GB/s (PCIe 4 x16)"
    )
    sparsity: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.99], min_length=1, description="one row each"
    )
    memory_bandwidth: Bandwidth = Field(default=2e12, description="of a rank, for the local work: 2TB/s")
    dense_local_ms: Milliseconds | None = Field(
        default=None, ge=0, description="clipping and AdamW, ms; default: from memory"
    )
    scape_local_ms: Milliseconds | None = Field(
        default=None, ge=0, description="SCAPE's local work, ms; default: from memory"
    )
    dense_overlap: float = Field(
        default=1.0, ge=0, le=1, description="share of the backward under which a dense reduction hides (overlap_comm)"
    )
    ballots: bool = Field(default=False, description="SCAPE's option of that name")
    mask_overlap: bool = Field(default=True, description="SCAPE's gathers run beside work of their own rank")

    def cluster(self) -> Cluster:
        return Cluster(
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            inter=Link(latency=self.latency, bandwidth=self.bandwidth),
            intra=Link(latency=self.intra_latency, bandwidth=self.intra_bandwidth),
            efficiency=self.efficiency,
            algorithm=self.algorithm,
        )

    def workload(self) -> Workload:
        return Workload(
            params=self.params,
            compute=self.compute_ms / 1e3,
            dtype=self.dtype,
            value_dtype=self.value_dtype,
            residual_dtype=self.residual_dtype,
            residual_device=self.residual_device,
            host_link=self.host_link,
            memory_bandwidth=self.memory_bandwidth,
            dense_local=None if self.dense_local_ms is None else self.dense_local_ms / 1e3,
            scape_local=None if self.scape_local_ms is None else self.scape_local_ms / 1e3,
            dense_overlap=self.dense_overlap,
            mask_overlap=self.mask_overlap,
            ballots=self.ballots,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each field, named after it; values stay text until :func:`checked`."""
    for name, field in PlanOptions.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        default = "" if field.is_required() or field.default is None else f" (default: {_shown(field.default)})"
        text = f"{field.description}{default}".replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            many = {"nargs": "+"} if name == "sparsity" else {}
            parser.add_argument(flag, help=text, metavar=name.upper(), **many)  # type: ignore[arg-type]


def _shown(value: Any) -> str:
    return (
        " ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else f"{value}"
    )


def checked(given: dict[str, Any]) -> PlanOptions:
    """The options from what was given; None counts as not given.

    Raises:
        ValueError: names every flag that is wrong, its value and what it means.
    """
    try:
        options = PlanOptions(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ValueError("\n".join(_complaint(each, given) for each in error.errors(include_url=False))) from None
    if options.nodes * options.gpus_per_node > MAX_RANKS:
        raise ValueError(
            f"--nodes {options.nodes} x --gpus-per-node {options.gpus_per_node}: more than {MAX_RANKS} ranks, which "
            "is as far as the model is meant to go; take fewer"
        )
    return options


def _complaint(error: Any, given: dict[str, Any]) -> str:
    name = str(error["loc"][0])
    flag, meaning = f"--{name.replace('_', '-')}", PlanOptions.model_fields[name].description
    if error["type"] == "missing":
        return f"{flag} is missing: {meaning}"
    value = given[name] if isinstance(given[name], str) else error["input"]  # as written, or the one of several
    return f"{flag} {value}: {error['msg'].removeprefix('Value error, ')} ({meaning})"
