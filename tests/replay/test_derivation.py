"""Deriving again gives what the live stages wrote; every kind of difference is found and shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from schemas.base import Event
from schemas.events import GroupReady, TrajectoryAdmitted, TrajectoryAssembled
from streams.replay.core import Comparison, compare_events, compare_topic, derive_topics, select_run
from streams.replay.service import DERIVED_TYPES, apply_recorded_rules, load_stages
from streams.runtime.memory import MemoryLog
from streams.runtime.step import Record
from tests.replay.recorded import CODEC, SETTINGS, make_sources, run_stages
from tests.unit.stages import builders as b


@pytest.fixture(scope="module")
def memory() -> MemoryLog:
    return run_stages(make_sources())


def derive(memory: MemoryLog) -> dict[str, list[Record]]:
    sources = {
        topic: [r for r in memory.read(topic) if r.event_type not in DERIVED_TYPES.get(topic, ())]
        for topic in memory.num_partitions
    }
    return derive_topics(load_stages(SETTINGS), sources, CODEC, memory.num_partitions)


def compare(
    memory: MemoryLog, topic: str, tamper: Callable[[list[Record]], list[Record]] = lambda records: records
) -> Comparison:
    recorded = [r for r in memory.read(topic) if r.event_type in DERIVED_TYPES[topic]]
    return compare_topic(tamper(recorded), derive(memory)[topic], CODEC)


def with_event(record: Record, event: Event) -> Record:
    return replace(record, value=CODEC.encode(event))


def test_the_log_holds_exactly_what_is_derived_again(memory: MemoryLog) -> None:
    trajectories, groups = compare(memory, "trajectories"), compare(memory, "groups")
    assert trajectories.differences == groups.differences == []
    assert trajectories.num_compared == {"TrajectoryAssembled": 6, "TrajectoryAdmitted": 6}
    assert groups.num_compared == {"GroupReady": 3}


def test_derived_records_lie_where_the_live_ones_do(memory: MemoryLog) -> None:
    live = {(r.partition, r.key, r.value) for r in memory.read("trajectories")}
    assert {(r.partition, r.key, r.value) for r in derive(memory)["trajectories"]} == live


def test_missing_extra_and_repeated_events_are_found(memory: MemoryLog) -> None:
    [missing] = compare(memory, "groups", lambda records: records[1:]).differences
    assert (missing.kind, missing.event_type) == ("missing", "GroupReady")
    [repeated] = compare(memory, "groups", lambda records: [*records, records[0]]).differences
    assert repeated.kind == "repeated"
    stranger = CODEC.encode(b.group_ready("run-1.t00000.077"))
    [extra] = compare(memory, "groups", lambda records: [*records, replace(records[0], value=stranger)]).differences
    assert (extra.kind, extra.key) == ("extra", "run-1.t00000.077")
    assert "cannot be derived" in str(extra)


def test_a_changed_field_is_shown_by_its_path(memory: MemoryLog) -> None:
    def tamper(records: list[Record]) -> list[Record]:
        event = CODEC.decode(records[0].value or b"")
        assert isinstance(event, GroupReady)
        member = replace(event.members[1], reward=0.25)
        return [with_event(records[0], replace(event, members=(event.members[0], member))), *records[1:]]

    [difference] = compare(memory, "groups", tamper).differences
    assert difference.kind == "different"
    [field] = difference.fields
    assert (field.path, field.recorded) == ("members[1].reward", "0.25")


def test_a_changed_token_is_shown_from_the_byte_that_differs(memory: MemoryLog) -> None:
    record = next(r for r in memory.read("trajectories") if r.event_type == "TrajectoryAssembled")
    event = CODEC.decode(record.value or b"")
    assert isinstance(event, TrajectoryAssembled)
    segment = event.segments[0]
    changed = replace(segment, ids=segment.ids[:16] + b"\x63\x00\x00\x00" + segment.ids[20:])
    [field] = compare_events(replace(event, segments=(changed,)), event)
    assert field.path == "segments[0].ids"
    assert field.recorded == "28 bytes, from byte 16: 630000000600000007000000"
    assert field.derived == "28 bytes, from byte 16: 050000000600000007000000"


def test_equal_events_in_other_bytes_say_so(memory: MemoryLog) -> None:
    event = CODEC.decode(memory.read("groups")[0].value or b"")
    assert compare_events(event, event)[0].path == "(encoding)"


def test_only_the_run_in_question_is_taken(memory: MemoryLog) -> None:
    other = replace(b.graded(), run_id="run-2")
    memory_records = [
        Record("rewards", 0, 0, b"k", CODEC.encode(other), (("event-type", b"RewardGraded"),)),
        Record("rewards", 0, 1, b"k", CODEC.encode(b.graded()), (("event-type", b"RewardGraded"),)),
        Record("rewards", 0, 2, b"k", b"garbage", (("event-type", b"RewardGraded"),)),
        Record("rewards", 0, 3, b"k", None, (("event-type", b"RewardGraded"),)),
    ]
    chosen = select_run(memory_records, frozenset({"RewardGraded"}), CODEC, "run-1")
    assert [record.offset for record in chosen] == [1]


def test_rules_are_the_recorded_ones() -> None:
    config = {
        "admission": {"overrides": {"overlong": "mask"}, "a_later_key": 1},
        "train": {"conversations": ["main", "subagent"]},
        "kafka": {"port": 1},
    }
    settings = apply_recorded_rules(SETTINGS, config)
    assert settings.admission.overrides == {"overlong": "mask"}
    assert settings.train.conversations == ("main", "subagent")
    assert settings.kafka.port == SETTINGS.kafka.port


def test_other_rules_derive_other_verdicts(memory: MemoryLog) -> None:
    """The comparison would notice a table that changed without a new version."""
    other = apply_recorded_rules(SETTINGS, {"admission": {"overrides": {"agent_completed": "zero_reward"}}})
    sources = {
        topic: [r for r in memory.read(topic) if r.event_type not in DERIVED_TYPES.get(topic, ())]
        for topic in memory.num_partitions
    }
    derived = derive_topics(load_stages(other), sources, CODEC, memory.num_partitions)
    verdicts = [CODEC.decode(r.value or b"") for r in derived["trajectories"]]
    assert {v.reward for v in verdicts if isinstance(v, TrajectoryAdmitted)} == {0.0}
    recorded = [r for r in memory.read("trajectories") if r.event_type in DERIVED_TYPES["trajectories"]]
    assert compare_topic(recorded, derived["trajectories"], CODEC).differences
