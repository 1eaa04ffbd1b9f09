"""Deriving topics again from source records, and comparing them with what the log holds. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.base import Event
from schemas.codec import HEADER_TYPE, Codec, CodecError
from streams.runtime.partitions import partition_of
from streams.runtime.step import Record, Stage, step

#: Field differences listed per event.
MAX_FIELDS = 8


@dataclass(frozen=True)
class FieldDifference:
    """One field, by its path in the event, e.g. `segments[0].mask`."""

    path: str
    recorded: str
    derived: str


@dataclass(frozen=True)
class Difference:
    """An event that the log and the derivation do not agree on."""

    topic: str
    event_type: str
    event_id: str
    key: str
    #: missing: derived again, not in the log. extra: in the log, not derivable. repeated: in the log more than once.
    kind: str
    fields: tuple[FieldDifference, ...] = ()

    def __str__(self) -> str:
        what = {
            "missing": "is not in the log",
            "extra": "is in the log and cannot be derived",
            "repeated": "is in the log more than once",
            "different": "differs",
        }[self.kind]
        lines = [f"{self.topic}: {self.event_type} of {self.key} ({self.event_id}) {what}"]
        lines += [f"    {f.path}: recorded {f.recorded}, derived {f.derived}" for f in self.fields]
        return "\n".join(lines)


@dataclass
class Comparison:
    """Derived events of one topic against the log's."""

    #: Event type -> events derived again.
    num_compared: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)


def derive_topics(
    stages: Sequence[Stage[Any]],
    sources: Mapping[str, Sequence[Record]],
    codec: Codec,
    num_partitions: Mapping[str, int],
) -> dict[str, list[Record]]:
    """Everything the stages emit, by topic, in the order of the stages. A stage reads what earlier ones derived.

    Raises the codec's UnknownSchemaError when a source event's schema is not known.
    """
    derived: dict[str, list[Record]] = defaultdict(list)
    for stage in stages:
        units: dict[int, list[Record]] = defaultdict(list)
        for topic in stage.inputs:
            for record in (*sources.get(topic, ()), *derived.get(topic, ())):
                units[record.partition if stage.scope == "partition" else 0].append(record)
        for number in sorted(units):
            result = step(stage, codec, stage.initial(), units[number])
            if result.blocked is not None:
                raise result.blocked
            for event in result.outputs:
                key = event.key.encode()
                partition = partition_of(key, num_partitions[event.TOPIC])
                header = (HEADER_TYPE, type(event).__name__.encode())
                offset = len(derived[event.TOPIC])
                derived[event.TOPIC].append(
                    Record(event.TOPIC, partition, offset, key, codec.encode(event), (header,), event.occurred_at)
                )
    return derived


def select_run(records: Iterable[Record], types: frozenset[str], codec: Codec, run_id: str) -> Iterator[Record]:
    """Records that hold an event of these types and this run. What cannot be decoded is nobody's."""
    for record in records:
        if record.value is None or record.event_type not in types:
            continue
        try:
            event = codec.decode(record.value)
        except CodecError:
            continue
        if event.run_id == run_id:
            yield record


def compare_topic(recorded: Iterable[Record], derived: Iterable[Record], codec: Codec) -> Comparison:
    """Compare by event id, byte for byte."""
    comparison = Comparison()
    in_log: dict[str, Record] = {}
    for record in recorded:
        event = codec.decode(record.value or b"")
        if event.event_id in in_log:
            comparison.differences.append(_difference(record.topic, event, "repeated"))
        in_log.setdefault(event.event_id, record)
    again: dict[str, Record] = {}
    for record in derived:
        event = codec.decode(record.value or b"")
        comparison.num_compared[type(event).__name__] += 1
        if event.event_id in again:
            comparison.differences.append(_difference(record.topic, event, "repeated"))
        again[event.event_id] = record
        found = in_log.get(event.event_id)
        if found is None:
            comparison.differences.append(_difference(record.topic, event, "missing"))
        elif found.value != record.value:
            fields = tuple(compare_events(codec.decode(found.value or b""), event))
            comparison.differences.append(_difference(record.topic, event, "different", fields))
    for event_id, record in in_log.items():
        if event_id not in again:
            comparison.differences.append(_difference(record.topic, codec.decode(record.value or b""), "extra"))
    return comparison


def _difference(topic: str, event: Event, kind: str, fields: tuple[FieldDifference, ...] = ()) -> Difference:
    return Difference(topic, type(event).__name__, event.event_id, event.key, kind, fields)


def compare_events(recorded: Event, derived: Event) -> list[FieldDifference]:
    """The first fields that differ; when none does, the bytes differ by their encoding."""
    found = list(_walk("", recorded, derived))
    if not found:
        return [FieldDifference("(encoding)", "another schema version or framing", "the current one")]
    return found[:MAX_FIELDS]


def _walk(path: str, left: Any, right: Any) -> Iterator[FieldDifference]:
    if dataclasses.is_dataclass(left) and type(left) is type(right):
        for entry in dataclasses.fields(left):
            name = f"{path}.{entry.name}" if path else entry.name
            yield from _walk(name, getattr(left, entry.name), getattr(right, entry.name))
    elif isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            yield from _walk(f"{path}[{index}]", a, b)
    elif left != right:
        yield FieldDifference(path or type(left).__name__, _show(left, right), _show(right, left))


def _show(value: Any, other: Any) -> str:
    """A value, short; of packed bytes, from the first byte that differs."""
    if isinstance(value, bytes) and isinstance(other, bytes):
        at = next(
            (i for i, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), min(len(value), len(other))
        )
        return f"{len(value)} bytes, from byte {at}: {value[at : at + 12].hex() or '(end)'}"
    if isinstance(value, tuple):
        return f"{len(value)} items"
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
