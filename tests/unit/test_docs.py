"""The documentation says what is so: refusals are refused, links lead somewhere, each command is run by some test."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepspeed_scape import doctor

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REFUSED = re.compile(r"^\| `(\{.*?\})` \|", re.MULTILINE)
COMMAND = re.compile(
    r"^(?:    |\$ )((?:[A-Z_]+=\S+ )*(?:sudo )?(?:deepspeed|python|bash|pip|accelerate|mpirun|sbatch)\b.*)$", re.M
)
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")

# what a command line begins with, and the test that runs it or its parser on what stands there
RUN_BY = {
    "deepspeed --module deepspeed_scape.run": "tests/dist/test_docs_start.py",
    "deepspeed --num_gpus 2 --module deepspeed_scape.run": "tests/dist/test_docs_start.py",
    "python -m deepspeed_scape.run --doctor": "tests/unit/test_doctor.py",
    "bash launch/quickstart.sh": "tests/unit/test_launch_quickstart.py",
    "python -m deepspeed_scape.plan": "tests/unit/test_plan_docs.py",
    "deepspeed --num_gpus 2 launch/pretrain.py": "tests/dist/test_pretrain.py",
    "python -m evals.report": "tests/unit/test_report.py",
    "python -m evals.downstream": "tests/unit/test_downstream.py",
    "python -m deepspeed_scape.universal": "tests/dist/test_world_size.py",
    "python -m deepspeed_scape.export": "tests/dist/test_export.py",
    "pip install torch": "launch/test.sh",
    "pip install -e": "launch/test.sh",
    "pip install 'rich": "tests/unit/test_plan_command.py",
    "bash launch/test.sh": ".ci/run",
}

# pages whose every block has a test of its own
RUN_WHOLE = {"multinode.md": "tests/unit/test_launch_scripts.py", "trainers.md": "tests/dist/test_examples.py"}


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for line in COMMAND.findall(page.read_text()):
            found.append((page.name, re.sub(r"^((?:[A-Z_]+=\S+ )*)(sudo )?", "", line)))
    return found


@pytest.mark.parametrize(("page", "command"), commands(), ids=lambda text: text[:60])
def test_a_command_is_run_by_a_test(page: str, command: str) -> None:
    by = [test for start, test in RUN_BY.items() if command.startswith(start)]
    by += [RUN_WHOLE[page]] if page in RUN_WHOLE else []
    assert by, f"{page}: {command}"
    assert all((ROOT / test).exists() for test in by)


def test_every_entry_is_used() -> None:
    lines = [command for _, command in commands()]
    assert [start for start in RUN_BY if not any(line.startswith(start) for line in lines)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [target for target, _ in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert missing == []


def refused_documents() -> list[dict[str, Any]]:
    return [json.loads(found) for found in REFUSED.findall((ROOT / "docs" / "refused.md").read_text())]


@pytest.mark.parametrize("changes", refused_documents(), ids=json.dumps)
def test_what_the_page_says_is_refused(changes: dict[str, Any]) -> None:
    base = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SCAPE", "params": {"lr": 1e-3, "sparsity": 0.99}},
    }
    assert doctor.refused(base, 2) is None
    error = doctor.refused(base | changes, 2)
    assert error is not None
    leaf, path = changes, []
    while isinstance(leaf, dict):
        name = list(leaf)[-1]
        path, leaf = [*path, name], leaf[name]
    assert error.key.rpartition(".")[2] in json.dumps(changes) and error.key.startswith(tuple(changes)), error


def test_the_page_of_refusals_is_long() -> None:
    assert len(refused_documents()) == 25
