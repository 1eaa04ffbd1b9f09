"""What is trained when: independent of the order of arrival, and exact across a restart."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from learner.consumption import GroupBuffer, TopicPart
from schemas.base import Event
from schemas.events import GroupDropped
from schemas.ids import RunId, derive_id
from tests.unit.learner.factory import RecordedGroup, Sampler, make_policy, record_group

RUN = RunId("run-test")
GROUPS: TopicPart = ("groups", 0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[RecordedGroup]:
    """Two steps of two groups of two trials; the calls' routing in two chunks each."""
    sampler = Sampler(make_policy(tmp_path_factory.mktemp("policy") / "p"), version=0)
    return [record_group(sampler, step, i, [0.0, 1.0], chunk_rows=9) for step in range(2) for i in range(2)]


def place(event: Event) -> TopicPart:
    """A partition by key, as the broker would choose one."""
    return (event.TOPIC, 0 if event.TOPIC == "groups" else sum(event.key.encode()) % 2)


def lay_out(events: list[Event]) -> list[tuple[Event, TopicPart, int]]:
    """Every event with its partition and offset, in the given order."""
    ends: dict[TopicPart, int] = {}
    out = []
    for event in events:
        part = place(event)
        out.append((event, part, ends.get(part, 0)))
        ends[part] = ends.get(part, 0) + 1
    return out


def events_of(groups: list[RecordedGroup]) -> list[Event]:
    return [e for g in groups for e in (g.ready, *g.trajectories, *g.routing)]


def make_buffer(**options: object) -> GroupBuffer:
    return GroupBuffer(RUN, needs_routing=True, **options)  # type: ignore[arg-type]


def ids(buffer: GroupBuffer, step: int) -> list[str] | None:
    chosen = buffer.choose_groups(step, 2)
    return chosen and [g.event.group_id for g in chosen]


def test_a_step_waits_for_its_groups_trajectories_and_every_chunk(recorded: list[RecordedGroup]) -> None:
    events = events_of(recorded[:2])
    for missing in range(len(events)):
        buffer = make_buffer()
        for event, part, offset in lay_out(events[:missing] + events[missing + 1 :]):
            buffer.apply(event, part, offset)
        assert ids(buffer, 0) is None
        buffer.apply(events[missing], place(events[missing]), 1000)
        assert ids(buffer, 0) == [g.ready.group_id for g in recorded[:2]]


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_does_not_depend_on_arrival_or_repeats(recorded: list[RecordedGroup], seed: int) -> None:
    rng = random.Random(seed)
    events = events_of(recorded)
    events += rng.sample(events, 10)
    rng.shuffle(events)
    buffer, trained = make_buffer(), []
    for event, part, offset in lay_out(events):
        buffer.apply(event, part, offset)
        while (chosen := buffer.choose_groups(len(trained), 2)) is not None:
            trained.append([g.event.group_id for g in chosen])
            buffer.consume(chosen)
    assert trained == [[g.ready.group_id for g in recorded[:2]], [g.ready.group_id for g in recorded[2:]]]
    assert buffer.num_waiting_groups == 0


def test_later_groups_do_not_take_the_place_of_a_steps_own(recorded: list[RecordedGroup]) -> None:
    buffer = make_buffer()
    for event, part, offset in lay_out(events_of([recorded[0], *recorded[2:]])):
        buffer.apply(event, part, offset)
    assert ids(buffer, 0) is None


@pytest.mark.parametrize("seed", range(8))
def test_restart_from_any_checkpoint_loses_and_repeats_nothing(recorded: list[RecordedGroup], seed: int) -> None:
    events = events_of(recorded)
    random.Random(seed).shuffle(events)
    log = lay_out(events)
    first, taken = make_buffer(), None
    for event, part, offset in log:
        first.apply(event, part, offset)
        if taken is None and (chosen := first.choose_groups(0, 2)) is not None:
            first.consume(chosen)
            taken = (first.next_offsets(), first.closed_groups, first.closed_trials)
    assert taken is not None
    offsets, closed_groups, closed_trials = taken
    second = make_buffer(next_offsets=offsets, closed_groups=closed_groups, closed_trials=closed_trials)
    reread = 0
    for event, part, offset in log:
        if offset >= offsets.get(part, 0):
            second.apply(event, part, offset)
            reread += 1
    assert ids(second, 0) is None  # the groups of step 0 are not there again
    assert ids(second, 1) == [g.ready.group_id for g in recorded[2:]]
    assert reread < len(log)
    second.consume(second.choose_groups(1, 2) or [])
    # Nothing waits any more: the offsets stand behind the last record of every partition.
    ends: dict[TopicPart, int] = {}
    for _, part, offset in log:
        ends[part] = max(ends.get(part, 0), offset + 1)
    assert second.next_offsets() == ends


