"""The learner on a real broker: kill -9 at every point, fencing, on-policy fidelity, bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import torch
from safetensors.torch import load_file

import learner.runner
from infra.kafka import EventWriter, ensure_topics, make_producer, read_events, topic_name
from infra.local.kafka import start_kafka, stop_kafka
from infra.local.ports import free_port
from infra.paths import checkpoint_dir, checkpoints_dir, policies_dir, policy_dir
from infra.settings import DataSection, KafkaSection, PolicySection, RunSection, ScheduleSection, Settings, TrainSection
from learner.backends.torch_backend import TorchBackend, TorchBackendOptions
from learner.checkpoint import CheckpointError, list_checkpoints
from learner.durable import verify_files
from learner.publish import PolicyError, list_policies
from learner.runner import LearnerRun
from schemas.base import Event
from schemas.events import DeadLettered, GroupReady, PolicyPublished, StepCompleted
from schemas.packing import unpack_floats, unpack_ints
from streams.runtime.log import FencedError
from tests.unit.learner.factory import RecordedGroup, Sampler, make_policy, record_group

NUM_STEPS, GROUPS_PER_STEP = 4, 2
REPOSITORY = Path(__file__).parents[2]
DEADLINE_SEC = 120.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_policy(tmp_path_factory.mktemp("policy") / "p")


@pytest.fixture
def settings(kafka_settings: Settings, policy: Path) -> Settings:
    return replace(
        kafka_settings,
        run=RunSection(id="run-a"),
        policy=PolicySection(path=str(policy)),
        schedule=replace(
            ScheduleSection(), num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP, group_size=3, max_staleness=1
        ),
        train=replace(
            TrainSection(),
            lr=1e-3,
            kl_coef=0.01,
            clip_low=0.1,
            clip_high=0.15,
            micro_batch_tokens=128,
            keep_checkpoints=2,
        ),
    )


def record_step(sampler: Sampler, run_id: str, step: int) -> list[RecordedGroup]:
    """The groups of a step: one with variation and a masked member, and one that has none in every other step."""
    sampler.version = step
    rewards = [[0.0, 1.0, None], [1.0, 1.0, float(step % 2)]]
    return [record_group(sampler, step, i, r, run_id=run_id, chunk_rows=9) for i, r in enumerate(rewards)]


def record_run(policy: Path, run_id: str) -> list[Event]:
    """Everything a run's learner reads, in a random order, with repeats and with what it must pass over."""
    sampler, rng = Sampler(policy, 0), random.Random(run_id)
    groups = [g for step in range(NUM_STEPS) for g in record_step(sampler, run_id, step)]
    groups.append(record_group(sampler, 0, 0, [1.0], run_id=run_id, purpose="validation"))
    events: list[Event] = [e for g in groups for e in (g.ready, *g.trajectories, *g.routing)]
    events += rng.sample(events, 20)
    rng.shuffle(events)
    return events


def write_all(settings: Settings, events: list[Event]) -> None:
    writer = EventWriter(settings)
    for event in events:
        writer.write(event)
    writer.flush()


def steps_of(settings: Settings) -> list[StepCompleted]:
    found = read_events(settings, "steps", types=(StepCompleted,))
    return [e for e in found if isinstance(e, StepCompleted) and e.run_id == settings.run.id]


def versions_of(settings: Settings) -> list[PolicyPublished]:
    found = read_events(settings, "policy-versions", types=(PolicyPublished,))
    return [e for e in found if isinstance(e, PolicyPublished) and e.run_id == settings.run.id]


