"""Weights out of a checkpoint: tied, frozen, odd-sized, zero-sized, several groups; equal to the live model's bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspeed_scape.export import export, weights
from tests.launch import ROOT, run_ranks

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("rank_world.py")
CASES: list[dict[str, Any]] = [
    {"name": f"zero{stage}-{dtype}", "stage": stage, "dtype": dtype, "params": {"sparsity": 0.9}}
    for stage in (1, 2)
    for dtype in ("fp32", "bf16")
]
NAMES = [case["name"] for case in CASES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of three ranks, where no size divides evenly."""
    folder = tmp_path_factory.mktemp("export")
    run_ranks(SCRIPT, 3, ["save", folder, json.dumps(CASES)])
    return folder


def live(folder: Path, name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The model's own state dict, and the masters of what was trained."""
    saved = torch.load(folder / name / "saved.pt")
    masters = {key: value["master"] for key, value in saved["parameters"].items()}
    return saved["module"], {key: value for key, value in masters.items() if value.numel()}


@pytest.mark.parametrize("name", NAMES)
def test_safetensors_has_every_name_and_the_exact_weights(folder: Path, tmp_path: Path, name: str) -> None:
    module, masters = live(folder, name)
    export(folder / name / "half", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == module.keys()
    for key, value in module.items():
        assert found[key].shape == value.shape, key
        assert torch.equal(found[key].to(value.dtype), value), key  # the live model, bit for bit
        if key in masters:
            assert torch.equal(found[key].reshape(-1), masters[key]), key  # and the fp32 masters behind it
    assert torch.equal(found["decode.weight"], found["embed.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_the_models_own_dtype(folder: Path, tmp_path: Path, name: str) -> None:
    module, _ = live(folder, name)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "deepspeed_scape.export", folder / name / "half", out, "--dtype", "model"]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, timeout=120)
    found = load_file(out / "model.safetensors")
    assert all(found[key].dtype == value.dtype and torch.equal(found[key], value) for key, value in module.items())


@pytest.mark.parametrize("name", NAMES)
def test_zero_to_fp32_agrees_on_what_was_trained(folder: Path, name: str) -> None:
    """DeepSpeed's own tool; at stage 1 it leaves frozen weights out, which is why there is another."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(str(folder / name), tag="half")
    ours = weights(folder / name / "half")
    _, masters = live(folder, name)
    for key in [*masters, "decode.weight"]:
        assert torch.equal(found[key], ours[key]), key


def test_an_export_loads_into_a_fresh_model(folder: Path, tmp_path: Path) -> None:
    from tests.dist.odd_model import OddNet

    export(folder / "zero2-fp32" / "half", tmp_path / "out", file_format="torch")
    model = OddNet(seed=9)
    model.load_state_dict(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True))
    module, _ = live(folder, "zero2-fp32")
    assert all(torch.equal(value, module[key]) for key, value in model.state_dict().items())
    assert model.decode.weight is model.embed.weight


def test_a_damaged_checkpoint_is_not_exported(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder / "zero1-fp32" / "half", tmp_path / "bad")
    victim = next((tmp_path / "bad").glob("*optim_states.pt"))
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 4
    victim.write_bytes(raw)
    command = [sys.executable, "-m", "deepspeed_scape.export", tmp_path / "bad", tmp_path / "out"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and victim.name in done.stderr and "SHA-256" in done.stderr
    assert not (tmp_path / "out").exists()
