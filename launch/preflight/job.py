"""What every rank runs: a script or a module with its arguments, by default launch/pretrain.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hjson

from launch.preflight.findings import Findings

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = ROOT / "launch" / "pretrain.py"
CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed")
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
SWITCH = "deepspeed_scape.run"
REFUSED = "Refused: "  # deepspeed_scape/doctor.py, whose import takes seconds
PATIENCE_S = 120  # for such an import on a busy machine


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program that a launcher starts on every rank."""

    program: str  # a script's path, or a module's name
    is_module: bool
    arguments: tuple[str, ...]

    def for_deepspeed(self) -> list[str]:
        """The end of a `deepspeed` command line."""
        return [*(["--module"] if self.is_module else []), self.program, *self.arguments]

    def for_rank(self) -> list[str]:
        """One rank's own command line."""
        return [sys.executable, "-u", *(["-m"] if self.is_module else []), self.program, *self.arguments]

    def script(self) -> str | None:
        """The script's path; of `deepspeed_scape.run`, that of the script it runs."""
        if not self.is_module:
            return self.program
        if self.program == SWITCH:
            return next((word for word in self.arguments if not word.startswith("-")), None)
        return None


def visible_gpus() -> list[str] | None:
    """The GPUs that this shell limits its programs to; None if it sets no limit."""
    for name in VISIBLE:
        if name in os.environ:
            return [entry for entry in os.environ[name].split(",") if entry.strip()]
    return None


def count_gpus() -> int:
    """GPUs of this machine that a job may use, without asking a driver that may not be there."""
    nvidia = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    amd = [path for path in nodes if path.read_text().strip() != "0"]  # a processor has a node too
    chosen = visible_gpus()
    return len(chosen) if chosen is not None and (nvidia or amd) else len(nvidia) or len(amd)


def make_job(module: str | None, words: Sequence[str]) -> Job:
    """The job of a command line's rest: nothing, or arguments behind `--`, mean launch/pretrain.py."""
    if module is not None:
        return Job(program=module, is_module=True, arguments=tuple(words))
    if words and words[0] != "--":
        return Job(program=words[0], is_module=False, arguments=tuple(words[1:]))
    arguments = tuple(words[1:])
    if not any(word.split("=")[0] in CONFIG_FLAGS for word in arguments):
        dtype = "bf16" if count_gpus() else "fp32"
        arguments = ("--deepspeed_config", str(ROOT / "ds_configs" / f"zero2_scape99_{dtype}.json"), *arguments)
    return Job(program=str(PRETRAIN), is_module=False, arguments=arguments)


def check_job(job: Job, findings: Findings) -> None:
    """Refuse a program or a DeepSpeed configuration that is not there."""
    script = job.script()
    if job.is_module and not _importable(job.program):
        remedy = f"pip install -e {ROOT}" if job.program == SWITCH else "install it, or go to the folder that has it"
        findings.refuse(f"--module {job.program}", f"{sys.executable} can't import it", remedy)
    if job.program == SWITCH and script is None:
        findings.refuse(f"--module {SWITCH}", "no script follows it", f"--module {SWITCH} train.py ...")
    if script is not None and not Path(script).is_file():
        findings.refuse(f"script {script}", "there is no such file here", "give its path as seen from this folder")
    for path in _configs(job.arguments):
        _check_config(path, findings)


def judge_options(job: Job, findings: Findings) -> None:
    """Ask launch/pretrain.py, in a process of its own, whether it takes its options; of other scripts one is known."""
    script = job.script()
    if script is None or not Path(script).is_file():
        return
    if Path(script).resolve() == PRETRAIN:
        places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "launch.options", *(word for word in job.arguments if word != script)]
        done = _ask(command, "the options of this script", findings, PYTHONPATH=os.pathsep.join(places))
        if done is None:
            return
        _, error, said = done.stderr.rpartition("error: ")
        if done.returncode and error:
            findings.wrong.append(said.strip())
        return
    dashed = next((word for word in job.arguments if word.split("=")[0] == "--deepspeed-config"), None)
    if dashed and "add_config_arguments" in Path(script).read_text(errors="replace"):
        findings.refuse(dashed, "DeepSpeed's add_config_arguments knows no such option", "write --deepspeed_config")


