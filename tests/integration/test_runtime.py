"""One contract for the transactional loop, kept on the log in memory and on a real broker."""

from __future__ import annotations

import io
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import fastavro
import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition

from infra.kafka import make_consumer, make_producer, topic_name
from infra.settings import Settings
from schemas.avro_types import load_schema
from schemas.base import Event
from schemas.codec import HEADER_TYPE, SINGLE_OBJECT_MAGIC, Codec, UnknownSchemaError, fingerprint
from schemas.events import DeadLettered, TrajectoryAdmitted
from streams.runtime.kafka_log import to_record
from streams.runtime.log import FAULT_POINTS, FencedError
from streams.runtime.loop import Loop, LoopOptions, TransactionalLoop
from streams.runtime.memory import MemoryLog, MemoryLoop
from streams.runtime.step import Record
from tests.laws import Crash
from tests.unit.runtime.stages import JoinStage, make_events, make_grade, make_renewal

Headers = tuple[tuple[str, bytes], ...]
CODEC = Codec()
NUM_PARTITIONS = 2
DEADLINE_SEC = 40.0


class World(Protocol):
    """A log with the loop on it."""

    def produce(self, topic: str, key: bytes | None, value: bytes, headers: Headers = ()) -> None: ...

    def read(self, topic: str) -> list[Record]:
        """Every committed record."""

    def loop(self, stage: JoinStage, instance: int = 0, **options: Any) -> Loop[Any]: ...


class MemoryWorld:
    def __init__(self) -> None:
        self.memory = MemoryLog(NUM_PARTITIONS)

    def produce(self, topic: str, key: bytes | None, value: bytes, headers: Headers = ()) -> None:
        self.memory.produce(topic, key, value, headers)

    def read(self, topic: str) -> list[Record]:
        return self.memory.read(topic)

    def loop(self, stage: JoinStage, instance: int = 0, **options: Any) -> Loop[Any]:
        return MemoryLoop(stage, self.memory, instance, **options)


class KafkaWorld:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._producer = make_producer(settings)

    def produce(self, topic: str, key: bytes | None, value: bytes, headers: Headers = ()) -> None:
        self._producer.produce(topic_name(self.settings, topic), key=key, value=value, headers=list(headers))
        self._producer.flush(10)

    def read(self, topic: str) -> list[Record]:
        consumer = make_consumer(self.settings, group="test", **{"enable.partition.eof": True})
        name = topic_name(self.settings, topic)
        numbers = consumer.list_topics(name, timeout=10).topics[name].partitions
        consumer.assign([TopicPartition(name, number, OFFSET_BEGINNING) for number in numbers])
        found, open_parts = [], set(numbers)
        while open_parts:
            for message in consumer.consume(1000, 0.2):
                error = message.error()
                if error is None:
                    found.append(to_record(message, topic))
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    open_parts.discard(message.partition())
        consumer.close()
        return found

    def loop(self, stage: JoinStage, instance: int = 0, **options: Any) -> Loop[Any]:
        return TransactionalLoop(stage, self.settings, instance, **options)


@pytest.fixture(params=["memory", "kafka"])
def world(request: pytest.FixtureRequest) -> World:
    if request.param == "memory":
        return MemoryWorld()
    return KafkaWorld(request.getfixturevalue("kafka_settings"))


class Running:
    """A loop in a thread."""

    def __init__(self, loop: Loop[Any]) -> None:
        self.loop = loop
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run(self.stop)
        except BaseException as exc:
            self.error = exc

    def wait_end(self) -> BaseException | None:
        """How it ended."""
        self.thread.join(DEADLINE_SEC)
        assert not self.thread.is_alive(), "the loop did not end"
        return self.error

    def wait_ready(self) -> None:
        wait_for(lambda: self.loop.ready or not self.thread.is_alive(), "ready")
        assert self.thread.is_alive(), self.error


