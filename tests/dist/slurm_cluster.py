"""A Slurm cluster of test nodes: a controller on the first, a daemon on each, and GPUs in which only Slurm believes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import TracebackType

from launch.lifeline import die_with_parent
from tests.dist.nodes import Nodes

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue")
CONF = """\
ClusterName=test
SlurmctldHost=node1
AuthType=auth/none
CredType=cred/none
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
NodeName=node[1-{count}] CPUs=2 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Slurm on these nodes, as a context manager.

    Raises:
        RuntimeError: it does not come up; with the ends of its logs.
    """

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        self.env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        (self.folder / "slurm.conf").write_text(CONF.format(folder=self.folder, count=self.nodes.count))
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        (self.folder / "state").mkdir()
        self._start(0, ["slurmctld", "-D"])
        for node in range(self.nodes.count):
            (self.folder / f"spool-node{node + 1}").mkdir()
            self._start(node, ["slurmd", "-D"])
        deadline = time.monotonic() + 60
        while "idle" not in self.say("sinfo", "-h", "-o", "%t").split() or "unk" in self.say("sinfo", "-h", "-o", "%t"):
            if time.monotonic() > deadline or any(d.poll() is not None for d in self._daemons):
                said = "".join(f"--- {p.name}\n{p.read_text()[-1500:]}\n" for p in sorted(self.folder.glob("*.log")))
                self.close()
                raise RuntimeError(f"Slurm does not come up\n{said}")
            time.sleep(0.5)
        return self

    def _start(self, node: int, command: list[str]) -> None:
        words = ["env", "-i", *(f"{k}={v}" for k, v in self.env.items()), *command]
        log = (self.folder / f"{command[0]}-{node}.stderr.log").open("wb")
        self._daemons.append(
            subprocess.Popen(
                self.nodes.command(node, words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        )

    def say(self, *command: str) -> str:
        """What a command on the first node prints."""
        return self.nodes.run(0, command, self.folder, self.env).stdout

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shut it down; what is left goes with the nodes."""
        self.say("scontrol", "shutdown")
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
