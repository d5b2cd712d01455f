"""A port for a rendezvous."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
