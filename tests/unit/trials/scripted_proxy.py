"""A capture proxy's outside for tests: control socket, HTTP on sockets that were handed over, canned replies."""

from __future__ import annotations

import functools
import json
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
#: (trial id, number of the call) -> bash command, or None for a reply without a tool call.
Script = Callable[[str, int], str | None]


class ScriptedProxy:
    """Accepts sessions; answers the n-th call of a trial with a bash tool call. One thread, one selector."""

    def __init__(self, path: Path, script: Script) -> None:
        self.path, self._script = path, script
        self.sessions: list[dict[str, Any]] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.fail_close = False
        self.refuse_duplicates = False
        self._selector = selectors.DefaultSelector()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(64)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._server, selectors.EVENT_READ, self._accept_control)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> ScriptedProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wake.send(b"x")
        self._thread.join(10)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake.close()

    def _loop(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                key.data()

    def _accept_control(self) -> None:
        sock, _ = self._server.accept()
        state: dict[str, Any] = {"calls": 0}
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._control(sock, state))

    def _control(self, sock: socket.socket, state: dict[str, Any]) -> None:
        data, fds, _, _ = socket.recv_fds(sock, 65536, 1)
        if not data:
            self._drop(sock, state)
            return
        for line in data.splitlines():
            message = json.loads(line)
            if message["op"] == "open":
                opened = {(m["trial_id"], m["attempt"]) for m in self.sessions}
                if self.refuse_duplicates and (message["trial_id"], message["attempt"]) in opened:
                    socket.socket(fileno=fds[0]).close()
                    sock.sendall(b'{"ok":false,"error":"open already","code":"duplicate_attempt"}\n')
                    continue
                state |= message | {"listener": socket.socket(fileno=fds[0])}
                self.sessions.append(message)
                state["listener"].setblocking(False)
                accept = functools.partial(self._accept_http, state)
                self._selector.register(state["listener"], selectors.EVENT_READ, accept)
                sock.sendall(b'{"ok":true}\n')
            elif self.fail_close:
                self._drop(sock, state)
            else:
                facts = {
                    "ok": True,
                    "num_calls": state["calls"],
                    "num_failed_calls": 0,
                    "num_sampled_tokens": 7 * state["calls"],
                    "num_parser_failures": 0,
                    "context_overflow": False,
                    "length_stop": False,
                }
                sock.sendall(json.dumps(facts).encode() + b"\n")

    def _drop(self, sock: socket.socket, state: dict[str, Any]) -> None:
        self._selector.unregister(sock)
        sock.close()
        listener = state.pop("listener", None)
        if listener is not None:
            self._selector.unregister(listener)
            listener.close()

    def _accept_http(self, state: dict[str, Any]) -> None:
        try:
            conn, _ = state["listener"].accept()
        except OSError:
            return
        conn.setblocking(True)
        buffer = bytearray()
        self._selector.register(conn, selectors.EVENT_READ, lambda: self._http(conn, state, buffer))

    def _http(self, conn: socket.socket, state: dict[str, Any], buffer: bytearray) -> None:
        try:
            data = conn.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(conn)
            conn.close()
            return
        buffer += data
        head, found, rest = bytes(buffer).partition(b"\r\n\r\n")
        if not found:
            return
        first, *lines = head.decode().split("\r\n")
        headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
        if len(rest) < int(headers["content-length"]):
            return
        buffer.clear()
        self.requests.append((first, headers, json.loads(rest)))
        command = self._script(state["trial_id"], state["calls"])
        state["calls"] += 1
        conn.sendall(_reply(command))


def _reply(command: str | None) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": "I fix it."}
    if command is not None:
        arguments = json.dumps({"command": command})
        message["tool_calls"] = [
            {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        ]
    body = json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [{"index": 0, "finish_reason": "stop" if command is None else "tool_calls", "message": message}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
        }
    ).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
