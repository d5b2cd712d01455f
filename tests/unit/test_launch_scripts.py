"""Every launch script's dry run prints the exact command, and its refusal starts nothing; so do those of the docs."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch.preflight import plans
from launch.preflight.envfile import read_env
from launch.preflight.findings import Findings
from launch.preflight.hostfile import read_hostfile
from launch.preflight.options import LAUNCHERS
from tests.fake_programs import MPICH, OPENMPI, SLURM, SSH, add_program, only_these

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
PYTHON = sys.executable
DEEPSPEED = str(Path(sys.executable).with_name("deepspeed"))
LOOPBACK = "lo"
JOB_ENV = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: two nodes that are none of this machine's addresses, an own script and its configuration."""
    (tmp_path / "launch").symlink_to(LAUNCH)
    (tmp_path / "hostfile").write_text("203.0.113.1 slots=2\n203.0.113.2 slots=2\n")
    (tmp_path / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={LOOPBACK}\nOMP_NUM_THREADS=1\n")
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n")
    (tmp_path / "ds.json").write_text("{}")
    return tmp_path


def run(folder: Path, script: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    programs = {"mpirun": OPENMPI, "mpirun.mpich": MPICH, "pdsh": "exit 9", "ssh": SSH, **SLURM}
    environment = only_these(folder / "bin", **programs) | {"OMPI_ALLOW_RUN_AS_ROOT": "1"} | env
    command = ["bash", f"launch/{script}", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def dry(folder: Path, script: str, *words: str, **env: str) -> list[str]:
    """The words of the printed command, the port replaced."""
    done = run(folder, script, "--dry-run", *words, **env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return [re.sub(r"^(MASTER_PORT=)?\d{4,5}$", r"\1PORT", word) for word in shlex.split(done.stdout)]


OWN = ["train.py", "--deepspeed_config", "ds.json"]
MODULE = ["--module", "deepspeed_scape.run", *OWN]
IN_ENV = ["env", f"GLOO_SOCKET_IFNAME={LOOPBACK}", "OMP_NUM_THREADS=1"]
MET = [*IN_ENV, f"NCCL_SOCKET_IFNAME={LOOPBACK}", "MASTER_ADDR=203.0.113.1", "MASTER_PORT=PORT"]
AT = ["--master_addr", "203.0.113.1", "--master_port", "PORT"]


def ranks(job: list[str]) -> list[str]:
    """A job as one rank's command."""
    return [PYTHON, "-u", *(["-m", *job[1:]] if job[0] == "--module" else job)]


@pytest.mark.parametrize("job", [OWN, MODULE], ids=["script", "module"])
def test_the_exact_commands(folder: Path, job: list[str]) -> None:
    importable = {"PYTHONPATH": str(ROOT)}
    as_rank = ["bash", str(LAUNCH / "as_rank.sh"), *ranks(job)]
    gpus = dry(folder, "one_node.sh", "--ranks", "3", *job, **importable)
    assert gpus == [*IN_ENV, DEEPSPEED, "--hostfile", "/dev/null", "--num_gpus", "3", "--master_port", "PORT", *job]
    hostfile = ["--hostfile", "hostfile"]
    assert dry(folder, "pdsh.sh", *job, **importable) == [
        DEEPSPEED, "--force_multi", "--launcher", "pdsh", *hostfile, *AT, *job
    ]  # fmt: skip
    assert dry(folder, "pdsh.sh", "--ssh-port", "2222", *job, **importable)[6:8] == ["--ssh_port", "PORT"]
    openmpi = dry(folder, "openmpi.sh", *job, **importable)
    begin = [*MET, "mpirun", *hostfile, "-n", "4", "--bind-to", "none"]
    begin += ["--mca", "btl_tcp_if_include", LOOPBACK, "--mca", "oob_tcp_if_include", LOOPBACK]
    assert openmpi[: len(begin)] == begin and openmpi[-len(as_rank) :] == as_rank
    passed = openmpi[len(begin) : -len(as_rank)]
    assert passed[::2] == ["-x"] * (len(passed) // 2)
    assert {"MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PYTHONPATH"} <= set(passed[1::2])
    assert dry(folder, "mpich.sh", *job, **importable) == [
        *MET, "mpirun.mpich", "-hosts", "203.0.113.1:2,203.0.113.2:2", "-n", "4", "-iface", LOOPBACK, *as_rank
    ]  # fmt: skip
    assert dry(folder, "slurm.sbatch", *job, **importable, **JOB_ENV) == [
        *MET, "srun", "--kill-on-bad-exit=1", *as_rank
    ]  # fmt: skip
    assert dry(folder, "slurm.sbatch", "--sbatch=--nodes=4 -p gpu", *job, **importable) == [
        "env", f"SCAPE_LAUNCH={LAUNCH}", "sbatch", "--nodes=4", "-p", "gpu", str(LAUNCH / "slurm.sbatch"), *job
    ]  # fmt: skip
    (folder / "hostfile").write_text("127.0.0.1 slots=2\n")
    assert dry(folder, "no_ssh.sh", "--master-port", "54321", *job, **importable) == [
        *IN_ENV, DEEPSPEED, "--no_ssh", "--node_rank", "0", *hostfile,
        "--master_addr", "127.0.0.1", "--master_port", "PORT", *job,
    ]  # fmt: skip


def test_without_a_script_it_is_the_pretraining_job(folder: Path) -> None:
    words = dry(folder, "one_node.sh", "--", "--preset", "small", "--output", "with blanks")
    at = words.index(str(LAUNCH / "pretrain.py"))
    assert words[at + 1] == "--deepspeed_config" and Path(words[at + 2]).is_file() and "scape99" in words[at + 2]
    assert words[at + 3 :] == ["--preset", "small", "--output", "with blanks"]


def test_slurm_finds_its_neighbours_from_a_copy(folder: Path) -> None:
    """A batch job runs Slurm's own copy of the script."""
    (folder / "spool").mkdir()
    copy = folder / "spool" / "slurm_script"
    copy.write_text((LAUNCH / "slurm.sbatch").read_text())
    programs = only_these(folder / "bin", **SLURM) | JOB_ENV
    for where in ({"SCAPE_LAUNCH": str(LAUNCH)}, {"SLURM_SUBMIT_DIR": str(folder)}):
        done = subprocess.run(
            ["bash", copy, "--dry-run", *OWN],
            cwd=folder,
            env=programs | where,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0 and " srun " in done.stdout, done.stderr


@pytest.mark.parametrize("script", [script for script, _ in LAUNCHERS.values()])
def test_what_is_wrong_is_told_and_nothing_is_started(folder: Path, script: str) -> None:
    (folder / ".deepspeed_env").write_text("# a comment\n")
    for words in ([], ["--dry-run"]):
        done = run(folder, script, *words, "trian.py", "--deepspeed_config", "no.json")
        assert done.returncode == 2 and done.stdout == ""
        assert "wrong        script trian.py: there is no such file here; " in done.stderr
        assert "wrong        DeepSpeed configuration no.json: " in done.stderr


@pytest.mark.parametrize("script", [script for script, _ in LAUNCHERS.values()])
def test_help(folder: Path, script: str) -> None:
    done = run(folder, script, "--help")
    assert done.returncode == 0 and done.stdout == "" and "--dry-run" in done.stderr
    wrong = run(folder, script, "--no-such-option", "train.py")
    assert wrong.returncode == 2 and "--no-such-option" in wrong.stderr


def test_a_script_becomes_its_launcher(folder: Path) -> None:
    """So that a signal to it is one to the launcher."""
    body = f'if [ "$1" = --version ]; then {MPICH}; else echo "$$ $MASTER_PORT"; fi'
    env = only_these(folder / "bin", mpirun=body)
    command = ["bash", "launch/mpich.sh", "--no-remote-checks", "--master-port", "29655", "train.py"]
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=60)
    assert said.split() == [str(process.pid), "29655"]


def test_a_sign_of_life_comes_before_the_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    program = importlib.import_module("launch.preflight.__main__")
    monkeypatch.setattr(sys, "argv", ["preflight", "one-node", "--dry-run"])
    monkeypatch.setattr(plans, "make_plan", lambda *_: sys.exit("the checks begin"))
    with pytest.raises(SystemExit, match="the checks begin"):
        program.main()
    told = capsys.readouterr()
    assert told.err == program.BEGUN and told.out == ""


def test_a_python_without_deepspeed_is_named(folder: Path) -> None:
    add_program(folder / "bin", "python-bare", f'exec {PYTHON} -I -S "$@"')
    done = run(folder, "one_node.sh", "train.py", PYTHON=str(folder / "bin" / "python-bare"))
    assert done.returncode == 2 and "it has no DeepSpeed; activate the environment" in done.stderr
    done = run(folder, "one_node.sh", "--help", PYTHON=str(folder / "bin" / "python-bare"))
    assert done.returncode == 0 and done.stdout == "" and "--dry-run" in done.stderr
    done = run(folder, "one_node.sh", "train.py", PYTHON="/nowhere/python")
    assert done.returncode == 2 and done.stderr.startswith(
        "wrong        PYTHON=/nowhere/python: there is no such program"
    )


@pytest.mark.parametrize(
    ("env", "answer"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_PROCID": "0"}, "3 4 1 2"),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, "3 4 1 2"),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1",
          "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "3 4 1 2"),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0",
          "SLURM_STEP_TASKS_PER_NODE": "2,1"}, "2 3 0 -"),
    ],
    ids=["openmpi-in-slurm", "mpich", "srun", "srun-uneven"],
)  # fmt: skip
def test_ranks_get_torchs_names(env: dict[str, str], answer: str) -> None:
    show = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK ${LOCAL_WORLD_SIZE:--}"; exit 5'
    command = ["bash", str(LAUNCH / "as_rank.sh"), "bash", "-c", show]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True)
    assert done.stdout.strip() == answer and done.returncode == 5  # the command's own status


def test_a_rank_that_nobody_started() -> None:
    command = ["bash", str(LAUNCH / "as_rank.sh"), "true"]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert done.returncode == 2 and "neither Open MPI, MPICH nor srun" in done.stderr


def documented() -> list[str]:
    """The launch commands of the docs, the README and the scripts' own comments."""
    pages = [ROOT / "docs" / "multinode.md", ROOT / "README.md", *(LAUNCH / script for script, _ in LAUNCHERS.values())]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    scripts = "|".join(script for script, _ in LAUNCHERS.values())
    found = [
        m for line in lines if (m := re.match(rf"(?:    |#   )((?:bash|sbatch .*) launch/(?:{scripts})\b.*)", line))
    ]
    return sorted({re.split(r" {3,}", m.group(1))[0] for m in found if not m.group(1).endswith("...")})


def test_there_are_documented_commands() -> None:
    text = "\n".join(documented())
    assert all(f"launch/{script}" in text for script, _ in LAUNCHERS.values())


@pytest.mark.parametrize("command", documented())
def test_documented_commands_are_right(folder: Path, command: str) -> None:
    """As they stand, in a folder that has what they name, but for starting something."""
    words = shlex.split(command, comments=True)
    if words[0] == "sbatch":  # sbatch would run the script on the first node
        words = ["bash", *words[words.index("launch/slurm.sbatch") :]]
    if "launch/no_ssh.sh" in words:
        (folder / "hostfile").write_text("127.0.0.1 slots=2\n")
    options = [LOOPBACK if word == "eth0" else word for word in words[2:] if word != "--dry-run"]
    assert dry(folder, words[1].removeprefix("launch/"), *options, PYTHONPATH=str(ROOT))


def blocks() -> list[str]:
    """The lines of docs/multinode.md that a reader would type."""
    lines = (ROOT / "docs" / "multinode.md").read_text().splitlines()
    return [line[4:] for line in lines if line.startswith("    ") and not line.startswith("    wrong ")]


def test_every_block_of_the_page_is_tested() -> None:
    """Launch scripts above, the files and the ranks of an mpirun below."""
    tested = {*documented(), *(line for line in blocks() if re.match(r"printf|echo|MASTER_ADDR=", line))}
    assert len(blocks()) > 8 and set(blocks()) <= tested


def test_the_pages_files_are_what_the_scripts_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for line in blocks():
        if line.startswith(("printf", "echo")):
            subprocess.run(["bash", "-c", line], check=True)
    findings = Findings()
    assert [host.slots for host in read_hostfile(Path("hostfile"), findings)] == [8, 8]
    assert read_env(findings) == {"GLOO_SOCKET_IFNAME": "eth0"} and findings.wrong == []


def test_the_pages_mpirun(folder: Path) -> None:
    """With stand-ins for an mpirun, one rank after the other, and for the training."""
    add_program(folder / "bin", "python", 'echo "$@" $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT')
    start = (
        "OMPI_COMM_WORLD_RANK=$r OMPI_COMM_WORLD_SIZE=$2 OMPI_COMM_WORLD_LOCAL_RANK=$r OMPI_COMM_WORLD_LOCAL_SIZE=$2"
    )
    body = f'n="$3 $4 $5 $6"\nfor r in 0 1; do env {start} $n; done'
    env = only_these(folder / "bin", mpirun=body)
    (line,) = (line for line in blocks() if line.startswith("MASTER_ADDR="))
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "".join(f"train.py {rank} of 2 at 10.0.0.1:29600\n" for rank in (0, 1))
