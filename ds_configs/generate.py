"""Write the DeepSpeed configuration files of this folder, or check that they are up to date.

    python -m ds_configs.generate            write
    python -m ds_configs.generate --check    compare; exit status 1 and the names of what differs

One file for each ZeRO stage, optimizer and precision: `zero2_scape99_bf16.json` and its like. The four optimizers
differ in the `optimizer` entry alone, which is the one switch a user turns. A training script may override the
batch sizes and the learning rate.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
STAGES = (1, 2)

_COMMON = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    # torch_adam: DeepSpeed's own FusedAdam would be compiled at the first start, for minutes on a CPU
    "adamw": {"type": "AdamW", "params": {"lr": 2e-3, **_COMMON, "torch_adam": True}},
    "adams": {"type": "AdamS", "params": {"lr": 5e-4, **_COMMON}},
    # the best of three at 90% on `small` (evals/results/first_result.json)
    "scape90": {"type": "SCAPE", "params": {"lr": 5e-4, **_COMMON, "sparsity": 0.9}},
    "scape99": {"type": "SCAPE", "params": {"lr": 5e-4, **_COMMON, "sparsity": 0.99}},
}

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    # bf16 has 8 bits of mantissa, too few to add micro-batches up in
    "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    # loss_scale 0 means dynamic
    "fp16": {
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        }
    },
}


def build_config(stage: int, optimizer: str, precision: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        **PRECISIONS[precision],
        "optimizer": OPTIMIZERS[optimizer],
        "steps_per_print": 1_000_000,
        "wall_clock_breakdown": False,
    }


def render_all() -> dict[str, str]:
    """File name -> content, for every file."""
    return {
        f"zero{stage}_{optimizer}_{precision}.json": json.dumps(build_config(stage, optimizer, precision), indent=2)
        + "\n"
        for stage in STAGES
        for optimizer in OPTIMIZERS
        for precision in PRECISIONS
    }


def write(folder: Path = FOLDER) -> None:
    for name, content in render_all().items():
        (folder / name).write_text(content)


def find_differences(folder: Path = FOLDER) -> list[str]:
    """One line for each file that is missing, that differs, or that nothing here writes."""
    expected = render_all()
    present = {path.name: path.read_text() for path in folder.glob("*.json")}
    return (
        [f"{name}: missing" for name in sorted(expected.keys() - present.keys())]
        + [f"{name}: not written by ds_configs.generate" for name in sorted(present.keys() - expected.keys())]
        + [f"{name}: differs" for name in sorted(expected.keys() & present.keys()) if present[name] != expected[name]]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the DeepSpeed configuration files of this folder.")
    parser.add_argument("--check", action="store_true", help="compare only, and fail where a file is out of date")
    if not parser.parse_args(argv).check:
        write()
        return 0
    differences = find_differences()
    for line in differences:
        print(line)
    if differences:
        print("run: python -m ds_configs.generate")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
