"""The stages as processes on a real broker: a whole run with its workers, proxy and learner played, and kills."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.kafka import EventWriter, make_codec, make_consumer, read_events, read_topic, topic_name
from infra.settings import RunSection, ScheduleSection, Settings
from schemas.base import Event
from schemas.events import AlertCleared, AlertRaised, GroupReady, PolicyPublished, RunFinished, TrialOffered
from schemas.ids import make_event_id, now_ms
from schemas.topics import CATALOGUE, SCHEMAS_TOPIC
from streams.pipeline import BY_NAME
from streams.runtime.step import Record
from tests.unit.stages import builders as make
from tests.unit.stages.checks import OUTPUTS, check_accounts, check_rederivation
from tests.unit.stages.history import History, make_history, world_settings
from tests.unit.stages.trial_scripts import make_trial_script

STAGES = ("scheduler", "assembly", "admission", "grouping")
DEADLINE_SEC = 180


def serve_in_child(name: str, settings: Settings) -> None:
    """What `rollstream serve` does, less its logging."""
    module, _, function = BY_NAME[name].entry.partition(":")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    getattr(importlib.import_module(module), function)(settings, 0, stop)


class Services:
    """The four stages, each in a process of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._spawn = multiprocessing.get_context("spawn")
        self._running = {name: self._start(name) for name in STAGES}

    def _start(self, name: str) -> multiprocessing.process.BaseProcess:
        process = self._spawn.Process(target=serve_in_child, args=(name, self._settings), name=name)
        process.start()
        return process

    def kill_and_start_again(self, name: str) -> None:
        """kill -9, then a new process takes over."""
        process = self._running[name]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        self._running[name] = self._start(name)

    def check(self) -> None:
        """Raise when one has ended by itself."""
        ended = {name: p.exitcode for name, p in self._running.items() if p.exitcode is not None}
        assert not ended, f"services ended: {ended}"

    def close(self) -> None:
        """Stop them; each must drain and exit with 0."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.join(30)
        codes = {name: process.exitcode for name, process in self._running.items()}
        for process in self._running.values():
            process.kill()
        assert set(codes.values()) == {0}, codes


class Players:
    """Workers, proxy, verifier, engine and learner: they read offers, groups and versions, and write what follows."""

    def __init__(self, settings: Settings, seed: int, loss_share: float) -> None:
        self.random, self.loss_share, self.version = random.Random(seed), loss_share, -1
        self.finished: RunFinished | None = None
        self.num_steps = self.num_trials = 0
        self._settings, self._codec = settings, make_codec(settings)
        self._writer = EventWriter(settings)
        self._ready: dict[int, list[GroupReady]] = defaultdict(list)
        self._consumer = make_consumer(settings, group="players")
        self._names = ("offers", "groups", "policy-versions", "runs")
        self._consumer.subscribe([topic_name(settings, name) for name in self._names])

    @property
    def clock_ms(self) -> int:
        return now_ms()

    def write(self, event: Event) -> None:
        """A source event happens now."""
        event_id = event.event_id if event.event_id.startswith("grade-") else make_event_id()
        stamped = replace(event, event_id=event_id, occurred_at=now_ms(), run_id=self._settings.run.id)
        self._writer.write(stamped)

    def begin(self) -> None:
        """Register the tasks and announce them; publish the starting policy."""
        for task_set, num in (("train", 4), ("held_out", 3)):
            for i in range(num):
                self.write(make.registered(f"{task_set}-{i}", task_set))
        self.write(make.run_started({"train": 4, "held_out": 3}))
        self.write(make.published(0))
        self._writer.flush()

    def poll(self) -> None:
        """Handle what came in, in the order of the log."""
        for message in self._consumer.consume(50, 0.1):
            assert message.error() is None
            event = self._codec.decode(message.value())
            if isinstance(event, TrialOffered):
                self.num_trials += 1
                for fact in make_trial_script(self, event):  # type: ignore[arg-type]
                    self.write(fact)
            elif isinstance(event, PolicyPublished):
                self.version = event.version
                self.write(make.loaded(event.version))
            elif isinstance(event, GroupReady) and event.purpose == "train":
                self._train(event)
            elif isinstance(event, RunFinished):
                self.finished = event
        self._writer.flush()

    def _train(self, group: GroupReady) -> None:
        self._ready[group.step].append(group)
        while len(self._ready[self.num_steps]) == self._settings.schedule.groups_per_step:
            groups = self._ready.pop(self.num_steps)
            self.write(make.step_completed(self.num_steps, group_ids=tuple(g.group_id for g in groups)))
            self.num_steps += 1
            self.write(make.published(self.num_steps))

    def close(self) -> None:
        self._consumer.close()


@pytest.fixture
def run_settings(kafka_settings: Settings) -> Settings:
    """A short run: 6 steps of 2 groups of 3, validated at 0, 3 and 6."""
    return replace(
        kafka_settings,
        run=RunSection(id=make.RUN, seed=3),
        schedule=ScheduleSection(num_steps=6, groups_per_step=2, group_size=3, max_staleness=1, validate_every=3),
    )


@pytest.fixture
def services(run_settings: Settings) -> Iterator[Services]:
    running = Services(run_settings)
    yield running
    running.close()


def read_history(settings: Settings) -> History:
    """Everything on the topics, by (topic, partition)."""
    codec, log = make_codec(settings), defaultdict(list)
    for topic in CATALOGUE:
        if topic.name == SCHEMAS_TOPIC:
            continue
        for message in read_topic(settings, topic.name):
            record = Record(topic.name, message.partition(), message.offset(), message.key(), message.value())
            assert record.value is not None
            log[topic.name, record.partition].append(codec.decode(record.value))
    return History(settings, dict(log))


def play(players: Players, services: Services, kills: dict[int, str]) -> None:
    """Until the run is finished. `kills`: number of offered trials -> the service that is killed then."""
    deadline = time.monotonic() + DEADLINE_SEC
    players.begin()
    while players.finished is None:
        assert time.monotonic() < deadline, f"not finished: {players.num_steps} steps, {players.num_trials} trials"
        services.check()
        players.poll()
        for at in [at for at in kills if at <= players.num_trials]:
            services.kill_and_start_again(kills.pop(at))
    assert not kills


def test_a_run_whose_stages_are_killed_ends_with_every_trial_accounted_for(
    run_settings: Settings, services: Services
) -> None:
    players = Players(run_settings, seed=5, loss_share=0.3)
    try:
        play(players, services, {5: "assembly", 12: "scheduler", 20: "grouping", 28: "admission", 36: "scheduler"})
    finally:
        players.close()
    history = read_history(run_settings)
    services.check()
    assert players.finished is not None
    assert (players.finished.outcome, players.finished.num_steps) == ("completed", 6)
    assert history.events("dead-letters") == []
    check_accounts(history)
    for stage_type in OUTPUTS:
        check_rederivation(history, stage_type, seed=1, repeats=0.3)


class ProgressService:
    """The Faust service in a thread."""

    def __init__(self, settings: Settings) -> None:
        from streams.progress.service import serve

        self._settings, self._stop = settings, threading.Event()
        self._error: BaseException | None = None

        def run() -> None:
            try:
                serve(settings, 0, self._stop)
            except BaseException as exc:
                self._error = exc

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def wait_for(self, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first snapshot for which `done` holds."""
        path = Path(self._settings.data.dir) / "run" / "progress.json"
        deadline = time.monotonic() + DEADLINE_SEC
        while time.monotonic() < deadline:
            assert self._error is None, self._error
            if path.exists():
                snapshot: dict[str, Any] = json.loads(path.read_text())
                if done(snapshot):
                    return snapshot
            self._thread.join(0.1)
        raise AssertionError(f"not seen: {path.read_text() if path.exists() else 'no snapshot'}")

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        assert self._error is None


