"""From records to inserts that can be repeated without harm.

Ingest is exact because an insert can be recognised when it comes again: a batch of one topic is known by its offset
bounds per partition, they are written down before the insert (as a note on the committed offset, so in Kafka itself),
and whoever reads the partition next replays a batch that was begun, with the same bounds and so the same token. A
server keeps the last tokens per table and drops what it has seen. Should a repeat slip through (bounds older than
that window), the raw tables replace rows of equal (_partition, _offset), and the views read them with FINAL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from consumers.clickhouse.columns import event_columns, table_name, to_arrow
from schemas.base import EVENTS
from schemas.codec import Codec, CodecError, UnknownSchemaError
from schemas.events import DeadLettered
from schemas.packing import PackingError
from streams.runtime.step import Record, make_dead_letter

SERVICE = "sink"

#: partition -> [first offset, last offset]
Bounds = dict[int, tuple[int, int]]


def format_bounds(bounds: Bounds) -> str:
    """`0:5-9+2:1-4`: partition, first and last offset."""
    return "+".join(f"{number}:{first}-{last}" for number, (first, last) in sorted(bounds.items()))


def parse_bounds(text: str) -> Bounds:
    """The bounds in `text`. Raises ValueError."""
    out: Bounds = {}
    for part in text.split("+"):
        number, _, offsets = part.partition(":")
        first, _, last = offsets.partition("-")
        out[int(number)] = (int(first), int(last))
    return out


@dataclass(frozen=True)
class Note:
    """What is written beside a committed offset: the database it refers to, and the batch that was begun there."""

    database: str
    pending: str = ""

    def format(self) -> str:
        """As text, without spaces."""
        return f"{self.database};{self.pending}"

    @staticmethod
    def parse(text: str) -> Note:
        """Of a note or of anything else: text that is no note refers to no database."""
        database, _, pending = text.partition(";")
        return Note(database, pending)


def schema_tag(event: str) -> str:
    """The part of a token that changes when an event's columns do."""
    return f"{event}.v{EVENTS[event].VERSION}.{len(event_columns(event))}"


@dataclass
class TopicBatch:
    """Decoded records of one topic, by event type, and the offsets they span."""

    topic: str
    bounds: Bounds = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    num_rows: int = 0
    num_bytes: int = 0
    #: What could not be decoded or fits no column; written with the batch.
    dead: list[DeadLettered] = field(default_factory=list)

    def note_offset(self, record: Record) -> None:
        """The batch spans this record, whatever became of it."""
        span = self.bounds.get(record.partition)
        self.bounds[record.partition] = (record.offset if span is None else span[0], record.offset)

    def add(self, event: str, row: dict[str, Any], num_bytes: int) -> None:
        """A decoded row."""
        self.rows.setdefault(event, []).append(row)
        self.num_rows += 1
        self.num_bytes += num_bytes

    def drop(self, partition: int) -> None:
        """Forget a partition that is no longer ours."""
        self.bounds.pop(partition, None)
        for event, rows in self.rows.items():
            self.rows[event] = [row for row in rows if row["_partition"] != partition]

    def token(self, event: str) -> str:
        """`topic:partition:first-last:schema`, with one `partition:first-last` per partition of the batch."""
        return f"{self.topic}:{format_bounds(self.bounds)}:{schema_tag(event)}"


class Decoder:
    """Records to batches. Learns writer schemas through `learn` when it meets one it does not know."""

    def __init__(self, codec: Codec, learn: Callable[[], None]) -> None:
        self._codec, self._learn = codec, learn

    def add(self, batch: TopicBatch, record: Record) -> None:
        """Decode one record into `batch`; what cannot be decoded goes to the dead letters.

        Raises UnknownSchemaError when the header names an event of this version in a schema that nobody published:
        its writer is newer, and skipping it would lose a row.
        """
        batch.note_offset(record)
        if record.value is None:
            return  # a tombstone of a compacted topic
        try:
            event, row = self._decode(record, record.value)
        except CodecError as exc:
            if isinstance(exc, UnknownSchemaError) and record.event_type in EVENTS:
                raise
            batch.dead.append(make_dead_letter(SERVICE, record, exc))
            return
        row["_topic"] = record.topic
        row["_partition"] = record.partition
        row["_offset"] = record.offset
        row["_timestamp"] = record.timestamp_ms
        row["_headers"] = record.headers
        row["_record"] = record  # should the row fit no column, the dead letter needs all of it
        batch.add(event, row, len(record.value))

    def _decode(self, record: Record, value: bytes) -> tuple[str, dict[str, Any]]:
        try:
            return self._codec.decode_record(value)
        except UnknownSchemaError:
            if record.event_type not in EVENTS:
                raise
        self._learn()
        return self._codec.decode_record(value)


_UNFIT = (PackingError, pa.ArrowException, OverflowError)


def build_tables(batch: TopicBatch) -> Iterator[tuple[str, str, Any]]:
    """(table, token, Arrow table) per event type; a row that fits no column goes to the dead letters."""
    for event, rows in batch.rows.items():
        if not rows:
            continue
        try:
            table = to_arrow(event, rows)
        except _UNFIT:
            fitting = [row for row in rows if _fits(event, row, batch.dead)]
            if not fitting:
                continue
            table = to_arrow(event, fitting)
        yield table_name(event), batch.token(event), table


def _fits(event: str, row: dict[str, Any], dead: list[DeadLettered]) -> bool:
    try:
        to_arrow(event, [row])
    except _UNFIT as exc:
        dead.append(make_dead_letter(SERVICE, row["_record"], exc))
        return False
    return True


def pending_batches(notes: Mapping[tuple[str, int], Note], database: str) -> dict[tuple[str, str], Bounds]:
    """(topic, bounds text) -> bounds of the batches that were begun and whose end is not known."""
    out: dict[tuple[str, str], Bounds] = {}
    for (topic, _), note in notes.items():
        if note.pending and note.database == database:
            out[topic, note.pending] = parse_bounds(note.pending)
    return out
