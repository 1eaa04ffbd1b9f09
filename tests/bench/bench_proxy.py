"""The capture proxy against a bare aiohttp pass-through, interleaved in one run.

Both answer the same conversations of 200 sampled tokens per call with histories that grow by some 3,000 characters a
turn and are resent in full. The pass-through reads the body, asks an engine process for ids, log-probs and text, and
returns a chat completion: it renders nothing, matches nothing and keeps nothing. The proxy renders the new messages,
samples from its in-process scripted engine, and answers once Kafka has the call and its routing.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from infra.kafka import drop_topics, ensure_topics, warm_up
from infra.local.kafka import start_kafka, stop_kafka
from infra.local.ports import free_port
from infra.paths import proxy_socket_path
from infra.settings import DataSection, KafkaSection, Settings
from tests.unit.proxy import tiny
from tests.unit.proxy.live import TOKEN, Worker, proxy_settings, running, scripted

NUM_SAMPLED = 200
CHARACTERS_PER_TURN = 3000
ROUNDS = 3
LATENCY_TURNS = 20
SESSIONS, TURNS = 16, 10

REPLY = " ".join(f"w{i % 10}" for i in range(NUM_SAMPLED))


# -- servers, each a process


def _serve_engine(pipe: Connection) -> None:
    """The engine behind the pass-through: answers at once with ids, log-probs and text."""
    answer = json.dumps(
        {"ids": list(range(5, 5 + NUM_SAMPLED)), "logprobs": [-0.125] * NUM_SAMPLED, "text": REPLY, "prompt_len": 1000}
    ).encode()

    async def generate(request: web.Request) -> web.Response:
        json.loads(await request.read())
        return web.Response(body=answer, content_type="application/json")

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", generate)
    uvloop.run(_serve_app(app, pipe))


def _serve_bare(pipe: Connection, engine_port: int) -> None:
    """The pass-through."""

    async def main() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

            async def chat(request: web.Request) -> web.Response:
                body = json.loads(await request.read())
                ask = {"messages": body["messages"], "return_token_ids": True, "logprobs": True}
                async with http.post(f"http://127.0.0.1:{engine_port}/generate", json=ask) as response:
                    made = await response.json()
                choice = {
                    "index": 0,
                    "message": {"role": "assistant", "content": made["text"]},
                    "finish_reason": "stop",
                }
                usage = {"prompt_tokens": made["prompt_len"], "completion_tokens": len(made["ids"])}
                return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})

            app = web.Application(client_max_size=2**26)
            app.router.add_post("/t/{trial}/v1/chat/completions", chat)
            await _serve_app(app, pipe)

    uvloop.run(main())


def _serve_proxy(pipe: Connection, settings: Settings, policy: Path) -> None:
    """The proxy with a scripted engine."""
    from producers.proxy.engines.scripted import ScriptEntry

    async def main() -> None:
        engine = scripted(policy, ScriptEntry(ids=tuple(5 + i % 400 for i in range(NUM_SAMPLED - 1))), keep_calls=0)
        async with running(settings, engine) as proxy:
            pipe.send(proxy.port)
            await asyncio.to_thread(pipe.recv)

    uvloop.run(main())


async def _serve_app(app: web.Application, pipe: Connection) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    pipe.send(runner.addresses[0][1])
    await asyncio.to_thread(pipe.recv)
    await runner.cleanup()


class Server:
    """A server process, its port, and the CPU time it has used."""

    def __init__(self, target: Any, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=target, args=(other, *args), daemon=True)
        self._process.start()
        if not self._pipe.poll(120):
            raise TimeoutError(f"{target.__name__} did not start")
        self.port: int = self._pipe.recv()

    def cpu_sec(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it."""
        self._pipe.send("stop")
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()


# -- driver


async def _turn(http: aiohttp.ClientSession, url: str, messages: list[dict[str, Any]]) -> float:
    """One call; appends the reply and the next user message. Seconds until the reply was read."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    started = time.perf_counter()
    async with http.post(url, data=body, headers={"Authorization": f"Bearer {TOKEN}"}) as response:
        reply = json.loads(await response.read())
        assert response.status == 200, reply
    took = time.perf_counter() - started
    messages.append(reply["choices"][0]["message"])
    text = f"{len(messages)} " + "the quick brown fox jumps " * (CHARACTERS_PER_TURN // 26)
    messages.append({"role": "user", "content": text})
    return took


async def _latency(http: aiohttp.ClientSession, url: str) -> float:
    """Milliseconds of the last five of LATENCY_TURNS turns in a row, median."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    took = [await _turn(http, url, messages) for _ in range(LATENCY_TURNS)]
    return statistics.median(took[-5:]) * 1000


