"""Where ranks meet: addresses, interfaces and ports, with this machine's own loopback and with made-up networks."""

from __future__ import annotations

import os
import socket

import pytest

from launch.preflight import environment, rendezvous
from launch.preflight.addresses import Interface, carrier, interfaces, is_free, is_loopback, resolve, towards
from launch.preflight.environment import check_nccl_interface, check_pdsh_environment, rank_variables, wanted_interface
from launch.preflight.findings import Findings
from launch.preflight.hostfile import Host
from launch.preflight.rendezvous import choose_address, choose_interface, choose_port

NODES = [Host(name="n1", slots=1, address="10.0.0.1"), Host(name="n2", slots=1, address="10.0.0.2")]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is n1, 10.0.0.1 on eth0; it has ib0 with another network, eth1 that is down, and lo."""
    known = {
        "lo": Interface(name="lo", addresses=("127.0.0.1", "::1"), up=True),
        "eth0": Interface(name="eth0", addresses=("10.0.0.1", "fe80::1"), up=True),
        "eth1": Interface(name="eth1", addresses=(), up=False),
        "ib0": Interface(name="ib0", addresses=("10.9.0.1",), up=True),
    }
    owner = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.9.0.1": "ib0"}
    for module in (rendezvous, environment):
        monkeypatch.setattr(module, "interfaces", lambda: known)
    monkeypatch.setattr(rendezvous, "carrier", owner.get)
    monkeypatch.setattr(rendezvous, "towards", lambda address: "eth0" if address.startswith("10.0.") else None)
    monkeypatch.setattr(rendezvous, "resolve", lambda name: [] if name == "nobody" else [name])
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def test_this_machine_has_a_loopback() -> None:
    name = carrier("127.0.0.1")
    assert name is not None and interfaces()[name].up and towards("127.0.0.1") == name
    assert carrier("203.0.113.1") is None  # set aside for documentation, so nobody's
    assert is_loopback("127.0.1.1") and is_loopback("::1") and not is_loopback("10.0.0.1") and not is_loopback("lo")
    assert "127.0.0.1" in resolve("127.0.0.1") and resolve("no-such-host.invalid") == []


@pytest.mark.parametrize("address", ["", "127.0.0.1"], ids=["all", "loopback"])
def test_a_port_in_use_is_seen(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
        findings = Findings()
        assert choose_port(port, True, findings) == port
        assert findings.wrong == [
            f"--master-port {port}: somebody listens on it here; give another, or none to have a free one chosen"
        ]
        elsewhere = Findings()
        choose_port(port, False, elsewhere)
        assert elsewhere.wrong == []
    assert is_free(port)


def test_a_port_is_chosen() -> None:
    findings = Findings()
    assert is_free(choose_port(None, True, findings)) and choose_port(None, False, findings) == 29500
    assert findings.wrong == []


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_what_is_no_port(port: int) -> None:
    findings = Findings()
    choose_port(port, True, findings)
    assert findings.wrong == [f"--master-port {port}: is no TCP port; give one between 1024 and 65535"]


def test_only_root_may_have_a_low_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    findings = Findings()
    choose_port(80, False, findings)
    assert "--master-port 80: only root may listen below 1024" in findings.wrong[0]


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("asked", "answer"), [(None, ("10.0.0.1", True)), ("10.9.0.1", ("10.9.0.1", True))], ids=["first", "second-network"]
)
def test_the_address_of_rank_0(asked: str | None, answer: tuple[str, bool]) -> None:
    findings = Findings()
    assert choose_address(NODES, asked, findings) == answer and findings.wrong == []


@pytest.mark.usefixtures("network")
def test_rank_0_may_be_elsewhere() -> None:
    findings = Findings()
    assert choose_address(NODES[::-1], None, findings) == ("10.0.0.2", False) and findings.wrong == []


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("nodes", "asked", "says"),
    [
        (NODES, "nobody", "--master-addr nobody: has no known address; leave it out for 10.0.0.1"),
        (NODES, "127.0.0.1", "--master-addr 127.0.0.1: is this machine for every node"),
        (NODES, "10.0.0.2", "--master-addr 10.0.0.2: is no address of this machine, but rank 0 runs on n1"),
        (NODES[::-1], "10.0.0.1", "--master-addr 10.0.0.1: is an address of this machine, but rank 0 runs on n2"),
    ],
    ids=["unknown", "loopback", "other", "mine"],
)
def test_wrong_addresses_of_rank_0(nodes: list[Host], asked: str, says: str) -> None:
    findings = Findings()
    choose_address(nodes, asked, findings)
    assert len(findings.wrong) == 1 and findings.wrong[0].startswith(says)


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("address", "here", "asked", "answer"),
    [
        ("10.0.0.1", True, None, "eth0"),
        ("10.0.0.2", False, None, "eth0"),
        ("10.0.0.1", True, "eth0", "eth0"),
        ("10.0.0.1", True, "eth0,ib0", "eth0,ib0"),
    ],
)
def test_the_interface(address: str, here: bool, asked: str | None, answer: str) -> None:
    findings = Findings()
    wish = None if asked is None else ("--interface", asked)
    assert choose_interface(address, here, True, wish, findings) == answer
    assert findings.wrong == findings.told == []


@pytest.mark.usefixtures("network")
def test_another_interface_than_the_address_is_worth_a_note() -> None:
    findings = Findings()
    assert choose_interface("10.0.0.1", True, True, ("--interface", "ib0"), findings) == "ib0"
    assert (
        findings.wrong == [] and "10.0.0.1 is on eth0, while the ranks' own sockets will use ib0" in findings.told[0][1]
    )


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("eth7", "--interface eth7: this machine has no such interface, only lo, eth0, eth1, ib0; take eth0"),
        ("eth0,eth7", "--interface eth7: this machine has no such interface"),
        ("eth1", "--interface eth1: the interface is down; ip link set eth1 up, or take eth0"),
        ("lo", "--interface lo: leads to no other node; take eth0"),
    ],
)
def test_wrong_interfaces(asked: str, says: str) -> None:
    findings = Findings()
    choose_interface("10.0.0.1", True, True, ("--interface", asked), findings)
    assert len(findings.wrong) == 1 and findings.wrong[0].startswith(says)


@pytest.mark.usefixtures("network")
def test_loopback_is_right_for_one_node() -> None:
    findings = Findings()
    assert choose_interface("127.0.0.1", True, False, None, findings) == "lo" and findings.wrong == []


@pytest.mark.usefixtures("network")
def test_no_way_to_the_first_node() -> None:
    findings = Findings()
    choose_interface("10.5.0.1", False, True, None, findings)
    assert findings.wrong == ["master address 10.5.0.1: no interface here leads to it; see `ip route get`, `ip addr`"]


@pytest.mark.usefixtures("network")
def test_where_a_wish_for_an_interface_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"GLOO_SOCKET_IFNAME": "eth0"}
    assert wanted_interface("ib0", files) == ("--interface", "ib0")
    assert wanted_interface(None, files) == (".deepspeed_env GLOO_SOCKET_IFNAME", "eth0")
    assert wanted_interface(None, {}) is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert wanted_interface(None, {}) == ("environment GLOO_SOCKET_IFNAME", "eth1")


@pytest.mark.usefixtures("network")
def test_the_launch_adds_only_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    assert rank_variables({"A": "1"}, "eth0", 2) == both | {"A": "1"}
    assert rank_variables({}, "lo", 1) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert rank_variables({}, None, 2) == {}
    assert rank_variables({"NCCL_SOCKET_IFNAME": "ib0"}, "eth0", 2) == both | {"NCCL_SOCKET_IFNAME": "ib0"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker")
    assert rank_variables({}, "eth0", 2) == {"GLOO_SOCKET_IFNAME": "eth0"}


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("value", ["eth", "=eth0", "^docker,lo", "ib0,eth7", ""])
def test_what_nccl_understands(value: str) -> None:
    findings = Findings()
    check_nccl_interface({"NCCL_SOCKET_IFNAME": value}, findings)
    assert findings.wrong == []


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("value", ["eno", "=eth", "=eth7"])
def test_what_nccl_would_not_find(value: str) -> None:
    findings = Findings()
    check_nccl_interface({"NCCL_SOCKET_IFNAME": value}, findings)
    assert findings.wrong == [
        f"NCCL_SOCKET_IFNAME {value}: fits none of lo, eth0, eth1, ib0; name one, or leave it to the launch"
    ]


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("addresses", "files", "wrong"),
    [
        (["10.0.0.1"], {}, False),
        (["127.0.1.1"], {}, True),
        ([], {}, True),
        (["127.0.1.1"], {"GLOO_SOCKET_IFNAME": "eth0"}, False),
    ],
)
def test_pdsh_needs_the_interface_in_the_file(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], files: dict[str, str], wrong: bool
) -> None:
    monkeypatch.setattr(environment, "resolve", lambda name: addresses)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    findings = Findings()
    check_pdsh_environment(files, "eth0", 2, findings)
    assert any("OMP_NUM_THREADS" in text for _, text in findings.told)
    assert [line.endswith("echo GLOO_SOCKET_IFNAME=eth0 >> .deepspeed_env") for line in findings.wrong] == [
        True
    ] * wrong
    alone = Findings()
    check_pdsh_environment(files, "eth0", 1, alone)
    assert alone.wrong == []
