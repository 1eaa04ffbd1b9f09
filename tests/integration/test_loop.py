"""The whole system on a short run: real broker, engine, harness, sandboxes, learner; and what kill -9 does to it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.config import replace_key
from infra.kafka import read_events
from infra.local.stack import down, up
from infra.run import Run
from infra.settings import Settings
from schemas.events import (
    AlertRaised,
    GroupDropped,
    GroupOffered,
    GroupReady,
    PolicyPublished,
    RunFinished,
    StepCompleted,
    TrajectoryAssembled,
    TrialFinished,
    TrialOffered,
)
from streams.replay.service import verify

pytestmark = pytest.mark.timeout(420)

RUN_LIMIT_SEC = 240.0


@pytest.fixture(scope="session")
def demo_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pool and a policy that has learned the format."""
    from learner.policies.demo_policy import make_demo_policy
    from learner.policies.warmup import WarmupSettings
    from producers.tasks.demo_pool import make_demo_pool

    home = tmp_path_factory.mktemp("demo")
    make_demo_pool(home / "pool", 0, num_train=24, num_held_out=8, num_sft=2048)
    make_demo_policy(home / "policy", home / "pool", 0, WarmupSettings(steps=90))
    return home


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def loop_settings(kafka_settings: Settings, demo_parts: Path, tmp_path: Path) -> Iterator[Settings]:
    values: dict[str, Any] = {
        "data.dir": str(tmp_path / "data"),
        "clickhouse.port": free_port(),
        "proxy.port": free_port(),
        "run.name": "short",
        "policy.path": str(demo_parts / "policy"),
        "tasks.train": str(demo_parts / "pool" / "train.parquet"),
        "tasks.held_out": str(demo_parts / "pool" / "held_out.parquet"),
        "schedule.num_steps": 4,
        "schedule.groups_per_step": 3,
        "schedule.group_size": 4,
        "schedule.max_staleness": 0,
        "schedule.validate_every": 4,
        "trials.lanes": 4,
        "trials.lease_sec": 6.0,
        "train.lr": 5e-4,
        "train.kl_coef": 1e-3,
        "train.clip_low": 0.1,
        "train.clip_high": 0.15,
    }
    settings = kafka_settings
    for name, value in values.items():
        settings = replace_key(settings, name, value)
    up(settings)
    yield settings
    down(settings)


def wait_for(condition: Callable[[], object], what: str, run: Run, limit_sec: float = RUN_LIMIT_SEC) -> None:
    deadline = time.monotonic() + limit_sec
    while not condition():
        run.supervisor.check()
        assert time.monotonic() < deadline, f"no {what} within {limit_sec:.0f} s"
        time.sleep(0.1)


def finish(run: Run) -> None:
    deadline = time.monotonic() + RUN_LIMIT_SEC
    assert run.wait(lambda: time.monotonic() > deadline), f"the run did not end within {RUN_LIMIT_SEC:.0f} s"


def check_laws(settings: Settings, *, num_steps: int) -> None:
    """What must hold of every finished run, whatever died in between."""
    offers = list(read_events(settings, "offers"))
    trials = {t for e in offers if isinstance(e, GroupOffered) for t in e.trial_ids}
    assert trials == {e.trial_id for e in offers if isinstance(e, TrialOffered)}
    ends = Counter(e.trial_id for e in read_events(settings, "trial-stages", types=(TrialFinished,)))
    assert set(ends) == trials
    assert set(ends.values()) == {1}

    ended = list(read_events(settings, "groups"))
    groups = Counter(e.group_id for e in ended if isinstance(e, GroupReady | GroupDropped))
    assert set(groups) == {e.group_id for e in offers if isinstance(e, GroupOffered)}
    assert set(groups.values()) == {1}

    steps = [e for e in read_events(settings, "steps") if isinstance(e, StepCompleted)]
    assert [e.step for e in steps] == list(range(num_steps))
    trained = Counter(g for e in steps for g in e.group_ids)
    assert set(trained.values()) == {1}
    ready = {e.group_id for e in ended if isinstance(e, GroupReady) and e.purpose == "train"}
    assert set(trained) == ready, "every ready group trains in exactly one step"
    versions = [e.version for e in read_events(settings, "policy-versions", types=(PolicyPublished,))]
    assert versions == list(range(num_steps + 1))
    for event in steps:
        everything = event.fidelity[0]
        assert everything.num_tokens > 0
        assert everything.pearson is None or everything.pearson >= 0.9999
        assert everything.mean_abs_dlogp <= 1e-5
        assert everything.replay_overlap is not None and everything.replay_overlap >= 0.99

    report = verify(settings, settings.run.id)
    assert report.differences == []
    assert report.num_compared["trajectories"] >= 2 * len(trials)
    assert report.num_compared["groups"] == len(groups)


