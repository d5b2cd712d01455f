"""The shipped configuration files: as the generator makes them, and as DeepSpeed reads them."""

import json

import pytest

from ds_configs import generate

NAMES = sorted(generate.render_all())


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """DeepSpeed takes the world size of a process group where there is one, and 1 otherwise."""
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def test_files_are_what_the_generator_writes():
    assert len(NAMES) == 2 * 4 * 3
    assert generate.find_differences() == []


def test_check_reports_every_kind_of_difference(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    generate.write(tmp_path)
    assert generate.find_differences(tmp_path) == []
    (tmp_path / NAMES[0]).unlink()
    (tmp_path / NAMES[1]).write_text("{}\n")
    (tmp_path / "stray.json").write_text("{}\n")
    assert generate.find_differences(tmp_path) == [
        f"{NAMES[0]}: missing",
        "stray.json: not written by ds_configs.generate",
        f"{NAMES[1]}: differs",
    ]


def test_command_line(monkeypatch, capsys):
    assert generate.main(["--check"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(generate, "find_differences", lambda: ["a.json: differs"])
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out.splitlines() == ["a.json: differs", "run: python -m ds_configs.generate"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.removesuffix(".json"))
def test_deepspeed_reads_it(name):
    from deepspeed.runtime.config import DeepSpeedConfig

    stage, optimizer, precision = name.removesuffix(".json").split("_")
    config = DeepSpeedConfig(str(generate.FOLDER / name))
    assert config.world_size == 1
    assert config.train_batch_size == config.train_micro_batch_size_per_gpu == 2
    assert config.gradient_accumulation_steps == 1
    assert config.gradient_clipping == 1.0
    assert config.zero_optimization_stage == int(stage.removeprefix("zero"))
    assert config.optimizer_params["betas"] == [0.9, 0.95]
    assert config.optimizer_params.get("sparsity") == {"scape90": 0.9, "scape99": 0.99}.get(optimizer)
    if hasattr(config, "float16_config"):
        bf16, fp16, loss_scale = (
            config.bfloat16_config.enabled, config.float16_config.enabled, config.float16_config.loss_scale
        )  # fmt: skip
    else:  # DeepSpeed 0.16.9 keeps them apart, and has a loss scale of 1 for bf16
        bf16, fp16 = config.bfloat16_enabled, config.fp16_enabled
        loss_scale = 0 if bf16 else config.loss_scale
    assert (bf16, fp16) == (precision == "bf16", precision == "fp16")
    assert loss_scale == 0  # dynamic
    assert config.grad_accum_dtype == ("fp32" if precision == "bf16" else None)


@pytest.mark.parametrize("stage", generate.STAGES)
@pytest.mark.parametrize("precision", generate.PRECISIONS)
def test_only_the_optimizer_entry_differs(stage, precision):
    """Switching to SCAPE is one entry of the file."""
    files = [
        json.loads((generate.FOLDER / f"zero{stage}_{optimizer}_{precision}.json").read_text())
        for optimizer in generate.OPTIMIZERS
    ]
    assert len({json.dumps(file.pop("optimizer")) for file in files}) == len(files)
    assert all(file == files[0] for file in files)
