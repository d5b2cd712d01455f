"""The doctor: what it says of this machine and of a JSON, without starting anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_scape import build_locks, doctor, run
from deepspeed_scape.config import ScapeConfigError, ScapeOptions

ROOT = Path(__file__).resolve().parents[2]


def document(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SCAPE", "params": {"lr": 1e-3, "sparsity": 0.99}},
    }
    return {**base, **changes}


def test_versions_and_abilities_are_told() -> None:
    told = dict(doctor.versions())
    assert told["torch"] == torch.__version__ and told["python"] == sys.version.split()[0]
    able = dict(doctor.usable())
    assert {"accelerator", "backend", "NCCL", "kernels", "mpi4py", "wandb", "pdsh", "srun"} <= set(able)
    if not torch.cuda.is_available():
        assert able["accelerator"] == "cpu" and able["backend"].startswith("gloo") and able["NCCL"].startswith("no")
        assert able["kernels"] == "compiled CPU loops (numba)"


def test_a_missing_program_or_a_failing_one_says_nothing() -> None:
    assert doctor._says(["no-such-program-here"]) is None
    assert doctor._says([sys.executable, "-c", "raise SystemExit(3)"]) is None
    assert doctor._says([sys.executable, "-c", "print('one'); print('two')"]) == "one"


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_shipped_configurations_are_accepted(path: Path) -> None:
    assert doctor.refused(json.loads(path.read_text()), 8) is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer.device"),
        ({"zero_optimization": {"stage": 2, "no_such_key": 1}}, "zero_optimization.no_such_key"),
        ({"optimizer": {"type": "SCAPE", "params": {"sparsity": 1.5}}}, "optimizer.params.sparsity"),
        ({"optimizer": {"type": "AdamS", "params": {"sparsity": 0.9}}}, "optimizer.params.sparsity"),
        ({"optimizer": {"type": "SCAPE", "params": {"lr": "auto"}}}, "optimizer.params.lr"),
        ({"gradient_cliping": 1.0}, "gradient_cliping"),
        ({"train_batch_size": 12}, "train_batch_size"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
    ],
)
def test_what_initialize_refuses_is_refused(changes: dict[str, Any], key: str) -> None:
    error = doctor.refused(document(**changes), 8)
    assert error is not None and key in error.key


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_batch_for_these_ranks_is_accepted(ranks: int) -> None:
    given = document(train_batch_size=2 * ranks, gradient_accumulation_steps=2)
    assert doctor.refused(given, ranks) is None and given["train_batch_size"] == 2 * ranks


def test_costs_are_the_designs() -> None:
    """README's bytes a parameter: 2 + 2 + 4 + 8 density + 16/W in bf16; (W-1)/W of 6 and of 0.074."""
    options = ScapeOptions(sparsity=0.99)
    (_, dense_sent, dense_held), (name, sent, held) = doctor.costs(options, "bf16", 10**9, 8)
    assert name == "SCAPE 99%"
    assert dense_sent == 6e9 * 7 / 8 and dense_held == 1e9 * (4 + 12 / 8)
    assert held == pytest.approx(1e9 * (2 + 2 + 4 + 0.08 + 16 / 8))
    assert sent / 1e9 / (7 / 8) == pytest.approx(0.04 + 0.02 + 0.0139, rel=0.01)
    assert doctor.costs(options, "bf16", 1000, 1)[1][1] == 0.0
    outside = ScapeOptions(sparsity=0.99, residual_device="cpu")
    assert doctor.costs(outside, "bf16", 10**9, 8)[1] == (name, sent, pytest.approx(held - 4e9 * 7 / 8))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*arguments: str) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", ["run", "--doctor", *arguments])
        with pytest.raises(SystemExit) as end:
            run.main()
        return end.value.code, capsys.readouterr().out

    config = tmp_path / "ds.json"
    config.write_text(json.dumps(document()))
    status, said = ask("--deepspeed_config", str(config), "--params", "1.8e9", "--ranks", "32")
    assert status == 0 and "accepted" in said and "1,800,000,000 parameters, 32 ranks, fp32" in said
    assert "check_replicas" in said and "SCAPE 99%" in said
    assert "pinned" not in said and "from step 101 on; those before send all elements (warmup_steps)" in said
    outside = document()
    outside["optimizer"]["params"]["residual_device"] = "cpu"
    config.write_text(json.dumps(outside))
    status, said = ask("--deepspeed_config", str(config), "--params", "1e9", "--ranks", "8")
    assert status == 0 and "3.5 GB of pinned host memory" in said
    config.write_text(json.dumps(document(zero_optimization={"stage": 0})))
    status, said = ask("--deepspeed_config", str(config))
    assert status == 1 and "zero_optimization.stage = 0" in said and "Remedy" in said
    several = document(zero_optimization={"stage": 0}, gradient_cliping=1, fp16=1)
    several["optimizer"]["params"]["sparcity"] = 0.9
    config.write_text(json.dumps(several))
    status, said = ask("--deepspeed_config", str(config), "--refusals")
    keys = ["gradient_cliping", "fp16", "optimizer.params.sparcity", "zero_optimization.stage"]
    assert status == 1 and [line.split(" = ")[0] for line in said.splitlines()] == [doctor.REFUSED + k for k in keys]
    several = document(zero_optimization={"stage": 3, "overlap_com": True})  # which DeepSpeed itself refuses
    several["optimizer"]["params"]["lr"] = "5e-4"
    config.write_text(json.dumps(several))
    said = ask("--deepspeed_config", str(config), "--refusals")[1]
    assert "DeepSpeed knows no such key. Remedy: write overlap_comm." in said
    keys = ["zero_optimization.overlap_com", "optimizer.params.lr", "zero_optimization.stage"]
    assert [line.split(" = ")[0] for line in said.splitlines()] == [doctor.REFUSED + k for k in keys]
    config.write_text(json.dumps(document(train_batch_size=12)))
    assert ask("--deepspeed_config", str(config), "--refusals") == (0, "")  # nobody has said how many ranks
    assert ask("--deepspeed_config", str(config), "--refusals", "--ranks", "8")[0] == 1
    config.write_text((ROOT / "launch" / "examples" / "scape_auto.json").read_text())
    status, said = ask("--deepspeed_config", str(config))
    assert re.search(r"^ *lr +auto *$", said, re.MULTILINE) and re.search(r"^ *sparsity +0", said, re.MULTILINE)
    assert status == 0 and "optimizer.params.lr" in said and "the Hugging Face Trainer or Accelerate fills in" in said
    config.write_text(json.dumps(document(optimizer={"type": "AdamW", "params": {"lr": 1e-3}})))
    status, said = ask("--deepspeed_config", str(config))
    assert status == 0 and "does not ask for SCAPE" in said
    assert ask("--deepspeed_config", str(tmp_path / "none.json"))[0] == 1
    assert ask()[0] == 0
    assert ask("--params", "many")[0] == 2
    assert not torch.distributed.is_initialized()


