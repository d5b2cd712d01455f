"""Where the ranks meet: the address of the first node, a port there, and the interface that leads to it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from launch.ports import free_port
from launch.preflight.addresses import carrier, interfaces, is_free, is_loopback, resolve, towards
from launch.preflight.findings import Findings
from launch.preflight.hostfile import Host

DEFAULT_PORT = 29500  # DeepSpeed's and torch's
PORT_TRIES = 10
PRIVILEGED = 1024


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """What every rank is told about the first."""

    address: str
    port: int
    interface: str | None  # None: nothing is known, and each library picks its own
    here: bool  # whether rank 0 runs on this machine


def choose_address(hosts: list[Host], asked: str | None, findings: Findings) -> tuple[str, bool]:
    """The address of rank 0, and whether it is on this machine."""
    first = hosts[0]
    here = carrier(first.address) is not None
    if asked is None:
        return first.address, here
    what = f"--master-addr {asked}"
    found = next(iter(resolve(asked)), None)
    if found is None:
        findings.refuse(what, "has no known address", f"leave it out for {first.address}, the address of {first.name}")
        return first.address, here
    if is_loopback(found) and len(hosts) > 1:
        findings.refuse(what, "is this machine for every node", f"give an address of {first.name} that all nodes reach")
    elif here != (carrier(found) is not None):
        whose = "no address of this machine" if here else "an address of this machine"
        why = f"is {whose}, but rank 0 runs on {first.name}, the first of the hostfile"
        findings.refuse(what, why, f"leave it out for {first.address}")
    return found, here


def choose_interface(
    address: str, here: bool, several: bool, asked: tuple[str, str] | None, findings: Findings
) -> str | None:
    """The interface for the ranks' sockets.

    Args:
        here: whether ``address`` is on this machine.
        several: whether there is more than one node.
        asked: where the wish was found, and the name, or several with commas.
    """
    found = carrier(address) if here else towards(address)
    if asked is None:
        if found is None:
            why = "no interface here leads to it"
            findings.refuse(f"master address {address}", why, "see `ip route get`, `ip addr`")
        return found
    origin, names = asked
    known = interfaces()
    for name in names.split(","):
        what = f"{origin} {name}"
        if name not in known:
            why = f"this machine has no such interface, only {', '.join(known)}"
            findings.refuse(what, why, f"take {found or 'another'}")
        elif not known[name].up:
            findings.refuse(what, "the interface is down", f"ip link set {name} up, or take {found or 'another'}")
        elif several and any(map(is_loopback, known[name].addresses)):
            findings.refuse(what, "leads to no other node", f"take {found or 'the interface of the network'}")
    if found not in names.split(","):
        findings.tell("note", f"{address} is on {found}, while the ranks' own sockets will use {names} ({origin})")
    return names


def choose_port(asked: int | None, here: bool, findings: Findings) -> int:
    """A port on rank 0's machine: the one asked for, else a free one, or DeepSpeed's where that can't be seen."""
    if asked is None and not here:
        return DEFAULT_PORT
    if asked is None:
        for _ in range(PORT_TRIES):
            if is_free(port := free_port()):
                return port
        findings.refuse("--master-port", "found no free port", "give one")
        return DEFAULT_PORT
    what = f"--master-port {asked}"
    if not 0 < asked < 65536:
        findings.refuse(what, "is no TCP port", "give one between 1024 and 65535")
    elif asked < PRIVILEGED and os.geteuid() != 0:
        findings.refuse(what, "only root may listen below 1024", "give one between 1024 and 65535")
    elif here and not is_free(asked):
        findings.refuse(what, "somebody listens on it here", "give another, or none to have a free one chosen")
    return asked
