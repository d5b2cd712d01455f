"""For each launcher: run its checks, and settle what its script is told."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.preflight.addresses import carrier
from launch.preflight.envfile import read_env
from launch.preflight.environment import (
    check_asked_interface,
    check_nccl_interface,
    check_pdsh_environment,
    heeded,
    rank_variables,
    wanted_interface,
)
from launch.preflight.findings import Findings
from launch.preflight.hostfile import Host, find_hostfile, locate, read_hostfile
from launch.preflight.job import Job, check_job, count_gpus, judge_configs, judge_options, make_job, visible_gpus
from launch.preflight.options import BY_SSH
from launch.preflight.programs import find_deepspeed, find_mpirun, need
from launch.preflight.remote import Question, check_nodes
from launch.preflight.rendezvous import DEFAULT_PORT, Rendezvous, choose_address, choose_interface, choose_port
from launch.preflight.settings import Settings
from launch.preflight.slurm import inside_job, job_hosts, try_submission

CPU_RANKS = 2
HERE = Path(__file__).resolve().parents[1]  # the folder of the launch scripts


def make_plan(launcher: str, options: argparse.Namespace, findings: Findings) -> Settings:
    """All checks of a launcher. The settings are whole only if nothing is wrong."""
    settings = Settings(options.dry_run)
    job = make_job(options.module, options.job)
    check_job(job, findings)
    judge_options(job, findings)
    if launcher == "slurm" and not inside_job():
        judge_configs(job, None, findings)
        _submit(options, settings, findings)
        return settings
    files = read_env(findings)
    check_nccl_interface(files, findings)
    hosts, hostfile = _hosts(launcher, options, settings, findings)
    _programs(launcher, job, settings, findings)
    judge_configs(job, sum(host.slots for host in hosts) or None, findings)
    if not hosts:
        check_asked_interface(getattr(options, "interface", None), findings)
        return settings
    meeting = _meet(launcher, options, hosts, files, findings)
    _tell(hosts, meeting, findings)
    _check_slots(hosts, findings)
    if launcher == "no-ssh":
        settings.set("node_rank", _node_rank(hosts, options.node_rank, findings))
    _environment(launcher, files, meeting, hosts, settings, findings)
    if launcher in BY_SSH and not options.no_remote_checks and not findings.wrong:
        question = Question(
            folder=os.getcwd(), script=job.script(), meeting=meeting, ssh_port=getattr(options, "ssh_port", None)
        )
        check_nodes(hosts, question, findings)
    settings.set("hostfile", str(hostfile))
    settings.set("ranks", sum(host.slots for host in hosts))
    settings.set("hosts", ",".join(f"{host.name}:{host.slots}" for host in hosts))
    settings.set("master_addr", meeting.address)
    settings.set("master_port", meeting.port)
    settings.set("interface", (meeting.interface or "").split(",")[0])
    settings.set("ssh_port", ["--ssh_port", str(options.ssh_port)] if getattr(options, "ssh_port", None) else [])
    return settings


def _submit(options: argparse.Namespace, settings: Settings, findings: Findings) -> None:
    """Outside a Slurm job: the command that makes one, running the same script with the same options."""
    need(("sbatch", "srun", "scontrol"), findings)
    again = []
    for flag, value in (("--module", options.module), ("--master-port", options.master_port),
                        ("--interface", options.interface)):  # fmt: skip
        again += [flag, str(value)] if value is not None else []
    command = ["sbatch", *shlex.split(options.sbatch), str(HERE / "slurm.sbatch"), *again, *options.job]
    if not findings.wrong:
        try_submission(command, findings)
    settings.set("submit", command)
    settings.export("SCAPE_LAUNCH", str(HERE))  # where a batch job finds what is beside its script


def _hosts(
    launcher: str, options: argparse.Namespace, settings: Settings, findings: Findings
) -> tuple[list[Host], Path]:
    """The nodes with their addresses; none if one can't be told."""
    if launcher == "one-node":
        ranks = options.ranks if options.ranks is not None else count_gpus() or CPU_RANKS
        if ranks < 1:
            findings.refuse(f"--ranks {ranks}", "no rank would run", "give at least 1")
            return [], Path()
        settings.set("which_gpus", _which_gpus(ranks, findings))
        # not a file: DeepSpeed would take /job/hostfile, where there is one, and start on its nodes
        return [Host(name="localhost", slots=ranks, address="127.0.0.1")], Path(os.devnull)
    if launcher == "slurm":
        hosts, path = job_hosts(findings), Path(os.devnull)
    else:
        path = find_hostfile(options.hostfile)
        hosts = read_hostfile(path, findings)
    located = locate(hosts, findings)
    return (located if len(located) == len(hosts) else []), path


