"""The process that owns the embedded ClickHouse directory and answers everyone else over HTTP on loopback.

    python -m consumers.clickhouse.owner --dir .rollstream/clickhouse --port 8123

chDB locks its directory for one process; so one process opens it and the sink, the command line and dashboards ask
it. Acknowledged inserts survive kill -9. SIGTERM or SIGINT: running statements end, then the engine closes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import structlog

log = structlog.get_logger()

LOCK_FILE = "owner.lock"


class OwnerError(RuntimeError):
    """The directory or the port cannot be had: says who has it and what to do."""


class DirectoryLock:
    """An advisory lock on the directory that also says who holds it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_FILE
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            holder = read_owner(directory)
            who = f"process {holder['pid']} (port {holder.get('port')})" if holder else "another process"
            raise OwnerError(
                f"{directory} is already owned by {who}; use its port, stop it with `rollstream down`, or set data.dir"
            ) from None

    def write(self, port: int) -> None:
        """Record the owner."""
        payload = json.dumps({"pid": os.getpid(), "port": port, "started_at": time.time()}).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, payload, 0)

    def release(self) -> None:
        """Give the directory back."""
        os.ftruncate(self._fd, 0)
        os.close(self._fd)


def read_owner(directory: Path) -> dict[str, int | float] | None:
    """Who last recorded ownership: pid, port, started_at; None when nobody or unreadable."""
    try:
        owner: dict[str, int | float] = json.loads((directory / LOCK_FILE).read_text())
    except (OSError, ValueError):
        return None
    return owner if "pid" in owner else None


def _check_port(host: str, port: int) -> None:
    """Fail before the engine is loaded when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise OwnerError(
                f"cannot listen on {host}:{port}: {exc.strerror}; set clickhouse.port to a free port, "
                "or clickhouse.url to the ClickHouse that is running there"
            ) from exc


async def _serve(directory: Path, host: str, port: int, lock: DirectoryLock) -> None:
    from consumers.clickhouse.engine import Engine
    from consumers.clickhouse.front import start

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    engine = Engine(str(directory))
    try:
        runner, front, bound = await start(engine, host, port)
        lock.write(bound)
        log.info("clickhouse_ready", url=f"http://{host}:{bound}", dir=str(directory), version=engine.version)
        await stop.wait()
        await runner.cleanup()
        await front.close()
    finally:
        engine.close()
    log.info("clickhouse_stopped", dir=str(directory))


def run_owner(directory: Path, host: str, port: int) -> None:
    """Own `directory` until a signal. Raises OwnerError when it or the port is taken."""
    from consumers.clickhouse.engine import EngineError

    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = DirectoryLock(directory)
    except OSError as exc:
        raise OwnerError(f"cannot use {directory}: {exc.strerror}; set data.dir to a directory you can write") from exc
    try:
        _check_port(host, port)
        asyncio.run(_serve(directory, host, port, lock))
    except EngineError as exc:
        remedy = "another program has it open" if exc.code == 76 else "move it away to start afresh from the log"
        raise OwnerError(f"the engine cannot open {directory} ({remedy}): {exc}") from exc
    except OSError as exc:
        raise OwnerError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    finally:
        lock.release()


def main(argv: list[str] | None = None) -> int:
    """Entry point: 0 after a signal, 1 with a message when the directory or the port is taken."""
    parser = argparse.ArgumentParser(prog="consumers.clickhouse.owner", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dir", required=True, type=Path, help="directory of the embedded engine")
    parser.add_argument("--port", required=True, type=int, help="port of the HTTP interface; 0: a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    args = parser.parse_args(argv)
    try:
        run_owner(args.dir.absolute(), args.host, args.port)
    except OwnerError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
