"""The laws every stage obeys, as functions over any stage and a recorded list of events.

- replay equals live: cutting the history anywhere, restoring from the first part and going on with the rest gives the
  outputs of one uninterrupted run;
- order and repeats do not matter: any interleaving across partitions, with any events repeated, gives the same set of
  outputs, byte for byte;
- a crash commits nothing: at every point of a transaction, a restart ends with each output in the log exactly once.

    check_laws(lambda: AssemblyStage(settings), events)
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from schemas.base import Event
from schemas.codec import Codec
from streams.runtime.log import FAULT_POINTS
from streams.runtime.loop import LoopOptions
from streams.runtime.memory import MemoryLog, MemoryLoop
from streams.runtime.step import Record, Stage, step

NUM_PARTITIONS = 2
CODEC = Codec()

MakeStage = Callable[[], Stage[Any]]
Streams = dict[tuple[str, int], list[Record]]


class Crash(BaseException):
    """A process that dies: nothing may catch it."""


def record_streams(stage: Stage[Any], events: Sequence[Event]) -> Streams:
    """The stage's input partitions holding the events, in their order."""
    memory = MemoryLog(NUM_PARTITIONS)
    for event in events:
        memory.write(event, CODEC)
    return {
        (topic, number): memory.committed_records((topic, number))[0]
        for topic in stage.inputs
        for number in range(memory.num_partitions[topic])
    }


def unit_of(stage: Stage[Any], part: tuple[str, int]) -> int:
    """Which state a partition belongs to."""
    return part[1] if stage.scope == "partition" else 0


def run_in_order(stage: Stage[Any], records: Sequence[Record], cut: int = 0) -> list[bytes]:
    """Encoded outputs of all records from `cut` on; the ones before it are restored from, their outputs discarded."""
    states: dict[int, Any] = {}
    outputs: list[bytes] = []
    for index, record in enumerate(records):
        number = unit_of(stage, (record.topic, record.partition))
        state = states[number] if number in states else stage.initial()
        result = step(stage, CODEC, state, [record])
        assert not result.dead, f"a recorded event was not applied: {result.dead[0].detail}"
        assert result.blocked is None
        states[number] = result.state
        if index >= cut:
            outputs.extend(CODEC.encode(event) for event in result.outputs)
    return outputs


def interleave(streams: Streams, rng: random.Random, repeat_share: float = 0.0) -> list[Record]:
    """A random merge that keeps the order within each partition; some records come again later."""
    queues = [list(records) for records in streams.values() if records]
    merged: list[Record] = []
    while queues:
        queue = rng.choice(queues)
        merged.append(queue.pop(0))
        if not queue:
            queues.remove(queue)
    for record in [r for r in merged if rng.random() < repeat_share]:
        merged.insert(rng.randint(merged.index(record) + 1, len(merged)), record)
    return merged


def check_outputs_once(outputs: Sequence[bytes]) -> None:
    """No output twice."""
    repeated = [data for data, num in Counter(outputs).items() if num > 1]
    assert not repeated, f"emitted more than once: {CODEC.decode(repeated[0])}"


def assert_same_set(found: Sequence[bytes], expected: Sequence[bytes], what: str) -> None:
    """Equal sets, with the first difference decoded."""
    missing, extra = set(expected) - set(found), set(found) - set(expected)
    assert not missing, f"{what}: {len(missing)} outputs missing, first: {CODEC.decode(sorted(missing)[0])}"
    assert not extra, f"{what}: {len(extra)} outputs too many, first: {CODEC.decode(sorted(extra)[0])}"


def check_replay_equals_live(make_stage: MakeStage, events: Sequence[Event], seed: int = 0) -> None:
    """Cut anywhere, restore partition by partition, go on: the outputs of an uninterrupted run."""
    stage = make_stage()
    streams = record_streams(stage, events)
    live = interleave(streams, random.Random(seed))
    expected = run_in_order(stage, live)
    check_outputs_once(expected)
    cuts = range(len(live) + 1) if len(live) <= 40 else sorted(random.Random(seed).sample(range(len(live) + 1), 40))
    for cut in cuts:
        before = run_in_order(make_stage(), live[:cut])
        # Restoring re-reads each input from its beginning, so in another order than live.
        for topics in (stage.inputs, stage.inputs[::-1]):
            history = sorted(live[:cut], key=lambda r: (topics.index(r.topic), r.partition, r.offset))
            after = run_in_order(make_stage(), history + live[cut:], cut=cut)
            check_outputs_once(before + after)
            assert_same_set(before + after, expected, f"restored after {cut} of {len(live)} records")


