"""The DeepSpeed engine of a run: built from the preset, resumed from a checkpoint, saved to one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import torch

from launch.models import build_model
from launch.schedule import lambda_scheduler
from launch.settings import Config

# what decides the model and the data: a resumed run that differs in one would not go on with the same training
PINNED = ("preset", "seq_len", "vocab_size", "seed", "tokens_key")
BATCHING = ("micro_batch", "accumulation", "world_size")  # may change; the data order from there on is another


def build_engine(args: argparse.Namespace, config: Config) -> Any:
    """A DeepSpeed engine around freshly initialised weights, the same on every rank.

    The JSON's scheduler is used if it has one, else `--lr-schedule` (constant by default).
    """
    torch.manual_seed(args.seed)
    model: Any = build_model(args.preset, vocab=args.vocab_size, seq=args.seq_len)
    if args.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    schedule = None
    if "scheduler" not in config:
        schedule = lambda_scheduler(
            kind=args.lr_schedule or "constant", warmup=args.lr_warmup or 0, steps=args.steps, floor=args.lr_floor
        )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=config,
        lr_scheduler=schedule,
        dist_init_required=False,
    )
    return engine


def check_same_run(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Compare the pinned settings of a checkpoint with this run's.

    Returns the names of those that differ and may (another world size or batch). Raises ValueError for the others.
    """
    for name in PINNED:
        if saved.get(name) != now.get(name):
            flag = "--data" if name == "tokens_key" else f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} {now.get(name)}: the checkpoint was made with {saved.get(name)}; give the same, or "
                "--resume never with another --output"
            )
    return [name for name in BATCHING if saved.get(name) != now.get(name)]


def latest_tag(save_dir: Path, universal: bool = False) -> str | None:
    """The tag that DeepSpeed's `latest` or `latest_universal` file names, if there is one."""
    latest = save_dir / ("latest_universal" if universal else "latest")
    return latest.read_text().strip() if latest.is_file() else None


def resume(engine: Any, save_dir: Path, how: str, pinned: dict[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """Load the checkpoint that `--resume` means into the engine.

    Returns its client state, or None to start afresh, and the settings that changed. Raises ValueError if the
    checkpoint is of another run.
    """
    tag = latest_tag(save_dir, engine.load_universal_checkpoint()) if how == "auto" else how
    if how == "never" or tag is None:
        return None, []
    path, state = engine.load_checkpoint(str(save_dir), tag=tag)
    if path is None:
        raise ValueError(f"--resume {how}: DeepSpeed found no checkpoint {tag} in {save_dir}; see its message above")
    return state, check_same_run(state["pinned"], pinned)


def save(engine: Any, save_dir: Path, state: dict[str, Any]) -> None:
    """Write checkpoint `step<N>`; every rank takes part. `state` comes back as the client state."""
    engine.save_checkpoint(str(save_dir), tag=f"step{state['step']}", client_state=state)