def stop_after(
    stop: threading.Event, num_commits: int, then: Callable[[], None] = lambda: None
) -> Callable[[str], None]:
    """Faults that end a learner at its n-th committed transaction (version 0 is one)."""
    seen = [0]

    def faults(point: str) -> None:
        seen[0] += point == "after_commit"
        if point == "after_commit" and seen[0] == num_commits:
            stop.set()

    return faults


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for a condition of another thread, with a deadline."""
    give_up = time.monotonic() + DEADLINE_SEC
    while not condition():
        assert time.monotonic() < give_up
        threading.Event().wait(0.02)


def run_here(settings: Settings, num_commits: int) -> None:
    """A learner in this process until it has committed `num_commits` transactions."""
    stop = threading.Event()
    LearnerRun(settings, 0, stop_after(stop, num_commits)).run(stop)


def run_process(settings: Settings, **options: str) -> int:
    args = {"settings": dataclasses.asdict(settings), **options}
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.learner_process", json.dumps(args)],
        cwd=REPOSITORY,
        timeout=DEADLINE_SEC,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


def check_history(settings: Settings, events: list[Event]) -> None:
    """Every group trained in exactly one step, versions contiguous, files as announced."""
    steps, versions = steps_of(settings), versions_of(settings)
    assert [s.step for s in steps] == list(range(NUM_STEPS))
    assert [(s.version_before, s.version_after) for s in steps] == [(n, n + 1) for n in range(NUM_STEPS)]
    assert [(p.version, p.step) for p in versions] == [(n, n) for n in range(NUM_STEPS + 1)]
    trained = [g for s in steps for g in s.group_ids]
    offered = {e.group_id for e in events if isinstance(e, GroupReady) and e.purpose == "train"}
    assert len(trained) == len(set(trained)) and set(trained) == offered
    newest = versions[-1]
    verify_files(Path(newest.path), newest.files, "")
    ids = list(unpack_ints(newest.canary_ids))
    loaded = TorchBackend(Path(newest.path), TorchBackendOptions())
    assert loaded.compute_canary(ids) == pytest.approx(list(unpack_floats(newest.canary_logprobs)), abs=1e-6)
    assert sorted(list_checkpoints(checkpoints_dir(settings))) == [NUM_STEPS - 1, NUM_STEPS]
    assert sorted(list_policies(policies_dir(settings))) == sorted({0, *range(NUM_STEPS - 2, NUM_STEPS + 1)})


def test_killed_at_every_point_equals_never_killed_bit_for_bit(settings: Settings, policy: Path) -> None:
    killed = replace(settings, run=RunSection(id="run-b"))
    events = {s.run.id: record_run(policy, s.run.id) for s in (settings, killed)}
    write_all(settings, events["run-a"] + events["run-b"])
    run_here(settings, NUM_STEPS + 1)
    check_history(settings, events["run-a"])

    kills = ["after_start_files:1", "after_checkpoint:1", "after_publish_files:2", "before_commit:2", "after_commit:1"]
    for kill_at in kills:
        assert run_process(killed, kill_at=kill_at) == -signal.SIGKILL, kill_at
    left = NUM_STEPS - len(steps_of(killed))
    assert left == 1  # each kill hit a step in the middle, not an idle learner
    assert run_process(killed, stop_at=f"after_commit:{left}") == 0
    check_history(killed, events["run-b"])

    for name in ("weights.safetensors", "optimizer.safetensors", "rng.safetensors"):
        a, b = (load_file(checkpoint_dir(s, NUM_STEPS) / name) for s in (settings, killed))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a), name
    one, other = steps_of(settings), steps_of(killed)
    assert [s.loss for s in one] == [s.loss for s in other]
    assert [s.fidelity for s in one] == [s.fidelity for s in other]
    start = load_file(policy_dir(settings, 0) / "model.safetensors")
    end = load_file(policy_dir(settings, NUM_STEPS) / "model.safetensors")
    assert any(not torch.equal(start[k], end[k]) for k in start)


def test_on_policy_samples_agree_and_every_version_is_told_apart(settings: Settings) -> None:
    """Each step samples from the version just published, as an engine would."""
    stop = threading.Event()
    sampled_until = [0]

    def sample_next(point: str) -> None:
        if point != "after_commit":
            return
        version = len(versions_of(settings)) - 1
        if version == NUM_STEPS:
            stop.set()
            return
        sampler = Sampler(policy_dir(settings, version), version)
        groups = record_step(sampler, settings.run.id, version)
        write_all(settings, [e for g in groups for e in (g.ready, *g.trajectories, *g.routing)])
        sampled_until[0] = version

    LearnerRun(settings, 0, sample_next).run(stop)
    steps = steps_of(settings)
    assert len(steps) == NUM_STEPS and sampled_until == [NUM_STEPS - 1]
    for step in steps:
        overall, own = step.fidelity
        assert own.version == step.version_before and own.num_tokens == overall.num_tokens == step.num_tokens
        assert overall.pearson is not None and overall.pearson >= 0.9999 and overall.mean_abs_dlogp <= 1e-5
        assert overall.replay_overlap == 1.0 and overall.replay_coverage == 1.0
        assert step.loss.ratio_mean == pytest.approx(1.0, abs=1e-4)
        assert step.timing.total_sec >= step.timing.forward_backward_sec > 0
    assert steps[-1].loss.kl_loss > 0.0  # it has moved away from version 0


def test_a_second_learner_fences_the_first(settings: Settings, policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = record_run(policy, settings.run.id)
    later = [e for e in events if isinstance(e, GroupReady) and e.step >= 1 and e.purpose == "train"]
    write_all(settings, [e for e in events if e not in later])
    stop, first_trained, second_waits = threading.Event(), threading.Event(), threading.Event()
    outcome: list[BaseException] = []
    holds = [0]
    real = learner.runner.only_writer

    def watched(parent: Path, until: threading.Event):  # type: ignore[no-untyped-def]
        holds[0] += 1
        if holds[0] == 2:
            second_waits.set()
        return real(parent, until)

    monkeypatch.setattr(learner.runner, "only_writer", watched)
    commits = [0]

    def faults(point: str) -> None:
        commits[0] += point == "after_commit"
        if commits[0] == 2:
            first_trained.set()

    def first() -> None:
        try:
            LearnerRun(settings, 0, faults).run(stop)
        except FencedError as exc:
            outcome.append(exc)

    one = threading.Thread(target=first)
    one.start()
    assert first_trained.wait(DEADLINE_SEC)
    two_stop = threading.Event()
    two = threading.Thread(target=lambda: LearnerRun(settings, 0, stop_after(two_stop, NUM_STEPS - 1)).run(two_stop))
    two.start()
    assert second_waits.wait(DEADLINE_SEC)
    write_all(settings, list(later))
    one.join(DEADLINE_SEC)
    two.join(DEADLINE_SEC)
    assert not one.is_alive() and not two.is_alive()
    assert len(outcome) == 1
    check_history(settings, events)


def test_bytes_that_are_no_event_go_to_the_dead_letters_and_do_not_block(settings: Settings, policy: Path) -> None:
    producer = make_producer(settings)
    for topic in ("groups", "routing"):
        producer.produce(topic_name(settings, topic), key=b"k", value=b"not an event")
    assert producer.flush(30) == 0
    events = record_run(policy, settings.run.id)
    write_all(settings, events)
    stop = threading.Event()

    def faults(point: str) -> None:
        if point == "after_commit" and len(steps_of(settings)) == NUM_STEPS:
            stop.set()

    LearnerRun(settings, 0, faults).run(stop)
    check_history(settings, events)
    letters = [e for e in read_events(settings, "dead-letters") if isinstance(e, DeadLettered)]
    assert sorted(e.original_topic for e in letters) == ["groups", "routing"]
    assert {e.original_value for e in letters} == {b"not an event"}


def test_shifted_replay_is_visible_in_the_step(settings: Settings, policy: Path) -> None:
    shifted = replace(settings, train=replace(settings.train, replay_shift_tokens=1))
    write_all(shifted, record_run(policy, shifted.run.id))
    run_here(shifted, 2)
    overall = steps_of(shifted)[0].fidelity[0]
    assert overall.replay_overlap is not None
    assert overall.replay_overlap < shifted.health.min_replay_overlap


def test_a_missing_policy_directory_is_a_clear_error(settings: Settings, tmp_path: Path) -> None:
    wrong = replace(settings, policy=PolicySection(path=str(tmp_path / "nowhere")))
    with pytest.raises(PolicyError, match=r"policy\.path: .*nowhere does not exist; set it to a directory"):
        LearnerRun(wrong, 0).run(threading.Event())
    assert versions_of(wrong) == []


def test_a_damaged_committed_checkpoint_stops_the_learner(settings: Settings, policy: Path) -> None:
    write_all(settings, record_run(policy, settings.run.id))
    run_here(settings, 2)
    (checkpoint_dir(settings, 1) / "weights.safetensors").write_bytes(b"?")
    with pytest.raises(CheckpointError, match=r"step00001/weights\.safetensors: 1 bytes, .*restore the directory"):
        LearnerRun(settings, 0).run(threading.Event())
    assert len(steps_of(settings)) == 1


def test_the_service_stops_when_told_and_says_it_is_ready(settings: Settings, policy: Path) -> None:
    from learner.service import serve

    write_all(settings, record_run(policy, settings.run.id))
    stop = threading.Event()
    done = replace(settings, schedule=replace(settings.schedule, num_steps=1))
    thread = threading.Thread(target=serve, args=(done, 0, stop))
    with structlog.testing.capture_logs() as logs:
        thread.start()
        wait_for(lambda: any(entry["event"] == "step_completed" for entry in logs) or not thread.is_alive())
        assert thread.is_alive()  # all steps are done: it idles
        stop.set()
        thread.join(DEADLINE_SEC)
    assert not thread.is_alive()
    assert [s.step for s in steps_of(done)] == [0]
    assert any(entry["event"] == "learner_ready" for entry in logs)


def test_a_broker_killed_in_the_middle_of_a_step_is_waited_for(
    settings: Settings, policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    port = free_port()
    stack = Settings(data=DataSection(dir=str(tmp_path_factory.mktemp("broker"))), kafka=KafkaSection(port=port))
    here = replace(settings, kafka=replace(settings.kafka, bootstrap=f"127.0.0.1:{port}"))
    brokers = [start_kafka(stack)]
    try:
        ensure_topics(here)
        events = record_run(policy, here.run.id)
        write_all(here, events)
        stop, seen = threading.Event(), Counter[str]()

        def faults(point: str) -> None:
            seen[point] += 1
            if f"{point}:{seen[point]}" == "after_publish_files:2":
                os.kill(brokers[0].pid, signal.SIGKILL)
                brokers.append(start_kafka(stack))
            if point == "after_commit" and seen[point] >= NUM_STEPS + 1 and len(steps_of(here)) == NUM_STEPS:
                stop.set()

        LearnerRun(here, 0, faults).run(stop)
        check_history(here, events)
    finally:
        stop_kafka(stack, brokers[-1])
