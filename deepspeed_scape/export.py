"""Write the weights of a checkpoint as safetensors (or a torch file), under every name the model knows them by.

    python -m deepspeed_scape.export CHECKPOINT OUT [--dtype fp32|bf16|fp16|model] [--format safetensors|torch]

Trained weights are the fp32 masters; frozen weights and buffers are as the model holds them. DeepSpeed's
``zero_to_fp32`` leaves frozen weights out at stage 1, and tied names out of its safetensors.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_scape import checkpoint, manifest
from deepspeed_scape.manifest import ScapeCheckpointError
from deepspeed_scape.universal import load_file, rank_files

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def weights(source: Path, dtype: str = "fp32") -> dict[str, Tensor]:
    """Every entry of the model's state dict; tied names share a tensor.

    Args:
        source: the folder of one tag.
        dtype: "fp32", "bf16" or "fp16" of all weights, from the fp32 masters; "model" for what the model held.

    Raises:
        ScapeCheckpointError: ``source`` is damaged, not SCAPE's, or universal.
    """
    listed = manifest.read(source)
    if listed.get("universal"):
        raise ScapeCheckpointError(f"{source} is universal. Remedy: export the checkpoint that it was made from")
    if problem := manifest.find_damage(source, listed["files"], listed["files"]):
        raise ScapeCheckpointError(problem)
    model = load_file(next(source / name for name in listed["files"] if name.endswith("_model_states.pt")))
    found = {name: value for name, value in model["module"].items() if torch.is_tensor(value)}
    if dtype == "model":
        return found
    shapes = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
    for name, value in _masters(
        [load_file(file)["optimizer_state_dict"] for file in rank_files(source, listed)]
    ).items():
        found[name] = value.view(shapes[name])
    for tied, name in (model.get("shared_params") or {}).items():
        found[tied] = found[name]
    return {name: v.to(DTYPES[dtype]) if v.is_floating_point() else v for name, v in found.items()}


def _masters(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """fp32 masters (n,) by name, from the ZeRO states of all ranks in rank order."""
    ours = states[0][checkpoint.KEY]
    found = {}
    for i, slots in enumerate(ours["parameters"]):
        size = ours["groups"][i]["last"].numel()
        parts = [state["single_partition_of_fp32_groups"][i].detach() for state in states]
        whole = torch.cat([torch.nn.functional.pad(part, (0, size - part.numel())) for part in parts])
        found.update({name: whole[start : start + numel].clone() for name, start, numel in slots if numel})
    return found


def export(source: Path, out: Path, dtype: str = "fp32", file_format: str = "safetensors") -> None:
    """Write ``out/model.safetensors`` or ``out/pytorch_model.bin``, whole or not at all.

    Args:
        source: the folder of one tag.
        out: a folder that is not there yet.
        dtype: see :func:`weights`.
        file_format: "safetensors" or "torch".

    Raises:
        ScapeCheckpointError: see :func:`weights`; or ``out`` exists.
    """
    if out.exists():
        raise ScapeCheckpointError(f"{out} exists. Remedy: name a folder that does not")
    found = weights(source, dtype)
    draft = manifest.draft_of(out.absolute())
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        if file_format == "safetensors":
            from safetensors.torch import save_file

            # shared memory is refused by the format, and a name left out is a tied weight lost
            whole = {name: value.contiguous().clone() for name, value in found.items()}
            save_file(whole, draft / "model.safetensors", {"format": "pt"})
            (draft / "model.safetensors").chmod(draft.stat().st_mode & 0o666)  # it leaves it to its writer alone
        else:
            torch.save(found, draft / "pytorch_model.bin")
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deepspeed_scape.export", description=__doc__.split("\n\n")[0])
    parser.add_argument("checkpoint", type=Path, help="the folder of one tag")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=[*DTYPES, "model"], default="fp32", help="of the weights (default: fp32)")
    parser.add_argument("--format", choices=("safetensors", "torch"), default="safetensors")
    args = parser.parse_args()
    try:
        export(args.checkpoint, args.out, args.dtype, args.format)
    except (ScapeCheckpointError, ImportError) as error:
        sys.exit(f"deepspeed_scape.export: error: {error}")
    print(f"{args.out}: written")


if __name__ == "__main__":
    main()
