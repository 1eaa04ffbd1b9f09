"""Kafka clients with the settings every part of the system relies on, and topic provisioning.

Producers hash keys as Java and aiokafka do (librdkafka's default CRC32 does not), are idempotent and wait for all
replicas; consumers read committed records only, never commit by themselves and say where they start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import structlog
from confluent_kafka import (
    AcknowledgeType,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    ShareConsumer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from infra.settings import Settings
from schemas.base import Event
from schemas.codec import HEADER_TYPE, Codec
from schemas.topics import CATALOGUE, MAX_MESSAGE_BYTES, SCHEMAS_TOPIC

log = structlog.get_logger()

#: Seconds that any start-up request to the cluster may take.
STARTUP_TIMEOUT_SEC = 15.0


#: Errors of a partition whose leader is not known yet.
LEADERLESS = frozenset({KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE})


class KafkaUnavailableError(RuntimeError):
    """The cluster could not be reached: names the address and the remedy."""


#: What the client raises for a request that failed.
ClientError = KafkaException


def bootstrap_servers(settings: Settings) -> str:
    """Address of the cluster: the configured one, else the local stack's broker."""
    return settings.kafka.bootstrap or f"127.0.0.1:{settings.kafka.port}"


def topic_name(settings: Settings, name: str) -> str:
    """The real name of a catalogue topic."""
    return settings.kafka.topic_prefix + name


def _common(settings: Settings) -> dict[str, Any]:
    return {
        "bootstrap.servers": bootstrap_servers(settings),
        "reconnect.backoff.max.ms": 1000,
        "socket.keepalive.enable": True,
        "allow.auto.create.topics": False,
        "log_level": 2,
        **settings.kafka.client,
    }


def make_producer(settings: Settings, *, transactional_id: str | None = None, **overrides: Any) -> Producer:
    """An idempotent producer; with `transactional_id` (prefixed here) a transactional one, not yet initialised."""
    config = _common(settings) | {
        "enable.idempotence": True,
        "acks": "all",
        "partitioner": "murmur2_random",
        "compression.type": "zstd",
        "linger.ms": 5,
        "message.max.bytes": MAX_MESSAGE_BYTES,
        "queue.buffering.max.kbytes": 256 * 1024,
    }
    if transactional_id:
        config["transactional.id"] = settings.kafka.topic_prefix + transactional_id
        config["transaction.timeout.ms"] = 30_000
    return Producer(config | overrides)


def make_consumer(settings: Settings, *, group: str, start: str = "earliest", **overrides: Any) -> Consumer:
    """A consumer of committed records that commits nothing by itself. `start`: earliest | latest | error."""
    config = _common(settings) | {
        "group.id": settings.kafka.topic_prefix + group,
        "auto.offset.reset": start,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "isolation.level": "read_committed",
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": 10_000,
        "fetch.message.max.bytes": MAX_MESSAGE_BYTES,
        "enable.partition.eof": False,
        "fetch.wait.max.ms": 500,
    }
    return Consumer(config | overrides)


def make_admin(settings: Settings) -> AdminClient:
    """An admin client."""
    return AdminClient(_common(settings))


def check_cluster(settings: Settings, timeout_sec: float = STARTUP_TIMEOUT_SEC) -> None:
    """Raise KafkaUnavailableError unless the cluster answers a metadata request."""
    try:
        make_admin(settings).list_topics(timeout=timeout_sec)
    except KafkaException as exc:
        raise KafkaUnavailableError(
            f"no Kafka at {bootstrap_servers(settings)} ({exc.args[0].str()}); start the local stack with "
            "`rollstream up`, or set kafka.bootstrap in the run file to a running cluster"
        ) from exc


def ensure_topics(settings: Settings) -> list[str]:
    """Create the catalogue's missing topics; returns what was created. Publishes the writer schemas."""
    check_cluster(settings)
    admin = make_admin(settings)
    present = set(admin.list_topics(timeout=STARTUP_TIMEOUT_SEC).topics)
    wanted = [
        NewTopic(
            topic_name(settings, t.name),
            num_partitions=t.partitions(settings.kafka.partitions),
            replication_factor=settings.kafka.replication,
            config=t.config(),
        )
        for t in CATALOGUE
        if topic_name(settings, t.name) not in present
    ]
    created = []
    for name, future in (admin.create_topics(wanted) if wanted else {}).items():
        try:
            future.result(STARTUP_TIMEOUT_SEC)
            created.append(name)
        except KafkaException as exc:
            if exc.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
    _publish_schemas(settings)  # also on a log that an older version made: the topic is compacted
    return created


