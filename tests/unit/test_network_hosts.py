"""Hosts of evals.network without making any: the commands, their order, and that failures leave nothing."""

from __future__ import annotations

import io
from typing import Any

import pytest

from evals.network import hosts as hosts_module
from evals.network.hosts import Hosts, HostsUnavailable, link_commands, missing, run_quietly, shape_commands


class FakeHolder:
    """Stands for the sleeping process of a namespace."""

    def __init__(self, pid: int, log: list[str]) -> None:
        self.pid, self.log, self.stderr = pid, log, io.BytesIO()

    def kill(self) -> None:
        self.log.append(f"kill {self.pid}")

    def wait(self) -> None:
        self.log.append(f"wait {self.pid}")


class Fakes:
    """A runner and a holder that note what they are asked; the runner fails at one command."""

    def __init__(self, fail_at: int = -1, hold_fails_at: int = -1) -> None:
        self.log: list[str] = []
        self.commands: list[str] = []
        self.fail_at, self.hold_fails_at, self.held = fail_at, hold_fails_at, 0

    def run(self, command: list[str]) -> None:
        self.commands.append(" ".join(command))
        if len(self.commands) == self.fail_at:
            raise HostsUnavailable("no more")

    def hold(self) -> Any:
        if self.held == self.hold_fails_at:
            raise HostsUnavailable("no namespace")
        self.held += 1
        return FakeHolder(99 + self.held, self.log)

    def hosts(self, count: int) -> Hosts:
        return Hosts(count, run=self.run, hold=self.hold)


def gone(*pids: int) -> list[str]:
    return [f"{verb} {pid}" for pid in pids for verb in ("kill", "wait")]


def test_everything_goes_down_hosts_before_switch() -> None:
    fakes = Fakes()
    with fakes.hosts(3) as hosts:
        assert fakes.log == []
        assert hosts.command(1, ["true"]) == ["nsenter", "--net=/proc/102/ns/net", "true"]
    assert fakes.log == gone(103, 102, 101, 100)
    hosts.close()
    assert len(fakes.log) == 8  # twice does no harm


def test_it_goes_down_on_ctrl_c_too() -> None:
    fakes = Fakes()
    with pytest.raises(KeyboardInterrupt), fakes.hosts(2):
        raise KeyboardInterrupt
    assert fakes.log == gone(102, 101, 100)


@pytest.mark.parametrize("fail_at", [1, 2, 3, 8, 12, 20])
def test_a_command_that_fails_takes_down_what_was_made(fail_at: int) -> None:
    fakes = Fakes(fail_at=fail_at)
    with pytest.raises(HostsUnavailable, match="no more"), fakes.hosts(2):
        raise AssertionError("entered")
    assert fakes.log == gone(102, 101, 100)


def test_a_namespace_that_is_not_granted_takes_down_the_others() -> None:
    fakes = Fakes(hold_fails_at=2)
    with pytest.raises(HostsUnavailable, match="no namespace"), fakes.hosts(4):
        raise AssertionError("entered")
    assert fakes.log == gone(101, 100) and fakes.commands == []


def test_segmentation_size_is_set_before_the_interface_is_up() -> None:
    commands = [" ".join(c) for c in link_commands(3, 7, 5)]
    at = {
        text: next(i for i, c in enumerate(commands) if text in c)
        for text in ("gso_max_size", "set eth0 up", "10.77.0.4/24")
    }
    assert at["gso_max_size"] < at["set eth0 up"]
    assert commands[0] == "nsenter --net=/proc/7/ns/net ip link add eth0 type veth peer name p3 netns 5"
    assert "nsenter --net=/proc/5/ns/net ip link set p3 master br0" in commands


def test_both_directions_are_shaped_and_freed() -> None:
    shaped = [" ".join(c) for c in shape_commands(0, 7, 5, 200.0, shaped=False)]
    assert shaped == [
        f"nsenter --net=/proc/{pid}/ns/net tc qdisc replace dev {dev} root tbf rate 200mbit burst 32kb latency 50ms"
        for pid, dev in ((7, "eth0"), (5, "p0"))
    ]
    freed = [" ".join(c) for c in shape_commands(0, 7, 5, None, shaped=True)]
    assert [c.split(" tc ")[1] for c in freed] == ["qdisc del dev eth0 root", "qdisc del dev p0 root"]
    assert shape_commands(0, 7, 5, None, shaped=False) == []


def test_unshaping_twice_deletes_once() -> None:
    fakes = Fakes()
    with fakes.hosts(2) as hosts:
        fakes.commands.clear()
        for mbit in (None, 1000.0, 100.0, None, None):
            hosts.shape(mbit)
    assert [c.split("qdisc ")[1].split()[0] for c in fakes.commands] == ["replace"] * 8 + ["del"] * 4


def test_a_failed_command_says_which_and_why() -> None:
    with pytest.raises(HostsUnavailable, match="^ls /nowhere-at-all: .*No such file"):
        run_quietly(["ls", "/nowhere-at-all"])


def test_missing_names_tools_and_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    monkeypatch.setattr(hosts_module.os, "geteuid", lambda: 1000)
    lacks = missing()
    assert "tc is not installed: apt-get install iproute2" in lacks and any("sudo python -m" in line for line in lacks)
    assert len(lacks) == 2


def test_missing_names_what_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(hosts_module.os, "geteuid", lambda: 0)

    def refuse(what: str) -> Any:
        def run(command: list[str]) -> None:
            if what in " ".join(command):
                raise HostsUnavailable("Operation not permitted")

        return run

    monkeypatch.setattr(hosts_module, "run_quietly", refuse("--net true"))
    assert "no network namespace (Operation not permitted)" in missing()[0]
    monkeypatch.setattr(hosts_module, "run_quietly", refuse("tbf"))
    assert "sch_tbf" in missing()[0]
    monkeypatch.setattr(hosts_module, "run_quietly", refuse("nothing"))
    assert missing() == []
