"""What this machine can do, and what a DeepSpeed JSON would do, before anything starts.

    python -m deepspeed_scape.run --doctor
    python -m deepspeed_scape.run --doctor --deepspeed_config ds.json --params 1.8e9 --ranks 32

Nothing is started: no process group, no model, no message. Ends with 1 if the JSON is refused.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from deepspeed_scape import build_locks
from deepspeed_scape import document as documents
from deepspeed_scape.config import OPTIMIZER_NAMES, ScapeConfigError, ScapeOptions, parse_options, refuse_all
from deepspeed_scape.initialize import check, rephrase, with_others
from deepspeed_scape.plan import memory
from deepspeed_scape.plan.cluster import Cluster, Link
from deepspeed_scape.plan.step import Workload, predict_dense, predict_scape
from deepspeed_scape.plan.units import count, show_bytes
from deepspeed_scape.refuse import check_config, refusals_of

PACKAGES = (
    "deepspeed", "torch", "triton", "numba", "numpy", "pydantic", "mpi4py", "wandb", "transformers", "accelerate",
)  # fmt: skip
LAUNCHERS = ("pdsh", "ssh", "mpirun", "srun")
PARAMS, RANKS = 10**9, 8  # of the costs, where none are given
REFUSED = "Refused: "  # begins each line of a refusal, which launch/preflight looks for
PATIENCE = 30  # seconds for a program that only says its version


def main(arguments: list[str]) -> int:
    """Print the report. Returns the exit status."""
    args = _parse(arguments)
    console = Console(soft_wrap=True, highlight=False)
    if not args.refusals:
        show_pairs(console, "Versions", versions())
        show_pairs(console, "Usable", usable())
    if args.deepspeed_config is None:
        return 0
    document = documents.read(args.deepspeed_config)
    if document is None:
        console.print(f"{args.deepspeed_config}: {_fault(args.deepspeed_config)}", markup=False)
        return 1
    document, left = documents.without_autos(document)
    refusal = refused(document, args.ranks)
    if refusal is not None:
        for line in str(documents.as_written(refusal, args.deepspeed_config)).split("\n"):
            console.print(f"{REFUSED}{line}", style="bold red", markup=False)
        return 1
    if args.refusals:
        return 0
    if left:
        told = f'{", ".join(left)}: "auto", which the Hugging Face Trainer or Accelerate fills in, and nobody else'
        console.print(told, markup=False)
    if (options := scape_options(document)) is None:
        console.print(f"{args.deepspeed_config}: accepted; it does not ask for SCAPE, so DeepSpeed alone decides")
        if args.params is not None:
            console.print("--params: no costs are told, they are SCAPE's")
        return 0
    console.print(f"{args.deepspeed_config}: accepted\n")
    shown = [(name, "auto" if f"optimizer.params.{name}" in left else str(value)) for name, value in options]
    show_pairs(console, "SCAPE", shown)
    show_costs(console, document, options, args.params or PARAMS, args.ranks or RANKS)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.deepspeed_config is None:
        given = [f"--{name}" for name in ("params", "ranks", "refusals") if getattr(args, name)]
        if given:
            parser.error(f"{', '.join(given)}: of what a JSON would do; name it by --deepspeed_config")
    return args


def _fault(path: str) -> str:
    """Why there is no document in a file of that name."""
    if os.path.isdir(path):
        return "is a folder; give the JSON file itself"
    return documents.fault(path) or "no such file"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed_scape.run --doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--deepspeed_config", "--deepspeed-config", metavar="JSON", help="what would it do?")
    parser.add_argument("--params", type=_number, help="of the model: 1.8e9, 500M (default: 1e9)")
    text = f"data-parallel ranks (default: {RANKS} for the costs, and no word on train_batch_size)"
    parser.add_argument("--ranks", type=_number, help=text)
    parser.add_argument("--refusals", action="store_true", help="say only what is refused")
    return parser


def _number(text: str) -> int:
    try:
        return count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def versions() -> list[tuple[str, str]]:
    """Python, this package and what it works with."""
    found = [("python", platform.python_version()), ("deepspeed_scape", _version("deepspeed-scape"))]
    return found + [(name, _version(name)) for name in PACKAGES]


def _version(name: str) -> str:
    if name == "torch":
        return str(torch.__version__)  # its wheel on PyPI leaves out for which CUDA it is
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def usable() -> list[tuple[str, str]]:
    """What a run on this machine would use."""
    locks = [("lock", build_locks.complaint(path)) for path in build_locks.left_behind()]
    return [*_accelerator(), ("kernels", _kernels()), *_optional(), *_launchers(), *locks]


def _accelerator() -> Iterator[tuple[str, str]]:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    backend = accelerator.communication_backend_name()
    if accelerator.device_name() == "cpu":
        backend = f"gloo (DeepSpeed's own name for it here is {backend})" if backend != "gloo" else backend
        yield "accelerator", "cpu"
    else:
        yield "accelerator", f"{accelerator.device_count()} x {accelerator.device_name()}"
    yield "backend", backend
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
    else:
        yield "NCCL", "no: there is no CUDA device"


def _kernels() -> str:
    from deepspeed_scape.kernels import loops_for, ops_for

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    some = torch.zeros(1, device=device)
    if getattr(ops_for(some), "__name__", "").endswith(".gpu"):  # the module that serves tensors of this device
        return "Triton"
    if device.type == "cuda":
        return "plain torch: triton is not installed"
    return "compiled CPU loops (numba)" if loops_for(some) is not None else "plain torch: pip install numba is faster"


def _optional() -> Iterator[tuple[str, str]]:
    said = _says([sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"])
    yield "mpi4py", said if said is not None else "no: pip install mpi4py, and an MPI library"
    yield "wandb", "yes" if importlib.util.find_spec("wandb") else "no: pip install wandb"


def _launchers() -> Iterator[tuple[str, str]]:
    for name in LAUNCHERS:
        yield name, shutil.which(name) or "not on PATH"


def _says(command: list[str]) -> str | None:
    """First line of what a program prints; None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def refused(document: dict[str, Any], ranks: int | None) -> ScapeConfigError | None:
    """Why ``deepspeed.initialize`` would refuse the JSON on so many ranks, as far as that needs no model.

    Without a number of ranks nothing is said about the batch.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    if not documents.is_ours(document):
        return None
    try:
        check(document, ranks)
        # DeepSpeed takes the number of ranks from a process group; the batch has been checked already
        alone = {key: value for key, value in document.items() if key != "train_batch_size"}
        config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **alone})
        optimizer = document.get("optimizer", {})
        found = refusals_of(check_config, config, optimizer.get("type"), optimizer.get("params") or {})
        refuse_all([*documents.missing_monitors(document), *found])
    except ScapeConfigError as error:
        return error
    except Exception as error:
        ours = rephrase(error, document) or ScapeConfigError(
            "configuration", "as given", f"DeepSpeed refuses it: {error}", "change what it names"
        )
        return with_others(ours, document)
    return None


def scape_options(document: dict[str, Any]) -> ScapeOptions | None:
    """SCAPE's options of a JSON that is not refused; None if it asks for another optimizer."""
    optimizer = document.get("optimizer") or {}
    if optimizer.get("type") not in OPTIMIZER_NAMES:
        return None
    options: ScapeOptions = parse_options(optimizer.get("params") or {}, ScapeOptions)
    return options


