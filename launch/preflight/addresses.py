"""Names, addresses, interfaces and ports, as this machine sees them."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface of this machine."""

    name: str
    addresses: tuple[str, ...]
    up: bool


def interfaces() -> dict[str, Interface]:
    """This machine's interfaces by name."""
    states = psutil.net_if_stats()
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = tuple(e.address.split("%")[0] for e in entries if e.family in (socket.AF_INET, socket.AF_INET6))
        found[name] = Interface(name=name, addresses=addresses, up=name in states and states[name].isup)
    return found


def resolve(name: str) -> list[str]:
    """The addresses of a name, IPv4 first; none if it is unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(address: str) -> bool:
    """Whether an address means the machine that uses it, as 127.0.1.1 does."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def carrier(address: str) -> str | None:
    """The interface here that has this address, if it is one of this machine's."""
    if is_loopback(address):
        return next((name for name, found in interfaces().items() if any(map(is_loopback, found.addresses))), None)
    return next((name for name, found in interfaces().items() if address in found.addresses), None)


def towards(address: str) -> str | None:
    """The interface by which this machine would send to an address; None if it has no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))  # of a datagram socket: looks up the route, sends nothing
        return carrier(probe.getsockname()[0])
    return None


def is_free(port: int) -> bool:
    """Whether a listener on all addresses, as torch's store is, can have this TCP port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: remains of an old job don't count
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True
