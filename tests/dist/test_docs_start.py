"""docs/start.md, followed to the letter: its JSON, its script, its command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.children import end_tree
from launch.ports import free_port
from tests.launch import ROOT, extensions_dir

pytestmark = pytest.mark.dist
PAGE = (ROOT / "docs" / "start.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def test_the_page_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("python"))
    (tmp_path / "ds.json").write_text(block("json"))
    (command,) = re.findall(r"^    (deepspeed --num_gpus 2 .*)$", PAGE, re.MULTILINE)
    words = command.split()
    words.insert(words.index("train.py"), str(Path(__file__).with_name("no_shm.py")))
    words[:1] = [sys.executable, str(Path(sys.executable).with_name("deepspeed")), "--master_port", str(free_port())]
    env = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions_dir(),
    }  # fmt: skip
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            words, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        status = process.wait(240)
    finally:
        if process.poll() is None:
            end_tree(process)
    said = (tmp_path / "log").read_text(errors="replace")
    assert status == 0, said[-5000:]
    told = re.findall(r"step (\d+) loss ([\d.]+) bytes sent (\d+) norm ([\d.]+)", said)
    assert [int(step) for step, *_ in told] == [30, 60, 90, 120, 150]
    assert float(told[-1][1]) < float(told[0][1])
    sent = [int(count) for _, _, count, _ in told]
    assert len(set(sent[:3])) == 1 and len(set(sent[3:])) <= 2
    assert sent[0] > 57_000 and sent[-1] < 15_000  # of 14,432 parameters, dense and at 90%
