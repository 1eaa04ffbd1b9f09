"""A worker's process: claims offers, leases them, runs attempts on its lanes, keeps leases alive, writes the facts.

Threads: the main one claims, renews and starts containers (they die with it); one per lane runs attempts; one serves
Kafka's delivery reports.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from infra.kafka import ClientError, DeliveryError, EventWriter, make_codec
from infra.settings import Settings
from producers.trials.attempt import AttemptRunner, Claim
from producers.trials.queue import Delivery, WorkQueue
from schemas.base import Event
from schemas.codec import CodecError
from schemas.events import GroupRevoked, LeaseRenewed, TrialLeased, TrialOffered
from schemas.ids import GroupId, TrialId, make_event_id, now_ms

log = structlog.get_logger()

_ACK_TIMEOUT_SEC = 60.0
_IDLE_SEC = 0.2


class EventLog:
    """The worker's events to Kafka, from any thread; a thread of its own serves the delivery reports."""

    def __init__(self, settings: Settings) -> None:
        self._writer = EventWriter(settings)
        self._lock = threading.Lock()  # the codec is not thread-safe
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve_reports, name="delivery-reports", daemon=True)
        self._thread.start()
        #: The first event that could not be written; the worker must stop.
        self.failed: Exception | None = None

    def _serve_reports(self) -> None:
        while not self._stop.is_set():
            self._writer.poll(0.1)

    def write(self, event: Event) -> None:
        """Queue an event; a failure shows in `failed`."""
        with self._lock:
            self._writer.write(event, on_ack=self._note)

    def _note(self, error: Exception | None) -> None:
        if error is not None and self.failed is None:
            self.failed = error

    def write_and_wait(self, events: Sequence[Event]) -> None:
        """Write and wait until these are acknowledged. Raises DeliveryError.

        The producer is idempotent and keeps a partition's order, so what was written to the same topic under the same
        key before is then in the log as well.
        """
        done, left, errors = threading.Event(), [len(events)], []

        def acknowledged(error: Exception | None) -> None:
            if error is not None:
                errors.append(error)
            left[0] -= 1  # reports are served by one thread at a time
            if left[0] == 0:
                done.set()

        with self._lock:
            for event in events:
                self._writer.write(event, on_ack=acknowledged)
        if not done.wait(_ACK_TIMEOUT_SEC):
            raise DeliveryError(f"{left[0]} events were not acknowledged by Kafka within {_ACK_TIMEOUT_SEC} s")
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Flush and stop."""
        self._writer.flush()
        self._stop.set()
        self._thread.join()


@dataclass
class _Lease:
    claim: Claim
    renewed_at: float


class Worker:
    """Claims and runs trials until stopped."""

    def __init__(
        self, settings: Settings, instance: int, work: WorkQueue, runner: AttemptRunner, events: EventLog
    ) -> None:
        self._settings, self._work, self._runner, self._events = settings, work, runner, events
        self._producer = f"worker/{instance}"
        self.worker_id = f"{self._producer}@{socket.gethostname()}:{os.getpid()}"
        self._codec = make_codec(settings)
        self._lanes: queue.SimpleQueue[Claim | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._lane_free = threading.Event()
        self._newest_attempt: dict[TrialId, int] = {}
        self._revoked: set[GroupId] = set()
        self._closing = False
        self.error: BaseException | None = None
        self.num_finished = 0
        self._threads = [
            threading.Thread(target=self._lane, name=f"lane-{i}", daemon=True) for i in range(settings.trials.lanes)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_running(self) -> int:
        """Trials held at the moment."""
        with self._lock:
            return len(self._leases)

    def tick(self, claim: bool = True) -> None:
        """One round of the main loop: claim for free lanes, keep leases alive. `claim` False: only the latter."""
        if self.error is not None:
            raise RuntimeError("a lane failed") from self.error
        if self._events.failed is not None:
            raise self._events.failed
        free = self._settings.trials.lanes - self.num_running if claim else 0
        self._lane_free.clear()
        try:
            deliveries = self._work.claim(free, _IDLE_SEC)
        except ClientError as exc:
            log.warning("offers cannot be read; trying again", error=str(exc))
            deliveries = []
            self._lane_free.wait(_IDLE_SEC)
        self._take(deliveries)
        self._renew()
        if free == 0:
            self._lane_free.wait(_IDLE_SEC)

    def _take(self, deliveries: Sequence[Delivery]) -> None:
        if not deliveries:
            return
        claims = [Claim(o, uuid.uuid4().hex, self.worker_id) for d in deliveries if (o := self._wanted(d)) is not None]
        if claims:
            self._events.write_and_wait([self._leased(c) for c in claims])
        self._work.acknowledge(deliveries)
        with self._lock:
            for claim in claims:
                self._leases[claim.lease_id] = _Lease(claim, time.monotonic())
        for claim in claims:
            self._lanes.put(claim)

    def _wanted(self, delivery: Delivery) -> TrialOffered | None:
        """The offer of a record, if it is one of this run that is worth running."""
        if delivery.event_type not in ("TrialOffered", "GroupRevoked"):
            return None
        try:
            event = self._codec.decode(delivery.value)
        except CodecError as exc:
            # Another reader of this topic keeps it as a dead letter; the lease clock offers the trial again.
            log.error("an offer cannot be read", error=str(exc))
            return None
        if event.run_id != self._settings.run.id:
            return None
        if isinstance(event, GroupRevoked):
            self._revoked.add(event.group_id)
            return None
        if not isinstance(event, TrialOffered) or event.group_id in self._revoked:
            return None
        if self._newest_attempt.get(event.trial_id, 0) >= event.attempt:
            return None
        self._newest_attempt[event.trial_id] = event.attempt
        return event

    def _leased(self, claim: Claim) -> TrialLeased:
        now = now_ms()
        return TrialLeased(
            event_id=make_event_id(now),
            run_id=claim.offer.run_id,
            occurred_at=now,
            producer=self._producer,
            trial_id=claim.offer.trial_id,
            attempt=claim.offer.attempt,
            lease_id=claim.lease_id,
            worker_id=claim.worker_id,
            deadline_ms=now + self._lease_ms,
        )

    @property
    def _lease_ms(self) -> int:
        return int(self._settings.trials.lease_sec * 1000)

    def _renew(self) -> None:
        moment = time.monotonic()
        with self._lock:
            due = [x for x in self._leases.values() if moment - x.renewed_at > self._settings.trials.lease_sec / 3]
        for lease in due:
            now = now_ms()
            self._events.write(
                LeaseRenewed(
                    event_id=make_event_id(now),
                    run_id=lease.claim.offer.run_id,
                    occurred_at=now,
                    producer=self._producer,
                    trial_id=lease.claim.offer.trial_id,
                    attempt=lease.claim.offer.attempt,
                    lease_id=lease.claim.lease_id,
                    deadline_ms=now + self._lease_ms,
                )
            )
            lease.renewed_at = moment

    def _lane(self) -> None:
        while (claim := self._lanes.get()) is not None:
            try:
                facts = self._runner.run(claim)
                if self._closing:
                    continue  # it was cut short by our own end: its lease lapses, the trial is offered again
                self._events.write_and_wait(facts)
                self.num_finished += 1
            except BaseException as exc:  # a lane must not die alone: the main loop ends the worker
                if self.error is None:
                    self.error = exc
                    log.exception("lane failed", trial=claim.offer.trial_id)
            finally:
                with self._lock:
                    self._leases.pop(claim.lease_id, None)
                self._lane_free.set()

    def drain(self, timeout_sec: float) -> None:
        """Let running trials end, for at most `timeout_sec`; the others are left to their leases."""
        deadline = time.monotonic() + timeout_sec
        while self.num_running and time.monotonic() < deadline and self.error is None:
            self._renew()
            self._lane_free.wait(_IDLE_SEC)
            self._lane_free.clear()
        self._closing = True
        for _ in self._threads:
            self._lanes.put(None)
