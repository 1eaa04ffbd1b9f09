"""From records to inserts that can be repeated without harm.

Ingest is exact because an insert can be recognised when it comes again: a batch of one topic is known by its offset
bounds per partition, they are written down before the insert (as a note on the committed offset, so in Kafka itself),
and whoever reads the partition next replays a batch that was begun, with the same bounds and so the same token. A
server keeps the last tokens per table and drops what it has seen. Should a repeat slip through (bounds older than
that window), the raw tables replace rows of equal (_partition, _offset), and the views read them with FINAL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import pyarrow as pa

from consumers.clickhouse.columns import event_columns, table_name, to_arrow, value_names
from schemas.base import EVENTS
from schemas.codec import Codec, CodecError, UnknownSchemaError
from schemas.events import DeadLettered
from schemas.packing import PackingError
from streams.runtime.step import Record, make_dead_letter

SERVICE = "sink"

_ROWS_AT_ONCE = 128

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


class EventRows:
    """Decoded records of one event type, kept as columns.

    Some rows at a time are turned into columns while they are still in the processor's cache: that takes a tenth of
    what it takes to collect each column from thousands of rows.
    """

    def __init__(self, event: str) -> None:
        names = value_names(event)
        self._partition = names.index("_partition")
        self._columns: list[list[Any]] = [[] for _ in names]
        self._recent: list[tuple[Any, ...]] = []
        self._records: list[Record] = []

    def append(self, values: tuple[Any, ...], record: Record) -> None:
        """Add a row: the values of the event's fields, in order of the schema."""
        self._recent.append(
            (*values, record.topic, record.partition, record.offset, record.timestamp_ms, record.headers)
        )
        self._records.append(record)
        if len(self._recent) == _ROWS_AT_ONCE:
            self._turn()

    def _turn(self) -> None:
        for column, values in zip(self._columns, zip(*self._recent, strict=True), strict=False):
            column.extend(values)
        self._recent.clear()

    @property
    def records(self) -> Sequence[Record]:
        """What each row was decoded from: should it fit no column, the dead letter needs all of it."""
        return self._records

    def columns(self) -> list[list[Any]]:
        """The values, in order of `value_names`."""
        self._turn()
        return self._columns

    def only(self, number: int) -> list[list[Any]]:
        """The columns of one row."""
        return [column[number : number + 1] for column in self.columns()]

    def keep(self, flags: Sequence[bool]) -> None:
        """Forget the rows whose flag is false."""
        self._columns = [list(compress(column, flags)) for column in self.columns()]
        self._records = list(compress(self._records, flags))

    def drop(self, partition: int) -> None:
        """Forget the rows of a partition."""
        self.keep([number != partition for number in self.columns()[self._partition]])


@dataclass
class TopicBatch:
    """Decoded records of one topic, by event type, and the offsets they span."""

    topic: str
    bounds: Bounds = field(default_factory=dict)
    rows: dict[str, EventRows] = field(default_factory=dict)
    num_rows: int = 0
    num_bytes: int = 0
    #: What could not be decoded or fits no column; written with the batch.
    dead: list[DeadLettered] = field(default_factory=list)

    def note_offset(self, record: Record) -> None:
        """The batch spans this record, whatever became of it."""
        span = self.bounds.get(record.partition)
        self.bounds[record.partition] = (record.offset if span is None else span[0], record.offset)

    def add(self, event: str, values: tuple[Any, ...], record: Record, num_bytes: int) -> None:
        """A decoded row."""
        rows = self.rows.get(event)
        if rows is None:
            rows = self.rows[event] = EventRows(event)
        rows.append(values, record)
        self.num_rows += 1
        self.num_bytes += num_bytes

    def drop(self, partition: int) -> None:
        """Forget a partition that is no longer ours."""
        self.bounds.pop(partition, None)
        for rows in self.rows.values():
            rows.drop(partition)

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
            event, values = self._decode(record, record.value)
        except CodecError as exc:
            if isinstance(exc, UnknownSchemaError) and record.event_type in EVENTS:
                raise
            batch.dead.append(make_dead_letter(SERVICE, record, exc))
            return
        batch.add(event, values, record, len(record.value))

    def _decode(self, record: Record, value: bytes) -> tuple[str, tuple[Any, ...]]:
        try:
            return self._codec.decode_values(value)
        except UnknownSchemaError:
            if record.event_type not in EVENTS:
                raise
        self._learn()
        return self._codec.decode_values(value)


_UNFIT = (PackingError, pa.ArrowException, OverflowError)


def build_tables(batch: TopicBatch) -> Iterator[tuple[str, str, Any]]:
    """(table, token, Arrow table) per event type; a row that fits no column goes to the dead letters."""
    for event, rows in batch.rows.items():
        try:
            table = to_arrow(event, rows.columns())
        except _UNFIT:
            rows.keep([_fits(event, rows, number, batch.dead) for number in range(len(rows.records))])
            table = to_arrow(event, rows.columns())
        if table.num_rows:
            yield table_name(event), batch.token(event), table


def _fits(event: str, rows: EventRows, number: int, dead: list[DeadLettered]) -> bool:
    try:
        to_arrow(event, rows.only(number))
    except _UNFIT as exc:
        dead.append(make_dead_letter(SERVICE, rows.records[number], exc))
        return False
    return True


def pending_batches(notes: Mapping[tuple[str, int], Note], database: str) -> dict[tuple[str, str], Bounds]:
    """(topic, bounds text) -> bounds of the batches that were begun and whose end is not known."""
    out: dict[tuple[str, str], Bounds] = {}
    for (topic, _), note in notes.items():
        if note.pending and note.database == database:
            out[topic, note.pending] = parse_bounds(note.pending)
    return out
