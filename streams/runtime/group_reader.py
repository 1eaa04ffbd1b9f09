"""A member of a consumer group that reads catalogue topics and commits offsets by hand, each with a note.

For readers outside transactions whose work is made repeatable by what they write down first: the note travels with
the committed offset in Kafka itself, so whichever instance gets the partition next finds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from infra.kafka import STARTUP_TIMEOUT_SEC, make_consumer, topic_name
from infra.settings import Settings
from streams.runtime.kafka_log import to_record
from streams.runtime.log import TopicPart
from streams.runtime.step import Record

log = structlog.get_logger()

#: (next offset, note); the offset is None where the group never committed.
Commit = tuple[int | None, str]


_TRANSIENT = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError._WAIT_COORD,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_ENOUGH_REPLICAS,
    }
)


class GroupReader:
    """One member. `on_assigned` gets each partition's last commit and returns where to start (None: the beginning)."""

    def __init__(
        self,
        settings: Settings,
        group: str,
        topics: Iterable[str],
        *,
        on_assigned: Callable[[dict[TopicPart, Commit]], dict[TopicPart, int | None]],
        on_revoked: Callable[[list[TopicPart], bool], None],
        should_stop: Callable[[], bool] = lambda: False,
        **overrides: Any,
    ) -> None:
        self._settings = settings
        self._names = {topic_name(settings, name): name for name in topics}
        self._on_assigned, self._on_revoked, self._should_stop = on_assigned, on_revoked, should_stop
        self._held: set[TopicPart] = set()
        self._down = False
        options: dict[str, Any] = {"queued.max.messages.kbytes": 32 * 1024, "error_cb": self._on_error} | overrides
        self._consumer: Consumer = make_consumer(settings, group=group, **options)
        self._consumer.subscribe(
            list(self._names), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )
        self.joined = False

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN and not self._down:
            self._down = True
            log.warning("kafka_unreachable", remedy="waiting for it")

    def _real(self, part: TopicPart, offset: int | None = None) -> TopicPartition:
        name = topic_name(self._settings, part[0])
        return TopicPartition(name, part[1], OFFSET_BEGINNING if offset is None else offset)

    def _part(self, tp: TopicPartition) -> TopicPart:
        return self._names[tp.topic], tp.partition

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.joined = True
        answer = consumer.committed(partitions, timeout=STARTUP_TIMEOUT_SEC) if partitions else []
        commits: dict[TopicPart, Commit] = {
            self._part(tp): (tp.offset if tp.offset >= 0 else None, tp.metadata or "") for tp in answer
        }
        start = self._on_assigned(commits) if commits else {}
        consumer.incremental_assign([self._real(part, offset) for part, offset in start.items()])
        self._held.update(start)

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._give_up(consumer, partitions, lost=False)

    def _lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._give_up(consumer, partitions, lost=True)

    def _give_up(self, consumer: Consumer, partitions: list[TopicPartition], *, lost: bool) -> None:
        parts = [self._part(tp) for tp in partitions]
        if parts:
            self._on_revoked(parts, lost)
        self._held.difference_update(parts)
        consumer.incremental_unassign(partitions)

    def poll(self, max_records: int, timeout_sec: float) -> list[Record]:
        """The next records; serves rebalances. Raises KafkaException for what the client cannot wait out."""
        records = []
        for message in self._consumer.consume(max_records, timeout_sec):
            error = message.error()
            if error is not None:
                if error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
                    raise KafkaException(error)
                log.debug("consumer_error", detail=error.str())
                continue
            self._down = False
            records.append(to_record(message, self._names[str(message.topic())]))
        return records

    def positions(self) -> dict[TopicPart, int]:
        """Next offset of every held partition that was read from; transaction markers count as read."""
        held = [self._real(part) for part in self._held]
        found = self._consumer.position(held) if held else []
        return {self._part(tp): tp.offset for tp in found if tp.offset >= 0}

    def commit(self, offsets: Mapping[TopicPart, tuple[int, str]]) -> None:
        """Commit (next offset, note) per partition, in one request; an outage is waited out until `should_stop`.

        Raises KafkaException when the group no longer takes it from this member.
        """
        parts = [
            TopicPartition(topic_name(self._settings, topic), partition, offset, note)
            for (topic, partition), (offset, note) in offsets.items()
        ]
        pause_sec = 0.05
        while parts:
            try:
                for tp in self._consumer.commit(offsets=parts, asynchronous=False) or ():
                    if tp.error is not None:
                        raise KafkaException(tp.error)
                return
            except KafkaException as exc:
                error: KafkaError = exc.args[0]
                if error.code() not in _TRANSIENT or self._should_stop():
                    raise
                log.warning("kafka_retry", what="commit", detail=error.str())
            time.sleep(pause_sec)
            pause_sec = min(2.0, pause_sec * 2)

    def close(self) -> None:
        """Leave the group; `on_revoked` is called for what is held."""
        self._consumer.close()


def read_ranges(settings: Settings, topic: str, ranges: Mapping[int, tuple[int, int]]) -> list[Record]:
    """The committed records of partition -> [first, last] of a catalogue topic, in order within a partition.

    Waits until every range is read. Raises KafkaException when the log cannot be read there any more.
    """
    consumer = make_consumer(settings, group="reader", start="error", **{"enable.partition.eof": True})
    real = topic_name(settings, topic)
    left = dict(ranges)
    records: list[Record] = []
    try:
        consumer.assign([TopicPartition(real, number, first) for number, (first, _) in ranges.items()])
        while left:
            for message in consumer.consume(1000, 0.2):
                error, number = message.error(), int(message.partition() or 0)
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    if error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
                        raise KafkaException(error)
                    continue
                if number not in left:
                    continue
                offset, last = int(message.offset() or 0), left[number][1]
                if error is None and offset <= last:
                    records.append(to_record(message, topic))
                if offset >= last:
                    del left[number]
        return records
    finally:
        consumer.close()
