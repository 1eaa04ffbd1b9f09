"""Offers as a work queue: one interface, a Kafka share group behind it or a plain consumer group.

Correctness never rests on it: an offer handed out twice is two attempts or one, and the log elects one end. What it
must not do is lose an offer silently, or keep one from idle workers for long.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from infra.kafka import (
    SHARE_DELIVERY_LIMIT,
    SHARE_LOCK_SEC,
    ClientError,
    commit_offset,
    configure_share_group,
    header_type,
    make_consumer,
    make_share_consumer,
    release_message,
    topic_name,
)
from infra.settings import Settings

log = structlog.get_logger()

_TOPIC = "offers"
#: What a poll brought beyond the free lanes goes back to the queue after this long (well within the lock).
_HOLD_SEC = SHARE_LOCK_SEC / 2
_COMMIT_SEC = 10.0


@dataclass(frozen=True)
class Delivery:
    """A record handed to this worker: its event type and bytes."""

    event_type: str | None
    value: bytes
    message: Any


class WorkQueue(Protocol):
    """Not thread-safe: one thread claims and acknowledges."""

    def claim(self, limit: int, timeout_sec: float) -> list[Delivery]:
        """At most `limit` records that nobody else was given. With limit 0 only keeps the membership alive."""

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """These are in the log as leased (or need no work): never hand them out again."""

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Do not run these now: to another worker where the queue can, else to a later claim."""

    def close(self) -> None:
        """Leave; what was not acknowledged goes back."""


class ShareGroupQueue:
    """A share group (KIP-932): more workers than partitions, no head-of-line blocking.

    A poll returns whole record batches whatever `max.poll.records` says, and the next poll wants all of them
    acknowledged. So the surplus is held for a while and then released; one that was released too often would be set
    aside by the broker, so it is accepted instead and kept here.
    """

    def __init__(self, settings: Settings, group: str, consumer: Any = None) -> None:
        self._consumer = consumer or make_share_consumer(settings, group=group)
        self._consumer.subscribe([topic_name(settings, _TOPIC)])
        self._held: deque[Delivery] = deque()
        self._kept: deque[Delivery] = deque()
        self._outstanding: set[tuple[int, int]] = set()
        self._polled_at = 0.0

    def claim(self, limit: int, timeout_sec: float) -> list[Delivery]:
        self._let_go()
        if not self._held and not self._kept and not self._outstanding:
            # Also with limit 0 the membership lives on: heartbeats are the client's own thread's business.
            if limit == 0:
                return []
            self._poll(timeout_sec)
        taken: list[Delivery] = []
        for source in (self._kept, self._held):
            while source and len(taken) < limit:
                taken.append(source.popleft())
        return taken

    def _poll(self, timeout_sec: float) -> None:
        for message in self._consumer.poll(timeout_sec):
            if message.error() is not None:
                log.warning("offer queue", error=message.error().str())
                continue
            delivery = Delivery(header_type(message.headers()), message.value() or b"", message)
            self._outstanding.add(_place(delivery))
            self._held.append(delivery)
        self._polled_at = time.monotonic()

    def _let_go(self) -> None:
        if not self._held or time.monotonic() - self._polled_at < _HOLD_SEC:
            return
        surplus, self._held = list(self._held), deque()
        last_chance = [d for d in surplus if d.message.delivery_count() >= SHARE_DELIVERY_LIMIT - 1]
        self._settle(last_chance, [d for d in surplus if d not in last_chance])
        self._kept.extend(last_chance)
        log.info("surplus offers released", num=len(surplus) - len(last_chance), kept=len(self._kept))

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        self._settle(deliveries, [])

    def release(self, deliveries: Sequence[Delivery]) -> None:
        self._settle([], deliveries)

    def _settle(self, accepted: Sequence[Delivery], released: Sequence[Delivery]) -> None:
        """Acknowledge in one request, in the order of the log, and wait for the answer.

        The preview client merges what is committed while a request is under way in the order of the calls, and the
        broker refuses the whole request when its offsets do not ascend: every lock in it would run out.
        """
        choices = [(d, True) for d in accepted] + [(d, False) for d in released]
        choices = [(d, keep) for d, keep in choices if _place(d) in self._outstanding]
        if not choices:
            return
        for delivery, keep in sorted(choices, key=lambda c: _place(c[0])):
            self._outstanding.discard(_place(delivery))
            if keep:
                self._consumer.acknowledge(delivery.message)
            else:
                release_message(self._consumer, delivery.message)
        for place, error in self._consumer.commit_sync(_COMMIT_SEC).items():
            if error is not None:  # they come again when their lock runs out
                log.warning("acknowledgements refused", partition=place.partition, error=str(error))

    def close(self) -> None:
        self.release(list(self._held))
        self._consumer.close()


