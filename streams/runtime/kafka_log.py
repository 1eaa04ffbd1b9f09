"""The log on Kafka: membership, restoring, fetching and transactions for one instance of a stage.

Two consumers for a stage of scope "partition": one is a member of the group on the anchor topic (the first input) and
never fetches; its assignment says which partition *numbers* this instance owns. The other fetches those numbers of all
inputs. So co-partitioned inputs always move together, which no assignor of librdkafka promises. Offsets are committed
under the member's metadata, which fences an instance that lost its partitions (KIP-447).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import structlog
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from infra.kafka import (
    STARTUP_TIMEOUT_SEC,
    KafkaUnavailableError,
    bootstrap_servers,
    make_consumer,
    make_producer,
    topic_name,
)
from infra.settings import Settings
from schemas.topics import SCHEMAS_TOPIC
from streams.runtime.log import (
    AbortedError,
    Faults,
    FencedError,
    LogLostError,
    LogSetupError,
    Outgoing,
    TopicPart,
)
from streams.runtime.step import Record

log = structlog.get_logger()

#: An instance that dies inside a transaction holds back readers of its outputs for at most this long, unless it is
#: started again: the next holder of its transactional id aborts it at once.
TRANSACTION_TIMEOUT_MS = 15_000
#: A batch waits this long for more records: fewer transactions, for that much latency per stage.
LINGER_SEC = 0.03

#: Connection failures are reported once by our error callback; librdkafka would print each attempt.
QUIET: dict[str, Any] = {"log_level": 2}
#: What one instance may fetch ahead: bounds its memory when it is slower than its inputs.
FETCH_AHEAD: dict[str, Any] = {"queued.max.messages.kbytes": 16 * 1024, **QUIET}
TO_THE_END: dict[str, Any] = {"enable.partition.eof": True, **FETCH_AHEAD}

_REQUEST_TIMEOUT_SEC = 10.0
_NO_SUCH_TOPIC = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}
_FENCED = {
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.FENCED_INSTANCE_ID,
}


class KafkaLog:
    """One instance's connection. See `streams.runtime.log.Log` for the contract of each method."""

    def __init__(self, settings: Settings, instance: int, *, session_timeout_sec: float = 10.0) -> None:
        self._settings, self._instance = settings, instance
        self._session_timeout_ms = int(session_timeout_sec * 1000)
        self._names: dict[str, str] = {}  # real topic name -> catalogue name
        self._member: Consumer | None = None
        self._data: Consumer | None = None
        self._producer: Producer | None = None
        self._num_partitions: dict[str, int] = {}
        self._inputs: tuple[str, ...] = ()
        self._scope = "single"
        self._name = ""
        self._assigned: list[int] = []
        self._joined = False
        self._start: dict[TopicPart, int] = {}  # partitions being fetched, and where from
        self._down = False
        self._stop = threading.Event()

    # -- opening and closing

    @property
    def joined(self) -> bool:
        """The group gave this member its assignment, be it empty."""
        return self._joined

    def open(
        self,
        name: str,
        inputs: tuple[str, ...],
        scope: str,
        on_revoked: Callable[[list[int]], None],
        stop: threading.Event,
    ) -> None:
        """Fence an earlier holder of the transactional id, then join the group."""
        self._name, self._inputs, self._scope, self._stop = name, inputs, scope, stop
        self._names = {topic_name(self._settings, t): t for t in inputs}
        self._data = make_consumer(
            self._settings,
            group=name if scope == "single" else f"{name}-data",
            start="error",
            error_cb=self._on_error,
            **FETCH_AHEAD,
        )
        self._check_inputs(self._data)
        self._producer = make_producer(
            self._settings,
            transactional_id=f"{name}-{self._instance}",
            error_cb=self._on_error,
            **{
                "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
                # The broker answers "concurrent transactions" while it still writes the last one's markers; the default
                # of 100 ms before asking again would be most of a transaction's time (measured: 105 ms against 25).
                "retry.backoff.ms": 20,
                **QUIET,
            },
        )
        self._retry("init_transactions", lambda: self._open_producer().init_transactions(_REQUEST_TIMEOUT_SEC))
        if scope == "single":
            self._assigned, self._joined = [0], True
        else:
            self._join(inputs[0], on_revoked)

    def _check_inputs(self, consumer: Consumer) -> None:
        try:
            known = consumer.list_topics(timeout=STARTUP_TIMEOUT_SEC).topics
        except KafkaException as exc:
            raise KafkaUnavailableError(
                f"no Kafka at {bootstrap_servers(self._settings)} ({exc.args[0].str()}); start the local stack with "
                "`rollstream up`, or set kafka.bootstrap in the run file to a running cluster"
            ) from exc
        for real, name in self._names.items():
            if real not in known or known[real].error is not None:
                raise LogSetupError(f"{self._name}: topic {real} does not exist; `rollstream up` creates every topic")
            self._num_partitions[name] = len(known[real].partitions)
        counts = {name: self._num_partitions[name] for name in self._inputs}
        if self._scope == "partition" and len(set(counts.values())) > 1:
            raise LogSetupError(
                f"{self._name}: its inputs must have equal numbers of partitions, and have {counts}; create them alike"
            )

    def _join(self, anchor: str, on_revoked: Callable[[list[int]], None]) -> None:
        membership: dict[str, Any] = {
            # A restarted instance gets its partitions back at once instead of after the session timeout.
            "group.instance.id": f"{self._name}-{self._instance}",
            "session.timeout.ms": self._session_timeout_ms,
            "heartbeat.interval.ms": min(2000, self._session_timeout_ms // 3),
            "queued.max.messages.kbytes": 64,
            **QUIET,
        }
        self._member = make_consumer(self._settings, group=self._name, error_cb=self._on_error, **membership)

        def assigned(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            consumer.incremental_assign(partitions)
            consumer.pause(partitions)
            self._assigned.extend(tp.partition for tp in partitions)
            self._joined = True

        def revoked(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            numbers = [tp.partition for tp in partitions]
            self._release(numbers)
            on_revoked(numbers)
            consumer.incremental_unassign(partitions)

        self._member.subscribe([topic_name(self._settings, anchor)], on_assign=assigned, on_revoke=revoked)

    def close(self) -> None:
        """Leave the group. An open transaction is left for the next holder of the id, or its timeout, to abort."""
        for consumer in (self._member, self._data):
            if consumer is not None:
                try:
                    consumer.close()
                except (KafkaException, RuntimeError) as exc:  # closing twice, or with the broker away
                    log.debug("consumer_close", detail=str(exc))
        if self._producer is not None:
            self._producer.purge()
        self._member = self._data = self._producer = None
        self._assigned, self._joined = [], False
        self._start.clear()

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN and not self._down:
            self._down = True
            log.warning(
                "kafka_unreachable",
                service=self._name,
                address=bootstrap_servers(self._settings),
                remedy="waiting for it",
            )

    def _open_producer(self) -> Producer:
        if self._producer is None:
            raise RuntimeError("the log is not open")
        return self._producer

    def _open_data(self) -> Consumer:
        if self._data is None:
            raise RuntimeError("the log is not open")
        return self._data

    # -- membership

    def poll_membership(self) -> list[int]:
        """Serve rebalances; returns newly assigned units."""
        if self._member is not None:
            message = self._member.poll(0)
            error = message.error() if message is not None else None
            if error is not None:
                if error.code() in _FENCED or error.fatal():
                    raise FencedError(self._fenced_text(error))
                log.debug("membership", service=self._name, detail=error.str())
        assigned, self._assigned = self._assigned, []
        return assigned

    def _fenced_text(self, error: KafkaError) -> str:
        return (
            f"{self._name}/{self._instance}: another process runs as this instance ({error.str()}); this one stops and "
            "has committed nothing since. Give every instance of a service a number of its own"
        )

    def _partitions_of(self, unit: int) -> list[TopicPart]:
        if self._scope == "partition":
            return [(topic, unit) for topic in self._inputs]
        return [(topic, number) for topic in self._inputs for number in range(self._num_partitions[topic])]

    def _real(self, part: TopicPart, offset: int | None = None) -> TopicPartition:
        name = topic_name(self._settings, part[0])
        return TopicPartition(name, part[1]) if offset is None else TopicPartition(name, part[1], offset)

    def committed(self, units: Iterable[int]) -> dict[TopicPart, int | None]:
        """Committed offsets; waits for a transaction of an earlier owner to end (KIP-447, stable offsets)."""
        parts = [self._real(part) for unit in units for part in self._partitions_of(unit)]
        consumer = self._member or self._open_data()
        answer = self._retry("committed offsets", lambda: consumer.committed(parts, timeout=_REQUEST_TIMEOUT_SEC))
        return {(self._names[tp.topic], tp.partition): tp.offset if tp.offset >= 0 else None for tp in answer}

    def _retry(self, what: str, call: Callable[[], Any]) -> Any:
        """Call until Kafka answers: an outage is waited out, unless we are told to stop."""
        pause_sec = 0.1
        while True:
            try:
                return call()
            except KafkaException as exc:
                error: KafkaError = exc.args[0]
                if error.code() in _FENCED:
                    raise FencedError(self._fenced_text(error)) from exc
                if error.fatal():
                    raise LogLostError(f"{what}: {error.str()}") from exc
                log.warning("kafka_retry", service=self._name, what=what, detail=error.str())
            if self._stop.wait(pause_sec):
                raise LogLostError(f"{what}: told to stop before Kafka answered")
            pause_sec = min(pause_sec * 2, 2.0)

    # -- reading

    def read_below(self, upto: Mapping[TopicPart, int]) -> Generator[list[Record], None, None]:
        """Re-read inputs up to the offsets, with a consumer of its own."""
        if not upto:
            return
        consumer = make_consumer(
            self._settings,
            group=f"{self._name}-restore",
            **TO_THE_END,
        )
        open_parts = dict(upto)
        try:
            consumer.assign([self._real(part, OFFSET_BEGINNING) for part in upto])
            while open_parts:
                batch: list[Record] = []
                for message in consumer.consume(2000, 0.1):
                    part = (self._names[str(message.topic())], int(message.partition() or 0))
                    limit = open_parts.get(part)
                    if limit is None:
                        continue
                    error = message.error()
                    if error is None and (message.offset() or 0) < limit:
                        batch.append(to_record(message, part[0]))
                    if error is not None and error.code() != KafkaError._PARTITION_EOF:
                        self._check_consumer_error(error)
                    elif (message.offset() or 0) >= limit - (error is None):
                        del open_parts[part]
                yield batch
        finally:
            consumer.close()

    def resume(self, start: Mapping[TopicPart, int | None]) -> None:
        """Begin to fetch."""
        parts = [self._real(part, OFFSET_BEGINNING if offset is None else offset) for part, offset in start.items()]
        self._open_data().incremental_assign(parts)
        self._start.update({part: offset or 0 for part, offset in start.items()})

    def _release(self, units: list[int]) -> None:
        self._assigned = [number for number in self._assigned if number not in units]
        gone = [part for unit in units for part in self._partitions_of(unit) if part in self._start]
        if gone:
            self._open_data().incremental_unassign([self._real(part) for part in gone])
            for part in gone:
                del self._start[part]

    def fetch(self, max_records: int, timeout_sec: float) -> list[Record]:
        """The next records. Waits for the first one; then takes what comes within a few milliseconds."""
        consumer = self._open_data()
        first = consumer.poll(timeout_sec)
        if first is None:
            return []
        messages = [first, *consumer.consume(max_records - 1, LINGER_SEC)]
        if self._down:
            self._down = False
            log.info("kafka_reachable", service=self._name)
        records: list[Record] = []
        for message in messages:
            error = message.error()
            if error is not None:
                self._check_consumer_error(error)
                continue
            record = to_record(message, self._names[str(message.topic())])
            if (record.topic, record.partition) in self._start:  # else fetched ahead, and taken away since
                records.append(record)
        return records

    def _check_consumer_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise LogSetupError(
                f"{self._name}: records after the committed offsets were deleted from the log ({error.str()}); restore "
                "the topic from an archive, or reset the group's offsets and accept the loss"
            )
        if error.fatal():
            raise LogLostError(error.str())
        log.warning("kafka_read", service=self._name, detail=error.str())

    def writer_schemas(self) -> list[dict[str, Any]]:
        """Every schema on the `schemas` topic."""
        return read_writer_schemas(self._settings)

    def lag(self) -> dict[TopicPart, int | None]:
        """High watermark (as the fetcher last saw it) less the next offset; transaction markers count as read."""
        consumer = self._open_data()
        out: dict[TopicPart, int | None] = {}
        for at in consumer.position([self._real(part) for part in self._start]):
            part = (self._names[at.topic], at.partition)
            marks = consumer.get_watermark_offsets(at, cached=True)
            if marks is None or marks[1] < 0:
                out[part] = None
            else:
                out[part] = max(0, marks[1] - (at.offset if at.offset >= 0 else self._start[part]))
        return out

    # -- writing

    def commit(self, batch: Iterable[Outgoing], offsets: Mapping[TopicPart, int], faults: Faults) -> None:
        """One transaction."""
        producer = self._open_producer()
        began = time.monotonic()
        try:
            producer.begin_transaction()
            faults("before_produce")
            for out in batch:
                self._produce(producer, out)
            faults("after_produce")
            if offsets:
                metadata = (self._member or self._open_data()).consumer_group_metadata()
                parts = [self._real(part, offset) for part, offset in offsets.items()]
                self._answered(
                    "offsets",
                    lambda: _call_within(
                        _REQUEST_TIMEOUT_SEC + 5.0,
                        lambda: producer.send_offsets_to_transaction(parts, metadata, _REQUEST_TIMEOUT_SEC),
                    ),
                )
            faults("before_commit")
            self._answered("commit", lambda: producer.commit_transaction(_REQUEST_TIMEOUT_SEC))
        except KafkaException as exc:
            self._give_up(producer, exc.args[0], began)
        faults("after_commit")

    def _produce(self, producer: Producer, out: Outgoing) -> None:
        topic = topic_name(self._settings, out.topic)
        while True:
            try:
                producer.produce(topic, key=out.key, value=out.value, headers=list(out.headers))
                return
            except BufferError:  # the queue is full: wait for the broker
                producer.poll(0.1)

    def _answered(self, what: str, call: Callable[[], Any]) -> None:
        """Make a transactional call. librdkafka repeats it itself while that can help, up to the timeout; a client that
        got no answer for so long is given up for a fresh one (calling again was seen to hang for good after an outage).
        """
        try:
            call()
        except KafkaException as exc:
            error: KafkaError = exc.args[0]
            if error.retriable() and not error.fatal() and not error.txn_requires_abort():
                raise LogLostError(f"{what}: {error.str()}") from exc
            raise

    def _give_up(self, producer: Producer, error: KafkaError, began: float) -> None:
        """Abort if that is possible, and say what became of the transaction."""
        # librdkafka calls a producer fenced also when only its transaction timed out in an outage. Whether another
        # process holds the id shows when we ask for it again: then that one is the survivor that is fenced.
        timed_out = (time.monotonic() - began) * 1000 >= 0.9 * TRANSACTION_TIMEOUT_MS
        if error.fatal() or error.code() in _FENCED:
            if error.code() in _FENCED and not timed_out:
                raise FencedError(self._fenced_text(error))
            raise LogLostError(error.str())
        if not error.txn_requires_abort():
            raise KafkaException(error)  # the record can never be written (too large, no such topic): a bug, or set-up
        try:
            self._answered("abort", lambda: producer.abort_transaction(_REQUEST_TIMEOUT_SEC))
        except KafkaException as exc:
            raise LogLostError(f"{error.str()}; and the abort failed: {exc.args[0].str()}") from exc
        raise AbortedError(error.str())


def _call_within(limit_sec: float, call: Callable[[], Any]) -> None:
    """Make a call of librdkafka that may ignore its own timeout; raise LogLostError when it does.

    `rd_kafka_send_offsets_to_transaction` blocks for ever when the group's coordinator went away at the wrong moment
    (confluentinc/librdkafka issue 5456). The thread is left in it; the client is given up, and the next one fences it.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=run, name="kafka-call", daemon=True)
    thread.start()
    thread.join(limit_sec)
    if thread.is_alive():
        raise LogLostError(f"no answer from the client within {limit_sec:.0f} s")
    if raised:
        raise raised[0]


def to_record(message: Message, topic: str) -> Record:
    """A record of the catalogue's topic from a message without error."""
    headers = message.headers()
    return Record(
        topic,
        message.partition(),
        message.offset(),
        message.key(),
        message.value(),
        tuple((name, value or b"") for name, value in headers) if headers else (),
        message.timestamp()[1],
    )


def read_writer_schemas(settings: Settings) -> list[dict[str, Any]]:
    """Every schema on the `schemas` topic."""
    return [json.loads(value) for _, value in read_compacted(settings, SCHEMAS_TOPIC)]


def read_compacted(settings: Settings, topic: str) -> list[tuple[bytes | None, bytes]]:
    """Everything on a small topic with one partition, to its end; the newest value per key."""
    consumer = make_consumer(settings, group="reader", **TO_THE_END)
    found: dict[bytes | None, bytes | None] = {}
    try:
        consumer.assign([TopicPartition(topic_name(settings, topic), 0, OFFSET_BEGINNING)])
        deadline = time.monotonic() + STARTUP_TIMEOUT_SEC
        while time.monotonic() < deadline:
            for message in consumer.consume(1000, 0.2):
                error = message.error()
                if error is None:
                    found[message.key()] = message.value()
                elif error.code() == KafkaError._PARTITION_EOF:
                    return [(key, value) for key, value in found.items() if value is not None]
                elif error.code() in _NO_SUCH_TOPIC:
                    raise LogSetupError(f"{topic_name(settings, topic)}: {error.str()}; `rollstream up` creates it")
        raise KafkaUnavailableError(f"{topic_name(settings, topic)} could not be read in {STARTUP_TIMEOUT_SEC} s")
    finally:
        consumer.close()
