"""SCAPE's state parameter by parameter, free of the world size it was written on.

DeepSpeed's universal checkpoint holds ``fp32``, ``exp_avg`` and ``exp_avg_sq`` of every parameter in a folder of its
name. Ours stands beside them, tensors and plain types only::

    OUT/zero/scape.bin              version, step, world_size, options, parameters, norms, decay of every group
    OUT/zero/PARAMETER/scape.bin    residual (n,) fp32   last (n,) int32

``residual`` is the mean over the old ranks. Every new rank gets it whole, so that the mean over the new ranks, which is
what a reduce computes, is what it was: no gradient is lost and none counts twice. Masks are made anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepspeed_scape.checkpoint import start_afresh
from deepspeed_scape.manifest import ScapeCheckpointError

if TYPE_CHECKING:
    from deepspeed_scape.group import ScapeGroup
    from deepspeed_scape.layout import ParamSlot
    from deepspeed_scape.zero import ScapeZeroOptimizer

FILE = "scape.bin"  # not .pt: DeepSpeed takes every .pt of a parameter's folder for an optimizer state


def split(states: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Name and state, (n,) each, of every parameter, from our part of all ranks' checkpoints in rank order."""
    for i, slots in enumerate(states[0]["parameters"]):
        groups = [state["groups"][i] for state in states]
        owned = {"last"} if any("visits" not in group for group in groups) else {"last", "visits"}
        whole = {key: torch.cat([group[key] for group in groups]) for key in owned}  # (P,) each
        for name, start, numel in slots:
            place = slice(start, start + numel)
            total = torch.zeros(numel, dtype=torch.float64)
            for group in groups:
                total += group["residual"][place]
            residual = total.div_(len(groups)).float()
            yield name, {"residual": residual, **{key: value[place].clone() for key, value in whole.items()}}


def summarise(states: list[dict[str, Any]]) -> dict[str, Any]:
    """What is not of one parameter.

    The noise terms of the last reduce are kept as sums over the ranks (see ``norms.py``).
    """
    kept = {key: states[0][key] for key in ("version", "step", "world_size", "options", "parameters", "visits")}
    noted = [state["norms"]["noted"] for state in states]
    sums = None if None in noted else [sum(terms) for terms in zip(*noted, strict=True)]
    decay = [group["decay"] for group in states[0]["groups"]]
    return {**kept, "norms": {"signal_share": states[0]["norms"]["signal_share"], "noted": sums}, "decay": decay}


def load(folder: Path, optimizer: ScapeZeroOptimizer, load_optimizer_states: bool) -> None:
    """Take this rank's part of a universal checkpoint ``folder`` (its ``zero``) into masters, moments and our state."""
    _load_settings(folder, optimizer, load_optimizer_states)
    for group in optimizer.scape_groups:
        for slot in group.layout.slots:
            _load_own(folder / slot.name, group, slot, "fp32", group.master.data)
    start_afresh(optimizer)
    if not load_optimizer_states:
        return
    common = _read(folder / FILE)
    for group, decay in zip(optimizer.scape_groups, common["decay"], strict=True):
        for slot in group.layout.slots:
            for key in ("exp_avg", "exp_avg_sq"):
                _load_own(folder / slot.name, group, slot, key, group.moments[key])
            _load_ours(folder / slot.name, group, slot)
        group.moments["step"].fill_(common["step"])
        group.decay.load(decay)
    optimizer.applied_steps, optimizer.visits = common["step"], common["visits"]
    optimizer.norms.load(_share_norms(common, optimizer.exchange.world_size))


def _load_settings(folder: Path, optimizer: ScapeZeroOptimizer, load_optimizer_states: bool) -> None:
    """Loss scale and, with the optimizer's state, learning rates and the like: DeepSpeed's own file and classes."""
    saved = torch.load(str(folder / "optimizer_state.pt"), map_location="cpu", weights_only=False)
    optimizer._load_global_state(saved)
    if load_optimizer_states:
        for group, kept in zip(optimizer.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in kept.items() if key != "params"})


def _load_own(folder: Path, group: ScapeGroup, slot: ParamSlot, key: str, into: Tensor) -> None:
    """The owner's part of one of DeepSpeed's tensors of a parameter, into the partition ``into`` (S,)."""
    here, there = overlap(slot, group)
    if here.stop > here.start:
        values = _read(folder / f"{key}.pt")["param"].reshape(-1)
        _check_size(folder / f"{key}.pt", values, slot)
        into[here].copy_(values[there])


def _load_ours(folder: Path, group: ScapeGroup, slot: ParamSlot) -> None:
    if slot.numel == 0:
        return
    state = _read(folder / FILE)
    _check_size(folder / FILE, state["residual"], slot)
    group.residual.load(state["residual"], slot.start)
    here, there = overlap(slot, group)
    group.last[here].copy_(state["last"][there])
    if group.visits is not None and "visits" in state:
        group.visits[here].copy_(state["visits"][there])


def overlap(slot: ParamSlot, group: ScapeGroup) -> tuple[slice, slice]:
    """Where a parameter lies in this owner's partition, and which part of the parameter that is; both may be empty."""
    size = group.layout.partition_size
    offset = slot.start - group.rank * size  # of the parameter's first element in the partition
    first = min(max(offset, 0), size)
    stop = max(min(offset + slot.numel, size), first)
    return slice(first, stop), slice(first - offset, stop - offset)


def _share_norms(common: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Each new rank's part of the noise terms: their sums give the ratio that they gave on the old ranks."""
    if common["norms"]["noted"] is None:
        return common["norms"]
    mean_square, sum_square = common["norms"]["noted"]
    return {**common["norms"], "noted": [mean_square / world_size, sum_square / common["world_size"]]}


def _read(path: Path) -> Any:
    """A file of tensors and plain types, mapped, so that only what is used is read."""
    try:
        return torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise ScapeCheckpointError(
            f"{path} is missing: this universal checkpoint was not written by deepspeed_scape.universal. Remedy: "
            "convert the checkpoint with python -m deepspeed_scape.universal CHECKPOINT OUT"
        ) from None


def _check_size(path: Path, values: Tensor, slot: ParamSlot) -> None:
    if values.numel() != slot.numel:
        raise ScapeCheckpointError(f"{path} has {values.numel()} elements, the model's {slot.name} {slot.numel}")
