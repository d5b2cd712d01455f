"""What SCAPE adds to DeepSpeed's ZeRO checkpoint, and how it is resumed.

DeepSpeed saves masters, ``exp_avg`` and ``exp_avg_sq`` as for any optimizer, so ``zero_to_fp32`` works. One extra key
of each rank's ZeRO state dict holds what is ours, as tensors and plain types only:

    version, step, world_size, rank, options, norms
    groups: residual (P,)   last (S,) int32   masks (W, K) int32 or None   decay (step + 1,) fp64
            visits (S,) int32 if `diagnostics_every` is set
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils import logger

from deepspeed_scape.decay import DecayHistory

if TYPE_CHECKING:
    from deepspeed_scape.group import ScapeGroup
    from deepspeed_scape.zero import ScapeZeroOptimizer

KEY = "scape"
VERSION = 1

_REMAKES_MASKS = ("sparsity", "selection", "block_size")  # a change of these keeps everything but the masks


class ScapeCheckpointError(RuntimeError):
    """A checkpoint that cannot be resumed as it is. The message says what to do."""


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


def save(optimizer: ScapeZeroOptimizer) -> dict[str, Any]:
    """The extra state of this rank. No mask gather may be in flight."""
    return {
        "version": VERSION,
        "step": optimizer.applied_steps,
        "world_size": optimizer.exchange.world_size,
        "rank": optimizer.exchange.rank,
        "options": optimizer.options.model_dump(),
        "norms": optimizer.norms.state(),
        "visits": optimizer.visits,
        "groups": [_save_group(group) for group in optimizer.scape_groups],
    }


def _save_group(group: ScapeGroup) -> dict[str, Any]:
    masks = None if group.position is None else group.masks().to(torch.int32)
    counted = {} if group.visits is None else {"visits": group.visits}
    return {"residual": group.residual, "last": group.last, "masks": masks, "decay": group.decay.state(), **counted}


def check(zero_state: dict[str, Any], optimizer: ScapeZeroOptimizer) -> None:
    """Refuse what cannot be resumed, before anything has been overwritten.

    Raises:
        ScapeCheckpointError: another optimizer's checkpoint, a newer version, another world size or rank, another
            normalizer, or other parameter groups.
    """
    if KEY not in zero_state:
        raise ScapeCheckpointError(
            "this checkpoint was not written by SCAPE, so it has no residuals and no visit times. Remedy: "
            "load_checkpoint(..., load_optimizer_states=False) takes its weights and starts SCAPE afresh"
        )
    state = zero_state[KEY]
    if state["version"] > VERSION:
        raise ScapeCheckpointError(
            f"checkpoint format {state['version']} is newer than {VERSION}: update deepspeed_scape"
        )
    here = {"world_size": optimizer.exchange.world_size, "rank": optimizer.exchange.rank}
    for name, value in here.items():
        if state[name] != value:
            raise ScapeCheckpointError(f"checkpoint of {name} {state[name]} loaded on {name} {value}")
    if state["options"]["normalizer"] != optimizer.options.normalizer:
        raise ScapeCheckpointError(
            f"optimizer.params.normalizer = {optimizer.options.normalizer!r}: the checkpoint's second moments are of "
            f"{state['options']['normalizer']!r}. Remedy: set it to that, or load with load_optimizer_states=False"
        )
    saved = [entry["residual"].numel() for entry in state["groups"]]
    live = [group.layout.numel for group in optimizer.scape_groups]
    if saved != live:
        raise ScapeCheckpointError(f"the checkpoint's parameter groups hold {saved} elements, this model's {live}")


def restore(zero_state: dict[str, Any], optimizer: ScapeZeroOptimizer) -> None:
    """Take over the extra state, or start afresh where only weights were loaded."""
    if KEY not in zero_state:
        _start_afresh(optimizer)
        return
    state = zero_state[KEY]
    changed = [key for key in _REMAKES_MASKS if state["options"][key] != getattr(optimizer.options, key)]
    if changed and optimizer.exchange.rank == 0:
        was = {key: state["options"][key] for key in changed}
        logger.warning(f"SCAPE: the checkpoint was written with {was}; residuals and moments go on, masks are remade")
    for group, saved in zip(optimizer.scape_groups, state["groups"], strict=True):
        group.residual.copy_(saved["residual"])
        group.last.copy_(saved["last"])
        group.decay.load(saved["decay"])
        if group.visits is not None:  # a checkpoint without counts starts them again
            group.visits.copy_(saved.get("visits", torch.zeros_like(group.visits)))
        keep = saved["masks"] is not None and not changed
        group.use_masks(saved["masks"].to(group.flat.device, torch.int64) if keep else None)
    optimizer.applied_steps = state["step"]
    optimizer.norms.load(state["norms"])
    optimizer.visits = state.get("visits", state["step"] * optimizer.options.density)  # older ones did not say


def _start_afresh(optimizer: ScapeZeroOptimizer) -> None:
    for group in optimizer.scape_groups:
        group.residual.zero_()
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
