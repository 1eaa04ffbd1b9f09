"""The worker on a real broker: real harness, sandboxes and grading; only the model behind the proxy is scripted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.kafka import EventWriter, end_offsets, make_codec, make_consumer, topic_name
from infra.paths import proxy_socket_path
from infra.settings import RunSection, Settings
from producers.trials import queue, service
from schemas.base import Event
from schemas.events import (
    AttemptFinished,
    GroupRevoked,
    LeaseRenewed,
    RewardGraded,
    StageFinished,
    StageStarted,
    TestResult,
    TrialLeased,
)
from schemas.ids import GroupId, RunId, TaskId, TrialId, make_event_id, now_ms
from tests.unit.trials.sample_task import FIX, make_offer, make_task
from tests.unit.trials.scripted_proxy import SUBMIT, ScriptedProxy

DEADLINE_SEC = 120.0
STAGES = ("prepare", "setup", "agent", "verify", "cleanup")


class Facts:
    """Everything the worker wrote so far, by reading its topics from the start."""

    def __init__(self, settings: Settings) -> None:
        self._consumer = make_consumer(settings, group="test-facts")
        self._codec = make_codec(settings)
        self._consumer.subscribe([topic_name(settings, t) for t in ("trial-stages", "rewards")])
        self.events: list[Event] = []

    def wait(self, until: Callable[[list[Event]], bool], deadline_sec: float = DEADLINE_SEC) -> list[Event]:
        """Read until the predicate holds; fails at the deadline."""
        end = time.monotonic() + deadline_sec
        while not until(self.events):
            assert time.monotonic() < end, f"not in time; seen {[type(e).__name__ for e in self.events]}"
            message = self._consumer.poll(0.2)
            if message is not None and message.error() is None:
                self.events.append(self._codec.decode(message.value()))
        return self.events

    def of(self, kind: type[Event], trial: str = "") -> list[Event]:
        return [e for e in self.events if type(e) is kind and (not trial or e.key == trial)]

    def close(self) -> None:
        self._consumer.close()


def finished(num: int) -> Callable[[list[Event]], bool]:
    """Holds once `num` attempts have ended and their grades are read (another topic)."""

    def check(events: list[Event]) -> bool:
        ends = [e for e in events if isinstance(e, AttemptFinished)]
        known = {e.event_id for e in events if isinstance(e, RewardGraded)}
        return len(ends) >= num and {e.reward_event_id for e in ends} - {None} <= known

    return check


@pytest.fixture
def settings(kafka_settings: Settings) -> Settings:
    trials = replace(kafka_settings.trials, lanes=2, lease_sec=3.0)
    return replace(kafka_settings, run=RunSection(name="t", id="run-t"), trials=trials)


@pytest.fixture
def facts(settings: Settings) -> Iterator[Facts]:
    reader = Facts(settings)
    yield reader
    reader.close()


def _script(trial: str, call: int) -> str | None:
    kind = int(trial.rsplit(".", 1)[1])
    if kind == 3:  # never submits: the turn limit ends it
        return "echo again"
    if kind == 4:  # a longer trial, so that its lease is renewed
        return f"sleep 2.5 && {FIX} && {SUBMIT}"
    return f"{FIX} && {SUBMIT}" if kind % 2 == 0 else SUBMIT


@pytest.mark.parametrize("share_groups", ["on", "off"])
def test_worker_writes_the_life_of_each_trial(
    settings: Settings, facts: Facts, tmp_path: Path, share_groups: str
) -> None:
    settings = replace(settings, kafka=replace(settings.kafka, share_groups=share_groups))
    task = make_task(tmp_path)
    offers = [make_offer(task, i) for i in range(5)]
    writer = EventWriter(settings)
    writer.write(make_offer(task, 9, run_id="another-run"))
    revoked = replace(
        make_offer(task, 8), group_id=GroupId("revoked-group"), event_id=make_event_id(), trial_id=offers[0].trial_id
    )
    now = now_ms()
    writer.write(
        GroupRevoked(
            event_id=make_event_id(),
            run_id=revoked.run_id,
            occurred_at=now,
            producer="scheduler",
            group_id=GroupId("other"),
            reason="test",
        )
    )
    for offer in offers:
        writer.write(offer)
    writer.flush()
    stop = threading.Event()
    worker = threading.Thread(target=service.serve, args=(settings, 0, stop))
    with ScriptedProxy(proxy_socket_path(settings, 0), _script) as proxy:
        worker.start()
        try:
            facts.wait(lambda events: finished(5)(events) or not worker.is_alive())
            assert worker.is_alive(), "the worker ended by itself"
        finally:
            stop.set()
            worker.join(60)
    assert not worker.is_alive()
    for index, offer in enumerate(offers):
        _check_trial(facts, offer.trial_id, index, task.digest)
    graded = [e for e in facts.of(RewardGraded) if isinstance(e, RewardGraded)]
    first = {e.event_id: e for e in graded if e.reused_from is None}
    assert {e.reused_from for e in graded} - {None} <= set(first)
    assert len(first) == 2, "one grade for the fix, one for no change"
    assert {s["seed"] for s in proxy.sessions} == {0, 1, 2, 3, 4}
    assert not any("another-run" in e.key for e in facts.events)
    renewals = [e for e in facts.of(LeaseRenewed, offers[4].trial_id) if isinstance(e, LeaseRenewed)]
    assert renewals and renewals[-1].deadline_ms > renewals[-1].occurred_at


def _check_trial(facts: Facts, trial: str, index: int, task_digest: str) -> None:
    lease = facts.of(TrialLeased, trial)[0]
    end = facts.of(AttemptFinished, trial)[0]
    assert isinstance(lease, TrialLeased) and isinstance(end, AttemptFinished)
    assert end.lease_id == lease.lease_id and end.setup_ok and end.capture_ok and end.verifier_ok
    assert [e.stage for e in facts.of(StageStarted, trial)] == list(STAGES)  # type: ignore[attr-defined]
    stages = [e for e in facts.of(StageFinished, trial) if isinstance(e, StageFinished)]
    assert [(e.stage, e.outcome) for e in stages] == [(s, "ok") for s in STAGES], [e.detail for e in stages]
    (reward,) = facts.of(RewardGraded, trial)
    assert isinstance(reward, RewardGraded)
    assert (reward.event_id, reward.diff_sha256, reward.task_digest) == (
        end.reward_event_id,
        end.diff_sha256,
        task_digest,
    )
    assert reward.reward == (1.0 if index % 2 == 0 else 0.0)
    outcomes = {t.test_id.split("::")[1]: t.outcome for t in reward.tests}
    assert outcomes == {"test_above": "passed" if index % 2 == 0 else "failed", "test_double": "passed"}
    assert (b"+    return x > limit" in (end.diff or b"")) == (index % 2 == 0)
    if index == 3:
        assert end.max_turns_hit and end.agent_exit_status == "LimitsExceeded" and end.num_calls == 3
    else:
        assert end.agent_exit_status == "Submitted" and end.agent_exit_code == 0 and end.num_calls == 1
    assert end.num_sampled_tokens == 7 * (end.num_calls or 0)


@pytest.mark.parametrize("share_groups", ["on", "off"])
def test_the_queue_hands_each_offer_to_one_worker(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share_groups: str
) -> None:
    settings = replace(settings, kafka=replace(settings.kafka, share_groups=share_groups))
    monkeypatch.setattr(queue, "_HOLD_SEC", 0.0)
    task = make_task(tmp_path)
    writer, codec = EventWriter(settings), make_codec(settings)
    for index in range(30):
        writer.write(make_offer(task, index))
    writer.flush()
    workers = [queue.make_queue(settings), queue.make_queue(settings)]
    seen: list[str] = []
    end = time.monotonic() + DEADLINE_SEC
    try:
        while len(set(seen)) < 30:
            assert time.monotonic() < end, f"{len(set(seen))} of 30 offers in time"
            for work in workers:
                taken = work.claim(3, 0.5)
                assert len(taken) <= 3 and work.claim(0, 0.1) == []
                work.release(taken[2:])
                work.acknowledge(taken[:2])
                seen += [codec.decode(d.value).key for d in taken[:2]]
    finally:
        for work in workers:
            work.close()
    assert len(seen) == 30 or share_groups == "off", "handed out twice (a rebalance of a plain group may do that)"


def test_grades_in_the_log_are_reused_by_the_next_worker(settings: Settings) -> None:
    assert service.load_grades(settings).get(("t", "d", "g")) is None
    writer = EventWriter(settings)
    for index in range(3):
        writer.write(
            RewardGraded(
                event_id=make_event_id(),
                run_id=RunId("another-run"),
                occurred_at=now_ms(),
                producer="worker/9",
                trial_id=TrialId(f"trial-{index}"),
                attempt=1,
                task_id=TaskId("task"),
                reward=1.0,
                tests=(TestResult(test_id="a::b", outcome="passed", expected="fail_to_pass"),),
                grader_id="pytest" if index else "somebody-else",
                grader_digest=f"g{index}",
                grade_attempt=1,
                diff_sha256="d",
                task_digest="t",
                reused_from=make_event_id() if index == 1 else None,
                duration_sec=0.1,
            )
        )
    writer.flush()
    grades = service.load_grades(settings)
    assert grades.get(("t", "d", "g0")) is None and grades.get(("t", "d", "g1")) is None
    known = grades.get(("t", "d", "g2"))
    assert known is not None and known.grade.reward == 1.0 and known.grade.tests[0].outcome == "passed"


_SERVE = """
import json, sys, threading
from infra.settings import *
from producers.trials.service import serve
raw = json.loads(sys.argv[1])
settings = Settings(run=RunSection(**raw["run"]), data=DataSection(**raw["data"]), kafka=KafkaSection(**raw["kafka"]),
                    trials=TrialsSection(**raw["trials"]))
