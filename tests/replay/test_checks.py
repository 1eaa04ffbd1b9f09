"""Each law holds on a sound run and is seen to be broken by every seeded violation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest

from schemas.base import Event
from schemas.events import (
    CallSlice,
    ExcludedCall,
    GroupReady,
    ModelCallCompleted,
    RunFinished,
    StepCompleted,
    TrajectoryAssembled,
    TrialFinished,
)
from schemas.ids import EventId, GroupId, TrialId, make_call_id
from streams.replay.checks import CheckRow, run_checks
from tests.replay.recorded import all_events, make_sources, run_stages
from tests.unit.stages import builders as b

E = TypeVar("E", bound=Event)

ENDS = "each offered trial ends once"
TOKENS = "each sampled token is trained once or excluded"
GROUPS = "each offered group ends once"
ONCE = "each group trains once at most"
CHAIN = "each step follows the one before"


@pytest.fixture(scope="module")
def sound() -> list[Event]:
    return all_events(run_stages(make_sources()))


def broken(events: list[Event]) -> dict[str, list[str]]:
    """Law -> details of what breaks it."""
    return {row.law: [v.detail for v in row.violations] for row in run_checks(events) if row.violations}


def first(events: list[Event], cls: type[E]) -> E:
    return next(event for event in events if isinstance(event, cls))


def swap(events: list[Event], old: Event, *new: Event) -> list[Event]:
    """The events with one replaced by others (or by none)."""

    def walk() -> Iterator[Event]:
        for event in events:
            if event is old:
                yield from new
            else:
                yield event

    return list(walk())


def test_a_sound_run_breaks_nothing(sound: list[Event]) -> None:
    assert broken(sound) == {}
    rows = {row.law: row for row in run_checks(sound)}
    assert (rows[ENDS].num_checked, rows[TOKENS].num_checked) == (6, 18)
    assert (rows[GROUPS].num_checked, rows[ONCE].num_checked, rows[CHAIN].num_checked) == (3, 2, 2)
    assert all(row.num_open == 0 for row in rows.values())


def test_trial_without_an_end(sound: list[Event]) -> None:
    end = first(sound, TrialFinished)
    assert broken(swap(sound, end))[ENDS] == ["no TrialFinished, and the run is completed"]


def test_trial_with_two_ends(sound: list[Event]) -> None:
    end = first(sound, TrialFinished)
    assert broken(swap(sound, end, end, replace(end, event_id=EventId("again"))))[ENDS] == ["2 TrialFinished"]


def test_end_of_a_trial_that_was_never_offered(sound: list[Event]) -> None:
    stranger = replace(first(sound, TrialFinished), trial_id=TrialId("nobody"), event_id=EventId("x"))
    assert broken([*sound, stranger])[ENDS] == ["TrialFinished without a TrialOffered"]


def test_a_run_that_goes_on_has_open_trials_and_no_violation(sound: list[Event]) -> None:
    finish = first(sound, RunFinished)
    going_on = [e for e in swap(sound, finish) if not isinstance(e, TrialFinished | TrajectoryAssembled | GroupReady)]
    going_on = [e for e in going_on if not isinstance(e, StepCompleted)]
    assert broken(going_on) == {}
    rows = {row.law: row for row in run_checks(going_on)}
    assert (rows[ENDS].num_open, rows[TOKENS].num_open, rows[GROUPS].num_open) == (6, 18, 3)


Change = Callable[[TrajectoryAssembled], TrajectoryAssembled]


def drop_segments(t: TrajectoryAssembled) -> TrajectoryAssembled:
    return replace(t, segments=())


def train_twice(t: TrajectoryAssembled) -> TrajectoryAssembled:
    return replace(t, segments=(*t.segments, *t.segments))


def exclude_too(t: TrajectoryAssembled) -> TrajectoryAssembled:
    entry = ExcludedCall(call_id=t.segments[0].calls[0].call_id, reason="orphaned_retry", num_sampled_tokens=2)
    return replace(t, excluded=(*t.excluded, entry))


def change_token(t: TrajectoryAssembled) -> TrajectoryAssembled:
    segment = t.segments[0]
    at = 4 * segment.calls[0].sampled_start
    return replace(t, segments=(replace(segment, ids=segment.ids[:at] + b"\x63" + segment.ids[at + 1 :]),))


def unmask_token(t: TrajectoryAssembled) -> TrajectoryAssembled:
    segment = t.segments[0]
    at = segment.calls[0].sampled_start
    return replace(t, segments=(replace(segment, mask=segment.mask[:at] + b"\x00" + segment.mask[at + 1 :]),))


def miscount_excluded(t: TrajectoryAssembled) -> TrajectoryAssembled:
    entries = tuple(
        ExcludedCall(call_id=make_call_id(t.trial_id, 2, n), reason="capture_broken", num_sampled_tokens=7)
        for n in (0, 1)
    )
    return replace(t, segments=(), excluded=entries)


def train_losing_attempt(t: TrajectoryAssembled) -> TrajectoryAssembled:
    segment = t.segments[0]
    lost = CallSlice(call_id=make_call_id(t.trial_id, 1, 0), prompt_start=0, sampled_start=3, sampled_end=5)
    return replace(t, segments=(replace(segment, calls=(*segment.calls, lost)),))


def hold_unknown_call(t: TrajectoryAssembled) -> TrajectoryAssembled:
    entry = ExcludedCall(call_id=make_call_id(t.trial_id, 2, 40), reason="failed", num_sampled_tokens=1)
    return replace(t, excluded=(*t.excluded, entry))


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (drop_segments, "2 sampled tokens are in no segment and not excluded"),
        (train_twice, "trained 2 times"),
        (exclude_too, "in a segment and excluded (orphaned_retry)"),
        (change_token, "the segment holds 2 trained tokens that are not the 2 sampled ones"),
        (unmask_token, "the segment holds 1 trained tokens that are not the 2 sampled ones"),
        (miscount_excluded, "excluded with 7 tokens, and 2 were sampled"),
        (train_losing_attempt, "attempt 1 lost to attempt 2, and a segment holds its tokens"),
        (hold_unknown_call, "no such call is recorded"),
    ],
)
def test_token_that_is_not_trained_once_or_excluded(sound: list[Event], change: Change, detail: str) -> None:
    trajectory = first(sound, TrajectoryAssembled)
    found = broken(swap(sound, trajectory, change(trajectory)))
    assert list(found) == [TOKENS]
    assert any(detail in line for line in found[TOKENS])


def test_calls_without_a_trajectory_in_a_completed_run(sound: list[Event]) -> None:
    details = broken(swap(sound, first(sound, TrajectoryAssembled)))[TOKENS]
    assert details == ["its trial has no trajectory, and the run is completed"] * 3


def test_two_calls_with_one_id(sound: list[Event]) -> None:
    call = first(sound, ModelCallCompleted)
    found = broken([*sound, replace(call, event_id=EventId("other"))])
    assert found == {TOKENS: ["two different calls were recorded with this id"]}
    assert broken([*sound, call]) == {}, "a repeat of the same event is none"


def test_calls_of_a_trial_whose_calls_were_not_counted_are_excluded_by_that(sound: list[Event]) -> None:
    trajectory = first(sound, TrajectoryAssembled)
    end = next(e for e in sound if isinstance(e, TrialFinished) and e.trial_id == trajectory.trial_id)
    events = swap(
        swap(sound, trajectory, replace(trajectory, segments=(), num_calls=0)), end, replace(end, num_calls=None)
    )
    assert broken(events) == {}


def test_group_ends(sound: list[Event]) -> None:
    ready = [e for e in sound if isinstance(e, GroupReady)]
    untrained = next(e for e in ready if e.group_id.endswith("002"))
    assert broken(swap(sound, untrained)) == {GROUPS: ["neither ready nor dropped, and the run is completed"]}
    assert broken([*sound, replace(untrained, event_id=EventId("x"))]) == {GROUPS: ["2 ends"]}
    stranger = b.group_ready("run-1.t00000.055")
    assert broken([*sound, stranger]) == {GROUPS: ["ended without a GroupOffered"]}


def test_group_trained_twice_or_never_ready_or_for_validation(sound: list[Event]) -> None:
    steps = [e for e in sound if isinstance(e, StepCompleted)]
    again = replace(steps[1], group_ids=(*steps[1].group_ids, *steps[0].group_ids))
    assert broken(swap(sound, steps[1], again)) == {ONCE: ["trained in steps 0, 1"]}
    unready = replace(steps[1], group_ids=(GroupId("nowhere"),))
    assert broken(swap(sound, steps[1], unready)) == {ONCE: ["trained in step 1, and never ready"]}
    ready = next(e for e in sound if isinstance(e, GroupReady) and e.group_id == steps[0].group_ids[0])
    validation = swap(sound, ready, replace(ready, purpose="validation"))
    assert broken(validation) == {ONCE: ["a validation group, trained in step 0"]}


@pytest.mark.parametrize(
    ("make", "detail"),
    [
        (lambda s: [s[0], replace(s[1], step=2)], "follows step 0"),
        (lambda s: [s[0], replace(s[1], version_before=0)], "starts from version 0; step 0 made 1"),
        (lambda s: [s[0], replace(s[0], group_ids=()), s[1]], "completed more than once"),
        (lambda s: [s[1]], "the first step in the log is not step 0"),
    ],
)
def test_steps_follow_each_other(
    sound: list[Event], make: Callable[[list[StepCompleted]], list[StepCompleted]], detail: str
) -> None:
    steps = [e for e in sound if isinstance(e, StepCompleted)]
    rest = [e for e in sound if not isinstance(e, StepCompleted)]
    assert broken([*rest, *make(steps)])[CHAIN] == [detail]


def test_a_violation_names_law_subject_and_detail(sound: list[Event]) -> None:
    end = first(sound, TrialFinished)
    row = next(row for row in run_checks(swap(sound, end)) if row.law == ENDS)
    assert isinstance(row, CheckRow)
    assert str(row.violations[0]) == f"{ENDS}: {end.trial_id}: no TrialFinished, and the run is completed"