async def _load(http: aiohttp.ClientSession, urls: list[str]) -> float:
    """Calls per second of parallel conversations."""

    async def conversation(url: str) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        for _ in range(TURNS):
            await _turn(http, url, messages)

    started = time.perf_counter()
    await asyncio.gather(*map(conversation, urls))
    return len(urls) * TURNS / (time.perf_counter() - started)


async def _measure(bare: Server, ours: Server, settings: Settings) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for round_number in range(ROUNDS):
            for name, server in (("bare", bare), ("ours", ours)):
                trials = [f"r{round_number}.{i}" for i in range(SESSIONS + 1)]
                urls = [f"http://127.0.0.1:{server.port}/t/{t}/v1/chat/completions" for t in trials]
                workers = [Worker(proxy_socket_path(settings, 0)) for _ in trials] if server is ours else []
                for worker, trial in zip(workers, trials, strict=False):
                    assert await worker.open(trial) == {"ok": True}
                out.setdefault(f"{name}_ms", []).append(await _latency(http, urls[-1]))
                before = server.cpu_sec()
                out.setdefault(f"{name}_per_sec", []).append(await _load(http, urls[:-1]))
                cpu_ms = (server.cpu_sec() - before) * 1000 / (SESSIONS * TURNS)
                out.setdefault(f"{name}_cpu_ms", []).append(cpu_ms)
                for worker in workers:
                    assert (await worker.close_session())["ok"]
                    worker.hang_up()
    return out


@contextmanager
def _kafka() -> Iterator[Settings]:
    """A broker and topics of this benchmark's own."""
    with tempfile.TemporaryDirectory() as directory:
        port = free_port()
        base = replace(Settings(), data=DataSection(dir=directory), kafka=KafkaSection(port=port))
        running_at = os.environ.get("ROLLSTREAM_TEST_BOOTSTRAP", "")
        record = None if running_at else start_kafka(base)
        kafka = KafkaSection(
            bootstrap=running_at or f"127.0.0.1:{port}", topic_prefix=f"bench-{uuid.uuid4().hex[:8]}-", partitions=2
        )
        settings = replace(base, kafka=kafka)
        try:
            warm_up(settings)
            ensure_topics(settings)
            yield settings
            drop_topics(settings)
        finally:
            if record is not None:
                stop_kafka(base, record)


def _row(name: str, unit: str, value: float, baseline: float, aim: float, *, lower_is_better: bool) -> dict[str, Any]:
    ratio = value / baseline
    met = ratio <= aim if lower_is_better else ratio >= aim
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "baseline": round(baseline, 3),
        "ratio": round(ratio, 3),
        "aim": aim,
        "met": met,
    }


def rows() -> list[dict[str, Any]]:
    """Latency, throughput and CPU of the proxy as ratios to the pass-through."""
    with _kafka() as kafka, tempfile.TemporaryDirectory() as directory:
        policy = tiny.write_tokenizer(Path(directory) / "policy")
        settings = proxy_settings(kafka, policy)
        servers: list[Server] = []
        try:
            servers.append(Server(_serve_engine))
            servers.append(Server(_serve_bare, servers[0].port))
            servers.append(Server(_serve_proxy, settings, policy))
            found = uvloop.run(_measure(servers[1], servers[2], settings))
        finally:
            for server in servers:
                server.stop()
    mid = {name: statistics.median(values) for name, values in found.items()}
    return [
        _row("proxy call, turn 20, p50", "ms", mid["ours_ms"], mid["bare_ms"], 1.5, lower_is_better=True),
        _row(
            "proxy calls/s, 16 sessions",
            "calls/s",
            mid["ours_per_sec"],
            mid["bare_per_sec"],
            0.5,
            lower_is_better=False,
        ),
        _row("proxy CPU per call", "ms", mid["ours_cpu_ms"], mid["bare_cpu_ms"], 2.5, lower_is_better=True),
    ]


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    for row in rows():
        print(json.dumps(row))
