"""Hosts on one machine: network namespaces joined by shaped links to a bridge in a namespace of its own.

    host 0  eth0 --- p0 \
    host 1  eth0 --- p1  > br0 (switch)          each eth0 sends, and each p sends to its host, through a token bucket
    host 2  eth0 --- p2 /

No namespace has a name: each lives as long as one sleeping process, which the kernel kills when this process ends,
however that ends. So two runs can't collide, and even a killed run leaves nothing behind. The sizes are those of
../shared/NETWORK.md: segmentation offload off by a small `gso_max_size`, set before any socket opens, or the kernel
spends the ranks' processor time on cutting packets; a larger bucket would let small messages through free.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from launch.lifeline import die_with_parent

SUBNET = "10.77.0"
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "sysctl": "procps"}
GSO_BYTES, BURST, QUEUE = "16384", "32kb", "50ms"

Command = list[str]
Run = Callable[[Command], None]


class HostsUnavailable(RuntimeError):
    """Namespaces or their links can't be made here; says what is missing and what helps."""


def run_quietly(command: Command) -> None:
    """Run one command.

    Raises:
        HostsUnavailable: it failed; with its own words.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise HostsUnavailable(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")


def missing() -> list[str]:
    """What this machine lacks for a network of namespaces, each with its remedy; empty when all is there."""
    lacks = [f"{tool} is not installed: apt-get install {TOOLS[tool]}" for tool in TOOLS if not shutil.which(tool)]
    if os.geteuid() != 0:
        return [*lacks, "not root: run it as `sudo python -m evals.network`, with the same python"]
    if lacks:
        return lacks
    try:
        run_quietly(["unshare", "--net", "true"])
    except HostsUnavailable as error:
        return [f"no network namespace ({error}): in a container, start it with --cap-add SYS_ADMIN,NET_ADMIN"]
    probe = "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 32kb latency 50ms"
    try:
        run_quietly(["unshare", "--net", "sh", "-c", probe])
    except HostsUnavailable as error:
        return [f"no traffic shaping ({error}): the kernel needs sch_tbf (CONFIG_NET_SCH_TBF); modprobe sch_tbf"]
    return []


def address(host: int) -> str:
    """IPv4 address of a host."""
    return f"{SUBNET}.{host + 1}"


def inside(pid: int, command: Sequence[str]) -> Command:
    """``command`` in the network namespace that process ``pid`` holds."""
    return ["nsenter", f"--net=/proc/{pid}/ns/net", *command]


def switch_commands(switch: int) -> list[Command]:
    """Make the bridge, in the namespace that process ``switch`` holds."""
    words = ("ip link add br0 type bridge", "ip link set br0 up")
    return [inside(switch, line.split()) for line in words]


def link_commands(host: int, pid: int, switch: int) -> list[Command]:
    """Join host number ``host``, held by ``pid``, to the bridge."""
    mine = (
        f"ip link add eth0 type veth peer name p{host} netns {switch}",
        f"ip addr add {address(host)}/24 dev eth0",
        f"ip link set eth0 gso_max_size {GSO_BYTES}",
        "ip link set lo up",
        "ip link set eth0 up",
        "sysctl -qw net.ipv4.tcp_congestion_control=reno",
    )
    bridge = (
        f"ip link set p{host} gso_max_size {GSO_BYTES}",
        f"ip link set p{host} master br0",
        f"ip link set p{host} up",
    )
    return [inside(pid, line.split()) for line in mine] + [inside(switch, line.split()) for line in bridge]


def shape_commands(host: int, pid: int, switch: int, mbit: float | None, shaped: bool) -> list[Command]:
    """Limit both directions of a host's link to ``mbit`` Mbit/s; None takes the limit away.

    Args:
        shaped: whether there is a limit now.
    """
    ends = ((pid, "eth0"), (switch, f"p{host}"))
    if mbit is None:
        return [inside(end, f"tc qdisc del dev {name} root".split()) for end, name in ends] if shaped else []
    limit = f"root tbf rate {mbit:g}mbit burst {BURST} latency {QUEUE}"
    return [inside(end, f"tc qdisc replace dev {name} {limit}".split()) for end, name in ends]


def hold_namespace() -> subprocess.Popen[bytes]:
    """Start a process that does nothing in a new network namespace.

    Raises:
        HostsUnavailable: the kernel grants none.
    """
    holder = subprocess.Popen(
        ["unshare", "--net", "sleep", "infinity"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=die_with_parent,
        start_new_session=True,  # Ctrl-C is for us: the namespaces go last
    )
    ours = os.readlink("/proc/self/ns/net")
    while holder.poll() is None:
        with suppress(OSError):
            if os.readlink(f"/proc/{holder.pid}/ns/net") != ours:
                return holder
        time.sleep(0.005)
    assert holder.stderr is not None
    raise HostsUnavailable(f"no network namespace: {holder.stderr.read().decode().strip()}")


class Hosts:
    """``count`` hosts on one switch, as a context manager; unshaped at first.

    Args:
        run: runs one command (a test may give another).
        hold: starts a namespace's process.

    Raises:
        HostsUnavailable: on entry, with all that was made taken down again.
    """

    def __init__(
        self, count: int, run: Run = run_quietly, hold: Callable[[], subprocess.Popen[bytes]] = hold_namespace
    ) -> None:
        self.count = count
        self._run, self._hold = run, hold
        self._holders: list[subprocess.Popen[bytes]] = []  # the switch, then the hosts
        self._shaped = False

    def __enter__(self) -> Hosts:
        try:
            for _ in range(self.count + 1):
                self._holders.append(self._hold())
            for command in switch_commands(self._switch):
                self._run(command)
            for host in range(self.count):
                for command in link_commands(host, self._pid(host), self._switch):
                    self._run(command)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _switch(self) -> int:
        return self._holders[0].pid

    def _pid(self, host: int) -> int:
        return self._holders[host + 1].pid

    def shape(self, mbit: float | None) -> None:
        """Limit every link to ``mbit`` Mbit/s each way; None for as fast as the machine goes."""
        for host in range(self.count):
            for command in shape_commands(host, self._pid(host), self._switch, mbit, self._shaped):
                self._run(command)
        self._shaped = mbit is not None

    def command(self, host: int, command: Sequence[str]) -> Command:
        """``command`` as it is run on a host."""
        return inside(self._pid(host), command)

    def close(self) -> None:
        """Take everything down, the hosts before the switch; more than once does no harm.

        Interfaces and rules go with their namespace, a namespace with the last process in it: end the ranks first.
        """
        while self._holders:
            holder = self._holders.pop()
            holder.kill()
            holder.wait()
            if holder.stderr is not None:
                holder.stderr.close()


def interface_bytes(name: str = "eth0") -> int:
    """Bytes that have left through an interface of this process's namespace, headers included.

    Raises:
        RuntimeError: there is no such interface.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        found, _, counters = line.partition(":")
        if found.strip() == name:
            return int(counters.split()[8])
    raise RuntimeError(f"no interface {name} in this network namespace")