def test_progress_follows_a_run_and_raises_each_alert_once(run_settings: Settings) -> None:
    settings = replace(run_settings, schedule=world_settings().schedule)
    history = make_history(4)
    writer = EventWriter(settings)
    events = [event for events in history.log.values() for event in events]
    for event in events[: len(events) // 2]:
        writer.write(event)
    writer.flush()
    service = ProgressService(settings)
    try:
        for event in events[len(events) // 2 :]:
            writer.write(event)
        writer.write(make.step_completed(4, fidelity=(make.fidelity(4, replay_overlap=0.4),), event_id=make_event_id()))
        writer.flush()
        seen = service.wait_for(lambda s: s["state"] == "completed" and s["num_steps_done"] == 5)
    finally:
        service.close()
    num_trials = sum(isinstance(e, TrialOffered) and e.attempt == 1 for e in events)
    assert (seen["trials"]["offered"], seen["trials"]["finished"]) == (num_trials, num_trials)
    assert "replay_overlap_low" in [a["check"] for a in seen["alerts"]]
    writer.write(make.step_completed(5, event_id=make_event_id()))  # while the service is down
    writer.flush()
    again = ProgressService(settings)
    try:
        again.wait_for(lambda s: s["num_steps_done"] == 6)
    finally:
        again.close()
    alerts = [e for e in read_events(settings, "alerts") if isinstance(e, AlertRaised | AlertCleared)]
    assert len({alert.event_id for alert in alerts}) == len(alerts)
    assert [type(a) for a in alerts if a.check == "replay_overlap_low"] == [AlertRaised, AlertCleared]