@contextmanager
def running(loop: Loop[Any]) -> Iterator[Running]:
    """Run a loop; it must end cleanly."""
    run = Running(loop)
    try:
        yield run
    finally:
        run.stop.set()
        error = run.wait_end()
    if error is not None:
        raise error


def wait_for(condition: Callable[[], bool], what: str, deadline_sec: float = DEADLINE_SEC) -> None:
    """Wait for an event of another thread, with a deadline."""
    deadline = time.monotonic() + deadline_sec
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_sec} s: {what}"
        tick.wait(0.02)


def write(world: World, *events: Event) -> None:
    for event in events:
        world.produce(
            event.TOPIC, event.key.encode(), CODEC.encode(event), ((HEADER_TYPE, type(event).__name__.encode()),)
        )


def outputs(world: World) -> Counter[str]:
    """Trial -> how often it was admitted, in committed records."""
    return Counter(CODEC.decode(record.value or b"").key for record in world.read("trajectories"))


def wait_outputs(world: World, num: int) -> Counter[str]:
    wait_for(lambda: sum(outputs(world).values()) >= num, f"{num} outputs")
    return outputs(world)


def once(numbers: range) -> Counter[str]:
    return Counter({f"trial-{n}": 1 for n in numbers})


class CrashAt:
    """Dies when `point` is reached for the `nth` time."""

    def __init__(self, point: str, nth: int) -> None:
        self.point, self.left = point, nth

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.left -= 1
            if self.left == 0:
                raise Crash(point)


SMALL = LoopOptions(max_records=7, commit_interval_sec=0.0, idle_wait_sec=0.1)


@pytest.mark.parametrize("scope", ["partition", "single"])
def test_outputs_are_derived_and_a_restart_adds_none(world: World, scope: str) -> None:
    write(world, *make_events(range(20)))
    for _ in range(2):
        with running(world.loop(JoinStage(scope))) as run:
            run.wait_ready()
            assert wait_outputs(world, 20) == once(range(20))
    record = world.read("trajectories")[0]
    event = CODEC.decode(record.value or b"")
    assert isinstance(event, TrajectoryAdmitted)
    assert (record.key, record.event_type) == (event.trial_id.encode(), "TrajectoryAdmitted")


@pytest.mark.parametrize("scope", ["partition", "single"])
@pytest.mark.parametrize("point", FAULT_POINTS)
def test_crash_and_restart_write_every_output_once(world: World, scope: str, point: str) -> None:
    write(world, *make_events(range(20)))
    crashed = Running(world.loop(JoinStage(scope), faults=CrashAt(point, 3), options=SMALL))
    assert isinstance(crashed.wait_end(), Crash)
    with running(world.loop(JoinStage(scope), options=SMALL)):
        assert wait_outputs(world, 20) == once(range(20))
    assert outputs(world) == once(range(20))


@pytest.mark.parametrize("scope", ["partition", "single"])
def test_restored_state_equals_live_state(world: World, scope: str) -> None:
    live, restored = JoinStage(scope), JoinStage(scope)
    write(world, *(make_grade(n) for n in range(10)), *(make_renewal(n) for n in range(5)))
    with running(world.loop(live)):
        wait_outputs(world, 5)
        wait_for(lambda: sum(map(len, live.made)) == 10, "all grades read")
    with running(world.loop(restored)) as run:
        run.wait_ready()
    by_content = lambda stage: sorted((sorted(state.items()) for state in stage.made if state), key=str)  # noqa: E731
    assert by_content(restored) == by_content(live)
    with running(world.loop(JoinStage(scope))):
        write(world, *(make_renewal(n) for n in range(5, 10)))  # completes what only the restored state knows
        assert wait_outputs(world, 10) == once(range(10))


