"""Ranks of a plain mpirun: found through MPI, or refused, never taken for jobs of one."""

from __future__ import annotations

import os
import sys
from typing import Any

import deepspeed.comm
import pytest

from launch.cluster import LOCAL_SIZES, SIZES, find_ranks

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *SIZES, *LOCAL_SIZES):
        monkeypatch.setenv(name, "")  # so that it is undone, whatever the test's subject sets
        monkeypatch.delenv(name)


def discover(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """DeepSpeed's discovery, with an MPI that has so many ranks."""

    def discovery(**_: Any) -> None:
        found = {
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "10.9.9.9",
            "MASTER_PORT": "29500",
        }
        os.environ.update(found)

    monkeypatch.setattr(deepspeed.comm, "mpi_discovery", discovery)


@pytest.mark.parametrize("size", SIZES)
def test_mpi_tells_the_rank(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    discover(monkeypatch, 2)
    monkeypatch.setenv(size, "2")
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    find_ranks()
    assert [os.environ[name] for name in NAMES] == ["1", "1", "2", "2", "10.9.9.9", "29500"]


def test_an_address_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    discover(monkeypatch, 2)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    find_ranks()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "1234")


@pytest.mark.parametrize("env", [{}, {"PMI_SIZE": "1"}, {"OMPI_COMM_WORLD_SIZE": "2", "RANK": "0"}])
def test_nothing_is_asked_without_need(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    discover(monkeypatch, 7)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    find_ranks()
    assert "WORLD_SIZE" not in os.environ


def test_without_mpi4py_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(ValueError, match="2 ranks were started, but can't ask MPI .*launch/as_rank.sh"):
        find_ranks()


def test_another_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    discover(monkeypatch, 1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ValueError, match="4 ranks were started, but mpi4py sees 1: it is for another MPI"):
        find_ranks()
