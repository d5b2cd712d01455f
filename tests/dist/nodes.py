"""Nodes on one machine as launchers see them: each a network of its own, and also its own host name, processes, ssh
server and /etc/hosts. Files are shared, as on most clusters.

    node1 10.77.0.1, node2 10.77.0.2, ... : evals.network.hosts joins them, here they become machines

Nothing outside the namespaces changes, and they go with all that runs in them when this process ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from evals.network.hosts import Command, Hosts, HostsUnavailable, address, missing
from launch.lifeline import die_with_parent

TOOLS = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"  # where sshd is, whatever the PATH
SETUP = """
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/ssh" /etc/ssh
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
touch "$2/ready.$1"
exec sleep infinity
"""
SSHD = """\
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
"""
SSH = """\
IdentityFile /etc/ssh/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


def lacking(*programs: str) -> list[str]:
    """What this machine lacks for nodes, and for these programs on them."""
    lacks = [f"{name}: apt-get install {package}" for name, package in TOOLS.items() if not _which(name)]
    return missing() + lacks + [f"{name} is not installed" for name in programs if not _which(name)]


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}")


class Nodes(Hosts):
    """``count`` nodes with ssh between them, as a context manager.

    Args:
        folder: for keys and settings.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.folder = folder
        self._names: Iterator[str] = iter(["switch", *(f"node{n + 1}" for n in range(count))])
        self._inits: list[int] = []
        self._servers: list[subprocess.Popen[bytes]] = []
        super().__init__(count, hold=self._hold_node)

    def __enter__(self) -> Nodes:
        self._write_settings()
        super().__enter__()
        for node in range(self.count):
            self._servers.append(
                subprocess.Popen(
                    self.command(node, [_which("sshd") or "sshd", "-D", "-e"]),
                    stdin=subprocess.DEVNULL,
                    stderr=(self.folder / f"sshd{node}.log").open("wb"),
                    preexec_fn=die_with_parent,
                )
            )
        for node in range(self.count):
            self._wait_for_ssh(node)
        return self

    def _write_settings(self) -> None:
        ssh = self.folder / "ssh"
        ssh.mkdir()
        for key in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / key)], check=True)
        (ssh / "sshd_config").write_text(SSHD)
        (ssh / "ssh_config").write_text(SSH)
        names = "".join(f"{address(n)} node{n + 1}\n" for n in range(self.count))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def _hold_node(self) -> subprocess.Popen[bytes]:
        name = next(self._names)
        spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        holder = subprocess.Popen(
            ["unshare", *spaces, "sh", "-ec", SETUP, "sh", name, str(self.folder)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        ready = self.folder / f"ready.{name}"
        while holder.poll() is None:
            if ready.exists():
                self._inits.append(int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0]))
                return holder
            time.sleep(0.005)
        assert holder.stderr is not None
        raise HostsUnavailable(f"no node: {holder.stderr.read().decode().strip()}")

    def command(self, host: int, command: Sequence[str]) -> Command:
        """``command`` as it is run on a node, in this process's folder."""
        spaces = ["--net", "--uts", "--mount", "--pid", f"--wd={os.getcwd()}"]
        return ["nsenter", "--target", str(self._inits[host + 1]), *spaces, "--", *command]

    def run(
        self, node: int, command: Sequence[str], folder: Path, env: dict[str, str], timeout: float = 200
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, in a folder and with nothing but this environment."""
        words = ["env", "-i", "-C", str(folder), *(f"{k}={v}" for k, v in env.items()), *command]
        return subprocess.run(
            self.command(node, words), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )

    def _wait_for_ssh(self, node: int) -> None:
        deadline = time.monotonic() + 20
        ask = self.command(0, ["ssh", "-o", "BatchMode=yes", f"node{node + 1}", "hostname"])
        while (done := subprocess.run(ask, capture_output=True, text=True)).stdout.strip() != f"node{node + 1}":
            if time.monotonic() > deadline:
                log = (self.folder / f"sshd{node}.log").read_text()
                raise HostsUnavailable(f"no ssh to node{node + 1}: {done.stderr.strip()}\n{log}")
            time.sleep(0.1)

    def close(self) -> None:
        """End every process of the nodes with the first of each, then what waited for them."""
        super().close()
        while self._servers:
            self._servers.pop().wait()
