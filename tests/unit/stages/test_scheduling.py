"""The scheduler, case by case."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from infra.config import settings_json
from infra.settings import RunSection, ScheduleSection, Settings
from schemas.base import Event
from schemas.events import GroupOffered, RunFinished, TrialFinished, TrialOffered
from schemas.ids import GroupId, TaskId
from streams.scheduling.clock import LeaseClock
from streams.scheduling.core import SchedulingStage
from streams.scheduling.ordering import REPLACEMENT_STRIDE, replacement_task, shuffle_epoch, task_at, trial_seed
from streams.scheduling.plan import MAX_REPLACEMENTS, pass_size, validation_points
from streams.scheduling.service import ScheduleChangedError, check_unchanged
from streams.scheduling.state import SchedulerState
from tests.unit.stages import builders as make

TASKS = tuple(TaskId(f"train-{i}") for i in range(4))


class Scheduler:
    """A stage with its state; outputs are read back at once, as they are from the log."""

    def __init__(self, **schedule: Any) -> None:
        fields: dict[str, Any] = {"num_steps": 4, "groups_per_step": 2, "group_size": 2, "max_staleness": 0}
        self.settings = Settings(run=RunSection(id=make.RUN), schedule=ScheduleSection(**(fields | schedule)))
        self.stage = SchedulingStage(self.settings)
        self.state: SchedulerState = self.stage.initial()
        self.outputs: list[Event] = []

    def see(self, *events: Event) -> list[Event]:
        """Apply events; what they led to."""
        new: list[Event] = []
        for event in events:
            self.state, outputs = self.stage.apply(self.state, event)
            new += outputs
        for event in list(new):
            if type(event).__name__ in self.stage.wanted:
                self.see(event)
        self.outputs += new
        return new

    def begin(self, num_held_out: int = 0) -> list[Event]:
        tasks = [make.registered(t) for t in TASKS]
        held_out = [make.registered(f"held-{i}", "held_out") for i in range(num_held_out)]
        start = make.run_started({"train": 4, "held_out": num_held_out})
        return self.see(*tasks, *held_out, start, make.published(0), make.loaded(0))

    def close(self, groups: Iterable[Event], **changes: Any) -> list[Event]:
        """All these groups become ready."""
        ready = [
            make.group_ready(g.group_id, g.purpose, g.step, **changes) for g in groups if isinstance(g, GroupOffered)
        ]
        return self.see(*ready)


def groups(events: Iterable[Event]) -> list[GroupOffered]:
    return [e for e in events if isinstance(e, GroupOffered)]


def steps(events: Iterable[Event]) -> list[tuple[str, int]]:
    return [(g.purpose, g.step) for g in groups(events)]


def test_the_first_step_is_offered_once_all_announced_tasks_are_registered_and_a_replica_serves() -> None:
    scheduler = Scheduler()
    assert scheduler.see(make.published(0), make.loaded(0), make.run_started({"train": 2})) == []
    assert scheduler.see(make.registered("a")) == []
    offers = scheduler.see(make.registered("b"))
    assert steps(offers) == [("train", 0), ("train", 0)]
    assert [g.group_id for g in groups(offers)] == ["run-1.t00000.000", "run-1.t00000.001"]
    trials = [e for e in offers if isinstance(e, TrialOffered)]
    assert [t.trial_id for t in trials] == [t for g in groups(offers) for t in g.trial_ids]
    assert {t.occurred_at for t in trials} == {1200}, "the newest of its causes: PolicyLoaded"
    assert trials[0].task_path == f"/tasks/{trials[0].task_id}"
    assert len({t.seed for t in trials}) == 4


def test_a_replica_that_refused_the_weights_does_not_serve() -> None:
    scheduler = Scheduler()
    tasks = [make.registered(t) for t in TASKS]
    assert scheduler.see(*tasks, make.run_started({"train": 4}), make.published(0), make.loaded(0, ok=False)) == []
    assert steps(scheduler.see(make.loaded(0))) == [("train", 0)] * 2


def test_events_of_other_runs_do_not_count() -> None:
    scheduler = Scheduler()
    scheduler.see(*(make.registered(t) for t in TASKS), make.run_started({"train": 4}), make.published(0))
    assert scheduler.see(make.loaded(0, run_id="run-2")) == []


@pytest.mark.parametrize(("max_staleness", "num_steps_offered"), [(0, 1), (1, 2), (3, 4)])
def test_the_staleness_bound(max_staleness: int, num_steps_offered: int) -> None:
    """capacity = (max_staleness + version + 1) * groups_per_step - (consumed + in flight), at version 0."""
    scheduler = Scheduler(max_staleness=max_staleness, num_steps=10)
    offered = groups(scheduler.begin())
    assert len(offered) == (max_staleness + 0 + 1) * 2
    assert {g.step for g in offered} == set(range(num_steps_offered))
    assert {g.policy_version for g in offered} == {0}
    more = groups(scheduler.see(make.step_completed(0), make.published(1), make.loaded(1)))
    assert [g.step for g in more] == [num_steps_offered] * 2
    assert {g.policy_version for g in more} == {1}


def test_the_next_step_waits_for_a_replica_that_serves_its_version() -> None:
    scheduler = Scheduler()
    scheduler.begin()
    assert scheduler.see(make.step_completed(0), make.published(1)) == []
    assert steps(scheduler.see(make.loaded(1))) == [("train", 1)] * 2


def test_an_epoch_offers_every_task_once_in_an_order_that_follows_from_the_seed() -> None:
    scheduler = Scheduler(max_staleness=3)
    offered = groups(scheduler.begin())
    assert [g.epoch for g in offered] == [0] * 4 + [1] * 4
    assert [g.task_id for g in offered[:4]] == list(shuffle_epoch(0, 0, TASKS))
    assert sorted(g.task_id for g in offered[4:]) == sorted(TASKS)
    orders = {shuffle_epoch(seed, epoch, TASKS) for seed in range(5) for epoch in range(5)}
    assert len(orders) > 10
    assert task_at(0, 5, TASKS) == (shuffle_epoch(0, 1, TASKS)[1], 1)


def test_seeds_and_order_are_fixed_for_ever() -> None:
    """Pinned values: a run that is resumed by a newer version must go on with the same ones."""
    assert trial_seed(7, "train", 3, 1, 0) == 1331099723
    assert shuffle_epoch(7, 0, TASKS) == ("train-0", "train-1", "train-3", "train-2")


def test_a_dropped_training_group_is_replaced_by_another_task() -> None:
    scheduler = Scheduler()
    first, second = groups(scheduler.begin())
    dropped = make_dropped(first, max_version=0, at=3000)
    offers = scheduler.see(dropped)
    (replacement,) = groups(offers)
    assert replacement.group_id == f"run-1.t00000.{REPLACEMENT_STRIDE}"
    assert replacement.task_id != first.task_id
    assert (replacement.step, replacement.occurred_at, len(offers)) == (0, 3000, 3)
    assert scheduler.see(dropped) == []
    (again,) = groups(scheduler.see(make_dropped(replacement)))
    assert again.group_id == f"run-1.t00000.{2 * REPLACEMENT_STRIDE}"
    (other,) = groups(scheduler.see(make_dropped(second)))
    assert other.group_id == f"run-1.t00000.{1 + REPLACEMENT_STRIDE}"


def test_a_replacement_is_based_on_the_newest_version_its_predecessor_saw() -> None:
    scheduler = Scheduler(max_staleness=2)
    first = groups(scheduler.begin())[0]
    (replacement,) = groups(scheduler.see(make_dropped(first, max_version=2)))
    assert replacement.policy_version == 2


def test_a_replacement_of_the_only_task_uses_it_again() -> None:
    assert replacement_task(0, 0, 5, (TaskId("a"),), TaskId("a")) == "a"


def test_a_slot_that_is_dropped_for_ever_fails_the_run_and_a_resume_tries_again() -> None:
    scheduler = Scheduler()
    group = groups(scheduler.begin())[0]
    for _ in range(MAX_REPLACEMENTS):
        (group,) = groups(scheduler.see(make_dropped(group)))
    (end,) = scheduler.see(make_dropped(group))
    assert isinstance(end, RunFinished)
    assert (end.outcome, end.num_steps) == ("failed", 0)
    assert "step 0" in end.detail
    assert scheduler.see(make.published(1), make.loaded(1)) == []
    assert len(groups(scheduler.see(make.run_started({"train": 4}, resumed=True)))) == 3


def test_a_validation_group_that_is_dropped_is_not_replaced() -> None:
    scheduler = Scheduler(validate_every=2)
    offered = groups(scheduler.begin(num_held_out=1))
    assert steps(scheduler.see(make_dropped(offered[0]))) == [("train", 0)] * 2


def test_validation_comes_before_the_first_step_then_every_n_and_after_the_last() -> None:
    scheduler = Scheduler(validate_every=3, validation_final_tasks=3, validation_tasks=1)
    offered = scheduler.begin(num_held_out=4)
    assert steps(offered) == [("validation", 0)] * 3
    assert [g.task_id for g in groups(offered)] == ["held-0", "held-1", "held-2"]
    assert {(g.num_trials, g.policy_version) for g in groups(offered)} == {(1, 0)}
    seen = []
    while offered:
        seen.append(steps(offered)[0])
        offered = scheduler.close(offered)
        if not offered and not scheduler.state.finished:
            step = seen[-1][1]
            offered = scheduler.see(make.step_completed(step), make.published(step + 1), make.loaded(step + 1))
        offered = list(groups(offered))
    assert seen == [
        ("validation", 0),
        ("train", 0),
        ("train", 1),
        ("train", 2),
        ("validation", 3),
        ("train", 3),
        ("validation", 4),
    ]
    assert [e.outcome for e in scheduler.outputs if isinstance(e, RunFinished)] == ["completed"]


def test_a_pass_pins_its_version_no_training_is_in_flight_that_could_end_it() -> None:
    scheduler = Scheduler(max_staleness=3, validate_every=2, num_steps=6)
    offered = scheduler.close(scheduler.begin(num_held_out=1))
    assert sorted({g.step for g in groups(offered)}) == [0, 1], "steps 2 and 3 wait for the pass at version 2"
    assert scheduler.see(make.step_completed(0), make.published(1), make.loaded(1)) == []
    scheduler.see(make.step_completed(1), make.published(2))
    passed = scheduler.see(make.loaded(2))
    assert steps(passed) == [("validation", 2)]
    assert sorted({g.step for g in groups(scheduler.close(passed))}) == [2, 3]


def test_a_pass_waits_for_exactly_its_version() -> None:
    scheduler = Scheduler(validate_every=1)
    tasks = [*(make.registered(t) for t in TASKS), make.registered("held", "held_out")]
    start = make.run_started({"train": 4, "held_out": 1})
    assert scheduler.see(*tasks, start, make.published(0), make.published(1), make.loaded(1)) == []
    assert steps(scheduler.see(make.loaded(0))) == [("validation", 0)]


def test_without_held_out_tasks_there_is_no_validation() -> None:
    scheduler = Scheduler(validate_every=1, num_steps=1)
    scheduler.close(scheduler.begin())
    (end,) = scheduler.see(make.step_completed(0))
    assert isinstance(end, RunFinished)
    assert (end.outcome, end.num_steps, end.occurred_at) == ("completed", 1, 4000)
    assert scheduler.see(make.step_completed(0)) == []


def test_validation_points_and_sizes() -> None:
    assert validation_points(ScheduleSection(num_steps=5, validate_every=2)) == [0, 2, 4, 5]
    assert validation_points(ScheduleSection(num_steps=4, validate_every=2)) == [0, 2, 4]
    assert validation_points(ScheduleSection(num_steps=4)) == []
    schedule = ScheduleSection(num_steps=4, validate_every=2, validation_tasks=8, validation_final_tasks=32)
    assert [pass_size(schedule, v, 64) for v in (0, 2, 4)] == [32, 8, 32]
    assert pass_size(schedule, 2, 5) == 5
    assert pass_size(replace(schedule, validation_final_tasks=0), 4, 64) == 8
    assert pass_size(replace(schedule, validation_tasks=0), 2, 64) == 64


def test_what_was_offered_before_a_restart_is_read_back_and_not_offered_again() -> None:
    before = Scheduler()
    offers = before.begin()
    after = Scheduler()
    after.see(*offers)
    assert after.begin() == []
    assert steps(after.see(make.step_completed(0), make.published(1), make.loaded(1))) == [("train", 1)] * 2


def test_a_retired_task_is_offered_no_more() -> None:
    from schemas.events import TaskRetired

    scheduler = Scheduler(max_staleness=3)
    scheduler.see(*(make.registered(t) for t in TASKS), make.published(0), make.loaded(0))
    scheduler.see(TaskRetired(**make.base(), task_id=TASKS[0], reason="its tests need a network"))
    offered = groups(scheduler.see(make.run_started({"train": 4})))
    assert TASKS[0] not in {g.task_id for g in offered}
    assert len(offered) == 8


# -- attempts and ends


def offered_trial(**schedule: Any) -> Scheduler:
    scheduler = Scheduler(**schedule)
    scheduler.see(make.trial_offered())
    return scheduler


def test_an_attempt_ends_its_trial_once() -> None:
    scheduler = offered_trial()
    scheduler.see(make.leased())
    finished = make.attempt_finished()
    (end,) = scheduler.see(finished)
    assert isinstance(end, TrialFinished)
    assert (end.termination_reason, end.attempt, end.num_attempts) == ("agent_completed", 1, 1)
    assert (end.attempt_event_id, end.reward_event_id, end.num_calls) == (finished.event_id, "grade-1", 1)
    assert end.occurred_at == 2000
    assert scheduler.see(finished, make.attempt_finished(attempt=2)) == []
    assert scheduler.state.trials == {}


def test_calls_of_a_broken_capture_are_not_counted_on() -> None:
    (end,) = offered_trial().see(make.attempt_finished(capture_ok=False, num_calls=3))
    assert isinstance(end, TrialFinished)
    assert (end.termination_reason, end.num_calls) == ("capture_broken", None)


def test_an_attempt_whose_offer_was_not_read_back_yet_waits_for_it() -> None:
    scheduler = Scheduler()
    assert scheduler.see(make.leased(), make.attempt_finished()) == []
    (end,) = scheduler.see(make.trial_offered(at=9000))
    assert (type(end), end.occurred_at) == (TrialFinished, 9000)


def test_a_lapsed_lease_is_offered_again_until_the_attempts_are_used_up() -> None:
    scheduler = offered_trial(max_attempts=2)
    scheduler.see(make.leased())
    (again,) = scheduler.see(make.lapsed())
    assert isinstance(again, TrialOffered)
    assert (again.attempt, again.occurred_at, again.seed) == (2, 6000, 1)
    assert scheduler.see(make.lapsed()) == []
    scheduler.see(make.leased(attempt=2, lease_id="lease-2"))
    (end,) = scheduler.see(make.lapsed(attempt=2, lease_id="lease-2"))
    assert isinstance(end, TrialFinished)
    assert (end.termination_reason, end.attempt, end.num_attempts) == ("sandbox_lost", 2, 2)
    assert (end.attempt_event_id, end.reward_event_id, end.num_calls) == (None, None, None)
    assert scheduler.see(make.attempt_finished(attempt=2)) == []


def test_a_late_survivor_that_finishes_first_wins() -> None:
    scheduler = offered_trial()
    scheduler.see(make.leased(), make.lapsed(), make.leased(attempt=2, lease_id="lease-2"))
    (end,) = scheduler.see(make.attempt_finished(attempt=1))
    assert isinstance(end, TrialFinished)
    assert (end.attempt, end.num_attempts) == (1, 2)
    assert scheduler.see(make.attempt_finished(attempt=2)) == []


def test_a_lapse_of_a_lease_that_does_not_hold_the_trial_changes_nothing() -> None:
    scheduler = offered_trial()
    assert scheduler.see(make.lapsed()) == [], "never leased"
    scheduler.see(make.leased(deadline_ms=9000))
    assert scheduler.see(make.lapsed(lease_id="other")) == []
    assert scheduler.see(make.lapsed(deadline_ms=5000)) == [], "renewed before the lapse reached the log"
    scheduler.see(make.leased(lease_id="lease-2"))
    assert scheduler.see(make.lapsed(deadline_ms=9000)) == [], "claimed by another worker meanwhile"


def test_the_clock_sees_a_deadline_pass_once_and_again_after_a_renewal() -> None:
    from schemas.events import LeaseRenewed

    scheduler = offered_trial()
    clock = LeaseClock(make.RUN, grace_ms=100)
    scheduler.see(make.leased(deadline_ms=5000))
    assert clock.tick(scheduler.state, 5099) == []
    (lapse,) = clock.tick(scheduler.state, 5100)
    assert (lapse.attempt, lapse.lease_id, lapse.deadline_ms) == (1, "lease-1", 5000)  # type: ignore[attr-defined]
    assert clock.tick(scheduler.state, 5200) == []
    scheduler.see(LeaseRenewed(**make.base(), trial_id=make.TRIAL, attempt=1, lease_id="lease-1", deadline_ms=7000))
    assert scheduler.see(lapse) == []
    assert clock.tick(scheduler.state, 6000) == []
    (lapse,) = clock.tick(scheduler.state, 7100)
    assert [type(e) for e in scheduler.see(lapse)] == [TrialOffered]
    assert clock.tick(scheduler.state, 9000) == []


def test_too_many_groups_per_step_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"schedule\.groups_per_step"):
        Scheduler(groups_per_step=REPLACEMENT_STRIDE + 1)


def test_a_resumed_run_keeps_its_schedule_but_may_be_extended() -> None:
    settings = Scheduler(validate_every=2).settings
    started = json.loads(settings_json(settings))
    check_unchanged(settings, started)
    check_unchanged(replace(settings, schedule=replace(settings.schedule, num_steps=99)), started)
    check_unchanged(settings, {})
    other = replace(settings, schedule=replace(settings.schedule, group_size=5), run=replace(settings.run, seed=4))
    with pytest.raises(ScheduleChangedError, match=r"schedule\.group_size was 2, is 5; run\.seed was 0, is 4; set it"):
        check_unchanged(other, started)


def make_dropped(group: GroupOffered, max_version: int | None = None, at: int = 3000) -> Event:
    from schemas.events import GroupDropped

    return GroupDropped(
        **make.base(at),
        group_id=GroupId(group.group_id),
        task_id=group.task_id,
        purpose=group.purpose,
        policy_version=group.policy_version,
        step=group.step,
        reason="too_few_admitted",
        members=(make.member(max_version=max_version),),
        num_admitted=0,
    )