def _place(delivery: Delivery) -> tuple[int, int]:
    return delivery.message.partition(), delivery.message.offset()


class ConsumerGroupQueue:
    """A plain consumer group: as many workers as partitions get work, and a partition's offers wait for its worker.

    What comes in while every lane is busy, and what is released, waits here with the committed offset behind it.
    Partitions are not paused: a pause outlives a rebalance that takes the partition away and brings it back.
    """

    def __init__(self, settings: Settings, group: str) -> None:
        self._consumer = make_consumer(settings, group=group)
        self._topic = topic_name(settings, _TOPIC)
        self._consumer.subscribe([self._topic], on_revoke=self._forget, on_lost=self._forget)
        self._waiting: deque[Delivery] = deque()
        self._outstanding: dict[int, set[int]] = {}

    def _forget(self, _: Any, partitions: Sequence[Any]) -> None:
        gone = {p.partition for p in partitions}
        self._waiting = deque(d for d in self._waiting if d.message.partition() not in gone)
        for partition in gone:
            self._outstanding.pop(partition, None)

    def claim(self, limit: int, timeout_sec: float) -> list[Delivery]:
        wait = timeout_sec if limit and not self._waiting else 0.0
        for message in self._consumer.consume(max(limit, 1), wait):
            if message.error() is not None:
                log.warning("offer queue", error=message.error().str())
                continue
            self._outstanding.setdefault(message.partition(), set()).add(message.offset())
            self._waiting.append(Delivery(header_type(message.headers()), message.value() or b"", message))
        return [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        ends: dict[int, int] = {}
        for partition, offset in map(_place, deliveries):
            if partition in self._outstanding:  # else it has gone to another worker
                self._outstanding[partition].discard(offset)
                ends[partition] = max(ends.get(partition, 0), offset + 1)
        for partition, end in ends.items():
            try:
                commit_offset(self._consumer, self._topic, partition, min(self._outstanding[partition] or {end}))
            except ClientError as exc:  # the group is being rebalanced: whoever reads on sees these offers again
                log.info("offers not committed", partition=partition, error=str(exc))

    def release(self, deliveries: Sequence[Delivery]) -> None:
        self._waiting.extend(deliveries)

    def close(self) -> None:
        self._consumer.close()


def make_queue(settings: Settings) -> WorkQueue:
    """The queue that `kafka.share_groups` asks for. Raises ValueError, also when the broker lacks what is wanted."""
    wanted = settings.kafka.share_groups
    if wanted not in ("auto", "on", "off"):
        raise ValueError(f"kafka.share_groups = {wanted!r}: use auto, on or off")
    # One group per run: a run's workers never skip past another run's offers for good.
    group = f"workers.{settings.run.id}"
    if wanted != "off":
        if configure_share_group(settings, group):
            log.info("offers come through a share group", group=group)
            return ShareGroupQueue(settings, group)
        if wanted == "on":
            raise ValueError("kafka.share_groups = on: the broker has no share groups (4.2 or newer); use auto or off")
    log.info("offers come through a consumer group", group=group)
    return ConsumerGroupQueue(settings, group + ".plain")