def test_poison_goes_to_dead_letters_and_does_not_block(world: World) -> None:
    kind: Headers = ((HEADER_TYPE, b"RewardGraded"), ("traceparent", b"00-aa-bb-01"))
    garbage = b"\xc3\x01" + fingerprint(load_schema("RewardGraded", 1)) + b"\xff\xff"
    write(world, make_grade(0))
    world.produce("rewards", b"trial-0", b"not avro", kind)
    world.produce("rewards", b"trial-0", garbage, kind)
    world.produce("rewards", b"\xff\x00", b"\x00\x00\x00\x00\x09body")  # no header, no registry
    write(world, make_grade(1, reward=-1.0), make_renewal(0))
    with running(world.loop(JoinStage())):
        assert wait_outputs(world, 1) == once(range(1))
        wait_for(lambda: len(world.read("dead-letters")) >= 4, "dead letters")
    letters = [CODEC.decode(record.value or b"") for record in world.read("dead-letters")]
    originals = {(r.partition, r.offset): r for r in world.read("rewards")}
    assert len(letters) == 4
    for letter in letters:
        assert isinstance(letter, DeadLettered)
        original = originals[letter.original_partition, letter.original_offset]
        assert letter.original_key_bytes == original.key
        assert letter.original_value == original.value
        assert letter.original_headers == dict(original.headers)
        assert letter.original_timestamp_ms == original.timestamp_ms
        assert letter.service == "join"
    classes = Counter(letter.error_class for letter in letters if isinstance(letter, DeadLettered))
    assert classes == {"CodecError": 2, "UnknownSchemaError": 1, "PoisonError": 1}


def test_events_of_other_types_are_skipped_undecoded(world: World) -> None:
    world.produce("rewards", b"trial-0", b"whatever this is", ((HEADER_TYPE, b"SomethingElse"),))
    write(world, *make_events(range(3)))
    with running(world.loop(JoinStage())):
        assert wait_outputs(world, 3) == once(range(3))
    assert world.read("dead-letters") == []


def newer_schema() -> dict[str, Any]:
    schema = json.loads(json.dumps(load_schema("RewardGraded", 1)))
    schema["fields"].append({"name": "confidence", "type": "double", "default": 1.0})
    return dict(schema)


def encode_newer(number: int) -> bytes:
    out = io.BytesIO(SINGLE_OBJECT_MAGIC + fingerprint(newer_schema()))
    out.seek(0, io.SEEK_END)
    fastavro.schemaless_writer(out, newer_schema(), {**make_grade(number).__dict__, "confidence": 0.5})
    return out.getvalue()


def test_unknown_schema_stops_the_stage_and_nothing_is_skipped(world: World) -> None:
    write(world, make_grade(0), make_renewal(0), make_renewal(1))
    world.produce("rewards", b"trial-1", encode_newer(1), ((HEADER_TYPE, b"RewardGraded"),))
    error = Running(world.loop(JoinStage())).wait_end()
    assert isinstance(error, UnknownSchemaError)
    assert "offset" in str(error) and "`schemas`" in str(error)
    world.produce("schemas", fingerprint(newer_schema()).hex().encode(), json.dumps(newer_schema()).encode())
    with running(world.loop(JoinStage())):
        assert wait_outputs(world, 2) == once(range(2))
    assert world.read("dead-letters") == []


def test_schema_published_while_running_is_learnt(world: World) -> None:
    write(world, make_renewal(1))
    with running(world.loop(JoinStage())) as run:
        run.wait_ready()
        world.produce("schemas", fingerprint(newer_schema()).hex().encode(), json.dumps(newer_schema()).encode())
        world.produce("rewards", b"trial-1", encode_newer(1), ((HEADER_TYPE, b"RewardGraded"),))
        assert wait_outputs(world, 1) == {"trial-1": 1}


def test_stop_commits_the_batch_in_hand(world: World) -> None:
    write(world, *make_events(range(10)), make_grade(10))
    stage = JoinStage()
    with running(world.loop(stage, options=LoopOptions(commit_interval_sec=3600.0))):
        wait_for(lambda: stage.num_done == 10, "everything applied")
    assert outputs(world) == once(range(10))
    again = JoinStage()
    with running(world.loop(again)) as run:
        run.wait_ready()
        assert sum(map(len, again.made)) == 11, "offsets without outputs were committed too, and restored from"


