"""A running proxy in the test's own event loop, a worker's side of the control socket, and the log it wrote."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai

from infra.kafka import make_consumer, topic_name
from infra.paths import proxy_socket_path
from infra.settings import PolicySection, ProxySection, RunSection, Settings
from producers.proxy.engines.base import Engine
from producers.proxy.engines.scripted import ScriptedEngine, ScriptEntry
from producers.proxy.rendering import Renderer
from producers.proxy.service import Proxy
from schemas.base import Event
from schemas.codec import Codec
from schemas.events import ModelCallCompleted

TOKEN = "trial-token"
RUN = "run-test"


def proxy_settings(settings: Settings, policy: Path, **proxy: Any) -> Settings:
    """Settings with an ephemeral port and the policy directory."""
    section = ProxySection(port=0, ack_timeout_sec=proxy.pop("ack_timeout_sec", 20.0), **proxy)
    return replace(settings, run=RunSection(id=RUN), proxy=section, policy=PolicySection(path=str(policy)))


def scripted(policy: Path, *entries: ScriptEntry, **options: Any) -> ScriptedEngine:
    """A scripted engine that serves version 0."""
    renderer = Renderer.from_policy(policy)
    engine = ScriptedEngine(
        entries, encode=renderer.encode, decode=renderer.decode, stop_token_id=renderer.stop_token_id, **options
    )
    engine.set_version(0)
    return engine


@asynccontextmanager
async def running(settings: Settings, engine: Engine) -> AsyncIterator[Proxy]:
    """A started proxy, closed at the end."""
    proxy = Proxy(settings, 0, engine)
    try:
        await proxy.start()
        yield proxy
    finally:
        await proxy.close()


class Worker:
    """One control connection."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._socket.setblocking(False)
        self._file = b""

    async def ask(self, message: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """Send a message, read its reply."""
        data = json.dumps(message).encode() + b"\n"
        if fds:
            self._socket.setblocking(True)
            socket.send_fds(self._socket, [data], list(fds))
            self._socket.setblocking(False)
        else:
            await asyncio.get_running_loop().sock_sendall(self._socket, data)
        async with asyncio.timeout(30):
            while b"\n" not in self._file:
                self._file += await asyncio.get_running_loop().sock_recv(self._socket, 65536)
        line, self._file = self._file.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    async def open(self, trial: str, *, attempt: int = 1, token: str = TOKEN, **more: Any) -> dict[str, Any]:
        """Open a bridge session."""
        return await self.ask(
            {"op": "open", "trial_id": trial, "attempt": attempt, "token": token, "run_id": RUN, "seed": 7,
             "temperature": 1.0, "max_turns": 8, "kind": "bridge"} | more
        )  # fmt: skip

    async def close_session(self) -> dict[str, Any]:
        """Close the session."""
        return await self.ask({"op": "close"})

    def hang_up(self) -> None:
        """Close the connection."""
        self._socket.close()


@asynccontextmanager
async def session(proxy: Proxy, trial: str, **more: Any) -> AsyncIterator[Worker]:
    """An open session."""
    worker = Worker(proxy_socket_path(proxy.settings, proxy.instance))
    try:
        reply = await worker.open(trial, **more)
        assert reply == {"ok": True}, reply
        yield worker
    finally:
        worker.hang_up()


def base_url(proxy: Proxy, trial: str) -> str:
    """Base URL of a trial."""
    return f"http://127.0.0.1:{proxy.port}/t/{trial}/v1"


def read_log(settings: Settings, topics: Sequence[str]) -> list[Event]:
    """Every event of the topics, in order per partition."""
    consumer = make_consumer(settings, group="reader", **{"enable.partition.eof": True})
    from confluent_kafka import KafkaError, TopicPartition

    codec, events = Codec(), []
    try:
        meta = consumer.list_topics(timeout=10)
        names = [topic_name(settings, t) for t in topics]
        parts = [TopicPartition(n, p, 0) for n in names for p in meta.topics[n].partitions]
        consumer.assign(parts)
        left = len(parts)
        while left:
            message = consumer.poll(10)
            assert message is not None, "the log could not be read to its end"
            if message.error():
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                left -= 1
            else:
                events.append(codec.decode(message.value()))
    finally:
        consumer.close()
    return events


def client(proxy: Any, trial: str, token: str = TOKEN) -> openai.AsyncOpenAI:
    """The SDK, pointed at a trial; no retries, so that a test sees every answer."""
    return openai.AsyncOpenAI(base_url=base_url(proxy, trial), api_key=token, max_retries=0, timeout=60)


def calls_of(events: list[Any]) -> list[ModelCallCompleted]:
    """The completed calls, in order of call index."""
    return sorted((e for e in events if isinstance(e, ModelCallCompleted)), key=lambda e: e.call_index)
