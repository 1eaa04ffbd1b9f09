"""The transactional loop against a bare confluent-kafka loop that does the same work, interleaved on one broker.

Both read the same 40,000 records of two topics, decode them, join them by trial in the same fold, write one event per
trial, and commit outputs and offsets in transactions of 2,000 records. The bare loop has no dead letters, no restore,
no rebalance and no error handling: it is what a person would write in an afternoon.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from infra.kafka import (
    drop_topics,
    ensure_topics,
    headers_of,
    make_codec,
    make_consumer,
    make_producer,
    topic_name,
    warm_up,
)
from infra.local.kafka import start_kafka, stop_kafka
from infra.local.ports import free_port
from infra.settings import DataSection, KafkaSection, Settings
from streams.runtime.loop import LoopOptions, TransactionalLoop
from tests.unit.runtime.stages import JoinStage, make_grade, make_renewal

NUM_TRIALS = 20_000
NUM_RECORDS = 2 * NUM_TRIALS
BATCH = 2000
ROUNDS = 5
AIM = 0.7


class Progress:
    """Records per second between the first and the last commit, so that set-up does not count."""

    def __init__(self, stage: JoinStage) -> None:
        self._stage = stage
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)
        self.done = threading.Event()

    def __call__(self, point: str) -> None:
        if point != "after_commit":
            return
        self._last = (time.perf_counter(), self._stage.num_applied)
        self._first = self._first or self._last
        if self._stage.num_applied == NUM_RECORDS:
            self.done.set()

    @property
    def records_per_sec(self) -> float:
        assert self._first is not None
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])


class CountingStage(JoinStage):
    """The fold, under a name of its own per round so that every round starts at the beginning."""

    def __init__(self, name: str) -> None:
        super().__init__("single")
        self.name = name
        self.num_applied = 0

    def apply(self, state: Any, event: Any) -> Any:
        self.num_applied += 1
        return super().apply(state, event)


def run_loop(settings: Settings, name: str) -> float:
    """One round of our loop."""
    stage = CountingStage(name)
    progress = Progress(stage)
    loop = TransactionalLoop(stage, settings, options=LoopOptions(max_records=BATCH), faults=progress)
    stop = threading.Event()
    thread = threading.Thread(target=loop.run, args=(stop,))
    thread.start()
    finished = progress.done.wait(120)
    stop.set()
    thread.join()
    assert finished, "the loop did not read everything in 120 s"
    return progress.records_per_sec


def run_bare(settings: Settings, name: str) -> float:
    """One round of the bare loop."""
    stage = CountingStage(name)
    progress = Progress(stage)
    codec = make_codec(settings)
    consumer = make_consumer(settings, group=name)
    producer = make_producer(settings, transactional_id=name, **{"retry.backoff.ms": 20})
    producer.init_transactions(30)
    consumer.assign(
        [
            TopicPartition(topic_name(settings, topic), number, OFFSET_BEGINNING)
            for topic in stage.inputs
            for number in range(settings.kafka.partitions)
        ]
    )
    state = stage.initial()
    while not progress.done.is_set():
        messages = consumer.consume(BATCH, 0.25)
        if not messages:
            continue
        producer.begin_transaction()
        offsets: dict[tuple[str, int], int] = {}
        for message in messages:
            state, outputs = stage.apply(state, codec.decode(message.value() or b""))
            for event in outputs:
                topic = topic_name(settings, event.TOPIC)
                producer.produce(topic, key=event.key, value=codec.encode(event), headers=headers_of(event))
            offsets[str(message.topic()), int(message.partition() or 0)] = int(message.offset() or 0) + 1
        producer.send_offsets_to_transaction(
            [TopicPartition(topic, number, at) for (topic, number), at in offsets.items()],
            consumer.consumer_group_metadata(),
            30,
        )
        producer.commit_transaction(30)
        progress("after_commit")
    consumer.close()
    return progress.records_per_sec


@contextmanager
def bench_settings() -> Iterator[Settings]:
    """A broker of our own, or the one ROLLSTREAM_TEST_BOOTSTRAP names, with the records on it."""
    with tempfile.TemporaryDirectory(prefix="rollstream-bench-") as directory:
        bootstrap, record = os.environ.get("ROLLSTREAM_TEST_BOOTSTRAP", ""), None
        settings = Settings(data=DataSection(dir=directory), kafka=KafkaSection(port=free_port()))
        if not bootstrap:
            record = start_kafka(settings)
            warm_up(settings)
        prefix = f"bench{uuid.uuid4().hex[:8]}-"
        settings = replace(settings, kafka=replace(settings.kafka, bootstrap=bootstrap, topic_prefix=prefix))
        try:
            ensure_topics(settings)
            write_records(settings)
            yield settings
        finally:
            drop_topics(settings)
            if record is not None:
                stop_kafka(settings, record)


def write_records(settings: Settings) -> None:
    """Both facts of every trial."""
    codec, producer = make_codec(settings), make_producer(settings)
    for number in range(NUM_TRIALS):
        for event in (make_grade(number), make_renewal(number)):
            topic = topic_name(settings, event.TOPIC)
            producer.produce(topic, key=event.key, value=codec.encode(event), headers=headers_of(event))
        producer.poll(0)
    assert producer.flush(60) == 0


def rows() -> list[dict[str, Any]]:
    """The benchmark's row."""
    with bench_settings() as settings:
        ours, bare = [], []
        for number in range(ROUNDS):
            bare.append(run_bare(settings, f"bare-{number}"))
            ours.append(run_loop(settings, f"loop-{number}"))
    value, baseline = statistics.median(ours), statistics.median(bare)
    ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
    return [
        {
            "name": "runtime: transactional loop vs bare confluent-kafka loop",
            "value": round(value),
            "unit": "records/s",
            "baseline": round(baseline),
            "ratio": round(ratio, 3),
            "aim": AIM,
            "met": ratio >= AIM,
        }
    ]


if __name__ == "__main__":
    for row in rows():
        print(row)
