"""The one function through which events become state and outputs, live and in replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from schemas.base import Event
from schemas.codec import HEADER_TYPE, Codec, CodecError, UnknownSchemaError
from schemas.events import DeadLettered
from schemas.ids import RunId, derive_id

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Record:
    """A Kafka record, whichever log it came from. `topic` is the catalogue name, without prefix."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp_ms: int = 0

    @property
    def event_type(self) -> str | None:
        """The event type in the headers, readable without decoding."""
        kind = self.header(HEADER_TYPE)
        return None if kind is None else kind.decode("utf-8", "replace")

    def header(self, name: str) -> bytes | None:
        """The first header of that name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Stage(Protocol[S]):
    """A fold: the pure core of a service.

    `apply` has no clock, no I/O and no randomness. It may update `state` in place and returns it. What it emits
    depends only on the *set* of events applied so far, not on their order across partitions nor on repeats: an
    output is emitted when the facts it needs are complete, once. That is what makes restoring by re-reading exact.
    """

    #: Service name: consumer group, transactional id and `producer` of its events.
    name: str
    #: Catalogue topics it reads.
    inputs: tuple[str, ...]
    #: Event types it applies; others are skipped undecoded.
    wanted: frozenset[str]
    #: "partition": one state per partition number of its co-partitioned inputs; "single": one state for all.
    scope: str

    def initial(self) -> S:
        """The state before any event."""

    def apply(self, state: S, event: Event) -> tuple[S, list[Event]]:
        """The next state and the derived events."""


@dataclass
class StepResult(Generic[S]):
    """What a batch of records led to."""

    state: S
    outputs: list[Event] = field(default_factory=list)
    #: For each output, the W3C trace context of the record that completed it, when that had one.
    traces: list[bytes | None] = field(default_factory=list)
    dead: list[DeadLettered] = field(default_factory=list)
    num_applied: int = 0
    #: Records of the batch that are done with; fewer than were given only when `blocked` is set.
    num_read: int = 0
    #: The writer schema of record `num_read` is unknown. The state holds everything before it: learn the schema and
    #: go on from that record.
    blocked: UnknownSchemaError | None = None


class PoisonError(Exception):
    """Raised by `apply` for an event that is well-formed and cannot be applied; it goes to the dead letters."""


def step(stage: Stage[S], codec: Codec, state: S, records: Sequence[Record]) -> StepResult[S]:
    """Apply records in order. What cannot be decoded or applied becomes a dead letter and does not block.

    One case does block: a record whose header names an event this stage reads, in a schema nobody published. Its
    writer is newer than this reader, and skipping it would derive wrong facts.

    `apply` must leave the state untouched when it raises PoisonError; any other exception is a bug and stops the
    service.
    """
    result = StepResult(state)
    wanted = stage.wanted
    for record in records:
        kind = record.event_type
        if (kind is not None and kind not in wanted) or record.value is None:
            result.num_read += 1  # another event, or a tombstone of a compacted topic
            continue
        try:
            event = codec.decode(record.value)
            if type(event).__name__ in wanted:
                result.state, outputs = stage.apply(result.state, event)
                result.num_applied += 1
                if outputs:
                    result.outputs.extend(outputs)
                    result.traces.extend([record.header("traceparent")] * len(outputs))
        except (CodecError, PoisonError) as exc:
            if kind is not None and isinstance(exc, UnknownSchemaError):
                result.blocked = exc
                return result
            result.dead.append(make_dead_letter(stage.name, record, exc))
        result.num_read += 1
    return result


def make_dead_letter(service: str, record: Record, error: Exception) -> DeadLettered:
    """A dead letter with all that is needed to put the record back. Deterministic: replay makes the same one."""
    return DeadLettered(
        event_id=derive_id("DeadLettered", service, record.topic, str(record.partition), str(record.offset)),
        run_id=RunId(""),
        occurred_at=record.timestamp_ms,
        producer=service,
        service=service,
        original_topic=record.topic,
        original_partition=record.partition,
        original_offset=record.offset,
        original_timestamp_ms=record.timestamp_ms,
        original_key=(record.key or b"").decode("utf-8", "replace"),
        original_key_bytes=record.key,
        original_value=record.value,
        original_headers=dict(record.headers),
        error_class=type(error).__name__,
        detail=str(error),
    )