def test_two_instances_split_the_partitions_and_hand_them_over(world: World) -> None:
    options = LoopOptions(session_timeout_sec=6.0)
    first, second = JoinStage(), JoinStage()
    write(world, *(make_grade(n) for n in range(30)))
    with running(world.loop(first, 0, options=options)) as run_first:
        run_first.wait_ready()
        write(world, *(make_renewal(n) for n in range(10)))
        wait_outputs(world, 10)
        with running(world.loop(second, 1, options=options)) as run_second:
            wait_for(lambda: len(run_first.loop.states) == len(run_second.loop.states) == 1, "one partition each")
            write(world, *(make_renewal(n) for n in range(10, 20)))
            assert wait_outputs(world, 20) == once(range(20))
            assert second.num_done > 0, "the second instance took part"
        wait_for(lambda: len(run_first.loop.states) == NUM_PARTITIONS, "the first has both again")
        write(world, *(make_renewal(n) for n in range(20, 30)))
        assert wait_outputs(world, 30) == once(range(30))


@pytest.mark.parametrize("scope", ["partition", "single"])
def test_second_process_with_the_same_number_fences_the_first(world: World, scope: str) -> None:
    write(world, *make_events(range(5)))
    first = Running(world.loop(JoinStage(scope)))
    wait_outputs(world, 5)
    with running(world.loop(JoinStage(scope))) as second:
        second.wait_ready()
        write(world, *make_events(range(5, 10)))
        error = first.wait_end()
        assert isinstance(error, FencedError)
        assert "number of its own" in str(error) or isinstance(world, MemoryWorld)
        assert wait_outputs(world, 10) == once(range(10))


def test_tick_writes_facts_of_the_clock(world: World) -> None:
    """A tick's events go out in a transaction and come back through the inputs."""
    asked: list[int] = []

    def tick(state: Any) -> list[Event]:
        asked.append(len(state))
        return [make_renewal(len(asked) - 1)] if len(asked) <= 3 else []

    write(world, *(make_grade(n) for n in range(3)))
    options = LoopOptions(idle_wait_sec=0.05, tick_interval_sec=0.05)
    with running(world.loop(JoinStage("single"), tick=tick, options=options)):
        assert wait_outputs(world, 3) == once(range(3))


def test_tick_waits_until_the_inputs_are_read(world: World) -> None:
    """After a restart with a backlog the clock judges nothing before the backlog is read."""
    write(world, *(make_grade(n) for n in range(40)))
    stage = JoinStage("single")
    seen: list[int] = []

    def tick(state: Any) -> list[Event]:
        seen.append(len(state))
        return []

    options = LoopOptions(max_records=4, idle_wait_sec=0.05, tick_interval_sec=0.0, tick_max_lag=8)
    with running(world.loop(stage, tick=tick, options=options)):
        wait_for(lambda: bool(seen), "a tick")
    assert min(seen) >= 32


def test_idle_loop_sleeps(world: World) -> None:
    write(world, *make_events(range(2)))
    with running(world.loop(JoinStage())) as run:
        wait_outputs(world, 2)
        begin = time.process_time()
        threading.Event().wait(2.0)  # measures this time itself: there is no event to wait for
        used = time.process_time() - begin
        assert run.thread.is_alive()
    assert used < 0.2, f"{used:.2f} s of CPU in 2 s without records"


def test_missing_topic_and_unequal_partitions_are_named(world: World) -> None:
    class NoSuch(JoinStage):
        inputs = ("rewards", "no-such-topic")

    class Unequal(JoinStage):
        inputs = ("rewards", "runs")

    error = Running(world.loop(NoSuch())).wait_end()
    assert error is not None and "no-such-topic does not exist" in str(error)
    error = Running(world.loop(Unequal())).wait_end()
    assert error is not None and "equal numbers of partitions" in str(error) and "'runs': 1" in str(error)