def check_order_and_repeats(
    make_stage: MakeStage, events: Sequence[Event], *, seed: int = 0, num_orders: int = 25
) -> None:
    """Any interleaving and any repeats: the same set, each output once."""
    stage = make_stage()
    streams = record_streams(stage, events)
    expected = run_in_order(stage, interleave(streams, random.Random(seed)))
    for number in range(1, num_orders + 1):
        rng = random.Random(f"{seed}/{number}")
        outputs = run_in_order(make_stage(), interleave(streams, rng, repeat_share=0.3 if number % 2 else 0.0))
        check_outputs_once(outputs)
        assert_same_set(outputs, expected, f"order {number}")


def check_crash_commits_nothing(make_stage: MakeStage, events: Sequence[Event]) -> None:
    """Die at each point of the first, second and third transaction; after a restart every output is there once."""
    stage = make_stage()
    expected = run_in_order(stage, interleave(record_streams(stage, events), random.Random(0)))
    for point in FAULT_POINTS:
        for nth in (1, 2, 3):
            memory = MemoryLog(NUM_PARTITIONS)
            for event in events:
                memory.write(event, CODEC)
            run_until_crash(make_stage(), memory, point, nth)
            run_to_end(make_stage(), memory)
            found = committed_outputs(memory, stage, expected)
            check_outputs_once(found)
            assert_same_set(found, expected, f"crash {point} of transaction {nth}")


def run_until_crash(stage: Stage[Any], memory: MemoryLog, point: str, nth: int) -> None:
    """Run until the `nth` time that `point` is reached, or until everything is read."""
    seen = Counter[str]()
    stop = threading.Event()

    def faults(reached: str) -> None:
        seen[reached] += 1
        if reached == point and seen[reached] == nth:
            raise Crash

    loop = MemoryLoop(stage, memory, codec=CODEC, faults=faults, options=_small_batches(memory, stage))
    ended = threading.Event()

    def run() -> None:
        with contextlib.suppress(Crash):
            loop.run(stop)
        ended.set()

    thread = threading.Thread(target=run, daemon=True)
    ends = _ends(memory, stage)
    thread.start()
    while not ended.wait(0.01) and not _all_read(memory, stage, ends):
        pass  # fewer transactions than `nth`: nothing to crash in
    stop.set()
    thread.join(10.0)


def run_to_end(stage: Stage[Any], memory: MemoryLog, *, timeout_sec: float = 10.0) -> None:
    """Run until every input is read and committed."""
    stop = threading.Event()
    loop = MemoryLoop(stage, memory, codec=CODEC, options=LoopOptions(commit_interval_sec=0.0, idle_wait_sec=0.02))
    thread = threading.Thread(target=loop.run, args=(stop,), daemon=True)
    ends = _ends(memory, stage)
    thread.start()
    with memory.changed:
        done = memory.changed.wait_for(lambda: _all_read(memory, stage, ends), timeout_sec)
    stop.set()
    thread.join(timeout_sec)
    assert done, f"inputs were not read to their end within {timeout_sec} s"


def committed_outputs(memory: MemoryLog, stage: Stage[Any], expected: Sequence[bytes]) -> list[bytes]:
    """What the stage has committed."""
    topics = {CODEC.decode(data).TOPIC for data in expected}
    values = [record.value or b"" for topic in sorted(topics) for record in memory.read(topic)]
    return [value for value in values if CODEC.decode(value).producer == stage.name]


def _all_read(memory: MemoryLog, stage: Stage[Any], ends: dict[tuple[str, int], int]) -> bool:
    committed = memory.group(stage.name).committed
    return all(committed.get(part, 0) >= end for part, end in ends.items())


def _ends(memory: MemoryLog, stage: Stage[Any]) -> dict[tuple[str, int], int]:
    """One past the last record of each input partition (a transaction marker may follow it)."""
    found = {part: memory.committed_records(part)[0] for part in _inputs(memory, stage)}
    return {part: records[-1].offset + 1 for part, records in found.items() if records}


def _inputs(memory: MemoryLog, stage: Stage[Any]) -> list[tuple[str, int]]:
    return [(topic, number) for topic in stage.inputs for number in range(memory.num_partitions[topic])]


def _small_batches(memory: MemoryLog, stage: Stage[Any]) -> LoopOptions:
    num_records = sum(len(memory.committed_records(part)[0]) for part in _inputs(memory, stage))
    return LoopOptions(max_records=max(1, num_records // 6), commit_interval_sec=0.0, idle_wait_sec=0.02)


def check_laws(make_stage: MakeStage, events: Sequence[Event]) -> None:
    """All laws."""
    check_replay_equals_live(make_stage, events)
    check_order_and_repeats(make_stage, events)
    check_crash_commits_nothing(make_stage, events)