def test_a_short_run_ends_and_the_log_proves_it(loop_settings: Settings) -> None:
    run = Run(loop_settings)
    run.start()
    try:
        finish(run)
        assert run.wait_for_sink()
        check_laws(run.settings, num_steps=4)

        from consumers.clickhouse.queries import fetch_status, fetch_summary, fetch_trace, run_sql

        summary = fetch_summary(run.settings, run.settings.run.id)
        assert [e["n"] for e in summary["evaluations"]] == [8, 8]
        assert summary["steps"] == 4
        assert summary["trials"] == 4 * 3 * 4 + 2 * 8 or summary["trials"] > 4 * 3 * 4 + 2 * 8
        assert fetch_status(run.settings, run.settings.run.id) is not None
        trial = next(iter(read_events(run.settings, "trajectories", types=(TrajectoryAssembled,)))).trial_id
        assert fetch_trace(run.settings, trial) is not None
        errors = "SELECT sum(num_tokens) FROM token_accounting WHERE place IN ('unaccounted', 'twice')"
        _, rows = run_sql(run.settings, errors)
        assert rows[0][0] in (None, 0)
    finally:
        run.stop()


def test_kill_9_of_learner_assembly_and_worker_loses_nothing(loop_settings: Settings) -> None:
    run = Run(loop_settings)
    run.start()
    try:
        for victim, after_steps in (("worker", 0), ("assembly", 1), ("learner", 2)):
            wait_for(
                lambda n=after_steps: (
                    len(list(read_events(run.settings, "steps"))) >= n
                    and any(e.purpose == "train" for e in read_events(run.settings, "offers", types=(TrialOffered,)))
                ),
                f"step {after_steps}",
                run,
            )
            os.kill(run.supervisor.pids()[victim, 0], signal.SIGKILL)
        finish(run)
        check_laws(run.settings, num_steps=4)
        assert run.supervisor.num_restarts >= 3
    finally:
        run.stop()


def test_a_stopped_run_resumes_from_the_log(loop_settings: Settings) -> None:
    first = Run(loop_settings)
    first.start()
    try:
        wait_for(lambda: len(list(read_events(first.settings, "steps"))) >= 1, "step", first)
    finally:
        first.stop(outcome="stopped")
    assert not first.supervisor.pids()
    second = Run(loop_settings)
    assert second.identity.resumed
    assert second.identity.run_id == first.identity.run_id
    second.start()
    try:
        finish(second)
        check_laws(second.settings, num_steps=4)
    finally:
        second.stop()
    third = Run(loop_settings)
    assert not third.identity.resumed, "a finished run is not resumed"
    outcomes = [e.outcome for e in read_events(loop_settings, "runs", types=(RunFinished,))]
    assert outcomes == ["stopped", "completed"]


def test_a_shifted_replay_raises_an_alert(loop_settings: Settings) -> None:
    settings = replace_key(loop_settings, "train.replay_shift_tokens", 1)
    run = Run(replace_key(settings, "schedule.num_steps", 1))
    run.start()
    try:
        finish(run)
        wait_for(
            lambda: any(
                e.check == "replay_overlap_low" for e in read_events(run.settings, "alerts", types=(AlertRaised,))
            ),
            "alert",
            run,
            60,
        )
    finally:
        run.stop()
