"""Ranks of test_trainer.py: each function trains through the Hugging Face Trainer and returns what came out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import worker

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVED = 8, 4  # optimizer steps, and the one that a resume starts from, in the middle of the second epoch
AUTO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "SCAPE",
        "params": {
            "lr": "auto",
            "betas": "auto",
            "eps": "auto",
            "weight_decay": "auto",
            "sparsity": 0.9,
            "warmup_steps": 0,
        },
    },
}
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
}


def arguments(folder: Path, settings: Any, **more: Any) -> Any:
    from transformers import TrainingArguments

    from tests.dist.hugging import MICROS

    chosen = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": MICROS, "max_steps": STEPS,
        "learning_rate": 4e-3, "weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 0.5, "warmup_steps": 2,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(), "log_level": "error", **more,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), deepspeed=settings, **chosen)


def trainer(model: Any, args: Any, **more: Any) -> Any:
    from transformers import Trainer

    from tests.dist.hugging import Sequences

    return Trainer(model=model, args=args, train_dataset=Sequences(), eval_dataset=Sequences(), **more)


def run(folder: Path, settings: Any, seed: int = 0, resume: str | None = None, trainer_more: Any = None, **more: Any):
    """One training; the trainer, its engine, and what the model saw."""
    from tests.dist.hugging import Recorder, build

    dropout = more.pop("dropout", 0.1)
    model = build(seed, dropout)
    seen = Recorder(model)
    made = trainer(model, arguments(folder, settings, **more), **(trainer_more or {}))
    made.train(resume_from_checkpoint=resume)
    return made, made.model_wrapped, seen


def replicas_equal(engine: Any) -> bool:
    flat = torch.cat([group.flat.float() for group in engine.optimizer.scape_groups])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(other, everyone[0]) for other in everyone)


def shipped(folder: Path) -> dict[str, Any]:
    """The shipped JSON as it is; the arguments must say what it says, which the Trainer checks."""
    path = ROOT / "ds_configs" / "zero2_scape99_bf16.json"
    same = {
        "gradient_accumulation_steps": 1, "learning_rate": 5e-4, "max_grad_norm": 1.0, "bf16": True,
    }  # fmt: skip
    made, engine, seen = run(folder, str(path), dropout=0.0, **same)
    found = {
        "optimizer": type(engine.optimizer).__name__,
        "sparsity": engine.optimizer.options.sparsity,
        "dtype": str(next(engine.module.parameters()).dtype),
        "applied": engine.optimizer.applied_steps,
        "equal": replicas_equal(engine),
        "losses": seen.losses,
        "logged": [row["grad_norm"] for row in made.state.log_history if "grad_norm" in row],
    }
    engine.destroy()
    return found


def filled(folder: Path) -> dict[str, Any]:
    """What every "auto" became, and whether the Trainer's accumulation and clipping are DeepSpeed's own, to the bit."""
    from tests.dist.hugging import by_hand
    from tests.dist.rank_checkpoint import digest

    settings = {**AUTO, "scheduler": SCHEDULE}
    _, engine, seen = run(folder, settings, dropout=0.0)
    options, config = engine.optimizer.options, engine._config
    found: dict[str, Any] = {
        "micro": engine.train_micro_batch_size_per_gpu(), "accumulation": engine.gradient_accumulation_steps(),
        "total": engine.train_batch_size(), "clip": engine.gradient_clipping(), "lr": options.lr,
        "betas": list(options.betas), "eps": options.eps, "weight_decay": options.weight_decay,
        "scheduler": [config.scheduler_name, config.scheduler_params], "final lr": engine.get_lr(),
        "clipped": engine.optimizer.step_stats["clip_coefficient"], "bf16": engine.bfloat16_enabled(),
    }  # fmt: skip
    written = json.loads(json.dumps(config._param_dict).replace("Infinity", "1000000"))
    ours = digest(engine)
    engine.destroy()
    per_step = [2, 2, 1] * STEPS
    again = by_hand(written, seen.calls, per_step[:STEPS], factor=float(dist.get_world_size()))
    found["by hand"] = digest(again) == ours
    again.destroy()
    return found


def resumed(folder: Path) -> dict[str, Any]:
    """An uninterrupted run against one that goes on from checkpoint-SAVED, in a Trainer with other weights."""
    from deepspeed_scape import Scape
    from tests.dist.rank_checkpoint import digest

    own = {key: value for key, value in AUTO.items() if key != "optimizer"}
    options = {"lr": 4e-3, "weight_decay": 0.1, "sparsity": 0.9, "warmup_steps": 0}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "trainer's schedule": (AUTO, {"lr_scheduler_type": "cosine"}),
        "deepspeed's schedule": ({**AUTO, "scheduler": SCHEDULE}, {}),
        "bf16": (AUTO, {"bf16": True}),
        "recomputing": (AUTO, {"activation_checkpointing": True}),
        "optimizer class": (own, {"trainer_more": {"optimizer_cls_and_kwargs": (Scape, options)}}),
    }
    out = {}
    for name, (settings, more) in cases.items():
        here = folder / name.replace(" ", "_").replace("'", "")
        whole, engine, seen = run(here, settings, save_strategy="steps", save_steps=SAVED, **more)
        uninterrupted = digest(engine)
        groups = [[group["weight_decay"], group["lr"]] for group in engine.optimizer.param_groups]
        rates = [row["learning_rate"] for row in whole.state.log_history if "learning_rate" in row]
        engine.destroy()
        half, engine, rest = run(here, settings, seed=5, resume=str(here / f"checkpoint-{SAVED}"), **more)
        rates_again = [row["learning_rate"] for row in half.state.log_history if "learning_rate" in row]
        out[name] = {
            "same": digest(engine) == uninterrupted, "replicas": replicas_equal(engine), "groups": groups,
            "losses": seen.losses[-len(rest.losses) :] == rest.losses, "rest": len(rest.losses),
            "rates": [rates, rates_again], "steps": half.state.global_step, "applied": engine.optimizer.applied_steps,
            "moved": rest.losses[0] != rest.losses[-1],
        }  # fmt: skip
        engine.destroy()
    return out


def weights(folder: Path) -> dict[str, Any]:
    """What is saved for others, and what happens with the two options that touch it."""
    from transformers import GPT2LMHeadModel

    made, engine, _ = run(
        folder / "best", AUTO, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True, save_total_limit=2,
    )  # fmt: skip
    best = made.state.best_model_checkpoint
    chosen = GPT2LMHeadModel.from_pretrained(best).state_dict()
    live = engine.module.state_dict()
    out: dict[str, Any] = {
        "best": Path(best).name,
        "best loaded": all(torch.equal(value, chosen[name]) for name, value in live.items()),
        "best step": engine.optimizer.applied_steps,
        "replicas": replicas_equal(engine),
    }
    made.save_model(str(folder / "final"))
    dist.barrier()
    final = GPT2LMHeadModel.from_pretrained(folder / "final").state_dict()
    out["saved"] = all(torch.equal(value, final[name]) for name, value in live.items())
    engine.destroy()
    more: dict[str, Any] = {"save_strategy": "steps", "save_steps": SAVED, "save_only_model": True}
    _, engine, _ = run(folder / "only", AUTO, **more)
    engine.destroy()
    there = sorted(path.name for path in (folder / "only" / f"checkpoint-{SAVED}").iterdir())
    out["only model"] = [name for name in there if name.startswith(("global_step", "latest", "model"))]
    resume = str(folder / "only" / f"checkpoint-{SAVED}")
    out["resume only model"] = worker.error_of(lambda: run(folder / "only", AUTO, resume=resume, **more))
    return out


def refused(folder: Path) -> dict[str, str]:
    """An "auto" that nobody fills in, and arguments that contradict the JSON."""
    params = {**AUTO["optimizer"]["params"], "sparsity": "auto"}
    unfilled = {**AUTO, "optimizer": {"type": "SCAPE", "params": params}}
    contrary = {**AUTO, "optimizer": {"type": "SCAPE", "params": {"lr": 1.0}}}
    stage3 = {**AUTO, "zero_optimization": {"stage": 3}}
    return {
        "unfilled": worker.error_of(lambda: run(folder, unfilled)),
        "contrary": worker.error_of(lambda: run(folder, contrary)),
        "stage 3": worker.error_of(lambda: run(folder, stage3)),
    }


def main() -> None:
    folder = Path(worker.args()[0])
    worker.init()
    import deepspeed_scape  # noqa: F401 (the one line that a script needs)

    logging.getLogger("transformers").setLevel(logging.ERROR)
    report = {}
    for check in (shipped, filled, resumed, weights, refused):
        report[check.__name__] = check(folder / check.__name__)
    worker.report(report)


if __name__ == "__main__":
    main()
