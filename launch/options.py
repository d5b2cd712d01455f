"""The command line of launch/pretrain.py, checked before anything starts.

The checks look at nothing but the arguments and files named by them, so every rank refuses the same thing.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from launch.corpus import find_text_files
from launch.hub import HUB_SOURCES, LOCAL_PREFIX, is_hub_source
from launch.models import PRESETS
from launch.schedule import SCHEDULES
from launch.settings import Config, resolve_config, set_scape_options
from launch.tokens import MIN_VOCAB
from launch.tracker import require_wandb

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = "embedded"


def _add_model_and_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and data")
    group.add_argument("--preset", default="tiny", help=f"the model: {', '.join(PRESETS)}")
    group.add_argument("--seq-len", type=int, help="tokens a sample is trained on (default: the preset's)")
    group.add_argument("--vocab-size", type=int, help="size of the byte-level BPE (default: the preset's)")
    group.add_argument(
        "--data",
        nargs="+",
        default=[EMBEDDED],
        help=f"files or folders of .txt[.xz|.bz2|.gz], or one of: {EMBEDDED}, {', '.join(HUB_SOURCES)}, "
        f"{LOCAL_PREFIX}FOLDER of parquet or jsonl files with a `text` column",
    )
    group.add_argument(
        "--val",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="names of --data files to hold out for validation (default: the last 5%% of the text)",
    )
    group.add_argument("--max-documents", type=int, help="read only so many training documents of a `datasets` source")
    group.add_argument("--cache-dir", type=Path, default=ROOT / "runs" / "cache", help="where token files are kept")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=int, default=1000, help="optimizer steps in all, those before a resume included")
    group.add_argument("--seed", type=int, default=0, help="of the weights and the data order")
    group.add_argument("--micro-batch", type=int, help="samples a rank and micro-step (default: the JSON's)")
    group.add_argument("--lr", type=float, help="replaces optimizer.params.lr of the JSON")
    group.add_argument("--lr-schedule", choices=SCHEDULES, help="default: the JSON's scheduler, else constant")
    group.add_argument("--lr-warmup", type=int, help="steps of linear warm-up (default 0)")
    group.add_argument("--lr-floor", type=float, default=0.1, help="where the cosine ends, as a share of --lr")
    group.add_argument("--activation-checkpointing", action="store_true", help="recompute activations to save memory")
    group.add_argument(
        "--timeout",
        type=float,
        default=60,
        help="seconds a rank waits for the others before the job ends with an error (default: 60)",
    )
    group.add_argument(
        "--force-fp16-cpu",
        action="store_true",
        help="let DeepSpeed use fp16 on a CPU that it thinks has none; for tests only, it is slow",
    )


def _add_records(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation, checkpoints and records")
    group.add_argument("--eval-every", type=int, default=200, help="steps between validations; 0 for the end only")
    group.add_argument("--eval-batches", type=int, default=40, help="validation micro-batches a rank")
    group.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; 0 for none")
    group.add_argument("--save-dir", type=Path, help="default: OUTPUT/checkpoints")
    group.add_argument("--resume", default="auto", metavar="{auto,never,TAG}", help="auto: the latest, if there is one")
    group.add_argument("--output", type=Path, default=Path("runs/pretrain"), help="folder of metrics.jsonl")
    group.add_argument("--log-every", type=int, default=10, help="steps between records")
    group.add_argument(
        "--diagnose-every",
        type=int,
        default=100,
        metavar="N",
        help="SCAPE: count residual norm, mask overlap and visits every N steps (optimizer.params.diagnostics_every, "
        "if the JSON does not set it); 0 never",
    )
    group.add_argument("--wandb", action="store_true", help="log to Weights & Biases as well")
    group.add_argument("--wandb-project", default="deepspeed_scape")
    group.add_argument("--wandb-name", help="default: the last part of --output")
    group.add_argument("--wandb-group", help="the experiment (default: the folder that --output lies in)")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pretrain.py", description="Causal-LM pre-training with DeepSpeed.", allow_abbrev=False
    )
    parser.add_argument("--deepspeed_config", "--deepspeed-config", required=True, help="JSON; see ds_configs/")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY.KEY=VALUE",
        help="change one key of the JSON, e.g. optimizer.params.sparsity=0.99 (VALUE is JSON); may be repeated",
    )
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # scripts often pass it
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)
    _add_model_and_data(parser)
    _add_training(parser)
    _add_records(parser)
    return parser


def _check_numbers(args: argparse.Namespace) -> None:
    at_least = {"steps": 1, "log_every": 1, "eval_batches": 1, "eval_every": 0, "save_every": 0, "lr_warmup": 0}
    at_least |= {
        "micro_batch": 1,
        "seq_len": 1,
        "max_documents": 1,
        "vocab_size": MIN_VOCAB,
        "seed": 0,
        "diagnose_every": 0,
    }
    for name, low in at_least.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least {low}")
    if args.lr is not None and not 0 < args.lr < float("inf"):
        raise ValueError(f"--lr {args.lr}: must be a positive number")
    if not 0 < args.timeout < float("inf"):
        raise ValueError(f"--timeout {args.timeout}: must be a positive number of seconds")
    if not 0 <= args.lr_floor <= 1:
        raise ValueError(f"--lr-floor {args.lr_floor}: a share of the learning rate, between 0 and 1")


def _check_data(args: argparse.Namespace) -> None:
    special = [entry for entry in args.data if entry == EMBEDDED or is_hub_source(entry)]
    if special and len(args.data) > 1:
        raise ValueError(f"--data {' '.join(args.data)}: {special[0]} can't be mixed with other sources; give one")
    if special and args.val:
        raise ValueError(f"--val {' '.join(args.val)}: holds out files, and --data {special[0]} has none; leave it out")
    if args.max_documents is not None and not is_hub_source(args.data[0]):
        raise ValueError(f"--max-documents {args.max_documents}: only for `datasets` sources, not {args.data[0]}")
    if not special:
        find_text_files(args.data)


def _check_schedule(args: argparse.Namespace, config: Config) -> None:
    if "scheduler" not in config:
        return
    for flag, value in (("--lr-schedule", args.lr_schedule), ("--lr-warmup", args.lr_warmup)):
        if value is not None:
            raise ValueError(f"{flag} {value}: {args.deepspeed_config} has a scheduler of its own; drop one of the two")


def _check_resume(args: argparse.Namespace) -> None:
    if args.resume not in ("auto", "never") and not (args.save_dir / args.resume).is_dir():
        tags = sorted(p.name for p in args.save_dir.glob("*/")) if args.save_dir.is_dir() else []
        raise ValueError(f"--resume {args.resume}: no such checkpoint in {args.save_dir}; it has {tags or 'none'}")


def parse_options(argv: list[str] | None = None) -> tuple[argparse.Namespace, Config]:
    """The arguments and the resolved DeepSpeed configuration. Exits with status 2 and the reason if one is wrong."""
    parser = build_parser()
    args = parser.parse_args(argv)
    args.save_dir = args.save_dir or args.output / "checkpoints"
    try:
        if args.preset not in PRESETS:
            raise ValueError(f"--preset {args.preset}: there is no such preset; take one of {', '.join(PRESETS)}")
        _check_numbers(args)
        config = resolve_config(args.deepspeed_config, args.overrides, lr=args.lr, micro_batch=args.micro_batch)
        set_scape_options(config, diagnostics_every=args.diagnose_every, timeout=args.timeout)
        _check_schedule(args, config)
        _check_data(args)
        _check_resume(args)
        if args.wandb:
            require_wandb()
    except ValueError as error:
        parser.error(str(error))
    preset = PRESETS[args.preset]
    args.seq_len = args.seq_len or preset.seq
    args.vocab_size = args.vocab_size or preset.vocab
    args.local_rank = int(os.environ.get("LOCAL_RANK", args.local_rank))
    return args, config


if __name__ == "__main__":  # launch/preflight asks whether the ranks would take these
    parse_options()