def test_a_refused_configuration_is_told_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    raising = "from deepspeed_scape import ScapeConfigError\nraise ScapeConfigError('a.b', 1, 'no', 'yes')"
    script.write_text(raising)
    monkeypatch.setattr(sys, "argv", ["run", str(script)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as end:
        run.main()
    assert end.value.code == "ScapeConfigError: a.b = 1: no. Remedy: yes."
    script.write_text(f"{raising} from ValueError('of DeepSpeed')")
    monkeypatch.setattr(sys, "argv", ["run", str(script)])
    with pytest.raises(ScapeConfigError):
        run.main()


@pytest.mark.parametrize("inside", ["shm_comm", "py311_cpu/shm_comm"])
def test_a_lock_that_a_killed_build_left_is_told(inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / inside / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    with open(lock):  # as the build that has made it does
        assert build_locks.left_behind() == []
    assert build_locks.left_behind() == [lock]
    assert dict(doctor.usable())["lock"].endswith(f"Remedy: rm {lock}")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent))
    assert build_locks.left_behind() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script given"),
        (["--local_rank=1"], "no script given"),
        (["--local_rank=0", "--deepspeed_config", "ds.json"], "--deepspeed_config stands where the script should"),
        (["--docter"], "--docter stands where the script should"),
        (["ds.json"], "ds.json is no Python script"),
        (["trian.py"], "script trian.py: there is no such file in "),
    ],
)
def test_a_script_that_is_not_there(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["run", *words])
    with pytest.raises(SystemExit) as end:
        run.main()
    assert end.value.code == 2 and capsys.readouterr().err.startswith(f"deepspeed_scape.run: {said}")


def test_the_package_alone_names_its_commands() -> None:
    done = subprocess.run([sys.executable, "-m", "deepspeed_scape"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "--module deepspeed_scape.run" in done.stderr and "universal" in done.stderr
