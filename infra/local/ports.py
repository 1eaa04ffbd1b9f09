"""Ports on loopback: is one free, and who has it."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from infra.local.errors import PortInUseError

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port nothing listens on at the moment."""
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        return int(sock.getsockname()[1])


def accepts_connections(port: int, timeout_sec: float = 0.5) -> bool:
    """Whether something accepts TCP connections on the loopback port."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout_sec):
            return True
    except OSError:
        return False


def check_port_free(port: int, what: str, remedy: str) -> None:
    """Raise PortInUseError, naming the process that listens where that can be seen, unless the port can be bound."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((LOOPBACK, port))
        except OSError as exc:
            if exc.errno == errno.EACCES:
                raise PortInUseError(f"{what}: port {port} needs root; {remedy}") from exc
            owner = listener_of(port)
            raise PortInUseError(f"{what}: port {port} is in use{f' by {owner}' if owner else ''}; {remedy}") from exc


def listener_of(port: int) -> str | None:
    """`process 123 (java)` for the listener of a port; None when it is another user's or gone."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rsplit(":", 1)[1], 16) == port and fields[3] == "0A":  # 0A: LISTEN
                inodes.add(f"socket:[{fields[9]}]")
    for proc in Path("/proc").iterdir() if inodes else ():
        if not proc.name.isdigit():
            continue
        try:
            if any(str(fd.readlink()) in inodes for fd in (proc / "fd").iterdir()):
                return f"process {proc.name} ({(proc / 'comm').read_text().strip()})"
        except OSError:  # another user's process, or one that has just ended
            continue
    return None
