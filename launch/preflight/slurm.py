"""What Slurm says: the nodes of a running job, and whether it would take one."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from launch.preflight.findings import Findings
from launch.preflight.hostfile import Host

UNREACHABLE = ("fetch_config", "Unable to contact slurm controller", "Could not establish a configuration source")


def inside_job() -> bool:
    """Whether this is a batch script, or a shell of salloc."""
    return "SLURM_JOB_ID" in os.environ


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` as [2, 2, 2, 1]. Raises ValueError for anything else."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(text)
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def job_hosts(findings: Findings) -> list[Host]:
    """The nodes of this job in Slurm's order, with as many slots as it runs tasks there."""
    nodes, tasks = os.environ.get("SLURM_JOB_NODELIST", ""), os.environ.get("SLURM_TASKS_PER_NODE", "")
    done = _run(["scontrol", "show", "hostnames", nodes])
    names = done.stdout.split() if done is not None and done.returncode == 0 else []
    if not names:
        said = "scontrol can't be run" if done is None else (done.stderr.strip() or "scontrol names no host")
        findings.refuse(f"SLURM_JOB_NODELIST {nodes}", said, "start inside a job: sbatch, or salloc")
        return []
    try:
        counts = tasks_per_node(tasks)
    except ValueError:
        counts = []
    if len(counts) != len(names):
        findings.refuse(f"SLURM_TASKS_PER_NODE {tasks}", f"does not fit {len(names)} nodes", "give --ntasks-per-node")
        return []
    return [Host(name=name, slots=count) for name, count in zip(names, counts, strict=True)]


def try_submission(command: Sequence[str], findings: Findings) -> None:
    """Ask the controller whether it would take this job; it starts nothing."""
    done = _run([command[0], "--test-only", *command[1:]])
    if done is None:
        return  # no sbatch: already refused
    said = " ".join((done.stderr or done.stdout).split()).removeprefix("sbatch: ")
    if done.returncode != 0 and any(sign in said for sign in UNREACHABLE):
        remedy = "submit where Slurm's commands work, as on a login node"
        findings.refuse("sbatch --test-only", f"no Slurm controller can be reached ({said})", remedy)
    elif done.returncode != 0:
        findings.refuse("sbatch --test-only", said, "change the #SBATCH lines of launch/slurm.sbatch, or give --sbatch")
    else:
        findings.tell("slurm", said)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
