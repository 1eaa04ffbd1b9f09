"""Frames over a stream socket: a JSON header, a blob, and descriptors. Standard library only.

A frame is two little-endian 32-bit lengths, the header and the blob; descriptors ride on its first bytes.
"""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Iterable
from typing import Any

_LENGTHS = struct.Struct("<II")
MAX_FRAME_BYTES = 256 << 20
MAX_FDS = 8


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


def send_frame(sock: socket.socket, header: dict[str, Any], blob: bytes = b"", fds: Iterable[int] = ()) -> None:
    """Send one frame."""
    text = json.dumps(header).encode()
    message, numbers = _LENGTHS.pack(len(text), len(blob)) + text, list(fds)
    try:
        sent = socket.send_fds(sock, [message], numbers) if numbers else sock.send(message)
        if sent < len(message):
            sock.sendall(message[sent:])
        if blob:
            sock.sendall(blob)
    except (BrokenPipeError, ConnectionResetError) as exc:
        raise ChannelClosedError(str(exc)) from exc


def receive_frame(sock: socket.socket) -> tuple[dict[str, Any], bytes, list[int]]:
    """Receive one frame: (header, blob, descriptors). Honours the socket's timeout (TimeoutError)."""
    first, fds = _receive_with_fds(sock, _LENGTHS.size)
    first += _receive(sock, _LENGTHS.size - len(first))
    header_len, blob_len = _LENGTHS.unpack(first)
    if header_len + blob_len > MAX_FRAME_BYTES:
        raise ChannelClosedError(f"frame of {header_len + blob_len} bytes is longer than {MAX_FRAME_BYTES}")
    return json.loads(_receive(sock, header_len)), _receive(sock, blob_len), fds


def _receive_with_fds(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    room = socket.CMSG_LEN(MAX_FDS * array.array("i").itemsize)
    try:
        data, ancillary, _, _ = sock.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError as exc:
        raise ChannelClosedError(str(exc)) from exc
    if not data:
        raise ChannelClosedError("the other end closed the channel")
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


def _receive(sock: socket.socket, size: int) -> bytes:
    out = bytearray(size)
    view, got = memoryview(out), 0
    while got < size:
        try:
            n = sock.recv_into(view[got:])
        except ConnectionResetError as exc:
            raise ChannelClosedError(str(exc)) from exc
        if not n:
            raise ChannelClosedError("the other end closed the channel inside a frame")
        got += n
    return bytes(out)
