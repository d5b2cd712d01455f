"""What SCAPE adds to DeepSpeed's ZeRO checkpoint, and how it is resumed.

DeepSpeed saves masters, ``exp_avg`` and ``exp_avg_sq`` as for any optimizer, so ``zero_to_fp32`` works. One extra key
of each rank's ZeRO state dict holds what is ours, as tensors and plain types only:

    version, step, world_size, rank, options, norms, parameters, visits
    groups: residual (P,)   last (S,) int32   masks (W, K) int32 or None   decay (step + 1,) fp64
            visits (S,) int32 if `diagnostics_every` is set

``parameters`` lists name, first element in the flat buffer and size of every parameter, group by group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils import logger

from deepspeed_scape.decay import DecayHistory
from deepspeed_scape.manifest import ScapeCheckpointError

if TYPE_CHECKING:
    from deepspeed_scape.group import ScapeGroup
    from deepspeed_scape.zero import ScapeZeroOptimizer

KEY = "scape"
VERSION = 2  # 2: names and places of the parameters

_REMAKES_MASKS = ("sparsity", "selection", "block_size")  # a change of these keeps everything but the masks


def refuse_mid_accumulation(gradients_wait: bool) -> None:
    """Gradients that wait for their boundary step are in no checkpoint. All ranks know the same and raise together.

    Raises:
        ScapeCheckpointError: between the micro-steps of an accumulation.
    """
    if gradients_wait:
        raise ScapeCheckpointError(
            "save_checkpoint in the middle of a gradient accumulation would lose the gradients accumulated so far. "
            "Remedy: save after engine.step() of a boundary micro-step"
        )


def describe(optimizer: ScapeZeroOptimizer) -> dict[str, Any]:
    """What decides whether a checkpoint fits a run: plain values, the same on every rank; also in the manifest."""
    return {
        "version": VERSION,
        "step": optimizer.applied_steps,
        "world_size": optimizer.exchange.world_size,
        "options": optimizer.options.model_dump(mode="json"),
        "parameters": [
            [[slot.name, slot.start, slot.numel] for slot in group.layout.slots] for group in optimizer.scape_groups
        ],
    }


def save(optimizer: ScapeZeroOptimizer) -> dict[str, Any]:
    """The extra state of this rank. No mask gather may be in flight."""
    return {
        **describe(optimizer),
        "rank": optimizer.exchange.rank,
        "norms": optimizer.norms.state(),
        "visits": optimizer.visits,
        "groups": [_save_group(group) for group in optimizer.scape_groups],
    }


def _save_group(group: ScapeGroup) -> dict[str, Any]:
    masks = None if group.position is None else group.masks().to(torch.int32)
    counted = {} if group.visits is None else {"visits": group.visits}
    return {
        "residual": group.residual.state(),
        "last": group.last,
        "masks": masks,
        "decay": group.decay.state(),
        **counted,
    }


def check(state: dict[str, Any], optimizer: ScapeZeroOptimizer, universal: bool = False) -> None:
    """Refuse what cannot be resumed, before anything has been overwritten.

    Args:
        state: what :func:`describe` returned when it was saved, from the manifest or from a rank's own state.
        optimizer: the live one.
        universal: the checkpoint is not tied to a world size.

    Raises:
        ScapeCheckpointError: another version, world size or normalizer, or other parameters.
    """
    if state["version"] != VERSION:
        raise ScapeCheckpointError(
            f"the checkpoint's format is {state['version']}, this deepspeed_scape reads {VERSION}. Remedy: install the "
            "deepspeed_scape that wrote it, or load with load_optimizer_states=False"
        )
    _check_parameters(state["parameters"], describe(optimizer)["parameters"])
    live = optimizer.exchange.world_size
    if not universal and state["world_size"] != live:
        raise ScapeCheckpointError(
            f"a checkpoint of {state['world_size']} ranks loaded on {live} ranks. Remedy: convert it with python -m "
            'deepspeed_scape.universal CHECKPOINT FOLDER/TAG, and give load_checkpoint the FOLDER, with "checkpoint": '
            '{"load_universal": true} in the JSON'
        )
    if not universal and state.get("rank", optimizer.exchange.rank) != optimizer.exchange.rank:
        raise ScapeCheckpointError(f"the file of rank {state['rank']} was loaded by rank {optimizer.exchange.rank}")
    if state["options"]["normalizer"] != optimizer.options.normalizer:
        raise ScapeCheckpointError(
            f"optimizer.params.normalizer = {optimizer.options.normalizer!r}: the checkpoint's second moments are of "
            f"{state['options']['normalizer']!r}. Remedy: set it to that, or load with load_optimizer_states=False"
        )


def own_state(zero_state: dict[str, Any]) -> dict[str, Any]:
    """Our part of a rank's ZeRO state.

    Raises:
        ScapeCheckpointError: another optimizer wrote it.
    """
    if KEY not in zero_state:
        raise ScapeCheckpointError(
            "this checkpoint was not written by SCAPE, so it has no residuals and no visit times. Remedy: "
            "load_checkpoint(..., load_optimizer_states=False) takes its weights and starts SCAPE afresh"
        )
    return zero_state[KEY]


def _check_parameters(saved: list[Any], live: list[Any]) -> None:
    """The same parameters in the same groups; their places may differ (padding depends on the world size)."""
    before, now = ([[(name, numel) for name, _, numel in group] for group in groups] for groups in (saved, live))
    if before == now:
        return
    if len(before) != len(now):
        raise ScapeCheckpointError(f"the checkpoint has {len(before)} parameter groups, this run {len(now)}")
    for i, (old, new) in enumerate(zip(before, now, strict=True)):
        for kind, odd in (("checkpoint", set(old) - set(new)), ("model", set(new) - set(old))):
            if odd:
                name, numel = min(odd)
                raise ScapeCheckpointError(
                    f"parameter group {i}: only the {kind} has {name} with {numel} elements. Remedy: freeze and group "
                    "the parameters as in the run that saved it, or load with load_optimizer_states=False"
                )
    raise ScapeCheckpointError("the checkpoint's parameters come in another order than the model's")


def restore(state: dict[str, Any], optimizer: ScapeZeroOptimizer) -> None:
    """Take over the extra state, or start afresh where only weights were loaded (``state`` is empty)."""
    if not state:
        start_afresh(optimizer)
        return
    changed = [key for key in _REMAKES_MASKS if state["options"][key] != getattr(optimizer.options, key)]
    if changed and optimizer.exchange.rank == 0:
        was = {key: state["options"][key] for key in changed}
        logger.warning(f"SCAPE: the checkpoint was written with {was}; residuals and moments go on, masks are remade")
    for group, saved in zip(optimizer.scape_groups, state["groups"], strict=True):
        group.residual.load(saved["residual"])
        group.last.copy_(saved["last"])
        group.decay.load(saved["decay"])
        if group.visits is not None:  # a checkpoint without counts starts them again
            group.visits.copy_(saved.get("visits", torch.zeros_like(group.visits)))
        keep = saved["masks"] is not None and not changed
        group.use_masks(saved["masks"].to(group.flat.device, torch.int64) if keep else None)
    optimizer.applied_steps = state["step"]
    optimizer.norms.load(state["norms"])
    optimizer.visits = state["visits"]


def start_afresh(optimizer: ScapeZeroOptimizer) -> None:
    """Forget everything but the weights."""
    for group in optimizer.scape_groups:
        group.residual.zero()
        group.last.zero_()
        if group.visits is not None:
            group.visits.zero_()
        group.decay = DecayHistory(group.flat.device)
        group.use_masks(None)
        for value in group.moments.values():
            value.zero_()
    optimizer.applied_steps = 0
    optimizer.norms.load(None)
    optimizer.visits = 0.0
