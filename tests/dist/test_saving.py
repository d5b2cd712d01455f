"""A save is whole or not there, whenever it is killed; what is damaged is refused by name and changes nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_scape import manifest
from tests.dist.rank_saving import POINTS
from tests.launch import run_ranks

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("rank_saving.py")
RANK0 = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
RANK1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def flip(path: Path, at: float = 0.5) -> None:
    raw = bytearray(path.read_bytes())
    raw[int(len(raw) * at)] ^= 1
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def swap(folder: Path) -> None:
    (folder / RANK0).rename(folder / "x")
    (folder / RANK1).rename(folder / RANK0)
    (folder / "x").rename(folder / RANK1)


def reseal(folder: Path, **changes: Any) -> None:
    """A manifest as another version would write it."""
    listed = manifest.read(folder)
    listed.pop("format")
    files = listed.pop("files")
    manifest.write(folder, {**listed, **changes}, files)


DAMAGE: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "truncated zero file": (lambda f: truncate(f / RANK1), [RANK1, "bytes, the manifest says"]),
    "truncated model file": (lambda f: truncate(f / MODEL), [MODEL, "bytes, the manifest says"]),
    "emptied": (lambda f: (f / RANK0).write_bytes(b""), [RANK0, "it has 0 bytes"]),
    "flipped zero file": (lambda f: flip(f / RANK0), [RANK0, "SHA-256"]),
    "flipped model file": (lambda f: flip(f / MODEL, 0.9), [MODEL, "SHA-256"]),
    "flipped manifest": (lambda f: flip(f / manifest.NAME, 0.3), [manifest.NAME, "is damaged"]),
    "truncated manifest": (lambda f: truncate(f / manifest.NAME), [manifest.NAME, "is damaged"]),
    "no manifest": (lambda f: (f / manifest.NAME).unlink(), [manifest.NAME, "not copied whole"]),
    "missing zero file": (lambda f: (f / RANK1).unlink(), [RANK1, "missing"]),
    "missing model file": (lambda f: (f / MODEL).unlink(), [MODEL, "missing"]),
    "wrong rank": (swap, ["_mp_rank_00_optim_states.pt is damaged", "SHA-256"]),
    "newer state": (lambda f: reseal(f, version=99), ["format is 99", "reads 2"]),
    "older state": (lambda f: reseal(f, version=1), ["format is 1", "reads 2"]),
    "newer manifest": (lambda f: reseal(f, format=7, deepspeed_scape="9.1"), ["format 7", "reads 1", "9.1"]),
    "other model": (
        lambda f: reseal(f, parameters=[[["other.weight", 0, 4]], [["b", 0, 1]], [["gain", 0, 1]]]),
        ["parameter group 0", "other.weight"],
    ),
    "fewer groups": (lambda f: reseal(f, parameters=[]), ["0 parameter groups, this run 3"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture(scope="module")
def good(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(SCRIPT, 2, ["good", folder / "good"])


@pytest.fixture(scope="module")
def killed(folder: Path) -> dict[str, Any]:
    return {
        point: run_ranks(SCRIPT, 2, ["die", folder / point.replace(" ", "_"), point], timeout=200, expect_failure=True)
        for point in POINTS
    }


@pytest.fixture(scope="module")
def tried(folder: Path, good: Any, killed: Any) -> dict[str, list[dict[str, Any]]]:
    """What each rank got for every attempt, all in one launch."""
    attempts: dict[str, dict[str, Any]] = {}
    for point in POINTS:
        path = str(folder / point.replace(" ", "_"))
        attempts[f"{point}/latest"] = {"folder": path, "tag": None}
        attempts[f"{point}/two"] = {"folder": path, "tag": "two"}
    for name, (damage, _) in DAMAGE.items():
        path = folder / "damaged" / name.replace(" ", "_")
        shutil.copytree(folder / "good", path)
        damage(path / "one")
        attempts[name] = {"folder": str(path), "tag": "one"}
    shutil.copytree(folder / "good", folder / "lost")
    (folder / "lost" / "latest").write_text("gone")
    attempts["latest names nothing"] = {"folder": str(folder / "lost"), "tag": None}
    attempts["two tags"] = {"folder": str(folder / "good"), "tag": ["one", "global_step6"]}
    attempts["fresh"] = {"folder": str(folder / "nowhere"), "tag": None}
    attempts["good"] = {"folder": str(folder / "good"), "tag": None}
    results = run_ranks(SCRIPT, 2, ["try", folder, json.dumps(list(attempts.values()))])
    return {name: [result[i] for result in results] for i, name in enumerate(attempts)}


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_save_leaves_the_checkpoint_before(killed: Any, tried: Any, good: Any, point: str) -> None:
    assert killed[point].returncode == -9 or killed[point].returncode == 137, killed[point].output
    for rank, got in enumerate(tried[f"{point}/latest"]):
        assert got["loaded"] and got["steps"] == 4
        assert got["losses"] == good[rank]["losses"]  # goes on as if nothing had happened


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_save_is_refused_or_whole(folder: Path, killed: Any, tried: Any, point: str) -> None:
    for got in tried[f"{point}/two"]:
        if point in ("renamed", "half of latest"):  # it was whole by then
            assert got["loaded"] and got["steps"] == 6
        elif point == "between the renames":
            assert "there is no checkpoint" in got["error"] and "load another tag: one" in got["error"]
        else:
            # where a rank outlives the other, it takes the rest of the broken save away
            why = "there is no checkpoint" if point == "half a file" else "was not finished"
            assert why in got["error"] and "load another tag: one" in got["error"] and got["unchanged"]


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_name_alike_on_all_ranks(tried: Any, name: str) -> None:
    said = [got["error"] for got in tried[name]]
    assert said[0] == said[1] and said[0].startswith("ScapeCheckpointError: ")
    assert "Remedy: " in said[0] or name == "fewer groups"
    for part in DAMAGE[name][1]:
        assert part in said[0]
    assert all(got["unchanged"] for got in tried[name])


def test_what_latest_names_must_exist(tried: Any) -> None:
    for got in tried["latest names nothing"]:
        for part in ("there is no checkpoint", "gone", "load another tag: global_step6, one"):
            assert part in got["error"]


def test_ranks_that_mean_different_tags_are_refused(tried: Any, good: Any) -> None:
    for got in tried["two tags"]:
        assert "the ranks would load different tags: ['one', 'global_step6']" in got["error"] and got["unchanged"]
    for result in good:
        assert "the ranks save different tags: mine0, mine1" in result["tags"]


def test_the_start_of_a_run_is_no_error(tried: Any) -> None:
    for got in tried["fresh"]:
        assert got["loaded"] is None and "error" not in got


def test_whole_checkpoints_load_and_leave_no_drafts(folder: Path, tried: Any, good: Any) -> None:
    assert all(got["steps"] == good[0]["step"] for got in tried["good"])
    left = sorted(path.name for path in (folder / "good").iterdir() if path.suffix not in (".bin", ".py"))
    assert left == ["global_step6", "latest", "one"]


def test_ours_is_tensors_and_plain_types(good: Any) -> None:
    assert all(result["safe"] for result in good)


def test_bf16_and_fp32_files_are_not_mixed_up(good: Any) -> None:
    for result in good:
        assert "bf16.enabled = true" in result["bf16"]["error"] and result["bf16"]["unchanged"]


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("no right to mount")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_is_told_on_all_ranks_and_loses_nothing(folder: Path, small_disk: Path) -> None:
    results = run_ranks(SCRIPT, 2, ["full", folder / "full", small_disk], timeout=200)
    for result in results:
        assert result["said"] == results[0]["said"]
        for part in ("ScapeCheckpointError: ", "cannot write", "bytes free"):
            assert part in result["said"]
        assert result["left"] == ["filler", "latest", "one"] and result["latest"] == "one"  # no rest of the broken save
        assert result["losses"] and result["resumed"]["steps"] == 4
    assert (folder / "full" / "elsewhere" / manifest.NAME).exists()
