"""The launch scripts for real: two nodes with ssh between them, and every launcher that this machine has.

Each trains the same small job with SCAPE, and all of them must come to the same losses, to the bit.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.metrics import read_metrics
from launch.preflight.findings import Findings
from launch.preflight.programs import find_mpirun
from tests.dist.nodes import Nodes, lacking
from tests.dist.user_folder import FIRST, MODULE, check_reports, fill, for_mpich, shell
from tests.fake_programs import add_program
from tests.launch import ROOT

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(bool(lacking()), reason=f"no nodes here: {'; '.join(lacking())}"),
]
LAUNCH = ROOT / "launch"
# of each script: what it is given besides the job, and the programs it needs
LAUNCHES = {
    "pdsh.sh": ((), ("pdsh",)),
    "openmpi.sh": ((), ()),
    "mpich.sh": ((), ()),
    "no_ssh.sh": (("--master-port", "29611"), ()),
}
PRETRAIN = [
    "--",
    "--set",
    "optimizer.params.warmup_steps=0",
    "--preset",
    "tiny",
    "--steps",
    "4",
    "--log-every",
    "1",
    "--eval-batches",
    "2",
    "--diagnose-every",
    "0",
]


def mpirun(kind: str) -> str:
    """The mpirun of this kind; skips the test where there is none."""
    findings = Findings()
    found = find_mpirun(kind, findings)
    if findings.wrong:
        pytest.skip(findings.wrong[0])
    return found


def require(script: str) -> None:
    """Skip unless the programs of a launch script are there."""
    if lacks := lacking(*LAUNCHES[script][1]):
        pytest.skip("; ".join(lacks))
    if script in ("openmpi.sh", "mpich.sh"):
        mpirun(script.removesuffix(".sh"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with Nodes(2, tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared folder that a user works in."""
    return fill(tmp_path_factory.mktemp("work"))


