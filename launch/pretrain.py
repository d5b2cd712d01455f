"""Causal-LM pre-training with DeepSpeed.

    deepspeed --num_gpus 2 launch/pretrain.py --deepspeed_config ds_configs/zero2_scape99_fp32.json --preset tiny

Writes OUTPUT/metrics.jsonl (launch/metrics.py tells its records). `--help` lists the options.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent)] + [p for p in sys.path if Path(p or ".").resolve() != _HERE]  # run as a script

import torch.distributed as dist  # noqa: E402

import deepspeed_scape  # noqa: E402, F401  (registers SCAPE and AdamS with DeepSpeed)
from deepspeed_scape import process_groups  # noqa: E402
from deepspeed_scape.manifest import ScapeCheckpointError  # noqa: E402
from deepspeed_scape.wire import WireMeter  # noqa: E402
from launch.batches import BatchOrder, count_windows, eval_windows  # noqa: E402
from launch.cluster import find_ranks, join_job, on_cpu, once_per_node  # noqa: E402
from launch.corpus import TextSource, embedded, from_files  # noqa: E402
from launch.engine import build_engine, resume, save  # noqa: E402
from launch.hub import from_hub, is_hub_source  # noqa: E402
from launch.loop import Progress, Trainer  # noqa: E402
from launch.metrics import Record, describe_run  # noqa: E402
from launch.models import count_parameters  # noqa: E402
from launch.options import EMBEDDED, ROOT, parse_options  # noqa: E402
from launch.recorder import Recorder  # noqa: E402
from launch.settings import Config  # noqa: E402
from launch.tokens import TokenData, open_tokens, prepare_tokens  # noqa: E402


def open_source(args: argparse.Namespace) -> TextSource:
    """The text that `--data` names. Raises ValueError if it can't be had."""
    if args.data[0] == EMBEDDED:
        return embedded()
    if is_hub_source(args.data[0]):
        return from_hub(args.data[0], args.max_documents)
    return from_files(args.data, args.val)


def load_data(args: argparse.Namespace) -> TokenData:
    """Token files, built by one process a node. Raises ValueError on every rank alike."""
    key = once_per_node(
        lambda: prepare_tokens(open_source(args), args.vocab_size, args.cache_dir),
        args.local_rank,
    )
    return open_tokens(args.cache_dir, key)


def describe(args: argparse.Namespace, config: Config, pinned: Record, data: TokenData, parameters: int) -> Record:
    """The config record."""
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    return {
        **describe_run(ROOT),
        "args": plain,
        "deepspeed": config,
        "data": data.meta,
        "params": parameters,
        "device": "cpu" if on_cpu() else "accelerator",
        **pinned,
    }


def make_trainer(args: argparse.Namespace, engine: Any, data: TokenData, meter: WireMeter, device: Any) -> Trainer:
    """Trainer with the data order of this world size; records go nowhere yet. Raises ValueError for too little text."""
    world, micro_batch = dist.get_world_size(), engine.train_micro_batch_size_per_gpu()
    order = BatchOrder(
        seed=args.seed,
        windows=count_windows(len(data.train), args.seq_len),
        world=world,
        micro_batch=micro_batch,
        accumulation=engine.gradient_accumulation_steps(),
    )
    held_out = count_windows(len(data.val), args.seq_len)
    batches = eval_windows(held_out, args.eval_batches, world, dist.get_rank(), micro_batch)
    return Trainer(
        engine=engine,
        data=data,
        order=order,
        eval_batches=batches,
        seq=args.seq_len,
        device=device,
        meter=meter,
        report=lambda record: None,
        tick=lambda: None,
    )


def pinned_settings(args: argparse.Namespace, trainer: Trainer) -> Record:
    """What a resumed run has to share with the one that made the checkpoint (see launch/engine.py)."""
    names = ("preset", "seq_len", "vocab_size", "seed")
    order = trainer.order
    return {n: getattr(args, n) for n in names} | {
        "tokens_key": trainer.data.meta["key"],
        "micro_batch": order.micro_batch,
        "accumulation": order.accumulation,
        "world_size": order.world,
    }


def train(args: argparse.Namespace, config: Config, meter: WireMeter) -> bool:
    """The whole job. Returns False if it diverged. Raises ValueError, on every rank alike, for what can't be run."""
    device = join_job(args.local_rank, timeout=args.timeout, force_fp16_cpu=args.force_fp16_cpu)
    data = load_data(args)
    engine = build_engine(args, config)
    trainer = make_trainer(args, engine, data, meter, device)
    pinned = pinned_settings(args, trainer)
    state, changed = resume(engine, args.save_dir, args.resume, pinned)
    if state is not None:
        trainer.progress = Progress(**state["progress"])
    parameters = count_parameters(engine.module)
    config_record = describe(args, config, pinned | {"changed_on_resume": changed}, data, parameters)
    recorder = Recorder(args, config_record, trainer.progress.step, resumed=state is not None)
    trainer.report, trainer.tick = recorder.report, recorder.tick
    roster = getattr(engine.optimizer, "roster", None)  # SCAPE's: it names a rank that is lost
    with roster.watch("training") if roster else nullcontext():
        finite = trainer.run(
            steps=args.steps,
            log_every=args.log_every,
            eval_every=args.eval_every,
            save_every=args.save_every,
            save=lambda p: save(engine, args.save_dir, {"step": p.step, "progress": vars(p).copy(), "pinned": pinned}),
        )
    recorder.finish(trainer.summary(parameters) | {"diverged": not finite})
    return finite


def main() -> None:
    try:
        find_ranks()
    except ValueError as error:
        sys.exit(f"pretrain.py: error: {error}")
    args, config = parse_options()
    meter = WireMeter()
    meter.install()
    try:
        finite = train(args, config, meter)
    except (ValueError, ScapeCheckpointError) as error:
        sys.exit(f"pretrain.py: error: {error}")
    dist.barrier()
    process_groups.destroy()
    if not finite:
        sys.exit("pretrain.py: the loss is no longer a number; try a lower --lr or --lr-warmup")


if __name__ == "__main__":
    main()
