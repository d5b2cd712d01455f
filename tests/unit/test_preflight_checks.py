"""The job, the programs, the other nodes and Slurm: what is missing is refused with its remedy."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_scape import doctor
from launch.preflight import job as job_module
from launch.preflight import remote
from launch.preflight.environment import check_asked_interface
from launch.preflight.findings import Findings
from launch.preflight.hostfile import Host
from launch.preflight.job import PRETRAIN, REFUSED, ROOT, check_job, count_gpus, judge_configs, judge_options, make_job
from launch.preflight.programs import find_deepspeed, find_mpirun, need
from launch.preflight.remote import Question, check_nodes
from launch.preflight.rendezvous import Rendezvous
from launch.preflight.settings import Settings
from launch.preflight.slurm import job_hosts, tasks_per_node, try_submission
from tests.fake_programs import MPICH, OPENMPI, SLURM, SSH, add_program


def test_jobs_are_read() -> None:
    config = str(ROOT / "ds_configs" / "zero2_scape99_fp32.json")
    pretrain = str(ROOT / "launch" / "pretrain.py")
    for words in ([], ["--"]):
        assert make_job(None, words).for_deepspeed() == [pretrain, "--deepspeed_config", config]
    job = make_job(None, ["--", "--preset", "small"])
    assert job.for_rank() == [sys.executable, "-u", pretrain, "--deepspeed_config", config, "--preset", "small"]
    assert make_job(None, ["--", "--deepspeed_config=a.json"]).arguments == ("--deepspeed_config=a.json",)
    own = make_job(None, ["train.py", "--", "-x"])
    assert own.for_deepspeed() == ["train.py", "--", "-x"] and own.script() == "train.py"
    module = make_job("deepspeed_scape.run", ["train.py", "--lr", "1"])
    assert module.for_deepspeed() == ["--module", "deepspeed_scape.run", "train.py", "--lr", "1"]
    assert module.for_rank() == [sys.executable, "-u", "-m", "deepspeed_scape.run", "train.py", "--lr", "1"]
    assert module.script() == "train.py" and make_job("other", ["train.py"]).script() is None


def test_gpus_get_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "count_gpus", lambda: 8)
    assert make_job(None, []).arguments[1].endswith("zero2_scape99_bf16.json")


def test_a_limit_of_gpus_that_are_not_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    real = count_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert count_gpus() == (2 if real else 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "ok.json").write_text("{}")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "job.py").write_text("")
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("module", "words"),
    [
        (None, ["train.py", "--deepspeed_config", "ok.json"]),
        (None, ["train.py", "--deepspeed", "--lr", "1"]),
        (None, ["train.py", "--deepspeed=ok.json"]),
        ("mine.job", ["--deepspeed-config=ok.json"]),
        (None, []),
    ],
)
def test_good_jobs(module: str | None, words: list[str]) -> None:
    findings = Findings()
    check_job(make_job(module, words), findings)
    assert findings.wrong == []


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("module", "words", "says"),
    [
        (None, ["trian.py"], "script trian.py: there is no such file here"),
        ("deepspeed_scape.run", ["trian.py"], "script trian.py: there is no such file here"),
        ("deepspeed_scape.run", ["--lr", "1"], "script 1: there is no such file here"),
        ("deepspeed_scape.run", [], "--module deepspeed_scape.run: no script follows it"),
        ("no_such_module.x", [], "--module no_such_module.x: "),
        ("mine.jib", [], "--module mine.jib: "),
        ("deepspeed_scape.rum", ["train.py"], "--module deepspeed_scape.rum: "),
        ("launch.pretrain", [], "--module launch.pretrain: "),  # of this repository, but not seen from that folder
        (None, ["train.py", "--deepspeed_config", "no.json"], "DeepSpeed configuration no.json: No such file"),
        (
            None,
            ["train.py", "--deepspeed_config=broken.json"],
            "DeepSpeed configuration broken.json: is not valid JSON",
        ),
        (None, ["train.py", "--deepspeed", "list.json"], "DeepSpeed configuration list.json: holds a list"),
    ],
)
def test_bad_jobs(module: str | None, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
    monkeypatch.setattr(sys, "path", [str(ROOT), *elsewhere])  # as in the program itself
    findings = Findings()
    check_job(make_job(module, words), findings)
    assert any(line.startswith(says) for line in findings.wrong), findings.wrong


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--", "--preset", "tinny"], "--preset tinny: there is no such preset; take one of tiny"),
        (["--", "--stepps", "3"], "unrecognized arguments: --stepps 3"),
        (["--", "--steps", "3"], None),
        (["train.py", "--deepspeed-config=ok.json"], "--deepspeed-config=ok.json: DeepSpeed's add_config_arguments"),
        (["own.py", "--deepspeed-config", "ok.json"], None),
    ],
)
def test_options_are_judged_before_the_launch(words: list[str], wrong: str | None) -> None:
    Path("train.py").write_text("parser = deepspeed.add_config_arguments(parser)")
    Path("own.py").touch()
    findings = Findings()
    judge_options(make_job(None, words), findings)
    assert [line.startswith(wrong or "") for line in findings.wrong] == ([True] if wrong else [])


@pytest.mark.usefixtures("folder")
def test_what_the_package_refuses_is_refused_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("train.py").write_text("import deepspeed_scape")
    bad = {"optimizer": {"type": "SCAPE"}, "zero_optimization": {"stage": 1}}
    bad |= {"train_batch_size": 3, "gradient_clipping": -1}
    Path("bad.json").write_text(json.dumps(bad))
    auto = {"optimizer": {"type": "SCAPE"}, "zero_optimization": {"stage": 2}}
    Path("other.json").write_text(json.dumps(auto | {"train_micro_batch_size_per_gpu": "auto"}))
    job = make_job(None, ["train.py", "--deepspeed", "bad.json", "--deepspeed_config=other.json"])
    findings = Findings()
    judge_configs(job, 2, findings)
    assert [line.split(" = ")[0] for line in findings.wrong] == [
        "bad.json: gradient_clipping",
        "bad.json: train_batch_size",
    ]
    assert findings.told == []
    findings = Findings()
    judge_configs(job, None, findings)
    assert [line.split(" = ")[0] for line in findings.wrong] == ["bad.json: gradient_clipping"]


@pytest.mark.usefixtures("folder")
def test_a_script_that_has_not_heard_of_scape_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, "", ""))
    Path("mine.json").write_text('{"optimizer": {"type": "SCAPE"},}  # as DeepSpeed takes it')
    Path("other.json").write_text('{"optimizer": {"type": "AdamW"}}')
    words = ["train.py", "--deepspeed_config", "mine.json"]

    def told(module: str | None, words: list[str]) -> list[str]:
        findings = Findings()
        check_job(make_job(module, words), findings)
        judge_configs(make_job(module, words), 2, findings)
        assert findings.wrong == []
        return [text for _, text in findings.told]

    assert told(None, words)[0].startswith("train.py does not import deepspeed_scape: ")
    assert told(None, ["train.py", "--deepspeed_config", "other.json"]) == []
    Path("train.py").write_text("import deepspeed_scape")
    assert told(None, words) == []


@pytest.mark.usefixtures("folder")
def test_a_json_that_cannot_be_judged_is_told_and_others_cost_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **given: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nNo module named deepspeed_scape")

    monkeypatch.setattr(subprocess, "run", fail)
    Path("mine.json").write_text('{"optimizer": {"type": "AdamS"}}')
    findings = Findings()
    judge_configs(make_job(None, ["train.py", "--deepspeed", "mine.json"]), 2, findings)
    assert findings.told == [("note", "what mine.json says: not judged: No module named deepspeed_scape")]
    for words in (["train.py", "--deepspeed", "ok.json"], ["train.py", "--deepspeed", "broken.json"], []):
        findings = Findings()
        judge_configs(make_job(None, words), 2, findings)
        assert findings.told == [] and findings.wrong == []


@pytest.mark.usefixtures("folder")
def test_what_takes_too_long_is_told_as_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], timeout: float, **given: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    Path("mine.json").write_text('{"optimizer": {"type": "AdamS"}}')
    job = make_job(None, [str(PRETRAIN), "--deepspeed", "mine.json"])
    for judge, what in (
        (lambda f: judge_options(job, f), "the options"),
        (lambda f: judge_configs(job, 2, f), "what "),
    ):
        findings = Findings()
        judge(findings)
        assert findings.wrong == [] and len(findings.told) == 1
        assert findings.told[0][1].startswith(what) and "not judged" in findings.told[0][1]


def test_the_package_begins_a_refusal_as_the_preflight_expects() -> None:
    assert REFUSED == doctor.REFUSED


def test_an_interface_is_looked_at_though_no_node_is_known() -> None:
    findings = Findings()
    check_asked_interface("lo", findings)
    check_asked_interface(None, findings)
    assert findings.told == []
    check_asked_interface("lo,eth99", findings)
    assert findings.told[0][1].startswith("--interface eth99: this machine has no such interface, only ")


def test_programs_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    add_program(tmp_path, "ssh", "")
    findings = Findings()
    need(("pdsh", "ssh"), findings)
    assert findings.wrong == ["program pdsh: is not on the PATH; apt-get install pdsh, or add to PATH"]


@pytest.mark.parametrize(
    ("programs", "kind", "answer"),
    [
        ({"mpirun": OPENMPI}, "openmpi", "mpirun"),
        ({"mpirun": MPICH, "mpirun.openmpi": OPENMPI}, "openmpi", "mpirun.openmpi"),
        ({"mpirun": MPICH}, "mpich", "mpirun"),
        ({"mpirun": OPENMPI, "mpiexec.hydra": MPICH}, "mpich", "mpiexec.hydra"),
    ],
)
def test_the_right_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], kind: str, answer: str
) -> None:
    monkeypatch.delenv("MPIRUN", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    for name, body in programs.items():
        add_program(tmp_path, name, body.replace("printf", "/usr/bin/printf"))
    findings = Findings()
    assert find_mpirun(kind, findings) == answer and findings.wrong == []


@pytest.mark.parametrize(
    ("programs", "asked", "kind", "says"),
    [
        ({}, None, "openmpi", "program mpirun or mpirun.openmpi: is not on the PATH; apt-get install openmpi-bin"),
        ({"mpirun": MPICH}, None, "openmpi", "openmpi is needed, but mpirun is `HYDRA build details:`"),
        ({"mpirun": OPENMPI}, None, "mpich", "mpich is needed, but mpirun is `mpirun (Open MPI) 4.1.4`"),
        ({"mpirun": OPENMPI}, "/no/mpirun", "openmpi", "MPIRUN=/no/mpirun: is not on the PATH"),
    ],
    ids=["none", "mpich", "openmpi", "asked"],
)
def test_the_wrong_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], asked: str | None, kind: str, says: str
) -> None:
    monkeypatch.delenv("MPIRUN", raising=False)
    if asked:
        monkeypatch.setenv("MPIRUN", asked)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, body in programs.items():
        add_program(tmp_path, name, body)
    findings = Findings()
    find_mpirun(kind, findings)
    assert len(findings.wrong) == 1 and says in findings.wrong[0]


def test_an_environment_without_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = Findings()
    find_deepspeed(findings)
    assert "program deepspeed: is neither beside" in findings.wrong[0]
    add_program(tmp_path, "deepspeed", "")
    assert find_deepspeed(Findings()) == str(tmp_path / "deepspeed")


def ask(work: Path, names: list[str], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    """What is wrong with nodes that all are this machine, asked through a stand-in for ssh."""
    add_program(work / "bin", "ssh", SSH)
    monkeypatch.setenv("PATH", f"{work / 'bin'}:/usr/bin:/bin")
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    meeting = {"address": "127.0.0.1", "port": port, "interface": socket.if_nameindex()[0][1], "here": True}
    question = {"folder": str(work), "script": "train.py", "ssh_port": None}
    meeting |= {k: v for k, v in changes.items() if k in meeting}
    question |= {k: v for k, v in changes.items() if k in question}
    findings = Findings()
    check_nodes(
        [Host(name=name, slots=1) for name in names], Question(meeting=Rendezvous(**meeting), **question), findings
    )
    return findings.wrong


def test_nodes_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(folder, ["n1", "n2"], monkeypatch) == []
    assert ask(folder, ["n1"], monkeypatch, script=None, ssh_port=2222, here=False) == []


def test_a_folder_with_blanks_and_quotes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = folder / "it's a 'folder' $HOME"
    odd.mkdir()
    (odd / "train.py").write_text("")
    assert ask(folder, ["n1"], monkeypatch, folder=str(odd)) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"folder": "/no/such"}, "host n1: has no folder /no/such; share or copy it to the same path on every node"),
        ({"script": "other.py"}, "host n1: has no other.py (seen from "),
        ({"interface": "eth77"}, "host n1: has no interface eth77, only "),
        ({"address": "127.0.0.2", "port": 1}, "host n1: can't reach 127.0.0.2:1, where the ranks meet ("),
    ],
    ids=["folder", "script", "interface", "firewall"],
)
def test_what_a_node_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str) -> None:
    if "port" in changes:  # nobody answers there: as behind a firewall
        monkeypatch.setattr(remote, "listening", lambda *_: nullcontext())
    wrong = ask(folder, ["n1"], monkeypatch, **changes)
    assert len(wrong) == 1 and wrong[0].startswith(says)


def test_a_node_without_this_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert ask(folder, ["n1"], monkeypatch)[0].startswith("host n1: has no /no/python; make the environment")


def test_a_python_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_program(folder / "bin", "python", "echo boom >&2; exit 7")
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
    assert ask(folder, ["n1"], monkeypatch)[0].startswith("host n1: its Python says `boom`")


def test_a_node_that_ssh_does_not_reach(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ask(folder, ["n1", "down1"], monkeypatch)
    assert wrong == [
        "host down1: ssh says `ssh: connect to host down1 port 22: Connection refused`; `ssh down1 true` must work "
        "without a question: install your public key"
    ]


def test_other_versions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "own_versions", lambda: {"torch": "0.1", "deepspeed": None})
    wrong = ask(folder, ["n1"], monkeypatch)
    assert len(wrong) == 2 and "host n1: has torch " in wrong[0] and "this machine 0.1" in wrong[0]
    assert "this machine (not installed)" in wrong[1]


def test_two_nodes_of_one_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_program(folder / "bin", "ssh", SSH)
    wrong = ask(folder, ["n1", "n1"], monkeypatch)
    assert wrong == ["host n1: calls itself n1, as n1 does, so ranks would be counted as on one machine; "
                     "give each node a name of its own"]  # fmt: skip


def test_slurms_counts() -> None:
    assert tasks_per_node("2") == [2] and tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    for text in ("", "2(3)", "a"):
        with pytest.raises(ValueError):
            tasks_per_node(text)


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, tasks: str, **programs: str) -> tuple[list[Host], list[str]]:
    for name, body in (SLURM | programs).items():
        add_program(folder / "bin", name, body)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", tasks)
    findings = Findings()
    return job_hosts(findings), findings.wrong


def test_the_nodes_of_a_slurm_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, wrong = slurm(folder, monkeypatch, "4(x2)")
    assert wrong == [] and hosts == [Host(name=f"203.0.113.{n}", slots=4) for n in (1, 2)]


@pytest.mark.parametrize("tasks", ["4(x3)", "4", "", "many"])
def test_counts_that_do_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch, tasks: str) -> None:
    hosts, wrong = slurm(folder, monkeypatch, tasks)
    assert hosts == [] and wrong == [f"SLURM_TASKS_PER_NODE {tasks}: does not fit 2 nodes; give --ntasks-per-node"]


def test_scontrol_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, wrong = slurm(folder, monkeypatch, "1", scontrol="echo 'no controller' >&2; exit 1")
    assert hosts == [] and wrong[0].startswith("SLURM_JOB_NODELIST n[1-2]: no controller; start inside a job")


def test_what_slurm_says_to_a_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(folder, monkeypatch, "1")
    findings = Findings()
    try_submission(["sbatch", "x"], findings)
    assert findings.wrong == [] and "Job 7 to start at" in findings.told[0][1]
    add_program(
        folder / "bin", "sbatch", "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1"
    )
    try_submission(["sbatch", "x"], findings)
    assert findings.wrong[0].startswith("sbatch --test-only: allocation failure: Requested node configuration")
    add_program(folder / "bin", "sbatch", "echo 'sbatch: error: fetch_config: DNS SRV lookup failed' >&2; exit 1")
    try_submission(["sbatch", "x"], findings)
    assert "no Slurm controller can be reached" in findings.wrong[1] and "login node" in findings.wrong[1]


WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)


@given(WORDS, st.lists(WORDS, max_size=4), WORDS)
def test_settings_survive_the_shell(value: str, words: list[str], exported: str) -> None:
    settings = Settings(dry_run=True)
    settings.set("value", value)
    settings.set("words", words)
    settings.set("number", 7)
    settings.export("EXPORTED", exported)
    script = (
        settings.text() + 'printf "%s\\0" "$dry_run" "$number" "$value" "${#words[@]}" "${words[@]}" "${exported[@]}"\n'
    )
    script += 'sh -c \'printf "%s" "$EXPORTED"\''
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    parts = ["true", "7", value, str(len(words)), *words, f"EXPORTED={exported}", exported]
    assert done.stdout == "\0".join(parts).encode()
