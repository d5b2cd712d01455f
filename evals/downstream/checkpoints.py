"""A checkpoint of launch/pretrain.py, or exported fp32 weights, as a transformers model with its tokenizer."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launch.metrics import read_metrics
from launch.models import PRESETS, build_model
from launch.options import ROOT
from launch.tokens import END_OF_TEXT

MODEL_STATES = "mp_rank_00_model_states.pt"
WEIGHTS = (".bin", ".pt", ".safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Where the weights lie and what is needed to build their model."""

    name: str
    path: Path  # a tag folder of DeepSpeed's, a file of weights, or a folder of such files
    preset: str
    vocab: int
    seq: int
    tokenizer: Path


def find(path: Path, args: argparse.Namespace) -> Checkpoint:
    """What `path` means: a run's folder, its checkpoints folder, one tag of it, or exported weights.

    Model and tokenizer are read from the checkpoint or the run's metrics.jsonl; `--preset`, `--vocab-size`, `--seq-len`
    and `--tokenizer` say it otherwise. Raises ValueError if anything is missing.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such checkpoint")
    place = _weights_of(path)
    known = _settings(place)
    preset = args.preset or known.get("preset")
    if preset not in PRESETS:
        raise ValueError(f"{path}: of which model? Give --preset, one of {', '.join(PRESETS)} (found: {preset})")
    vocab = args.vocab_size or known.get("vocab_size") or PRESETS[preset].vocab
    seq = args.seq_len or known.get("seq_len") or PRESETS[preset].seq
    return Checkpoint(_name(place), place, preset, vocab, seq, _tokenizer(path, known, args))


def _weights_of(path: Path) -> Path:
    for folder in (path, path / "checkpoints"):
        if (folder / MODEL_STATES).is_file():
            return folder
        if (folder / "latest").is_file():
            tag = folder / (folder / "latest").read_text().strip()
            if not (tag / MODEL_STATES).is_file():
                raise ValueError(f"{folder / 'latest'}: names {tag.name}, which has no {MODEL_STATES}")
            return tag
    if path.suffix in WEIGHTS or (path.is_dir() and _files(path)):
        return path
    raise ValueError(
        f"{path}: neither a checkpoint of launch/pretrain.py (no `latest`, no {MODEL_STATES}) nor exported weights "
        f"({', '.join(WEIGHTS)})"
    )


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(p for p in path.iterdir() if p.suffix in WEIGHTS and p.name != MODEL_STATES)


def _is_zero(place: Path) -> bool:
    return (place / MODEL_STATES).is_file()


def _name(place: Path) -> str:
    parts = [p for p in place.resolve().parts if p != "checkpoints"]
    return "/".join(parts[-2:])


def _settings(place: Path) -> dict[str, Any]:
    """preset, vocab_size, seq_len, tokens_key and cache_dir, as far as checkpoint and run tell."""
    known: dict[str, Any] = {}
    for parent in [place, *place.resolve().parents][:4]:
        if (parent / "metrics.jsonl").is_file():
            config = read_metrics(parent / "metrics.jsonl")[0]
            known = {**config, "cache_dir": config.get("args", {}).get("cache_dir")}
            break
    if _is_zero(place):
        # our own file: DeepSpeed's holds more than tensors, so its unpickler has to run
        known |= torch.load(place / MODEL_STATES, map_location="cpu", mmap=True, weights_only=False).get("pinned", {})
    return known


def _tokenizer(path: Path, known: dict[str, Any], args: argparse.Namespace) -> Path:
    if args.tokenizer:
        candidates = [args.tokenizer]
    else:
        caches = [args.cache_dir or known.get("cache_dir"), ROOT / "runs" / "cache"]
        candidates = [Path(c) / str(known.get("tokens_key")) / "tokenizer.json" for c in caches if c]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ValueError(f"{path}: its tokenizer is not at {candidates[0]}; give --tokenizer FILE or --cache-dir FOLDER")


def load_model(checkpoint: Checkpoint) -> nn.Module:
    """The model in fp32, in evaluation mode. Raises ValueError if the weights are of another model."""
    model = build_model(checkpoint.preset, vocab=checkpoint.vocab, seq=checkpoint.seq)
    state = {name.removeprefix("module."): tensor for name, tensor in _read_weights(checkpoint.path).items()}
    wrong = [n for n, p in model.state_dict().items() if n in state and state[n].shape != p.shape]
    if wrong:
        shapes = f"{tuple(state[wrong[0]].shape)} in the file, {tuple(model.state_dict()[wrong[0]].shape)} expected"
        raise ValueError(f"{checkpoint.path}: not a {checkpoint.preset}: {wrong[0]} is {shapes}")
    missing, unknown = model.load_state_dict(state, strict=False)
    stored = {model.get_parameter(n).data_ptr() for n, _ in model.named_parameters() if n in state}
    lost = [n for n in missing if model.state_dict()[n].data_ptr() not in stored]  # a tied weight is there once
    if lost or unknown:
        raise ValueError(f"{checkpoint.path}: not a {checkpoint.preset}: missing {lost[:3]}, unknown {unknown[:3]}")
    return model.float().eval()


def _read_weights(place: Path) -> dict[str, Tensor]:
    if _is_zero(place):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return dict(get_fp32_state_dict_from_zero_checkpoint(str(place.parent), tag=place.name))
    state: dict[str, Tensor] = {}
    for file in _files(place):
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            state |= load_file(file)
        else:
            state |= torch.load(file, map_location="cpu", weights_only=True)
    return state


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The byte-level BPE as transformers wants it; the end of text is also what a prompt starts with."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(checkpoint.tokenizer), bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
