"""Processes and brokers that die: nothing is lost and nothing is doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.kafka import ensure_topics
from infra.local.kafka import start_kafka
from infra.local.ports import free_port
from infra.settings import DataSection, KafkaSection, Settings
from streams.runtime.log import FAULT_POINTS
from streams.runtime.loop import LoopOptions
from tests.integration.test_runtime import (
    DEADLINE_SEC,
    NUM_PARTITIONS,
    KafkaWorld,
    once,
    outputs,
    running,
    wait_for,
    wait_outputs,
    write,
)
from tests.unit.runtime.stages import JoinStage, make_events, make_grade, make_renewal

ROOT = Path(__file__).parents[2]


def start_process(settings: Settings, scope: str, point: str, nth: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.integration.runtime_process"]
    arguments = [settings.kafka.bootstrap, settings.kafka.topic_prefix, scope, point, str(nth)]
    return subprocess.Popen([*command, *arguments], cwd=ROOT)


@pytest.mark.parametrize("scope", ["partition", "single"])
def test_processes_killed_at_every_point(kafka_settings: Settings, scope: str) -> None:
    """Four processes die in turn, each at another point of a transaction; the fifth finishes and stops on SIGTERM."""
    world = KafkaWorld(kafka_settings)
    write(world, *make_events(range(60)))
    for point in FAULT_POINTS:
        process = start_process(kafka_settings, scope, point, nth=2)
        assert process.wait(DEADLINE_SEC) == -signal.SIGKILL
    process = start_process(kafka_settings, scope, "never", nth=1)
    try:
        assert wait_outputs(world, 60) == once(range(60))
    finally:
        process.terminate()
    assert process.wait(DEADLINE_SEC) == 0
    assert outputs(world) == once(range(60))


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Settings]:
    """A broker that the test may kill; its pid changes, its address does not."""
    settings = Settings(
        data=DataSection(dir=str(tmp_path)), kafka=KafkaSection(port=free_port(), partitions=NUM_PARTITIONS)
    )
    record = start_kafka(settings)
    settings = replace(settings, kafka=replace(settings.kafka, bootstrap=f"127.0.0.1:{record.port}"))
    ensure_topics(settings)
    yield settings
    for pid in broker_pids(tmp_path):
        os.kill(pid, signal.SIGKILL)


def broker_pids(data_dir: Path) -> list[int]:
    """Processes whose command line names the data directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(data_dir).encode() in command and b"java" in command:
            found.append(int(entry.name))
    return found


class Outage:
    """Kills the broker at a point of the `nth` transaction and brings it back after `down_sec`."""

    def __init__(self, settings: Settings, point: str, nth: int, down_sec: float) -> None:
        self._settings, self._point, self._left, self._down_sec = settings, point, nth, down_sec
        self.over = threading.Event()

    def __call__(self, point: str) -> None:
        if point != self._point:
            return
        self._left -= 1
        if self._left == 0:
            for pid in broker_pids(Path(self._settings.data.dir)):
                os.kill(pid, signal.SIGKILL)
            threading.Timer(self._down_sec, self._restart).start()

    def _restart(self) -> None:
        start_kafka(replace(self._settings, kafka=replace(self._settings.kafka, bootstrap="")))
        self.over.set()


@pytest.mark.parametrize(("point", "down_sec"), [("after_produce", 1.0), ("before_commit", 20.0)])
def test_broker_killed_inside_a_transaction(own_broker: Settings, point: str, down_sec: float) -> None:
    """The loop waits and goes on, also when the outage is longer than the transaction's timeout."""
    world = KafkaWorld(own_broker)
    write(world, *make_events(range(30)))
    outage = Outage(own_broker, point, nth=3, down_sec=down_sec)
    options = LoopOptions(max_records=7, commit_interval_sec=0.0)
    with running(world.loop(JoinStage("partition"), faults=outage, options=options)) as run:
        wait_for(outage.over.is_set, "the broker is back", 90)
        write(world, *(make_grade(n) for n in range(30, 40)), *(make_renewal(n) for n in range(30, 40)))
        wait_for(lambda: len(outputs(world)) == 40 or run.error is not None, "all outputs", 90)
        assert run.error is None
    assert outputs(world) == once(range(40))
