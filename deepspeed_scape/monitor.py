"""What a step reports: a dict after every step, and DeepSpeed's monitors (W&B, TensorBoard, CSV) when they are on.

Keys of ``engine.optimizer.step_stats``, and of the monitors with ``Train/Scape/`` before them:

    bytes_scalar, bytes_reduce, bytes_ballots, bytes_params, bytes_mask, bytes_total   bytes this rank sent in this step
    grad_norm         the norm that clipping used, an estimate of ||mean gradient||
    grad_norm_rms     sqrt(mean over ranks of ||g_i||^2), an upper bound of it
    clip_coefficient  what the gradients were multiplied with, in (0, 1]
    skipped           1 for a step that was dropped because of an inf or nan
    ms_<part>         milliseconds of each part of the step (on CPUs), mask_wait among them
"""

from __future__ import annotations

from typing import Any


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
