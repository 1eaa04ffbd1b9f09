"""The loop every counting stage runs in: read a batch, step, write outputs and offsets in one transaction.

State is never stored: on assignment it is made again by re-reading the inputs from the low watermark to the
committed offsets through the same `step`, outputs discarded (they were committed with those offsets).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import structlog

from infra.kafka import KafkaUnavailableError, headers_of, make_codec
from infra.settings import Settings
from schemas.base import Event
from schemas.codec import Codec, CodecError, UnknownSchemaError
from schemas.events import DeadLettered
from streams.runtime.kafka_log import KafkaLog
from streams.runtime.log import AbortedError, Faults, Log, LogLostError, Outgoing, TopicPart, ignore_faults
from streams.runtime.metrics import LoopMetrics
from streams.runtime.step import Record, Stage, StepResult, step

S = TypeVar("S")
log = structlog.get_logger()


@dataclass(frozen=True)
class LoopOptions:
    """How a loop trades latency for throughput."""

    #: Records of one batch, and so of one transaction.
    max_records: int = 2000
    #: Wait for the first record of a batch; also how often an idle loop looks at its membership and its stop event.
    idle_wait_sec: float = 0.25
    #: Offsets of batches without outputs are committed at most this late. They cost nothing but re-reading.
    commit_interval_sec: float = 0.5
    #: How often `tick` is called.
    tick_interval_sec: float = 0.25
    #: No tick while more records than this are unread.
    tick_max_lag: int = 64
    #: How long a stopping loop tries to commit its last batch; what it cannot commit is read again at the next start.
    drain_timeout_sec: float = 10.0
    #: An instance that was not heard of for so long loses its partitions to others (the broker's least is 6).
    session_timeout_sec: float = 10.0


@dataclass
class _Unit(Generic[S]):
    """One state and what it has not committed yet."""

    state: S
    offsets: dict[TopicPart, int] = field(default_factory=dict)
    batch: list[Outgoing] = field(default_factory=list)


class Loop(Generic[S]):
    """Runs a stage on a log until told to stop. See `TransactionalLoop` for Kafka, `MemoryLoop` for tests."""

    def __init__(
        self,
        stage: Stage[S],
        client: Log,
        codec: Codec,
        *,
        instance: int = 0,
        options: LoopOptions | None = None,
        tick: Callable[[S], list[Event]] | None = None,
        faults: Faults = ignore_faults,
    ) -> None:
        """`tick(state)`, for stages of scope "single": called every `tick_interval_sec`, returns source events (facts
        of the clock) that are written in the loop's next transaction; it must not change the state.
        """
        if tick is not None and stage.scope != "single":
            raise ValueError(f"stage {stage.name}: only a stage of scope 'single' can have a tick")
        self._stage, self._client, self._codec = stage, client, codec
        self._options = options or LoopOptions()
        self._tick, self._faults = tick, faults
        self._metrics = LoopMetrics(stage.name, instance)
        self._log = log.bind(service=stage.name, instance=instance)
        self._units: dict[int, _Unit[S]] = {}
        self._assigned: list[int] = []
        self._ticked: list[Outgoing] = []
        self._last_commit = self._last_tick = self._last_lag = 0.0
        self._joined = False

    # -- what others see

    @property
    def ready(self) -> bool:
        """The group was joined and every assigned unit is restored (also when there is none for this instance)."""
        return self._joined and not self._assigned

    @property
    def states(self) -> dict[int, S]:
        """Unit number -> its state. Read it from the loop's own thread, or when the loop is at rest."""
        return {number: unit.state for number, unit in self._units.items()}

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set; then the batch in hand is finished and committed.

        Raises KafkaUnavailableError when there is no log at the start (later it is waited for), FencedError when
        another process took over this instance, LogSetupError when an input is missing, UnknownSchemaError when an
        input holds events of a schema nobody published.
        """
        was_open = False
        while not stop.is_set():
            try:
                self._client.open(self._stage.name, self._stage.inputs, self._stage.scope, self._on_revoked, stop)
                self._learn_schemas()
                was_open = True
                self._run_connected(stop)
                return
            except (LogLostError, KafkaUnavailableError) as exc:
                if isinstance(exc, KafkaUnavailableError) and not was_open:
                    raise
                self._log.warning(
                    "log_lost", detail=str(exc), remedy="connecting again; state is restored from the log"
                )
                stop.wait(1.0)
            finally:
                self._joined = False
                self._units.clear()
                self._assigned.clear()
                self._metrics.units.set(0)
                self._client.close()

    # -- one connection

    def _run_connected(self, stop: threading.Event) -> None:
        self._last_commit = time.monotonic()
        while not stop.is_set():
            self._poll_membership()
            if self._assigned:
                self._adopt(stop)
                continue
            records = self._client.fetch(self._options.max_records, self._options.idle_wait_sec)
            began = time.monotonic()
            self._apply_batch(records)
            self._run_tick(began)
            if self._must_commit(began):
                self._commit(stop)
                self._metrics.batch_sec.observe(time.monotonic() - began)
            if began - self._last_lag > 5.0:
                self._last_lag = began
                self._report_lag()
        self._commit(stop)

    def _poll_membership(self) -> None:
        self._assigned.extend(self._client.poll_membership())
        self._joined = self._client.joined

    def _on_revoked(self, units: list[int]) -> None:
        for number in units:
            self._units.pop(number, None)
            if number in self._assigned:
                self._assigned.remove(number)
        self._metrics.units.set(len(self._units))
        self._log.info("units_revoked", units=units)

    def _unit_of(self, record: Record) -> int:
        return record.partition if self._stage.scope == "partition" else 0

    # -- restoring

    def _adopt(self, stop: threading.Event) -> None:
        """Restore the states of newly assigned units, then fetch on from their committed offsets."""
        numbers = self._assigned[:]
        began = time.monotonic()
        committed = self._client.committed(numbers)
        for number in numbers:
            self._units[number] = _Unit(self._stage.initial())
        num_records = 0
        with closing(self._client.read_below({tp: offset for tp, offset in committed.items() if offset})) as history:
            for records in history:
                num_records += len(records)
                for number, group in self._by_unit(records).items():
                    for _ in self._step_all(self._units[number], group):
                        pass  # these outputs were committed together with the offsets
                self._poll_membership()
                if stop.is_set() or any(number not in self._units for number in numbers):
                    break
        if stop.is_set():
            return
        kept = [number for number in numbers if number in self._units]
        if len(kept) < len(numbers):  # a unit was taken away meanwhile: begin again with the others
            for number in kept:
                del self._units[number]
            return
        self._assigned = self._assigned[len(numbers) :]
        self._client.resume(committed)
        self._metrics.restored.inc(num_records)
        self._metrics.units.set(len(self._units))
        self._log.info(
            "units_restored", units=numbers, num_records=num_records, seconds=round(time.monotonic() - began, 3)
        )

    # -- one batch

    def _by_unit(self, records: Iterable[Record]) -> dict[int, list[Record]]:
        groups: dict[int, list[Record]] = defaultdict(list)
        for record in records:
            number = self._unit_of(record)
            if number in self._units:
                groups[number].append(record)
        return groups

    def _step_all(self, unit: _Unit[S], records: list[Record]) -> Iterator[StepResult[S]]:
        """Step through all records; an unknown writer schema is looked up on the `schemas` topic once."""
        looked_up = -1
        done = 0
        while done < len(records):
            result = step(self._stage, self._codec, unit.state, records[done:] if done else records)
            unit.state = result.state
            yield result
            done += result.num_read
            if result.blocked is not None:
                if looked_up == done:
                    at = records[done]
                    raise UnknownSchemaError(
                        f"{at.topic}/{at.partition} offset {at.offset} ({at.event_type}): {result.blocked}; nothing "
                        "was skipped. Upgrade this service, or publish the writer's schema to the `schemas` topic"
                    )
                looked_up = done
                self._learn_schemas()

    def _apply_batch(self, records: list[Record]) -> None:
        if not records:
            return
        for topic, num in Counter(record.topic for record in records).items():
            self._metrics.count_in(topic, num)
        for number, group in self._by_unit(records).items():
            unit = self._units[number]
            for result in self._step_all(unit, group):
                unit.batch.extend(map(self._encode, result.outputs, result.traces))
                unit.batch.extend(map(self._encode_dead, result.dead))
            for record in group:
                unit.offsets[record.topic, record.partition] = record.offset + 1

    def _encode(self, event: Event, trace: bytes | None) -> Outgoing:
        headers = headers_of(event)
        if trace is not None:
            headers.append(("traceparent", trace))
        return Outgoing(event.TOPIC, event.key.encode(), self._codec.encode(event), tuple(headers))

    def _encode_dead(self, letter: DeadLettered) -> Outgoing:
        self._metrics.dead_letters.inc()
        self._log.warning(
            "dead_letter",
            topic=letter.original_topic,
            partition=letter.original_partition,
            offset=letter.original_offset,
            detail=letter.detail,
        )
        return Outgoing(letter.TOPIC, letter.original_key_bytes, self._codec.encode(letter), tuple(headers_of(letter)))

    def _run_tick(self, now: float) -> None:
        if self._tick is None or 0 not in self._units or now - self._last_tick < self._options.tick_interval_sec:
            return
        self._last_tick = now
        # A clock that judges old state (after a restart, say) would record what the unread records contradict.
        lag = self._client.lag().values()
        if any(num is None for num in lag) or sum(num or 0 for num in lag) > self._options.tick_max_lag:
            return
        self._ticked.extend(self._encode(event, None) for event in self._tick(self._units[0].state))

    # -- committing

    def _must_commit(self, now: float) -> bool:
        if self._ticked or any(unit.batch for unit in self._units.values()):
            return True
        return now - self._last_commit >= self._options.commit_interval_sec and any(
            unit.offsets for unit in self._units.values()
        )

    def _commit(self, stop: threading.Event) -> None:
        """One transaction for all that is pending; tried again, less what was revoked, until it is committed."""
        deadline: float | None = None
        pause_sec = 0.05
        while True:
            batch = [*self._ticked, *(out for unit in self._units.values() for out in unit.batch)]
            offsets = {tp: offset for unit in self._units.values() for tp, offset in unit.offsets.items()}
            if not batch and not offsets:
                return
            try:
                self._client.commit(batch, offsets, self._faults)
                break
            except AbortedError as exc:
                self._metrics.aborted.inc()
                self._log.warning("transaction_aborted", detail=str(exc), remedy="the same batch is tried again")
            if stop.is_set():
                deadline = deadline or time.monotonic() + self._options.drain_timeout_sec
                if time.monotonic() > deadline:
                    self._log.warning("drain_gave_up", num_outputs=len(batch), remedy="read again at the next start")
                    return
            time.sleep(pause_sec)
            pause_sec = min(pause_sec * 2, 1.0)
            self._poll_membership()
        self._ticked.clear()
        for unit in self._units.values():
            unit.batch.clear()
            unit.offsets.clear()
        self._last_commit = time.monotonic()
        self._metrics.committed.inc()
        for topic, num in Counter(out.topic for out in batch).items():
            self._metrics.count_out(topic, num)

    # -- schemas and lag

    def _learn_schemas(self) -> None:
        for schema in self._client.writer_schemas():
            try:
                self._codec.add_schema(schema)
            except CodecError as exc:  # an event type of a newer version: matters only if this stage is sent one
                self._log.debug("schema_not_known_here", detail=str(exc))

    def _report_lag(self) -> None:
        lag: Counter[str] = Counter()
        for (topic, _), num in self._client.lag().items():
            lag[topic] += num or 0
        for topic, num in lag.items():
            self._metrics.set_lag(topic, num)


class TransactionalLoop(Loop[S]):
    """A stage on Kafka."""

    def __init__(
        self,
        stage: Stage[S],
        settings: Settings,
        instance: int = 0,
        *,
        options: LoopOptions | None = None,
        tick: Callable[[S], list[Event]] | None = None,
        faults: Faults = ignore_faults,
    ) -> None:
        super().__init__(
            stage,
            KafkaLog(settings, instance, session_timeout_sec=(options or LoopOptions()).session_timeout_sec),
            make_codec(settings),
            instance=instance,
            options=options,
            tick=tick,
            faults=faults,
        )