def judge_configs(job: Job, ranks: int | None, findings: Findings) -> None:
    """Ask the package itself, in a process of its own, what it would refuse; it takes the seconds of its imports.

    Args:
        ranks: None before Slurm has given any, and the batch is not judged.
    """
    for path in _configs(job.arguments):
        _tell_unregistered(job, path, findings)
        if _optimizer(path) is None or path.resolve().parent == ROOT / "ds_configs":  # those are tested
            continue
        command = [sys.executable, "-m", SWITCH, "--doctor", "--refusals", "--deepspeed_config", str(path)]
        command += [] if ranks is None else ["--ranks", str(ranks)]
        if (done := _ask(command, f"what {path} says", findings)) is None:
            continue
        refused = [line.removeprefix(REFUSED) for line in done.stdout.split("\n") if line.startswith(REFUSED)]
        for line in refused:
            findings.wrong.append(f"{path}: {line}")
        if done.returncode and not refused:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").split("\n")[-1]
            findings.tell("note", f"what {path} says: not judged: {said}")


def _ask(command: list[str], what: str, findings: Findings, **env: str) -> subprocess.CompletedProcess[str] | None:
    """What a process of its own says; None, with a note that it was not judged, if it can't or takes too long."""
    try:
        return subprocess.run(
            command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        findings.tell("note", f"{what}: not judged: {error}")
        return None


def _optimizer(path: Path) -> str | None:
    """The optimizer that a configuration asks for; None without one, or if the file is refused already."""
    try:
        config = _read(path)
    except (OSError, ValueError):
        return None
    section = config.get("optimizer") if isinstance(config, dict) else None
    return None if section is None else str(section.get("type") if isinstance(section, dict) else section)


def _tell_unregistered(job: Job, path: Path, findings: Findings) -> None:
    """A script that has never heard of SCAPE, whose JSON asks for it: DeepSpeed would not know the name."""
    script = job.script()
    if script is None or job.program == SWITCH or not Path(script).is_file():
        return
    known = "deepspeed_scape" in Path(script).read_text(errors="replace")
    if (_optimizer(path) or "").lower() == "scape" and not known:
        told = f"{script} does not import deepspeed_scape: unless something that it imports does, DeepSpeed will not"
        findings.tell("note", f'{told} know "SCAPE"; start it by --module {SWITCH} {script}')


def _importable(module: str) -> bool:
    """Whether a rank could import it: from its folder or installed, not just because this program's root is at hand."""
    before, name, where = list(sys.path), "", None
    sys.path[:] = [os.getcwd(), *before[1:]]  # the first entry is of this program's own making
    try:
        for part in module.split("."):
            name = f"{name}.{part}".lstrip(".")
            # not importlib.util.find_spec, which knows what this program has imported, and imports what is around it
            found = next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, where))), None)
            if found is None:
                return False
            where = found.submodule_search_locations or []
        return True
    finally:
        sys.path[:] = before


def _configs(arguments: Sequence[str]) -> list[Path]:
    """The files that arguments name as DeepSpeed configurations."""
    found = []
    for at, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag not in CONFIG_FLAGS:
            continue
        value = value if equals else next(iter(arguments[at + 1 : at + 2]), "")
        if value and not value.startswith("-") and (flag != "--deepspeed" or value.endswith(".json")):
            found.append(Path(value))
    return found


def _check_config(path: Path, findings: Findings) -> None:
    what = f"DeepSpeed configuration {path}"
    try:
        config = _read(path)
    except OSError as error:
        findings.refuse(what, str(error.strerror), f"{ROOT / 'ds_configs'} has ready ones")
    except ValueError as error:
        findings.refuse(what, f"is not valid JSON ({error})", "correct it, or take one of ds_configs/")
    else:
        if not isinstance(config, dict):
            findings.refuse(what, f"holds a {type(config).__name__}", "write a JSON object")


def _read(path: Path) -> Any:
    """As DeepSpeed reads it, which takes comments and trailing commas. Raises OSError, ValueError."""
    text = path.read_text()
    if not text.strip():
        raise ValueError("it is empty")
    return hjson.loads(text)