def wait_for_leaders(settings: Settings, timeout_sec: float = STARTUP_TIMEOUT_SEC) -> None:
    """Wait until every partition answers: a broker that restarts takes connections before it leads its partitions.

    Raises KafkaUnavailableError naming partitions that still do not.
    """
    admin = make_admin(settings)
    deadline = time.monotonic() + timeout_sec
    while True:
        topics = admin.list_topics(timeout=STARTUP_TIMEOUT_SEC).topics
        asked = {TopicPartition(name, p): OffsetSpec.latest() for name, t in topics.items() for p in t.partitions}
        answers = admin.list_offsets(asked, request_timeout=STARTUP_TIMEOUT_SEC) if asked else {}
        silent = [f"{tp.topic}/{tp.partition}" for tp, future in answers.items() if future.exception()]
        if not silent:
            return
        if time.monotonic() > deadline:
            raise KafkaUnavailableError(
                f"{len(silent)} partitions at {bootstrap_servers(settings)} have no leader after {timeout_sec:.0f} s "
                f"({', '.join(silent[:3])}, ...); see the broker's log"
            )
        time.sleep(0.05)


def warm_up(settings: Settings) -> None:
    """Make a fresh cluster load its group and transaction coordinators, which costs the first request 1-2 s."""
    producer = make_producer(settings, transactional_id="warm-up")
    consumer = make_consumer(settings, group="warm-up")
    try:
        _until_loaded(lambda: producer.init_transactions(STARTUP_TIMEOUT_SEC))
        where = [TopicPartition(topic_name(settings, SCHEMAS_TOPIC), 0)]
        _until_loaded(lambda: consumer.committed(where, timeout=STARTUP_TIMEOUT_SEC))
    finally:
        consumer.close()


def _until_loaded(request: Callable[[], object]) -> None:
    """Repeat a request while its coordinator is being elected or loaded."""
    loading = (
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    )
    deadline = time.monotonic() + STARTUP_TIMEOUT_SEC
    while True:
        try:
            request()
            return
        except KafkaException as exc:
            if exc.args[0].code() not in loading or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def drop_topics(settings: Settings) -> None:
    """Delete the catalogue's topics under `kafka.topic_prefix`, with everything in them."""
    admin = make_admin(settings)
    present = admin.list_topics(timeout=STARTUP_TIMEOUT_SEC).topics
    names = [name for t in CATALOGUE if (name := topic_name(settings, t.name)) in present]
    for future in admin.delete_topics(names).values() if names else ():
        future.result(STARTUP_TIMEOUT_SEC)


def _publish_schemas(settings: Settings) -> None:
    producer = make_producer(settings)
    for key, value in Codec().schema_records():
        producer.produce(topic_name(settings, SCHEMAS_TOPIC), key=key, value=value)
    left = producer.flush(STARTUP_TIMEOUT_SEC)
    if left:
        raise KafkaUnavailableError(f"{left} schema records were not acknowledged within {STARTUP_TIMEOUT_SEC} s")


def headers_of(event: Event, traceparent: str | None = None) -> list[tuple[str, bytes]]:
    """Headers every event carries: its type (readable without decoding) and the W3C trace context."""
    headers = [(HEADER_TYPE, type(event).__name__.encode())]
    if traceparent:
        headers.append(("traceparent", traceparent.encode()))
    return headers


def header_type(headers: list[tuple[str, bytes]] | None) -> str | None:
    """The event type named in a record's headers."""
    for name, value in headers or ():
        if name == HEADER_TYPE:
            return value.decode()
    return None


def new_traceparent() -> str:
    """A fresh W3C trace context (version 00, sampled)."""
    return f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"


class DeliveryError(RuntimeError):
    """An event was not written: names the event and why."""