serve(settings, int(sys.argv[2]), threading.Event())
"""


def _spawn(settings: Settings, instance: int) -> subprocess.Popen[bytes]:
    import json
    from dataclasses import asdict

    raw = json.dumps({k: asdict(getattr(settings, k)) for k in ("run", "data", "kafka", "trials")})
    return subprocess.Popen([sys.executable, "-c", _SERVE, raw, str(instance)], cwd=Path(__file__).parents[2])


def _processes_with(marker: bytes) -> list[int]:
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker in (entry / "environ").read_bytes() or marker in (entry / "cmdline").read_bytes():
                    out.append(int(entry.name))
            except OSError:
                continue
    return out


def test_a_killed_worker_leaves_nothing_and_another_takes_over(
    settings: Settings, facts: Facts, tmp_path: Path
) -> None:
    task = make_task(tmp_path)
    marker = f"sleep 31{os.getpid()}"

    def script(trial: str, call: int) -> str:
        return f"{marker}; {SUBMIT}" if first.poll() is None and first_may_hang else f"{FIX} && {SUBMIT}"

    first_may_hang = True
    with ScriptedProxy(proxy_socket_path(settings, 0), script) as proxy:
        first = _spawn(settings, 0)
        try:
            writer = EventWriter(settings)
            offer = make_offer(task, 0)
            writer.write(offer)
            writer.flush()
            facts.wait(lambda events: any(isinstance(e, TrialLeased) for e in events))
            _wait_for(lambda: _processes_with(marker.encode().replace(b" ", b"\0")) != [])
            first.send_signal(signal.SIGKILL)
            first.wait(10)
            _wait_for(lambda: _processes_with(marker.encode().replace(b" ", b"\0")) == [])
            _wait_for(lambda: _processes_with(settings.kafka.topic_prefix.encode()) == [])
        finally:
            first.kill()
            first.wait()
        first_may_hang = False
        second = _spawn(settings, 1)
        try:
            # What the scheduler's lease clock does when the deadline passed without a renewal.
            writer.write(make_offer(task, 0, attempt=2))
            writer.flush()
            facts.wait(finished(1))
        finally:
            second.terminate()
            second.kill()
            second.wait()
    end = facts.of(AttemptFinished)[0]
    assert isinstance(end, AttemptFinished) and end.attempt == 2 and end.verifier_ok
    assert [s["attempt"] for s in proxy.sessions] == [1, 2]
    assert proxy.sessions[0]["token"] != proxy.sessions[1]["token"]
    assert end_offsets(settings, ("rewards",))


def _wait_for(condition: Callable[[], bool], deadline_sec: float = 60.0) -> None:
    end = time.monotonic() + deadline_sec
    while not condition():
        assert time.monotonic() < end, "not in time"
        threading.Event().wait(0.05)
