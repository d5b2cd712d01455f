"""What a step reports: a dict after every step, and DeepSpeed's monitors (W&B, TensorBoard, CSV) when they are on.

Keys of ``engine.optimizer.step_stats``, and of the monitors with ``Train/Scape/`` before them:

    bytes_scalar, bytes_reduce, bytes_ballots, bytes_params, bytes_mask, bytes_total   bytes this rank sent in this step
    grad_norm         the norm that clipping used, an estimate of ||mean gradient||
    grad_norm_rms     sqrt(mean over ranks of ||g_i||^2), an upper bound of it
    clip_coefficient  what the gradients were multiplied with, in (0, 1]
    skipped           1 for a step that was dropped because of an inf or nan
    sparsity          share of the elements that this step did not synchronise: 0 in a dense one, 1 in a skipped one
    visits            how often an element was in the mask so far, on average; dense steps do not count
    ms_<part>         milliseconds of each part of the step, mask_wait among them; on a GPU of the step before

The monitors also get ``diagnostics.py``'s keys whenever there are new ones, and W&B, once, the configuration: DeepSpeed
leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed_scape.group import ScapeGroup
    from deepspeed_scape.zero import ScapeZeroOptimizer


def collect_stats(optimizer: ScapeZeroOptimizer, loss_scale: float) -> dict[str, float]:
    """``step_stats`` of the step just done; nothing in it makes the host wait."""
    sent = optimizer.exchange.take_sent()
    density = (
        0.0 if optimizer.overflow else sent_share(optimizer.scape_groups, optimizer._is_dense(optimizer.applied_steps))
    )
    return {
        **{f"bytes_{purpose}": float(count) for purpose, count in sent.items()},
        "bytes_total": float(sum(sent.values())),
        "grad_norm": float(optimizer._global_grad_norm),
        "grad_norm_rms": optimizer.norms.rms / loss_scale,
        "clip_coefficient": optimizer.norms.coefficient,
        "skipped": float(optimizer.overflow),
        "sparsity": 1.0 - density,
        "visits": optimizer.visits,
        **{f"ms_{lap}": ms for lap, ms in optimizer.stopwatch.read().items()},
    }


def sent_share(groups: Sequence[ScapeGroup], dense: bool) -> float:
    """Share of all elements, padding included, that a step synchronises."""
    return sum(group.kept(dense) for group in groups) / max(1, sum(group.kept(True) for group in groups))


class StepMonitor:
    """Writes a step's statistics to the engine's monitors, on rank 0, against the samples seen."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def write(self, stats: dict[str, float]) -> None:
        """Write ``stats``; nothing happens when no monitor is enabled."""
        engine = self._engine
        if engine.monitor.enabled and engine.global_rank == 0:
            engine.monitor.write_events(
                [(f"Train/Scape/{key}", value, engine.global_samples) for key, value in stats.items()]
            )


def tell_wandb(engine: Any, document: dict[str, Any]) -> None:
    """Put the configuration of a run into the W&B run that DeepSpeed's monitor began; nothing without one.

    Its keys: ``deepspeed``, the JSON as it was given; ``scape``, every option with its default; ``zero_stage`` and
    ``world_size`` (data-parallel ranks).
    """
    monitor = getattr(getattr(engine, "monitor", None), "wandb_monitor", None)
    if monitor is None or not monitor.enabled or engine.global_rank != 0:
        return
    import wandb

    told: dict[str, Any] = {
        "deepspeed": document,
        "zero_stage": engine.zero_optimization_stage(),
        "world_size": engine.dp_world_size,
    }
    if (options := getattr(engine.optimizer, "options", None)) is not None:
        told["scape"] = options.model_dump(mode="json")
    if wandb.run is not None:
        wandb.run.config.update(told, allow_val_change=True)