def dtype_of(document: dict[str, Any]) -> str:
    """Of the model: fp16, bf16 or fp32."""
    return next((name for name in ("fp16", "bf16") if document.get(name, {}).get("enabled")), "fp32")


def show_pairs(console: Console, title: str, pairs: list[tuple[str, str]]) -> None:
    """A table of names and values."""
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in pairs:
        table.add_row(name, value)
    console.print(table)
    console.print()


def show_costs(console: Console, document: dict[str, Any], options: ScapeOptions, params: int, ranks: int) -> None:
    """Bytes a step and bytes held of one rank, beside dense ZeRO."""
    dtype = dtype_of(document)
    console.print(f"{params:,} parameters, {ranks} rank{'s'[: ranks != 1]}, {dtype}, for one rank:")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for heading in ("sent a step", "of dense", "held", "held, bytes a parameter"):
        table.add_column(heading, justify="right")
    rows = costs(options, dtype, params, ranks)
    dense = rows[0][1]
    for name, sent, held in rows:
        share = f"{sent / dense:.2%}" if dense else "-"
        table.add_row(name, show_bytes(sent), share, show_bytes(held), f"{held / params:.2f}")
    console.print(table)
    if options.sparsity and options.warmup_steps:
        console.print(f"from step {options.warmup_steps + 1} on; those before send all elements (warmup_steps)")
    if pinned := memory.pinned(params, ranks, options.residual_dtype, options.residual_device):
        said = f"and {show_bytes(pinned)} of pinned host memory (residual_device), moved once a step"
        console.print(f"on GPUs, {said}; on CPUs the residual is in host memory as it is")
    console.print("held: weights, gradients, optimizer and mask between steps, no activations; docs/memory.md")


def costs(options: ScapeOptions, dtype: str, params: int, ranks: int) -> list[tuple[str, float, float]]:
    """(name, bytes a rank sends in a step, bytes it holds), dense ZeRO first."""
    work = Workload(
        params=params,
        compute=0.0,  # bytes do not depend on times
        dtype=dtype,  # type: ignore[arg-type]
        value_dtype=options.value_dtype,
        residual_dtype=options.residual_dtype,
        residual_device=options.residual_device,
        ballots=options.ballots,
    )
    link = Link(latency=0.0, bandwidth=math.inf)
    cluster = Cluster(nodes=ranks, gpus_per_node=1, inter=link, intra=link)
    dense, sparse = predict_dense(work, cluster), predict_scape(work, cluster, options.sparsity)
    return [(row.name, row.bytes_sent, row.memory) for row in (dense, sparse)]
