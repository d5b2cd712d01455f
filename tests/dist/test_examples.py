"""The commands of docs/trainers.md as they stand there, under the real launchers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.ports import free_port
from tests.launch import BIN, ROOT, extensions_dir, kill_tagged

pytest.importorskip("transformers", reason="the examples train a model of transformers")
pytest.importorskip("accelerate", reason="pip install 'deepspeed-scape[test]'")
pytestmark = pytest.mark.dist
PAGE = ROOT / "docs" / "trainers.md"
PORT = {"deepspeed": "--master_port", "accelerate": "--main_process_port"}


JSON = "launch/examples/scape_auto.json"


def command_of(program: str) -> list[str]:
    """The words of the page's one command that starts with ``program``."""
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"    {program} ")]
    return shlex.split(line)


def run(words: list[str], folder: Path, *more: str) -> None:
    """The command on this test's own port, in its own ``runs/``, and through no_shm.py."""
    program, *rest = [word.replace("runs/", f"{folder}/") for word in words]
    if JSON in rest:  # the page's 40 steps would all be dense
        document = json.loads((ROOT / JSON).read_text())
        document["optimizer"]["params"]["warmup_steps"] = 5
        rest[rest.index(JSON)] = str(folder / "sparse.json")
        (folder / "sparse.json").write_text(json.dumps(document))
    rest.insert(rest.index("deepspeed_scape.run") + 1, "tests/dist/no_shm.py")
    own = [*(rest.pop(0) for _ in range(program == "accelerate")), PORT[program], str(free_port())]
    tag = uuid.uuid4().hex
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": extensions_dir(), "SCAPE_TEST_TAG": tag, "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, str(BIN / program), *own, *rest, *more]
    if program == "deepspeed" and not torch.cuda.is_available():
        command.append("--use_cpu")  # the Trainer's own flag, see the page
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)
    finally:
        kill_tagged(tag)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "scape_manifest.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    run(command_of("deepspeed"), folder)
    return folder / "hf"


def losses(checkpoint: Path) -> dict[int, float]:
    rows = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_the_trainer_script_trains_with_scape(trained: Path) -> None:
    found = losses(trained / "checkpoint-40")
    assert list(found) == [10, 20, 30, 40] and found[40] < found[10] - 0.3
    saved = manifest(trained / "checkpoint-40" / "global_step40")
    assert saved["step"] == 40 and saved["world_size"] == 2 and saved["options"]["sparsity"] == 0.9
    assert saved["options"]["lr"] == 1e-3  # the JSON says "auto"
    assert (trained / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_trainer_script_goes_on_from_its_newest_checkpoint(trained: Path) -> None:
    run(command_of("deepspeed"), trained.parent, "--max_steps", "60")
    assert list(losses(trained / "checkpoint-60")) == [10, 20, 30, 40, 50, 60]
    assert manifest(trained / "checkpoint-60" / "global_step60")["step"] == 60


@pytest.mark.slow  # three quarters of a minute, and test_accelerate.py trains the same way
def test_the_accelerate_script_trains_with_scape(tmp_path: Path) -> None:
    run(command_of("accelerate"), tmp_path)
    saved = manifest(tmp_path / "accelerate" / "pytorch_model")
    assert saved["step"] == 40 and saved["world_size"] == 2
    assert [saved["options"][name] for name in ("lr", "weight_decay", "sparsity")] == [1e-3, 0.1, 0.9]