def _which_gpus(ranks: int, findings: Findings) -> list[str]:
    """DeepSpeed obeys CUDA_VISIBLE_DEVICES only if it is not told a number."""
    chosen = visible_gpus()
    if not count_gpus() or not chosen:
        return ["--num_gpus", str(ranks)]
    if ranks != len(chosen):
        why = f"$CUDA_VISIBLE_DEVICES names {len(chosen)} GPUs"
        findings.refuse(f"--ranks {ranks}", why, "leave --ranks out, or name as many GPUs as ranks")
    return []


def _programs(launcher: str, job: Job, settings: Settings, findings: Findings) -> None:
    if launcher in ("one-node", "pdsh", "no-ssh"):
        settings.set("deepspeed", find_deepspeed(findings))
        settings.set("job", job.for_deepspeed())
    else:
        settings.set("job", job.for_rank())
    if launcher == "pdsh":
        need(("pdsh", "ssh"), findings)
    elif launcher in ("openmpi", "mpich"):
        settings.set("mpirun", find_mpirun(launcher, findings))
    elif launcher == "slurm":
        need(("srun",), findings)
    if launcher == "openmpi" and os.geteuid() == 0 and os.environ.get("OMPI_ALLOW_RUN_AS_ROOT") != "1":
        remedy = "be somebody else, or export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        findings.refuse("user root", "Open MPI refuses to run for root", remedy)


def _meet(
    launcher: str, options: argparse.Namespace, hosts: list[Host], files: dict[str, str], findings: Findings
) -> Rendezvous:
    address, here = choose_address(hosts, getattr(options, "master_addr", None), findings)
    wanted = None if launcher == "one-node" else wanted_interface(options.interface, files)
    is_node = any(carrier(host.address) for host in hosts)
    if wanted is not None and not is_node:
        interface: str | None = wanted[1]  # of the nodes, which this machine is none of
    else:
        interface = choose_interface(address, here, len(hosts) > 1, wanted, findings)
    asked = options.master_port
    if launcher == "no-ssh" and asked is None:
        asked = DEFAULT_PORT  # every node has to be told the same
    return Rendezvous(address=address, port=choose_port(asked, here, findings), interface=interface, here=here)


def _tell(hosts: Sequence[Host], meeting: Rendezvous, findings: Findings) -> None:
    findings.tell("nodes", ", ".join(f"{h.name} ({h.address}) {h.slots} rank{'s'[: h.slots != 1]}" for h in hosts))
    seen = "" if meeting.here else ", which only that machine can tell to be free"
    findings.tell("rendezvous", f"{meeting.address}:{meeting.port}{seen}; interface {meeting.interface}")


def _check_slots(hosts: Sequence[Host], findings: Findings) -> None:
    """Compare this machine's entry with its GPUs or, where it has none, its processors."""
    mine = next((host for host in hosts if carrier(host.address)), None)
    if mine is None:
        return
    gpus, cores = count_gpus(), os.cpu_count() or 1
    if 0 < gpus < mine.slots:
        findings.refuse(f"{mine.name} slots={mine.slots}", f"this machine has {gpus} GPUs", f"give {gpus} or fewer")
    elif not gpus and mine.slots > cores:
        findings.tell("note", f"{mine.slots} ranks on {cores} processors")


def _node_rank(hosts: Sequence[Host], asked: int | None, findings: Findings) -> int:
    """Which line of the hostfile this machine is, from 0."""
    mine = next((at for at, host in enumerate(hosts) if carrier(host.address)), None)
    if mine is None:
        names = ", ".join(f"{host.name} ({host.address})" for host in hosts)
        findings.refuse(
            "this machine", f"has the address of no node: {names}", "start it on those, or correct the file"
        )
        return 0
    if asked is not None and asked != mine:
        findings.refuse(f"--node-rank {asked}", f"this machine is node {mine}, {hosts[mine].name}", "leave it out")
    return mine


def _environment(
    launcher: str,
    files: dict[str, str],
    meeting: Rendezvous,
    hosts: Sequence[Host],
    settings: Settings,
    findings: Findings,
) -> None:
    """Export the ranks' variables, or for pdsh see that they are where DeepSpeed looks."""
    if launcher == "pdsh":
        check_pdsh_environment(files, meeting.interface, len(hosts), findings)
        findings.tell(
            "environment", "DeepSpeed's, and " + (shlex.join(f"{k}={v}" for k, v in files.items()) or "nothing")
        )
        return
    variables = rank_variables(files, meeting.interface, len(hosts))
    if launcher in ("openmpi", "mpich", "slurm"):
        variables |= {"MASTER_ADDR": meeting.address, "MASTER_PORT": str(meeting.port)}
    for name, value in variables.items():
        settings.export(name, value)
    names = sorted(set(variables) | set(heeded()))
    settings.set("exports", [word for name in names for word in ("-x", name)])
    findings.tell("environment", shlex.join(f"{k}={v}" for k, v in variables.items()) or f"as it is; {sys.executable}")
