"""launch/slurm.sbatch on a Slurm cluster of two test nodes: asked, refused, run, and ended by a rank that fails."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.nodes import Nodes, lacking
from tests.dist.slurm_cluster import PROGRAMS, SlurmCluster
from tests.dist.user_folder import MODULE, check_reports, fill, shell
from tests.launch import ROOT

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(bool(lacking(*PROGRAMS)), reason=f"no Slurm nodes here: {'; '.join(lacking(*PROGRAMS))}"),
]
SCRIPT = str(ROOT / "launch" / "slurm.sbatch")
TWO = "--nodes=2 --ntasks-per-node=1 --gpus-per-node=1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with (
        Nodes(2, tmp_path_factory.mktemp("nodes")) as nodes,
        SlurmCluster(nodes, tmp_path_factory.mktemp("slurm")) as up,
    ):
        yield up


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("work"))


def run(cluster: SlurmCluster, folder: Path, *command: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    return cluster.nodes.run(0, command, folder, shell(folder, SLURM_CONF=cluster.env["SLURM_CONF"]), timeout)


def test_slurm_is_asked_before_anything_is_submitted(cluster: SlurmCluster, folder: Path) -> None:
    done = run(cluster, folder, "bash", SCRIPT, "--dry-run", f"--sbatch={TWO}", "who.py", "a b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"env SCAPE_LAUNCH={ROOT}/launch sbatch {TWO} {SCRIPT} who.py a\\ b"
    assert "to start at" in done.stderr
    assert cluster.say("squeue", "-h", "-t", "all").strip() == ""


@pytest.mark.parametrize("options", ["--nodes=5", f"{TWO} --gpus-per-node=8", f"{TWO} --partition=nowhere"])
def test_what_slurm_would_not_take(cluster: SlurmCluster, folder: Path, options: str) -> None:
    for words in (["--dry-run"], []):
        done = run(cluster, folder, "bash", SCRIPT, *words, f"--sbatch={options}", "who.py")
        assert done.returncode == 2 and done.stdout == "" and "wrong        sbatch --test-only: " in done.stderr
    assert cluster.say("squeue", "-h", "-t", "all").strip() == ""


def test_an_unedited_script_trains_in_a_job(cluster: SlurmCluster, folder: Path) -> None:
    """The script submits itself; the batch job finds its neighbours, checks again, and srun starts the ranks."""
    log = folder / "job.log"
    done = run(cluster, folder, "bash", SCRIPT, f"--sbatch={TWO} --wait --output={log}", *MODULE, "slurm")
    assert done.returncode == 0, log.read_text()[-3000:] + done.stderr
    check_reports(folder, "slurm")
    assert "rendezvous   10.77.0.1:" in log.read_text()


def test_sbatch_itself_from_the_repository(cluster: SlurmCluster, folder: Path) -> None:
    log = folder / "who.log"
    words = ["sbatch", *TWO.split(), "--ntasks-per-node=2", "--wait", f"--output={log}", "launch/slurm.sbatch"]
    done = run(cluster, ROOT, *words, str(folder / "who.py"), "x y")
    assert done.returncode == 0, log.read_text()[-3000:] + done.stderr
    said = sorted(line for line in log.read_text().splitlines() if line.startswith("WHO"))
    assert said == [f"WHO {rank} {rank % 2} 4 node{rank // 2 + 1} ['x y']" for rank in range(4)]


def test_a_rank_that_fails_ends_the_job(cluster: SlurmCluster, folder: Path) -> None:
    log, begin = folder / "fails.log", time.monotonic()
    done = run(cluster, folder, "bash", SCRIPT, f"--sbatch={TWO} --wait --output={log}", "one_fails.py", "100")
    assert done.returncode != 0 and time.monotonic() - begin < 60


def test_what_is_wrong_inside_a_job_is_in_its_log(cluster: SlurmCluster, folder: Path) -> None:
    log = folder / "wrong.log"
    done = run(cluster, folder, "sbatch", *TWO.split(), "--wait", f"--output={log}", "--export=ALL,SCAPE_LAUNCH="
               f"{ROOT}/launch", SCRIPT, "--interface", "eth9", "who.py")  # fmt: skip
    assert done.returncode == 2 and "--interface eth9: this machine has no such interface" in log.read_text()