def launch(
    nodes: Nodes, folder: Path, script: str, *words: str, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run a launch script on the first node; without ssh on both at once, and what both said."""
    command = ["bash", str(LAUNCH / script), *LAUNCHES[script][0], *words]
    if script != "no_ssh.sh":
        return nodes.run(0, command, folder, shell(folder), timeout)
    words_1 = ["env", "-i", "-C", str(folder), *(f"{k}={v}" for k, v in shell(folder).items()), *command]
    other = subprocess.Popen(
        nodes.command(1, words_1), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    done = nodes.run(0, command, folder, shell(folder), timeout)
    said, _ = other.communicate(timeout=60)
    return subprocess.CompletedProcess(command, done.returncode or other.returncode, done.stdout + said, done.stderr)


def losses(output: Path) -> list[tuple[int, float]]:
    config, steps, summary = read_metrics(output / "metrics.jsonl")
    assert config["world_size"] == 2 and summary is not None and config["deepspeed"]["optimizer"]["type"] == "SCAPE"
    assert all(step["bytes_sent"] > 0 for step in steps)
    return [(step["step"], step["loss"]) for step in steps]


@pytest.fixture(scope="module")
def expected(nodes: Nodes, folder: Path) -> list[tuple[int, float]]:
    """The losses of two ranks on one node, by launch/one_node.sh."""
    words = [
        "bash",
        str(LAUNCH / "one_node.sh"),
        *PRETRAIN,
        "--output",
        str(folder / "one"),
        "--cache-dir",
        str(folder / "cache"),
    ]
    done = nodes.run(0, words, folder, shell(folder))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return losses(folder / "one")


@pytest.mark.parametrize("script", LAUNCHES)
def test_the_pretraining_job_comes_to_the_same_losses(
    nodes: Nodes, folder: Path, expected: list[tuple[int, float]], script: str
) -> None:
    require(script)
    output = folder / script
    done = launch(nodes, folder, script, *PRETRAIN, "--output", str(output), "--cache-dir", str(folder / "cache"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert losses(output) == expected


def check_same(folder: Path, name: str) -> None:
    """SCAPE trained on both nodes, and to the same losses as with the launcher before."""
    losses, kept = check_reports(folder, name), folder / "losses.json"
    assert not kept.exists() or json.loads(kept.read_text()) == losses
    kept.write_text(json.dumps(losses))


@pytest.mark.parametrize("script", LAUNCHES)
def test_an_unedited_script_through_the_module(nodes: Nodes, folder: Path, script: str) -> None:
    require(script)
    done = launch(nodes, folder, script, *MODULE, str(folder / script))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_same(folder, script)


def need_mpi4py() -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: pip install mpi4py")


def mpi_words(kind: str, name: str) -> list[str]:
    """A plain mpirun over both nodes, as its manual has it; no variable names a rank."""
    if kind == "openmpi":
        words = [mpirun(kind), "--hostfile", "hostfile", "-n", "2", "--mca", "btl_tcp_if_include", "eth0"]
        words += ["--mca", "oob_tcp_if_include", "eth0", "-x", "PYTHONPATH", "-x", "GLOO_SOCKET_IFNAME"]
    else:
        words = [mpirun(kind), "-hosts", "node1,node2", "-ppn", "1", "-n", "2", "-iface", "eth0"]
    return [*words, sys.executable, "-u", "-m", "deepspeed_scape.run", "train.py", "--deepspeed_config", "ds.json",
            "--out", name]  # fmt: skip


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_mpi4py_finds_the_ranks_without_a_launcher(nodes: Nodes, folder: Path, kind: str) -> None:
    need_mpi4py()
    env = shell(folder, GLOO_SOCKET_IFNAME="eth0", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    # UCX, below Debian's MPICH, takes two nodes of one kernel for one machine and tries shared memory
    env |= for_mpich(folder) | {"UCX_TLS": "tcp"} if kind == "mpich" else {}
    done = nodes.run(0, mpi_words(kind, f"mpi4py-{kind}"), folder, env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_same(folder, f"mpi4py-{kind}")


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_deepspeeds_own_mpi_launchers(nodes: Nodes, folder: Path, kind: str) -> None:
    """As ../shared/NETWORK.md and DeepSpeed's pages have them, for a script that imports deepspeed_scape."""
    found = mpirun(kind)
    if kind == "openmpi":
        need_mpi4py()
    # DeepSpeed calls it by this name, whichever kind Debian gave it to
    add_program(folder / "bin", "mpirun", f'exec {shutil.which(found)} "$@"')
    only = {"openmpi": "--mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0", "mpich": " -iface eth0"}[kind]
    deepspeed = str(Path(sys.executable).with_name("deepspeed"))
    words = [deepspeed, "--hostfile", "hostfile", "--launcher", kind, f"--launcher_args={only}", "--master_addr",
             FIRST, "imports.py", "--deepspeed_config", "ds.json", "--out", f"own-{kind}"]  # fmt: skip
    env = shell(folder, PATH=f"{folder / 'bin'}:/usr/bin:/bin", DS_ACCELERATOR="cpu")
    done = nodes.run(0, words, folder, env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_same(folder, f"own-{kind}")


@pytest.mark.parametrize("script", ["openmpi.sh", "mpich.sh"])
def test_nodes_may_differ_and_arguments_arrive_whole(nodes: Nodes, folder: Path, script: str) -> None:
    require(script)
    (folder / "uneven").write_text("node1 slots=2\nnode2 slots=1\n")
    done = launch(nodes, folder, script, "--hostfile", "uneven", "who.py", "two words", "a'b\"c", "$HOME *")
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("WHO"))
    arguments = "['two words', 'a\\'b\"c', '$HOME *']"
    assert said == [f"WHO 0 0 3 node1 {arguments}", f"WHO 1 1 3 node1 {arguments}", f"WHO 2 0 3 node2 {arguments}"]


@pytest.mark.parametrize(("script", "others"), [("openmpi.sh", 100), ("mpich.sh", 4)])
def test_a_rank_that_fails_fails_the_launch(nodes: Nodes, folder: Path, script: str, others: int) -> None:
    """Open MPI ends the other ranks. MPICH waits for them, as pdsh does: there SCAPE's `timeout` ends them."""
    require(script)
    begin = time.monotonic()
    done = launch(nodes, folder, script, "one_fails.py", str(others), timeout=80)
    assert done.returncode == 3 and time.monotonic() - begin < 60


def refused(nodes: Nodes, folder: Path, script: str, *words: str, node: int = 0) -> str:
    """What a script says that starts nothing."""
    done = nodes.run(node, ["bash", str(LAUNCH / script), *words], folder, shell(folder))
    assert done.returncode == 2 and done.stdout == "", done.stderr
    return done.stderr


def test_what_only_nodes_can_tell(nodes: Nodes, folder: Path, tmp_path: Path) -> None:
    """Each mistake on real hosts, by a script that needs no other program than ssh."""
    mpi = next((s for s in ("openmpi.sh", "mpich.sh", "pdsh.sh") if not _missing(s)), None)
    if mpi is None:
        pytest.skip("neither mpirun nor pdsh is installed")
    (folder / "third").write_text("node1 slots=1\nnode3 slots=1\n")
    assert "host node3: has no known address" in refused(nodes, folder, mpi, "--hostfile", "third", "who.py")
    (folder / "gone").write_text("node1 slots=1\n10.77.0.9 slots=1\n")
    assert "host 10.77.0.9: ssh says `ssh: connect to host" in refused(
        nodes, folder, mpi, "--hostfile", "gone", "who.py"
    )
    assert "--interface eth5: this machine has no such" in refused(nodes, folder, mpi, "--interface", "eth5", "who.py")
    assert "--master-addr 10.77.0.2: is no address of this machine" in refused(
        nodes, folder, mpi, "--master-addr", "10.77.0.2", "who.py"
    )
    assert "--node-rank 0: this machine is node 1, node2" in refused(
        nodes, folder, "no_ssh.sh", "--node-rank", "0", "who.py", node=1
    )


def _missing(script: str) -> bool:
    findings = Findings()
    if script != "pdsh.sh":
        find_mpirun(script.removesuffix(".sh"), findings)
    return bool(findings.wrong) or bool(lacking(*LAUNCHES[script][1]))


def test_a_firewall_is_found(nodes: Nodes, folder: Path) -> None:
    """The second node has no way to the address where the ranks would meet: none of its ranks would get there."""
    script = next((s for s in ("openmpi.sh", "mpich.sh", "pdsh.sh") if not _missing(s)), None)
    if script is None:
        pytest.skip("neither mpirun nor pdsh is installed")
    blackhole = nodes.command(1, ["ip", "route", "add", "blackhole", "10.88.0.1/32"])
    subprocess.run(blackhole, check=True)
    subprocess.run(nodes.command(0, ["ip", "addr", "add", "10.88.0.1/32", "dev", "eth0"]), check=True)
    said = refused(nodes, folder, script, "--master-addr", "10.88.0.1", "who.py")
    assert "host node2: can't reach 10.88.0.1:" in said and "where the ranks meet" in said
    subprocess.run(nodes.command(0, ["ip", "addr", "del", "10.88.0.1/32", "dev", "eth0"]), check=True)
