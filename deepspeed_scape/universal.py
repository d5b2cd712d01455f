"""Convert a checkpoint so that it can be resumed on another number of ranks.

    python -m deepspeed_scape.universal CHECKPOINT OUT

CHECKPOINT is the folder of one tag (``runs/mine/checkpoints/step1000``). OUT is written whole or not at all:
DeepSpeed's ``ds_to_universal`` with SCAPE's own state beside it (``reshard.py``). OUT's parent gets a
``latest_universal`` that names OUT, and the run goes on with ``"checkpoint": {"load_universal": true}`` and
``engine.load_checkpoint(OUT's parent)``.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal

from deepspeed_scape import checkpoint, manifest, reshard
from deepspeed_scape.manifest import ScapeCheckpointError

META = ("version", "step", "world_size", "options", "parameters")


def convert(source: Path, out: Path, workers: int = 1) -> None:
    """Write the universal checkpoint ``out`` from the checkpoint ``source``.

    Args:
        source: the folder of one tag.
        out: a folder that is not there yet.
        workers: processes that DeepSpeed's conversion uses.

    Raises:
        ScapeCheckpointError: ``source`` is damaged, not SCAPE's or universal already, or ``out`` exists.
    """
    source, out = source.absolute(), out.absolute()
    listed = manifest.read(source)
    if listed.get("universal"):
        raise ScapeCheckpointError(f"{source} is a universal checkpoint already")
    if problem := manifest.find_damage(source, listed["files"], listed["files"]):
        raise ScapeCheckpointError(problem)
    if out.exists():
        raise ScapeCheckpointError(f"{out} exists. Remedy: name a folder that does not")
    draft = manifest.draft_of(out)
    shutil.rmtree(draft, ignore_errors=True)
    stage = draft / out.name  # DeepSpeed puts latest_universal beside its output: into the draft with it
    stage.mkdir(parents=True)
    try:
        _convert_deepspeeds(source, stage, workers)
        _convert_ours(rank_files(source, listed), stage / "zero")
        _seal(stage, listed)
        stage.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    manifest.write_text(out.with_name("latest_universal"), out.name)


def _convert_deepspeeds(source: Path, stage: Path, workers: int) -> None:
    args = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(stage),
        num_extract_workers=workers,
        num_merge_workers=workers,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    told = io.StringIO()  # a page of progress that says nothing to the user, unless it fails
    try:
        with contextlib.redirect_stdout(told), _without_empty_parameters():
            ds_to_universal.main(args)
    except Exception as error:
        raise ScapeCheckpointError(
            f"DeepSpeed's ds_to_universal failed on {source}: {error!r}\n{told.getvalue()[-2000:]}"
        ) from error


@contextlib.contextmanager
def _without_empty_parameters() -> Iterator[None]:
    """An older converter stops at a parameter without elements, of which no rank has written a fragment."""
    stock = ds_to_universal._merge_tp_slice_files
    if "ds_checkpoint" not in inspect.signature(stock).parameters:
        yield
        return

    def merge(args: Any, ds_checkpoint: Any, shapes: dict[str, torch.Size], folder: str) -> None:
        stock(args, ds_checkpoint, {name: shape for name, shape in shapes.items() if shape.numel()}, folder)

    ds_to_universal._merge_tp_slice_files = merge
    try:
        yield
    finally:
        ds_to_universal._merge_tp_slice_files = stock


def rank_files(source: Path, listed: dict[str, Any]) -> list[Path]:
    """The ZeRO files of a checkpoint in rank order.

    Raises:
        ScapeCheckpointError: some ranks' files are elsewhere.
    """
    names = [name for name in listed["files"] if name.endswith("_optim_states.pt")]
    by_rank = sorted(names, key=lambda name: int(name.split("zero_pp_rank_")[1].split("_")[0]))
    if len(by_rank) != listed["world_size"]:
        raise ScapeCheckpointError(
            f"{source} has the files of {len(by_rank)} ranks, but {listed['world_size']} wrote it. Remedy: bring the "
            "files of all nodes into one folder"
        )
    return [source / name for name in by_rank]


def _convert_ours(files: list[Path], zero: Path) -> None:
    states = [load_file(file)["optimizer_state_dict"][checkpoint.KEY] for file in files]
    for name, state in reshard.split(states):
        if state["last"].numel():
            torch.save(state, zero / name / reshard.FILE)
    torch.save(reshard.summarise(states), zero / reshard.FILE)
    path, lean = zero / "optimizer_state.pt", zero / "optimizer_state.lean"
    common = load_file(path)
    del common[checkpoint.KEY]  # rank 0's, a copy that nothing reads
    torch.save(common, lean)  # not over a file that is mapped
    lean.replace(path)


def load_file(path: Path) -> Any:
    """One of DeepSpeed's files, mapped where its format allows; it may name classes of DeepSpeed's."""
    try:
        return torch.load(str(path), map_location="cpu", weights_only=False, mmap=True)
    except RuntimeError:  # checkpoint.serialization: false writes a format that cannot be mapped
        return torch.load(str(path), map_location="cpu", weights_only=False)


def _seal(stage: Path, listed: dict[str, Any]) -> None:
    files = [path for path in stage.rglob("*") if path.is_file()]
    meta = {key: listed[key] for key in (*META, "deepspeed_scape", "deepspeed", "bf16")}
    described = {str(path.relative_to(stage)): manifest.describe_file(path, sync=True) for path in files}
    manifest.write(stage, {**meta, "universal": True}, described)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deepspeed_scape.universal", description=__doc__.split("\n\n")[0])
    parser.add_argument("checkpoint", type=Path, help="the folder of one tag")
    parser.add_argument("out", type=Path, help="the folder to write; a latest_universal that names it comes beside it")
    parser.add_argument("--workers", type=int, default=1, help="processes that convert (default: 1)")
    args = parser.parse_args()
    try:
        convert(args.checkpoint, args.out, args.workers)
    except ScapeCheckpointError as error:
        sys.exit(f"deepspeed_scape.universal: error: {error}")
    folder = args.out.absolute().parent
    print(f"{args.out}: written. To resume it on any number of ranks put")
    print(f'  "checkpoint": {{"load_universal": true}}  into the JSON, and call  load_checkpoint("{folder}")')


if __name__ == "__main__":
    main()
