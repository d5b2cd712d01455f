"""The variables that every rank gets, and by which way."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

from launch.preflight.addresses import interfaces, is_loopback, resolve
from launch.preflight.findings import Findings

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# what a rank listens to and this shell may have set: libraries of the job, by the beginning of a variable's name
HEEDED = ("DS_", "GLOO_", "HF_", "LD_LIBRARY_PATH", "NCCL_", "OMP_", "PYTHON", "TOKENIZERS_", "TORCH_", "TRITON_",
          "UCX_", "WANDB_")  # fmt: skip
PDSH_CARRIES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")  # deepspeed/launcher/runner.py, and its CUDA accelerator


def wanted_interface(option: str | None, files: Mapping[str, str]) -> tuple[str, str] | None:
    """Which interface the user asks for, and where: by option, in .deepspeed_env, or in this shell."""
    if option is not None:
        return "--interface", option
    for origin, source in ((".deepspeed_env", files), ("environment", os.environ)):
        if value := source.get(GLOO):
            return f"{origin} {GLOO}", value
    return None


def check_nccl_interface(files: Mapping[str, str], findings: Findings) -> None:
    """NCCL takes beginnings of names (`eth`), exact ones (`=eth0`), lists, and what to leave out (`^docker`)."""
    value = files.get(NCCL, os.environ.get(NCCL, ""))
    if not value or value.startswith("^"):
        return
    exact, names = value.startswith("="), [name for name in value.removeprefix("=").split(",") if name]
    known = interfaces()
    if not any(have == name if exact else have.startswith(name) for have in known for name in names):
        findings.refuse(f"{NCCL} {value}", f"fits none of {', '.join(known)}", "name one, or leave it to the launch")


def check_asked_interface(name: str | None, findings: Findings) -> None:
    """As far as it goes while the nodes are not known: this machine need not be one of them."""
    known = interfaces()
    for part in (name or "").split(","):
        if part and part not in known:
            findings.tell("note", f"--interface {part}: this machine has no such interface, only {', '.join(known)}")


def rank_variables(files: Mapping[str, str], interface: str | None, nodes: int) -> dict[str, str]:
    """What the launch itself exports: the files' variables, and the interface for libraries that have none yet.

    On one node NCCL finds its own way; gloo would look up the machine's name, which may be nobody's.
    """
    variables = dict(files)
    for name in (GLOO, NCCL) if nodes > 1 else (GLOO,):
        if interface is not None and name not in files and name not in os.environ:
            variables[name] = interface
    return variables


def heeded(prefixes: Iterable[str] = HEEDED) -> list[str]:
    """Names of this shell's variables that a rank should have."""
    return sorted(name for name in os.environ if name.startswith(tuple(prefixes)))


def check_pdsh_environment(files: Mapping[str, str], interface: str | None, nodes: int, findings: Findings) -> None:
    """Over pdsh nothing but .deepspeed_env reaches the ranks, a few variables apart."""
    lost = [name for name in heeded() if not name.startswith(PDSH_CARRIES) and name not in files]
    if lost:
        findings.tell("note", f"set here, but unknown to the ranks: {', '.join(lost)} (use .deepspeed_env)")
    if nodes < 2 or interface is None or GLOO in files:
        return
    own = socket.gethostname()
    addresses = resolve(own)
    if not addresses or all(map(is_loopback, addresses)):
        why = f"gloo would announce {own} as {addresses[0] if addresses else 'nothing'}, where no other node finds it"
        findings.refuse(f".deepspeed_env {GLOO} (not set)", why, f"echo {GLOO}={interface} >> .deepspeed_env")
