"""The one function through which events become state and outputs, live and in replay."""

from __future__ import annotations

from collections.abc import Iterable
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
        return next((v.decode("utf-8", "replace") for k, v in self.headers if k == HEADER_TYPE), None)


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
    dead: list[DeadLettered] = field(default_factory=list)
    num_applied: int = 0


class PoisonError(Exception):
    """Raised by `apply` for an event that is well-formed and cannot be applied; it goes to the dead letters."""


def step(stage: Stage[S], codec: Codec, state: S, records: Iterable[Record]) -> StepResult[S]:
    """Apply records in order. What cannot be decoded or applied becomes a dead letter and does not block.

    `apply` must leave the state untouched when it raises PoisonError; any other exception is a bug and stops the service.
    """
    result = StepResult(state)
    for record in records:
        kind = record.event_type
        if kind is not None and kind not in stage.wanted:
            continue
        try:
            if record.value is None:
                continue  # a tombstone of a compacted topic
            event = codec.decode(record.value)
            if type(event).__name__ not in stage.wanted:
                continue
            result.state, outputs = stage.apply(result.state, event)
        except UnknownSchemaError:
            raise  # the writer is newer: stop before skipping what a newer version would read
        except (CodecError, PoisonError) as exc:
            result.dead.append(make_dead_letter(stage.name, record, exc))
            continue
        result.num_applied += 1
        result.outputs.extend(outputs)
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
