"""Ranks of test_accelerate.py: each function trains through Accelerate and returns what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests import worker
from tests.dist.rank_trainer import AUTO, SCHEDULE, replicas_equal

STEPS, SAVED = 6, 3
OPTIMIZER = {"type": "SCAPE", "params": {"lr": "auto", "weight_decay": "auto", "sparsity": 0.9, "warmup_steps": 0}}
SETTINGS = {**AUTO, "optimizer": OPTIMIZER}


class Run:
    """A model, its loader and an accelerator, prepared together."""

    def __init__(self, settings: Any, seed: int = 0, dropout: float = 0.0, client: Any = None, **plugin: Any) -> None:
        from accelerate import Accelerator, DeepSpeedPlugin, PartialState
        from accelerate.state import AcceleratorState, GradientState
        from accelerate.utils import DummyOptim, DummyScheduler, set_seed

        from tests.dist.hugging import MICROS, Recorder, Sequences, build

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState(cpu=not torch.cuda.is_available())  # else Accelerate sees one process
        given = {"hf_ds_config": settings} if settings else {"gradient_accumulation_steps": MICROS}
        self.accelerator = Accelerator(
            gradient_accumulation_steps=MICROS, deepspeed_plugin=DeepSpeedPlugin(**given, **plugin)
        )
        model = build(seed, dropout)
        self.seen = Recorder(model)
        loader = DataLoader(Sequences(), batch_size=2)
        optimizer = client(model) if client else DummyOptim(model.parameters(), lr=4e-3, weight_decay=0.1)
        parts = [model, optimizer, loader]
        if "scheduler" in (settings or {}):
            total = STEPS * dist.get_world_size()  # Accelerate divides it by the ranks
            parts.append(DummyScheduler(optimizer, total_num_steps=total, warmup_num_steps=2))
        self.engine, self.optimizer, self.loader, *_ = self.accelerator.prepare(*parts)
        set_seed(11)
        self.norms: list[float] = []
        self.done = 0

    def train(self, steps: int) -> None:
        """Optimizer steps; an epoch's last one has one micro-step."""
        while True:
            for batch in self.loader:
                with self.accelerator.accumulate(self.engine):
                    self.accelerator.backward(self.engine(**batch).loss)
                    if self.accelerator.sync_gradients:
                        self.norms.append(float(self.accelerator.clip_grad_norm_(self.engine.parameters(), 1.0)))
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.done += self.accelerator.sync_gradients
                if self.done == steps:
                    return


def accumulated(folder: Path) -> dict[str, Any]:
    """Both stages (Accelerate enters engine.no_sync() at stage 1): what was filled in, and the loop by hand."""
    from tests.dist.hugging import by_hand
    from tests.dist.rank_checkpoint import digest

    out = {}
    for stage in (1, 2):
        zero, clip = {**AUTO["zero_optimization"], "stage": stage}, "auto" if stage == 1 else 0.2
        run = Run({**SETTINGS, "zero_optimization": zero, "scheduler": SCHEDULE, "gradient_clipping": clip})
        run.train(STEPS)
        engine = run.engine
        out[str(stage)] = {
            "micro": engine.train_micro_batch_size_per_gpu(), "accumulation": engine.gradient_accumulation_steps(),
            "total": engine.train_batch_size(), "clip": engine.gradient_clipping(),
            "lr": engine.optimizer.options.lr, "weight_decay": engine.optimizer.options.weight_decay,
            "scheduler": engine._config.scheduler_params, "final lr": engine.get_lr(),
            "applied": engine.optimizer.applied_steps, "replicas": replicas_equal(engine),
            "norms": [norm == norm and norm > 0 for norm in run.norms],
            "clipped": engine.optimizer.step_stats["clip_coefficient"],
        }  # fmt: skip
        ours, written = digest(engine), {**engine._config._param_dict, "steps_per_print": None}
        engine.destroy()
        again = by_hand(written, run.seen.calls, [2, 2, 1, 2, 2, 1], factor=0.5)
        out[str(stage)]["by hand"] = digest(again) == ours
        again.destroy()
    return out


def resumed(folder: Path) -> dict[str, Any]:
    """save_state, load_state, and one more save_state over the first."""
    from tests.dist.rank_checkpoint import digest

    settings = {**SETTINGS, "scheduler": SCHEDULE}
    whole = Run(settings, dropout=0.1)
    whole.train(SAVED)
    whole.accelerator.save_state(str(folder))
    whole.train(STEPS)
    wanted = digest(whole.engine)
    whole.engine.destroy()
    half = Run(settings, seed=5, dropout=0.1)
    half.accelerator.load_state(str(folder))
    half.done = SAVED
    half.train(STEPS)
    out: dict[str, Any] = {
        "same": digest(half.engine) == wanted,
        "losses": whole.seen.losses[-len(half.seen.losses) :] == half.seen.losses,
        "micro-steps": len(half.seen.losses),
    }
    half.accelerator.save_state(str(folder))
    half.engine.destroy()
    third = Run(settings, seed=6)
    third.accelerator.load_state(str(folder))
    out["saved again"] = digest(third.engine) == wanted
    third.engine.destroy()
    return out


def clients(folder: Path) -> dict[str, Any]:
    """No JSON at all: the plugin's own arguments, and a Scape object from the script."""
    from deepspeed_scape import Scape

    run = Run(None, client=lambda model: Scape(model.parameters(), lr=4e-3, sparsity=0.9, warmup_steps=0), zero_stage=2)
    run.train(STEPS)
    found = [type(run.engine.optimizer).__name__, run.engine.optimizer.applied_steps, replicas_equal(run.engine)]
    run.engine.destroy()
    return {"found": found}


def refused(folder: Path) -> dict[str, str]:
    unfilled = {**SETTINGS, "optimizer": {"type": "SCAPE", "params": {"lr": "auto", "betas": "auto"}}}
    managed = {**SETTINGS, "managed_gradient_accumulation": False}
    return {
        "betas": worker.error_of(lambda: Run(unfilled)),
        "stage 3": worker.error_of(lambda: Run({**SETTINGS, "zero_optimization": {"stage": 3}})),
        "unmanaged": worker.error_of(lambda: Run(managed).train(1)),
        "plain": worker.error_of(lambda: plain()),
    }


def plain() -> Any:
    """The same document without anybody who fills it in."""
    import deepspeed

    from tests.dist.hugging import build

    model = build()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=dict(SETTINGS))


def main() -> None:
    folder = Path(worker.args()[0])
    worker.init()
    import deepspeed_scape  # noqa: F401 (the one line that a script needs)

    report = {}
    for check in (accumulated, resumed, clients, refused):
        report[check.__name__] = check(folder / check.__name__)
    worker.report(report)


if __name__ == "__main__":
    main()
