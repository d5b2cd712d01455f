"""The other nodes, asked over ssh: are folder, Python and script there, the same versions, and the way back open."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from launch.preflight.findings import Findings
from launch.preflight.hostfile import Host
from launch.preflight.rendezvous import Rendezvous

MARK = "SCAPE-FACTS "  # a login may print a greeting around it
PACKAGES = ("torch", "deepspeed", "deepspeed-scape")
NO_FOLDER, NO_PYTHON, NO_SCRIPT, NO_SSH = 101, 102, 103, 255
TIMEOUT_S = 60
AT_ONCE = 32

# runs in the other node's Python, which need not have this repository; gets packages, an address, and a port or 0
ASK = """
import json, socket, sys
from importlib.metadata import PackageNotFoundError, version
def of(name):
    try: return version(name)
    except PackageNotFoundError: return None
names, address, port = sys.argv[1].split(","), sys.argv[2], int(sys.argv[3])
facts = {"name": socket.gethostname(), "interfaces": [n for _, n in socket.if_nameindex()], "refused": ""}
facts["versions"] = {n: of(n) for n in names}
try: port and socket.create_connection((address, port), 10).close()
except OSError as error: facts["refused"] = str(error)
print("SCAPE-FACTS " + json.dumps(facts))
"""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of every node."""

    folder: str
    script: str | None
    meeting: Rendezvous
    ssh_port: int | None


def own_versions() -> dict[str, str | None]:
    """The versions that this machine's ranks would run."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        found[name] = None
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def ask_command(host: str, question: Question) -> list[str]:
    """The ssh command line that asks one node; it never waits for a password."""
    way = question.meeting
    words = (sys.executable, "-c", ASK, ",".join(PACKAGES), way.address, str(way.port if way.here else 0))
    steps = [f"cd {shlex.quote(question.folder)} || exit {NO_FOLDER}"]
    steps.append(f"test -x {shlex.quote(sys.executable)} || exit {NO_PYTHON}")
    if question.script is not None:
        steps.append(f"test -f {shlex.quote(question.script)} || exit {NO_SCRIPT}")
    steps.append(f"exec {shlex.join(words)}")
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    options += ["-p", str(question.ssh_port)] if question.ssh_port is not None else []
    return ["ssh", *options, host, f"sh -c {shlex.quote('; '.join(steps))}"]


@contextmanager
def listening(meeting: Rendezvous, nodes: int) -> Iterator[None]:
    """Answer on the rendezvous port if rank 0 will be here, so that nodes can try the way; the kernel does it all."""
    server = None
    if meeting.here:
        with suppress(OSError, OverflowError):  # the port is not free, or none, which has been told
            server = socket.create_server(("", meeting.port), backlog=2 * nodes + 8)
    try:
        yield
    finally:
        if server is not None:
            server.close()


def check_nodes(hosts: Sequence[Host], question: Question, findings: Findings) -> None:
    """Ask all nodes at once and refuse what would end the launch."""
    with listening(question.meeting, len(hosts)), ThreadPoolExecutor(min(AT_ONCE, len(hosts))) as pool:
        answers = list(pool.map(lambda host: _ask(host.name, question), hosts))
    names: dict[str, str] = {}
    for host, (status, said) in zip(hosts, answers, strict=True):
        facts = _facts(said)
        if facts is None:
            _refuse_silence(host.name, status, said, question, findings)
            continue
        _compare(host.name, facts, question, findings)
        if twin := names.get(facts["name"]):
            why = f"calls itself {facts['name']}, as {twin} does, so ranks would be counted as on one machine"
            findings.refuse(f"host {host.name}", why, "give each node a name of its own")
        names[facts["name"]] = host.name


def _ask(host: str, question: Question) -> tuple[int, str]:
    """ssh's exit status and all that was printed."""
    try:
        done = subprocess.run(
            ask_command(host, question), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return NO_SSH, f"no answer within {TIMEOUT_S} s"
    except OSError as error:
        return NO_SSH, str(error)
    return done.returncode, done.stdout + done.stderr


def _facts(said: str) -> dict[str, Any] | None:
    for line in said.splitlines():
        if line.startswith(MARK):
            facts: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return facts
    return None


def _refuse_silence(host: str, status: int, said: str, question: Question, findings: Findings) -> None:
    last = next((line for line in reversed(said.splitlines()) if line.strip()), f"status {status}")
    why, remedy = {
        NO_FOLDER: (f"has no folder {question.folder}", "share or copy it to the same path on every node"),
        NO_PYTHON: (f"has no {sys.executable}", "make the environment at the same path on every node"),
        NO_SCRIPT: (f"has no {question.script} (seen from {question.folder})", "copy the script to every node"),
        NO_SSH: (f"ssh says `{last}`", f"`ssh {host} true` must work without a question: install your public key"),
    }.get(status, (f"its Python says `{last}`", f"repair {sys.executable} there"))
    findings.refuse(f"host {host}", why, remedy)


def _compare(host: str, facts: dict[str, Any], question: Question, findings: Findings) -> None:
    meeting = question.meeting
    for name, ours in own_versions().items():
        theirs = facts["versions"].get(name)
        if theirs != ours:
            why = f"has {name} {theirs or '(not installed)'}, this machine {ours or '(not installed)'}"
            findings.refuse(f"host {host}", why, "install the same version everywhere")
    for name in meeting.interface.split(",") if meeting.interface else ():
        if name in facts["interfaces"]:
            continue
        why = f"has no interface {name}, only {', '.join(facts['interfaces'])}"
        findings.refuse(f"host {host}", why, "give --interface one that every node has")
    if facts["refused"]:
        why = f"can't reach {meeting.address}:{meeting.port}, where the ranks meet ({facts['refused']})"
        findings.refuse(f"host {host}", why, "open the port in the firewall, or give --master-addr, --master-port")
