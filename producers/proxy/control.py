"""The control socket: workers open and close sessions, and hand over listening sockets of their sandboxes.

Newline-delimited JSON on a Unix stream socket, one connection per trial attempt; the connection's life is the
session's life. An `open` of kind `listener` carries one file descriptor (SCM_RIGHTS, unix(7)): a TCP socket that
listens inside the sandbox's network namespace. A socket keeps the namespace it was made in, so accepting here serves
the sandbox without a relay and without a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from producers.proxy.recorder import NotRecordedError
from producers.proxy.sessions import DuplicateSessionError, Session, SessionError, Sessions

log = structlog.get_logger()

MAX_LINE_BYTES = 64 * 1024


class ControlServer:
    """Accepts control connections until closed."""

    def __init__(self, path: Path, sessions: Sessions, http_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self._path = path
        self._sessions = sessions
        self._http_protocol = http_protocol
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind and accept. Raises RuntimeError when another proxy owns the socket."""
        if await self._alive():
            raise RuntimeError(f"{self._path}: another proxy is serving here; stop it, or use another data.dir")
        self._path.unlink(missing_ok=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(str(self._path))
            self._path.chmod(0o600)
            listener.listen(512)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))

    async def _alive(self) -> bool:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_unix_connection(str(self._path))
            writer.close()
            return True
        return False

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                conn, _ = await loop.sock_accept(listener)
            except OSError as exc:
                log.error("control socket cannot accept", error=str(exc))
                await asyncio.sleep(0.1)  # out of file descriptors: try again when some are free
                continue
            conn.setblocking(False)
            task = asyncio.create_task(_Connection(conn, self._sessions, self._http_protocol).run())
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def close(self) -> None:
        """Drop every session and remove the socket."""
        if self._accepting is not None:
            self._accepting.cancel()
        for task in tuple(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(tuple(self._connections))
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)


class _Connection:
    """One control connection."""

    def __init__(
        self, conn: socket.socket, sessions: Sessions, http_protocol: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        self._conn = conn
        self._sessions = sessions
        self._http_protocol = http_protocol
        self._session: Session | None = None
        self._server: asyncio.Server | None = None
        self._buffer = b""
        self._fds: list[int] = []

    async def run(self) -> None:
        try:
            while (line := await self._read_line()) is not None:
                await self._send(await self._handle(line))
        except (OSError, SessionError) as exc:
            log.warning("control connection failed", error=str(exc))
        finally:
            await self._end()

    async def _read_line(self) -> bytes | None:
        """The next line; None at the end. Descriptors that came along are kept in `_fds`."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise SessionError(f"control message longer than {MAX_LINE_BYTES} bytes")
            data = await self._receive()
            if not data:
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    async def _receive(self) -> bytes:
        loop = asyncio.get_running_loop()
        while True:
            try:
                data, fds, flags, _ = socket.recv_fds(self._conn, MAX_LINE_BYTES, 4)
            except BlockingIOError:
                readable = asyncio.Event()
                loop.add_reader(self._conn, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(self._conn)
                continue
            self._fds += fds
            if flags & socket.MSG_CTRUNC:
                raise SessionError("more file descriptors were attached than the one expected")
            return data

    async def _send(self, reply: dict[str, Any]) -> None:
        await asyncio.get_running_loop().sock_sendall(self._conn, json.dumps(reply).encode() + b"\n")

    async def _handle(self, line: bytes) -> dict[str, Any]:
        try:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise SessionError("a control message is a JSON object")
            match message.get("op"):
                case "open":
                    await self._open(message)
                    return {"ok": True}
                case "close":
                    return await self._close()
                case other:
                    raise SessionError(f"unknown op {other!r}; known: open, close")
        except DuplicateSessionError as exc:
            return {"ok": False, "error": str(exc), "code": "duplicate_attempt"}
        except (SessionError, NotRecordedError) as exc:
            return {"ok": False, "error": str(exc)}
        except ValueError as exc:
            return {"ok": False, "error": f"not JSON: {exc}"}

    async def _open(self, message: dict[str, Any]) -> None:
        if self._session is not None:
            raise SessionError("open: this connection has a session already; use one connection per attempt")
        session = Session.from_message(message)
        kind = message.get("kind")
        if kind not in ("listener", "bridge"):
            raise SessionError(f"open: `kind` must be listener or bridge, not {kind!r}")
        if (kind == "listener") != (len(self._fds) == 1):
            raise SessionError(f"open: kind {kind} with {len(self._fds)} file descriptors attached")
        listener = _take_listener(self._fds.pop()) if kind == "listener" else None
        try:
            self._sessions.add(session)
        except SessionError:
            if listener is not None:
                listener.close()
            raise
        self._session = session
        if listener is not None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._http_protocol, sock=listener)

    async def _close(self) -> dict[str, Any]:
        if self._session is None:
            raise SessionError("close: no session was opened on this connection")
        closing = asyncio.ensure_future(self._session.close())
        gone = asyncio.ensure_future(self._read_line())
        try:
            await asyncio.wait({closing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not closing.done():
                if (line := gone.result()) is None:
                    raise ConnectionResetError("the worker went away while its session was being closed")
                self._buffer = line + b"\n" + self._buffer
            return {"ok": True, **asdict(await closing)}
        finally:
            gone.cancel()
            closing.cancel()
            await asyncio.wait({closing, gone})

    async def _end(self) -> None:
        """The connection is over: so is the session."""
        for fd in self._fds:
            os.close(fd)
        if self._server is not None:
            self._server.close()
        if self._session is not None:
            await self._session.drop()
            self._sessions.remove(self._session)
        self._conn.close()


def _take_listener(fd: int) -> socket.socket:
    """The attached descriptor as a listening TCP socket. Raises SessionError for anything else."""
    sock = socket.socket(fileno=fd)
    listening = False
    with contextlib.suppress(OSError):
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    if not listening or sock.type != socket.SOCK_STREAM or sock.family not in (socket.AF_INET, socket.AF_INET6):
        sock.close()
        raise SessionError("open: the attached descriptor is not a listening TCP socket")
    # Accepted connections inherit it: without it a reply in two writes waits for the peer's delayed ACK (40 ms).
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    return sock
