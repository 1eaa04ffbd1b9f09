"""The proxy when things go away or change under it: Kafka, its own process, the weights."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from infra.kafka import EventWriter, KafkaUnavailableError, ensure_topics, warm_up
from infra.local.kafka import start_kafka, stop_kafka
from infra.local.ports import free_port
from infra.paths import proxy_socket_path
from infra.settings import DataSection, EngineSection, KafkaSection, Settings
from producers.proxy.engines.scripted import ScriptEntry
from producers.proxy.service import serve
from schemas.events import ModelCallCompleted, PolicyLoaded, RoutingRecorded
from schemas.packing import unpack_bits
from tests.unit.proxy import tiny
from tests.unit.proxy.live import (
    RUN,
    TOKEN,
    Worker,
    calls_of,
    client,
    proxy_settings,
    read_log,
    running,
    scripted,
    session,
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tokenizer(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def settings(kafka_settings: Settings, policy: Path) -> Settings:
    return proxy_settings(kafka_settings, policy)


# -- Kafka goes away


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[tuple[Settings, int]]:
    """A broker that this test may stop, and its process id."""
    base = replace(Settings(), data=DataSection(dir=str(tmp_path / "broker")), kafka=KafkaSection(port=free_port()))
    record = start_kafka(base)
    try:
        warm_up(base)
        ensure_topics(base)
        yield base, record.pid
    finally:
        os.kill(record.pid, signal.SIGCONT)
        stop_kafka(base, record)


async def test_calls_wait_for_a_kafka_that_comes_back(own_broker, policy):
    base, pid = own_broker
    settings = proxy_settings(base, policy)
    async with running(settings, scripted(policy, ScriptEntry(text="kept"))) as proxy, session(proxy, "t") as worker:
        ask = client(proxy, "t").chat.completions.create
        await ask(model="m", messages=[{"role": "user", "content": "before"}])
        os.kill(pid, signal.SIGSTOP)
        call = asyncio.create_task(ask(model="m", messages=[{"role": "user", "content": "during"}]))
        done, _ = await asyncio.wait([call], timeout=1.0)
        assert not done, "a reply was finished before the log had it"
        os.kill(pid, signal.SIGCONT)
        assert (await call).choices[0].message.content == "kept"
        assert (await worker.close_session())["num_calls"] == 2
    assert len(calls_of(read_log(settings, ["model-calls"]))) == 2


async def test_without_kafka_a_call_fails_and_the_capture_is_broken(own_broker, policy):
    base, pid = own_broker
    settings = proxy_settings(base, policy, ack_timeout_sec=1.0)
    engine = scripted(policy, ScriptEntry(text="lost"))
    async with running(settings, engine) as proxy:
        async with session(proxy, "t") as worker:
            ask = client(proxy, "t").chat.completions.create
            await ask(model="m", messages=[{"role": "user", "content": "before"}])
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(openai.InternalServerError, match="Kafka did not") as failed:
                await ask(model="m", messages=[{"role": "user", "content": "during"}])
            assert failed.value.status_code == 503 and failed.value.code == "capture_unavailable"
            os.kill(pid, signal.SIGCONT)
            with pytest.raises(openai.InternalServerError, match="run the trial again"):
                await ask(model="m", messages=[{"role": "user", "content": "after"}])
            reply = await worker.close_session()
            assert reply["ok"] is False and "Kafka did not" in reply["error"]
        async with session(proxy, "next") as worker:  # the proxy itself recovers
            await client(proxy, "next").chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
            assert (await worker.close_session())["num_calls"] == 1


def test_no_kafka_at_the_start_is_said(policy, tmp_path):
    settings = replace(
        proxy_settings(Settings(), policy),
        kafka=KafkaSection(bootstrap=f"127.0.0.1:{free_port()}"),
        data=DataSection(dir=str(tmp_path)),
        engine=EngineSection(kind="scripted"),
    )
    with pytest.raises(KafkaUnavailableError, match="no Kafka at"):
        serve(settings, 0, threading.Event())


# -- the process


@pytest.fixture
async def process(settings: Settings, policy: Path, tmp_path: Path) -> AsyncIterator[tuple[Settings, Any]]:
    """`rollstream serve proxy` with the scripted engine, and a function that starts it again."""
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"text": "a reply of some tokens", "delay_ms": 1}) + "\n")
    port = free_port()
    config = tmp_path / "run.toml"
    config.write_text(
        f'[run]\nid = "{RUN}"\n[data]\ndir = "{settings.data.dir}"\n'
        f'[kafka]\nbootstrap = "{settings.kafka.bootstrap}"\ntopic_prefix = "{settings.kafka.topic_prefix}"\n'
        f'[policy]\npath = "{policy}"\n[proxy]\nport = {port}\n'
        f'[engine]\nkind = "scripted"\nscript = "{script}"\n'
    )
    settings = replace(settings, proxy=replace(settings.proxy, port=port))
    writer = EventWriter(settings)
    writer.write(tiny.publish(policy, run_id=RUN, version=0, canary_ids=[1, 2], canary_logprobs=[-1.0]))
    writer.flush()
    started: list[subprocess.Popen[bytes]] = []

    async def start() -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-c",
            "from infra.cli import main; main()",
            "serve",
            "proxy",
            "--config",
            str(config),
        ]
        process = subprocess.Popen(command)
        started.append(process)
        facts = Path(settings.data.dir) / "run" / "services" / "proxy-0.json"
        async with asyncio.timeout(60), aiohttp.ClientSession() as http:
            while True:
                assert process.poll() is None, "the proxy ended"
                try:
                    health = json.loads(facts.read_text())
                    if health["pid"] == process.pid:
                        async with http.get(f"http://127.0.0.1:{health['port']}/readyz") as response:
                            if response.status == 200:
                                return process
                except (OSError, ValueError, aiohttp.ClientError):
                    pass
                await asyncio.sleep(0.05)

    try:
        yield settings, start
    finally:
        for one in started:
            if one.poll() is None:
                one.terminate()
            one.wait(30)


async def test_kill_9_loses_no_acknowledged_call(process):
    settings, start = process
    acknowledged: set[str] = set()
    for round_number in range(2):
        server = await start()
        workers = []
        for lane in range(4):
            worker = Worker(proxy_socket_path(settings, 0))
            assert await worker.open(f"r{round_number}.{lane}") == {"ok": True}
            workers.append(worker)

        async def lane_calls(trial: str, stream: bool) -> None:
            sdk = openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{settings.proxy.port}/t/{trial}/v1", api_key=TOKEN, max_retries=0
            )
            for number in range(10_000):
                ask: Any = [{"role": "user", "content": f"q{number}"}]
                if stream:
                    async with sdk.chat.completions.stream(model="m", messages=ask) as events:
                        reply: Any = await events.get_final_completion()
                else:
                    reply = await sdk.chat.completions.create(model="m", messages=ask)
                acknowledged.add(reply.id.removeprefix("chatcmpl-"))

        before = len(acknowledged)
        lanes = [asyncio.create_task(lane_calls(f"r{round_number}.{i}", i % 2 == 0)) for i in range(4)]
        async with asyncio.timeout(60):
            while len(acknowledged) < before + 40:
                await asyncio.sleep(0.01)
        server.kill()
        await asyncio.gather(*lanes, return_exceptions=True)
        server.wait(10)
        for worker in workers:
            worker.hang_up()
    recorded = {e.call_id for e in read_log(settings, ["model-calls"]) if isinstance(e, ModelCallCompleted)}
    assert len(acknowledged) >= 80 and acknowledged <= recorded


async def test_sigterm_drains(process):
    settings, start = process
    server = await start()
    async with asyncio.timeout(60):
        worker = Worker(proxy_socket_path(settings, 0))
        assert await worker.open("t") == {"ok": True}
        server.terminate()
        assert await asyncio.to_thread(server.wait, 30) == 0
    assert not proxy_socket_path(settings, 0).exists()
    loaded = [e for e in read_log(settings, ["policy-versions"]) if isinstance(e, PolicyLoaded)]
    assert [(e.version, e.ok, e.replica) for e in loaded] == [(0, True, "engine/0")]


# -- with weights


def spy(write: Any, written: list[Any]) -> Any:
    """A recorder's `write` that also tells the test what was acknowledged."""

    def wrapped(events: Any, *rest: Any) -> Any:
        done = write(events, *rest)
        done.add_done_callback(lambda _: written.extend(events))
        return done

    return wrapped


