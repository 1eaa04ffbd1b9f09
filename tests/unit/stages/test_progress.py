"""Live progress and health checks, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from infra.settings import HealthSection, RunSection, ScheduleSection, Settings
from schemas.base import Event
from schemas.events import AlertCleared, AlertRaised, GroupDropped, RunFinished, TrajectoryAdmitted, TrajectoryRejected
from schemas.ids import TrialId
from streams.progress.checks import MIN_TRIALS, WINDOW_TRIALS
from streams.progress.core import ProgressStage, ProgressState, make_snapshot
from tests.unit.stages import builders as make
from tests.unit.stages.history import make_history

SETTINGS = Settings(run=RunSection(id=make.RUN), schedule=ScheduleSection(num_steps=4), health=HealthSection())


def follow(*events: Event) -> tuple[ProgressState, list[Event]]:
    stage = ProgressStage(SETTINGS)
    state, alerts = stage.initial(), []
    for event in events:
        state, out = stage.apply(state, event)
        alerts += out
    return state, alerts


def ended(group_id: str, index: int, reward: float | None, reason: str = "agent_completed") -> Event:
    common: dict[str, Any] = {
        "trial_id": TrialId(f"{group_id}.{index:02d}"),
        "group_id": group_id,
        "trajectory_event_id": "t",
        "termination_reason": reason,
        "table_version": "v1",
        "min_version": 0,
        "max_version": 0,
        "num_sampled_tokens": 10,
    }
    if reward is None:
        return TrajectoryRejected(**make.base(), **common, rule="mask")
    return TrajectoryAdmitted(**make.base(), **common, rule="keep", reward=reward, reward_event_id="g")


def test_the_snapshot_of_a_run_in_its_middle() -> None:
    """Four trials offered in step 0: one solved, one not, one lost at set-up, one open."""
    events = [
        make.run_started({"train": 1}),
        make.published(0),
        make.loaded(0),
        make.group_offered("run-1.v00000.000", 1, purpose="validation"),
        ended("run-1.v00000.000", 0, 1.0),
        make.group_ready("run-1.v00000.000", "validation"),
        make.group_offered("run-1.t00000.000", 4),
        ended("run-1.t00000.000", 0, 1.0),
        ended("run-1.t00000.000", 1, 0.0),
        ended("run-1.t00000.000", 2, None, "env_setup_failed"),
    ]
    once, twice = follow(*events)[0], follow(*events, *events)[0]
    snapshot = make_snapshot(once, SETTINGS)
    assert make_snapshot(twice, SETTINGS) == snapshot
    assert snapshot["headline"] == "3/4 trials, 1 setup failures"
    assert (snapshot["current"]["purpose"], snapshot["current"]["num_admitted"]) == ("train", 2)
    assert snapshot["trials"] == {
        "offered": 5,
        "finished": 4,
        "by_reason": {"agent_completed": 3, "env_setup_failed": 1},
    }
    assert [(r["purpose"], r["step"], r["solve_rate"]) for r in snapshot["solve_rates"]] == [
        ("validation", 0, 1.0),
        ("train", 0, 0.25),
    ]
    assert snapshot["tokens"] == {"sampled": 40, "trained": 0}
    assert snapshot["groups"] == {"offered": 2, "ready": 1}
    assert (snapshot["version"], snapshot["served"], snapshot["state"]) == (0, {"engine/0": 0}, "running")


def test_a_finished_run_and_other_runs() -> None:
    end = RunFinished(**make.base(), outcome="completed", num_steps=4)
    other = make.run_started({"train": 1}, run_id="run-2", name="other")
    state, _ = follow(make.run_started({"train": 1}), make.step_completed(0), end, other)
    snapshot = make_snapshot(state, SETTINGS)
    assert (snapshot["state"], snapshot["name"], snapshot["num_steps_done"]) == ("completed", "run", 1)
    assert (snapshot["headline"], snapshot["current"], snapshot["tokens"]["trained"]) == ("no trial is open", None, 100)


def step(number: int, version: int | None = None, **entry: Any) -> Event:
    """A step whose tokens are of `version` (default: the one it started from)."""
    of_version = number if version is None else version
    return make.step_completed(number, fidelity=(make.fidelity(), make.fidelity(of_version, **entry)))


def test_a_shifted_replay_raises_one_alert_that_is_cleared_when_it_passes_again() -> None:
    bad, worse, good = step(3, replay_overlap=0.4), step(4, replay_overlap=0.3), step(5)
    _, (raised, cleared) = follow(step(2), bad, bad, worse, good, bad, good)
    assert isinstance(raised, AlertRaised)
    assert (raised.check, raised.subject, raised.severity) == ("replay_overlap_low", "learner", "critical")
    assert (raised.value, raised.threshold) == (0.4, 0.98)
    assert "step 3" in raised.detail
    assert isinstance(cleared, AlertCleared)
    assert cleared.raised_event_id == raised.event_id
    again = follow(step(2), bad)[1]
    assert [e.event_id for e in again] == [raised.event_id], "the id follows from the step"


@pytest.mark.parametrize(
    ("event", "checks"),
    [
        (step(3), []),
        (step(3, replay_overlap=0.9799), ["replay_overlap_low"]),
        (step(3, replay_overlap=0.98), []),
        (step(3, replay_overlap=None, pearson=None), []),
        (step(3, pearson=0.989), ["rollout_training_mismatch"]),
        (step(3, pearson=0.5, replay_overlap=0.1), ["replay_overlap_low", "rollout_training_mismatch"]),
        (step(3, version=2, replay_overlap=0.9), []),  # an update lies between: some experts did change
        (step(3, version=2, replay_overlap=0.5), ["replay_overlap_low"]),
        (step(3, version=3, replay_overlap=0.1, num_tokens=0), []),
    ],
)
def test_step_checks(event: Event, checks: list[str]) -> None:
    assert [e.check for e in follow(event)[1]] == checks  # type: ignore[attr-defined]


def test_a_fenced_replica_and_its_return() -> None:
    refused = make.loaded(2, ok=False, replica="engine/1", detail="digest of model.safetensors differs")
    _, alerts = follow(make.loaded(1, replica="engine/1"), refused, make.loaded(2, replica="engine/0"))
    (raised,) = alerts
    assert isinstance(raised, AlertRaised)
    assert (raised.check, raised.subject) == ("replica_fenced", "engine/1")
    assert "digest of model.safetensors differs" in raised.detail
    _, alerts = follow(refused, make.loaded(2, replica="engine/1"))
    assert [type(e) for e in alerts] == [AlertRaised, AlertCleared]


def test_too_many_trials_lost_to_infrastructure() -> None:
    def group(number: int, num: int, reason: str) -> Event:
        members = tuple(make.member(termination_reason=reason) for _ in range(num))
        return make.group_ready(f"run-1.t00000.{number:03d}", members=members)

    lost = group(0, MIN_TRIALS - 1, "env_setup_failed")
    assert follow(lost)[1] == [], "too few to judge"
    _, (raised,) = follow(lost, group(1, 1, "agent_crashed"))
    assert isinstance(raised, AlertRaised)
    assert (raised.check, raised.value) == ("setup_failures_high", pytest.approx(19 / 20))
    assert "env_setup_failed" in raised.detail
    healthy = [group(2 + i, 50, "agent_completed") for i in range(WINDOW_TRIALS // 50)]
    state, alerts = follow(lost, group(1, 1, "agent_crashed"), *healthy)
    assert [type(e) for e in alerts] == [AlertRaised, AlertCleared]
    assert len(state.ends) == WINDOW_TRIALS


def test_a_whole_history_adds_up() -> None:
    history = make_history(3)
    stage = ProgressStage(history.settings)
    state = stage.initial()
    for event in history.events(*stage.inputs):
        if type(event).__name__ in stage.wanted:
            state, _ = stage.apply(state, event)
    snapshot = make_snapshot(state, history.settings)
    assert snapshot["state"] == "completed"
    assert snapshot["trials"]["offered"] == snapshot["trials"]["finished"] > 20
    assert snapshot["num_steps_done"] == 4
    dropped = [e.purpose for e in history.events("groups") if isinstance(e, GroupDropped)]
    assert snapshot["groups"]["ready"] == 4 * 2 + 3 * 3 - dropped.count("validation")
    assert snapshot["groups"]["offered"] == snapshot["groups"]["ready"] + len(dropped)