class EventWriter:
    """Writes source events outside transactions; every failure surfaces at the next `write` or at `flush`."""

    def __init__(self, settings: Settings, codec: Codec | None = None, producer: Producer | None = None) -> None:
        self._settings = settings
        self._codec = codec or make_codec(settings)
        self._producer = producer or make_producer(settings)
        self._error: DeliveryError | None = None

    def write(
        self,
        event: Event,
        *,
        traceparent: str | None = None,
        on_ack: Callable[[Exception | None], None] | None = None,
    ) -> None:
        """Queue an event. `on_ack` is called from `poll`/`flush` with None, or with the error.

        Raises DeliveryError when an earlier event failed, CodecError when the event does not fit its schema.
        """
        self._raise_pending()

        def done(error: KafkaError | None, _: Message) -> None:
            failure = DeliveryError(f"{type(event).__name__} {event.event_id}: {error.str()}") if error else None
            if on_ack is not None:
                on_ack(failure)
            elif failure is not None:
                self._error = failure

        topic, value = topic_name(self._settings, event.TOPIC), self._codec.encode(event)
        while True:
            try:
                self._producer.produce(
                    topic,
                    key=event.key.encode(),
                    value=value,
                    headers=headers_of(event, traceparent),
                    on_delivery=done,
                )
                break
            except BufferError:  # the queue is full: wait for the broker, never drop
                self._producer.poll(0.1)
        self._producer.poll(0)

    def poll(self, timeout_sec: float = 0.0) -> None:
        """Serve delivery reports."""
        self._producer.poll(timeout_sec)

    def flush(self, timeout_sec: float = 30.0) -> None:
        """Wait until everything is acknowledged. Raises DeliveryError otherwise."""
        left = self._producer.flush(timeout_sec)
        self._raise_pending()
        if left:
            raise DeliveryError(f"{left} events were not acknowledged by Kafka within {timeout_sec} s")

    def _raise_pending(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def make_codec(settings: Settings) -> Codec:
    """The codec of a run: Confluent framing when a Schema Registry is configured."""
    registry = None
    if settings.schema_registry.url:
        from infra.schema_registry import SchemaRegistry

        registry = SchemaRegistry(settings.schema_registry.url)
    return Codec(registry, settings.kafka.topic_prefix)


def watermarks(consumer: Consumer, part: TopicPartition) -> tuple[int, int]:
    """(low, high) of a partition. A leader that is moving (a fresh topic, a restarted broker) is waited for.

    Raises KafkaUnavailableError when there is none within STARTUP_TIMEOUT_SEC.
    """
    deadline = time.monotonic() + STARTUP_TIMEOUT_SEC
    while True:
        try:
            low, high = consumer.get_watermark_offsets(part, timeout=STARTUP_TIMEOUT_SEC)
            return low, high
        except KafkaException as exc:
            if time.monotonic() > deadline or exc.args[0].code() not in LEADERLESS:
                raise KafkaUnavailableError(f"{part.topic}/{part.partition}: {exc.args[0].str()}") from exc
            time.sleep(0.1)


def end_offsets(settings: Settings, topics: tuple[str, ...]) -> Mapping[tuple[str, int], int]:
    """(catalogue topic, partition) -> high watermark."""
    consumer = make_consumer(settings, group="offsets")
    try:
        meta = consumer.list_topics(timeout=STARTUP_TIMEOUT_SEC)
        out: dict[tuple[str, int], int] = {}
        for name in topics:
            for partition in meta.topics[topic_name(settings, name)].partitions:
                tp = TopicPartition(topic_name(settings, name), partition)
                out[name, partition] = watermarks(consumer, tp)[1]
        return out
    finally:
        consumer.close()


def read_topic(
    settings: Settings, name: str, *, follow: bool = False, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[Message]:
    """The records of a catalogue topic, in order within a partition; ends at the high watermarks unless `follow`.

    Raises KafkaUnavailableError when the topic does not exist or the cluster does not answer.
    """
    for message in read_topic_marking_end(settings, name, follow=follow, should_stop=should_stop):
        if message is not None:
            yield message


def read_topic_marking_end(
    settings: Settings, name: str, *, follow: bool = False, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[Message | None]:
    """As `read_topic`, with one None where everything that was there at the start has been read."""
    check_cluster(settings)
    consumer = make_consumer(settings, group="reader")
    try:
        real = topic_name(settings, name)
        meta = consumer.list_topics(real, timeout=STARTUP_TIMEOUT_SEC).topics[real]
        if meta.error is not None:
            raise KafkaUnavailableError(f"topic {real} does not exist; `rollstream up` creates it")
        ends: dict[int, int] = {}
        starts: dict[int, int] = {}
        for partition in meta.partitions:
            tp = TopicPartition(real, partition)
            starts[partition], ends[partition] = watermarks(consumer, tp)
        consumer.assign([TopicPartition(real, p, offset) for p, offset in starts.items()])
        caught_up = False
        while not should_stop():
            for message in consumer.consume(500, 0.2):
                if message.error() is None:
                    yield message
            if not caught_up and all(at >= ends[p] for p, at in _positions(consumer, real, starts).items()):
                caught_up = True
                yield None
            if caught_up and not follow:
                return
    finally:
        consumer.close()


def _positions(consumer: Consumer, real: str, fallback: Mapping[int, int]) -> dict[int, int]:
    """Next offset per partition; transaction markers count, which is why messages alone do not tell the end."""
    found = consumer.position([TopicPartition(real, p) for p in fallback])
    return {tp.partition: tp.offset if tp.offset >= 0 else fallback[tp.partition] for tp in found}


def read_events(settings: Settings, name: str, *, types: tuple[type[Event], ...] = ()) -> Iterator[Event]:
    """The decoded events now on a topic, of the given types (all when none are given)."""
    codec, wanted = make_codec(settings), {t.__name__ for t in types}
    for message in read_topic(settings, name):
        value = message.value()
        if value is None or (wanted and header_type(message.headers()) not in wanted):
            continue
        yield codec.decode(value)


def group_lag(settings: Settings, group: str, ends: Mapping[tuple[str, int], int]) -> int:
    """Records between a group's committed offsets and `ends` ((catalogue topic, partition) -> offset)."""
    consumer = make_consumer(settings, group=group)
    try:
        wanted = [TopicPartition(topic_name(settings, name), p) for (name, p) in ends]
        committed = consumer.committed(wanted, timeout=STARTUP_TIMEOUT_SEC)
        at = {(tp.topic, tp.partition): max(tp.offset, 0) for tp in committed}
        return sum(max(0, end - at.get((topic_name(settings, n), p), 0)) for (n, p), end in ends.items())
    finally:
        consumer.close()


#: Deliveries after which the broker sets a record of a share group aside (KIP-932; the broker's own maximum).
SHARE_DELIVERY_LIMIT = 10
#: A record handed out through a share group returns to the queue after this long without an acknowledgement.
SHARE_LOCK_SEC = 60


def configure_share_group(settings: Settings, group: str) -> bool:
    """Set up a share group that reads committed records from the start; False where the broker has none."""
    values = {
        "share.auto.offset.reset": "earliest",
        "share.isolation.level": "read_committed",
        "share.record.lock.duration.ms": str(SHARE_LOCK_SEC * 1000),
        "share.delivery.count.limit": str(SHARE_DELIVERY_LIMIT),
        "share.assignment.interval.ms": "0",
    }
    admin, name = make_admin(settings), settings.kafka.topic_prefix + group
    for key in values:  # one by one: brokers know different subsets, the first decides
        entry = ConfigEntry(key, values[key], incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.GROUP, name, incremental_configs=[entry])
        try:
            admin.incremental_alter_configs([resource])[resource].result(STARTUP_TIMEOUT_SEC)
        except KafkaException as exc:
            if key == "share.auto.offset.reset":
                log.info("the broker has no share groups", error=exc.args[0].str())
                return False
            log.warning("share group setting refused", setting=key, error=exc.args[0].str())
    return True


def make_share_consumer(settings: Settings, *, group: str, **overrides: Any) -> ShareConsumer:
    """A consumer of a share group that acknowledges explicitly. Not thread-safe."""
    config = _common(settings) | {
        "group.id": settings.kafka.topic_prefix + group,
        "share.acknowledgement.mode": "explicit",
        "fetch.wait.max.ms": 500,
    }
    config.pop("allow.auto.create.topics")  # the preview client refuses the property; its topics are never created
    return ShareConsumer(config | overrides)


def release_message(consumer: ShareConsumer, message: Message) -> None:
    """Give a record of a share group back for another member."""
    consumer.acknowledge(message, AcknowledgeType.RELEASE)


def commit_offset(consumer: Consumer, topic: str, partition: int, offset: int) -> None:
    """Commit that everything below `offset` is done. `topic`: real name. Raises ClientError, also in a rebalance."""
    consumer.commit(offsets=[TopicPartition(topic, partition, offset)], asynchronous=False)


#: Say so when a partition's end is reached: records of transactions leave markers that no message shows.
_AT_END: dict[str, Any] = {"enable.partition.eof": True}


def read_newest(settings: Settings, name: str, limit: int) -> Iterator[bytes]:
    """Values of the newest `limit` records per partition of a catalogue topic, up to its present end."""
    ends = end_offsets(settings, (name,))
    left = {partition: end for (_, partition), end in ends.items() if end > 0}
    if not left:
        return
    consumer = make_consumer(settings, group="read-newest", start="error", **_AT_END)
    try:
        topic = topic_name(settings, name)
        consumer.assign([TopicPartition(topic, p, max(0, end - limit)) for p, end in left.items()])
        deadline = time.monotonic() + STARTUP_TIMEOUT_SEC
        while left and time.monotonic() < deadline:
            for message in consumer.consume(500, 0.2):
                error, value = message.error(), message.value()
                if error is not None and error.code() == KafkaError._PARTITION_EOF:
                    left.pop(message.partition(), None)
                elif error is None and value is not None:
                    yield value
    finally:
        consumer.close()