async def test_published_policies_are_loaded_and_served(kafka_settings, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from producers.proxy.engines.torch_engine import TorchEngine
    from producers.proxy.engines.torch_engine_model import LoadedModel

    canary = list(range(5, 45))
    policies = [tiny.write_model(tmp_path / f"v{seed}", seed=seed) for seed in (0, 1)]
    published = []
    for version, directory in enumerate(policies):
        logprobs = LoadedModel.load(directory, version, "float32").canary(canary)
        published.append(
            tiny.publish(directory, run_id=RUN, version=version, canary_ids=canary, canary_logprobs=logprobs)
        )
    settings = proxy_settings(kafka_settings, Path())
    settings = replace(settings, policy=replace(settings.policy, path=""))
    writer = EventWriter(settings)
    torch.set_num_threads(1)

    written: list[Any] = []

    async def publish(event: Any) -> PolicyLoaded:
        writer.write(event)
        await asyncio.to_thread(writer.flush)
        async with asyncio.timeout(60):
            while len(answers()) < event.version + 1:
                await asyncio.sleep(0.02)
        return answers()[-1]

    def answers() -> list[PolicyLoaded]:
        return [e for e in written if isinstance(e, PolicyLoaded)]

    async with running(settings, TorchEngine(EngineSection(max_batch=8), replica="engine/0")) as proxy:
        monkeypatch.setattr(proxy.recorder, "write", spy(proxy.recorder.write, written))
        async with session(proxy, "t") as worker:
            ask = client(proxy, "t").chat.completions.create
            body: Any = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 12}
            assert not proxy.ready
            with pytest.raises(openai.InternalServerError, match="no policy is loaded"):
                await ask(**body)
            assert (await publish(published[0])).ok and proxy.ready
            await ask(**body)
            assert (await publish(published[1])).ok
            await asyncio.gather(*(ask(**body) for _ in range(8)))
            bad = replace(published[0], version=2)  # the weights of one version with the canary of another
            bad = replace(bad, canary_logprobs=published[1].canary_logprobs)
            refused = await publish(bad)
            assert not refused.ok and (refused.canary_max_abs_dlogp or 0) > 1e-3 and not proxy.ready
            with pytest.raises(openai.InternalServerError, match=r"no policy is loaded|fenced"):
                await ask(**body)
            counts = await worker.close_session()
    assert (counts["num_calls"], counts["num_failed_calls"]) == (11, 2)
    events = read_log(settings, ["model-calls", "routing", "policy-versions"])
    assert [(e.version, e.ok) for e in events if isinstance(e, PolicyLoaded)] == [(0, True), (1, True), (2, False)]
    calls = calls_of(events)
    assert [[s.version for s in c.version_spans] for c in calls] == [[0]] + [[1]] * 8
    assert len({c.sampled_ids for c in calls}) > 1 and len({c.seed for c in calls}) == 9
    for call in calls:
        rows = [e for e in events if isinstance(e, RoutingRecorded) and e.call_id == call.call_id]
        assert sum(r.num_tokens for r in rows) == call.prompt_len + len(call.sampled_ids) // 4 - 1
        assert all(all(unpack_bits(r.valid, r.num_tokens)) for r in rows)
