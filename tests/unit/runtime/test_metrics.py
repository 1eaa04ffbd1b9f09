"""Health endpoints and metrics."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from infra.settings import DataSection, Settings
from streams.runtime.memory import MemoryLog, MemoryLoop
from streams.runtime.metrics import start_health_server
from tests.laws import CODEC, run_to_end
from tests.unit.runtime.stages import JoinStage, make_events


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data=DataSection(dir=str(tmp_path)))


def test_endpoints_and_service_file(settings: Settings, tmp_path: Path) -> None:
    ready = threading.Event()
    server = start_health_server("assembly", 2, settings, ready=ready.is_set)
    file = tmp_path / "run" / "services" / "assembly-2.json"
    facts = json.loads(file.read_text())
    assert facts["port"] == server.port
    assert fetch(server.port, "/readyz") == (503, "not yet\n")
    ready.set()
    assert fetch(server.port, "/readyz") == (200, "ok\n")
    assert fetch(server.port, "/healthz") == (200, "ok\n")
    assert fetch(server.port, "/nothing")[0] == 404
    server.close()
    assert not file.exists()


def test_file_of_a_newer_process_is_left(settings: Settings, tmp_path: Path) -> None:
    server = start_health_server("assembly", 0, settings, ready=lambda: True)
    file = tmp_path / "run" / "services" / "assembly-0.json"
    file.write_text(json.dumps({"pid": 1, "port": 2}))
    server.close()
    assert json.loads(file.read_text())["port"] == 2


def test_loop_counts_records_outputs_and_transactions() -> None:
    class Counted(JoinStage):
        name = "counted"

    memory = MemoryLog(2)
    for event in make_events(range(6)):
        memory.write(event, CODEC)
    memory.produce("rewards", b"k", b"poison")
    run_to_end(Counted(), memory)
    server = start_health_server("counted", 0, ready=lambda: True)
    text = fetch(server.port, "/metrics")[1]
    server.close()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if 'service="counted"' in line)
    labels = 'instance="0",service="counted"'
    assert float(values[f'rollstream_records_in_total{{{labels},topic="rewards"}}']) == 7
    assert float(values[f'rollstream_records_in_total{{{labels},topic="trial-stages"}}']) == 6
    assert float(values[f'rollstream_records_out_total{{{labels},topic="trajectories"}}']) == 6
    assert float(values[f"rollstream_dead_letters_total{{{labels}}}"]) == 1
    assert float(values['rollstream_transactions_total{instance="0",outcome="committed",service="counted"}']) >= 1
    assert float(values[f"rollstream_batch_seconds_count{{{labels}}}"]) >= 1


def test_lag_is_reported() -> None:
    memory = MemoryLog(2)
    for event in make_events(range(4)):
        memory.write(event, CODEC)
    loop = MemoryLoop(JoinStage("single"), memory)
    client = loop._client
    client.open("join", ("rewards", "trial-stages"), "single", lambda units: None, threading.Event())
    client.resume(client.committed([0]))
    assert sum(num or 0 for num in client.lag().values()) == 8
    client.fetch(100, 0.0)
    assert sum(num or 0 for num in client.lag().values()) == 0
    client.close()
