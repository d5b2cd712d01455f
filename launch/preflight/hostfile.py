"""The hostfile: DeepSpeed's own grammar, with what it would misread refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launch.preflight.addresses import is_loopback, resolve
from launch.preflight.findings import Findings

DEEPSPEED_DEFAULT = Path("/job/hostfile")
ENTRY = re.compile(r"(\S+)\s+slots=(\d+)(.*)")  # DeepSpeed's pattern, and the rest of the line, which it ignores


@dataclass(frozen=True, kw_only=True)
class Host:
    """One node: its name as the hostfile has it, how many ranks it runs, its address."""

    name: str
    slots: int
    address: str = ""


def find_hostfile(asked: str | None) -> Path:
    """The file that is meant: the one asked for, else ./hostfile, else DeepSpeed's default if that exists."""
    if asked is not None:
        return Path(asked)
    here = Path("hostfile")
    return DEEPSPEED_DEFAULT if not here.exists() and DEEPSPEED_DEFAULT.is_file() else here


def read_hostfile(path: Path, findings: Findings) -> list[Host]:
    """The nodes of a file, in its order, without addresses; lines that can't be read are left out and refused."""
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        # DeepSpeed would take a missing file as "this machine alone"
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        findings.refuse(f"--hostfile {path}", str(why), "write one line a node, such as `node1 slots=8`")
        return []
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if line and not line.startswith("#"):
            _read_entry(f"{path}:{number} `{line}`", line, hosts, findings)
    if not hosts and not findings.wrong:
        findings.refuse(f"--hostfile {path}", "names no node", "write one line a node, such as `node1 slots=8`")
    return list(hosts.values())


def _read_entry(where: str, line: str, hosts: dict[str, Host], findings: Findings) -> None:
    match = ENTRY.match(line)
    if match is None:
        findings.refuse(where, "is not `NAME slots=NUMBER`", "write it like `node1 slots=8`, no blanks around `=`")
        return
    name, slots, rest = match.group(1), int(match.group(2)), match.group(3)
    if rest and not rest[0].isspace():
        findings.refuse(where, f"DeepSpeed would read {slots} slots and drop `{rest}`", "write a plain number")
    elif slots == 0:
        findings.refuse(where, "0 slots run no rank", "give the number of GPUs, or leave the node out")
    elif name in hosts:
        findings.refuse(where, f"{name} is there twice", "one line a node, with all its slots")
    else:
        hosts[name] = Host(name=name, slots=slots)


def locate(hosts: list[Host], findings: Findings) -> list[Host]:
    """The same nodes with their addresses; those that have none, or one that others can't use, are refused."""
    located: list[Host] = []
    for host in hosts:
        addresses = resolve(host.name)
        usable = [a for a in addresses if len(hosts) == 1 or not is_loopback(a)]
        if not addresses:
            remedy = "add it to /etc/hosts or the name server, or write its address into the hostfile"
            findings.refuse(f"host {host.name}", "has no known address", remedy)
        elif not usable:
            why = f"resolves to {addresses[0]}, by which every other node means itself"
            findings.refuse(f"host {host.name}", why, "give it its network address in /etc/hosts or the hostfile")
        elif twin := next((other for other in located if other.address == usable[0]), None):
            why = f"has the address {usable[0]} of {twin.name}, so both would use the same GPUs"
            findings.refuse(f"host {host.name}", why, "one line a machine, with all its slots")
        else:
            located.append(Host(name=host.name, slots=host.slots, address=usable[0]))
    return located