def test_dropped_and_validation_groups_hold_nothing_back(recorded: list[RecordedGroup]) -> None:
    dropped, validation = recorded[0], recorded[1]
    drop = GroupDropped(
        event_id=derive_id("GroupDropped", dropped.ready.group_id),
        run_id=RUN,
        occurred_at=1,
        producer="grouping",
        group_id=dropped.ready.group_id,
        task_id=dropped.ready.task_id,
        purpose="train",
        policy_version=0,
        step=0,
        reason="revoked",
        members=dropped.ready.members[:1],  # the other trial was never known to the group
        num_admitted=0,
    )
    events: list[Event] = [
        *dropped.trajectories,
        *dropped.routing,
        *validation.routing,
        *(replace(t, purpose="validation") for t in validation.trajectories),
        drop,
        replace(validation.ready, purpose="validation"),
        *dropped.trajectories,
        *validation.routing,  # late repeats
    ]
    buffer = make_buffer()
    for event, part, offset in lay_out(events):
        buffer.apply(event, part, offset)
    ends: dict[TopicPart, int] = {}
    for _, part, offset in lay_out(events):
        ends[part] = offset + 1
    assert buffer.next_offsets() == ends and buffer.num_waiting_groups == 0


def test_masked_members_are_neither_waited_for_nor_trained(recorded: list[RecordedGroup]) -> None:
    group = recorded[0]
    first, second = group.ready.members
    ready = replace(group.ready, members=(first, replace(second, admitted=False, reward=None)), num_admitted=1)
    buffer = make_buffer()
    kept = [e for e in (*group.trajectories, *group.routing) if e.key == first.trial_id]
    for event, part, offset in lay_out([ready, *kept]):
        buffer.apply(event, part, offset)
    (chosen,) = buffer.choose_groups(0, 1) or []
    assert [t.trajectory.trial_id for t in chosen.trials] == [first.trial_id]


def test_without_replay_routing_is_not_waited_for(recorded: list[RecordedGroup]) -> None:
    buffer = GroupBuffer(RUN, needs_routing=False)
    for event, part, offset in lay_out([e for e in events_of(recorded[:2]) if e.TOPIC != "routing"]):
        buffer.apply(event, part, offset)
    assert ids(buffer, 0) is not None


def test_other_runs_are_passed_over(recorded: list[RecordedGroup]) -> None:
    buffer = GroupBuffer(RunId("another"), needs_routing=True)
    for event, part, offset in lay_out(events_of(recorded)):
        buffer.apply(event, part, offset)
    assert buffer.num_waiting_groups == 0 and buffer.next_offsets()[GROUPS] == 4


def test_a_group_that_names_another_trajectory_is_an_error(recorded: list[RecordedGroup]) -> None:
    group = recorded[0]
    member = replace(group.ready.members[0], trajectory_event_id=derive_id("x", "y"))
    buffer = make_buffer()
    wrong = replace(group.ready, members=(member, *group.ready.members[1:]))
    for event, part, offset in lay_out([wrong, *group.trajectories, *group.routing]):
        buffer.apply(event, part, offset)
    with pytest.raises(ValueError, match=r"trial .*\.00 has trajectory"):
        buffer.choose_groups(0, 1)


def test_what_a_step_waits_for_is_named(recorded: list[RecordedGroup]) -> None:
    group, buffer = recorded[0], make_buffer()
    assert buffer.describe_wait(0, 1) == "step 0 has 0 of 1 groups"
    buffer.apply(group.ready, GROUPS, 0)
    assert "1 of 1 groups; the trajectory of trial run-test.t00000.000.00" in buffer.describe_wait(0, 1)
    for event, part, offset in lay_out(list(group.trajectories)):
        buffer.apply(event, part, offset)
    assert "routing of trial run-test.t00000.000.00 has not all arrived" in buffer.describe_wait(0, 1)
    assert "engine.record_routing" in buffer.describe_wait(0, 1)
