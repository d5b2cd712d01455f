"""Hostfile and .deepspeed_env: what DeepSpeed would misread or fail on is refused, all else reads as it reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.launcher.runner import _parse_hostfile
from hypothesis import given
from hypothesis import strategies as st

from launch.preflight import hostfile as hostfile_module
from launch.preflight.envfile import read_env
from launch.preflight.findings import Findings
from launch.preflight.hostfile import Host, find_hostfile, locate, read_hostfile


def read(tmp_path: Path, text: str) -> tuple[list[Host], list[str]]:
    path = tmp_path / "hostfile"
    path.write_text(text)
    findings = Findings()
    return read_hostfile(path, findings), findings.wrong


def test_a_good_hostfile(tmp_path: Path) -> None:
    hosts, wrong = read(tmp_path, "# two nodes\n\nnode1 slots=8\n  10.0.0.2\tslots=4 max_slots=4\n")
    assert wrong == []
    assert hosts == [Host(name="node1", slots=8), Host(name="10.0.0.2", slots=4)]


@pytest.mark.parametrize(
    ("text", "what", "says"),
    [
        ("node1", ":1 `node1`", "write it like `node1 slots=8`"),
        ("node1 8", ":1 `node1 8`", "is not `NAME slots=NUMBER`"),
        ("node1 slots = 8", ":1 `node1 slots = 8`", "no blanks around"),
        ("node1:8", ":1 `node1:8`", "is not"),
        ("node1 slots=-1", "slots=-1`", "is not"),
        ("# c\nnode1 slots=0", ":2 `node1 slots=0`", "0 slots run no rank"),
        ("node1 slots=4.5", "slots=4.5`", "DeepSpeed would read 4 slots and drop `.5`"),
        ("node1 slots=8\nnode1 slots=4", ":2 `node1 slots=4`", "node1 is there twice"),
        ("", "--hostfile", "names no node"),
        ("# nothing\n", "--hostfile", "names no node"),
    ],
)
def test_bad_lines_are_refused(tmp_path: Path, text: str, what: str, says: str) -> None:
    _, wrong = read(tmp_path, text)
    assert len(wrong) == 1 and what in wrong[0] and says in wrong[0]


def test_every_bad_line_is_told(tmp_path: Path) -> None:
    hosts, wrong = read(tmp_path, "a slots=0\nb\nc slots=1\nc slots=1\n")
    assert [host.name for host in hosts] == ["c"] and len(wrong) == 3


@pytest.mark.parametrize("kind", ["absent", "folder", "binary"])
def test_a_hostfile_that_can_not_be_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "hostfile"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe")
    findings = Findings()
    assert read_hostfile(path, findings) == []
    assert len(findings.wrong) == 1 and findings.wrong[0].startswith(f"--hostfile {path}: ")


def test_which_hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "job"
    monkeypatch.setattr(hostfile_module, "DEEPSPEED_DEFAULT", job)
    assert find_hostfile("x") == Path("x") and find_hostfile(None) == Path("hostfile")
    job.write_text("a slots=1")
    assert find_hostfile(None) == job
    (tmp_path / "hostfile").write_text("a slots=1")
    assert find_hostfile(None) == Path("hostfile")


PIECES = st.sampled_from(
    ["n1", "n2", " ", "\t", "slots=", "slots", "=", "0", "2", "16", "#", "\n", "\n", "max_slots=4", "."]
)


@given(st.lists(PIECES, max_size=14).map("".join))
def test_what_is_accepted_reads_as_deepspeed_reads_it(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("hostfile")
    hosts, wrong = read(folder, text)
    with (folder / "hostfile").open() as file:
        lines = file.readlines()
    try:
        theirs = dict(_parse_hostfile(lines))
    except ValueError:
        assert wrong
        return
    if not wrong:
        assert {host.name: host.slots for host in hosts} == theirs


def located(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> tuple[list[Host], list[str]]:
    monkeypatch.setattr(hostfile_module, "resolve", lambda name: names[name])
    findings = Findings()
    return locate([Host(name=name, slots=1) for name in names], findings), findings.wrong


def test_addresses_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, wrong = located(monkeypatch, {"a": ["127.0.1.1", "10.0.0.1"], "b": ["10.0.0.2", "fd00::2"]})
    assert wrong == [] and [host.address for host in hosts] == ["10.0.0.1", "10.0.0.2"]


def test_one_node_may_be_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert located(monkeypatch, {"a": ["127.0.0.1"]})[1] == []


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"a": [], "b": ["10.0.0.2"]}, "host a: has no known address; add it to /etc/hosts"),
        (
            {"a": ["10.0.0.1"], "b": ["127.0.1.1"]},
            "host b: resolves to 127.0.1.1, by which every other node means itself",
        ),
        (
            {"a": ["10.0.0.1"], "b": ["10.0.0.1"]},
            "host b: has the address 10.0.0.1 of a, so both would use the same GPUs",
        ),
    ],
)
def test_bad_addresses_are_refused(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]], says: str) -> None:
    hosts, wrong = located(monkeypatch, names)
    assert len(hosts) == 1 and len(wrong) == 1 and wrong[0].startswith(says)


def test_a_name_that_nobody_knows() -> None:
    findings = Findings()
    assert locate([Host(name="no-such-host.invalid", slots=1)], findings) == []
    assert "host no-such-host.invalid: has no known address" in findings.wrong[0]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    monkeypatch.chdir(here)
    return home, here


def test_the_nearer_file_wins(folders: tuple[Path, Path]) -> None:
    home, here = folders
    (home / ".deepspeed_env").write_text("A=1\nB=2\n")
    (here / ".deepspeed_env").write_text("B = x=y \nC=three words")
    findings = Findings()
    assert read_env(findings) == {"A": "1", "B": "x=y", "C": "three words"} and findings.wrong == []


def test_no_file_is_no_variable_and_another_name_counts(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = Findings()
    assert read_env(findings) == {}
    (folders[1] / "other").write_text("A=1\n")
    monkeypatch.setenv("DS_ENV_FILE", "other")
    assert read_env(findings) == {"A": "1"}


def test_one_file_in_both_places_is_read_once(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders[0])
    (folders[0] / ".deepspeed_env").write_text("bad\n")
    findings = Findings()
    read_env(findings)
    assert len(findings.wrong) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "a line without `=`; delete the line"),
        ("# NCCL settings", "a line without `=`"),
        ("# A=1", "`# A` is no variable's name; write NAME=VALUE: no `export`, no comments"),
        ("export A=1", "`export A` is no variable's name"),
        ("=1", "`` is no variable's name"),
        ('A="two words"', "DeepSpeed puts it between double quotes"),
        ("A=$HOME/x", "write the plain value"),
        ("A=`date`", "write the plain value"),
    ],
)
def test_bad_env_lines_are_refused(folders: tuple[Path, Path], line: str, says: str) -> None:
    (folders[1] / ".deepspeed_env").write_text(f"GOOD=1\n{line}\nLAST=2\n")
    findings = Findings()
    assert read_env(findings) == {"GOOD": "1", "LAST": "2"}
    assert len(findings.wrong) == 1 and f".deepspeed_env:2 `{line}`" in findings.wrong[0] and says in findings.wrong[0]
