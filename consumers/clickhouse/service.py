"""The sink service: every topic of the catalogue into ClickHouse, exactly once, about a second behind.

Order of things for each batch: note its bounds (a commit that moves no offset), insert, commit the offsets. After a
kill at any point the next holder of the partitions finds the note, replays that batch with the same bounds and so the
same deduplication tokens, and goes on. The note also names the database, by its UUID: a database that was removed or
exchanged for another is filled from the beginning of the log.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import structlog

from consumers.clickhouse.columns import all_events, event_columns
from consumers.clickhouse.connect import reason_of, wait_for_clickhouse
from consumers.clickhouse.migrate import migrate
from consumers.clickhouse.sink import (
    SERVICE,
    Bounds,
    Decoder,
    Note,
    TopicBatch,
    build_tables,
    format_bounds,
    parse_bounds,
    pending_batches,
)
from infra.kafka import EventWriter, ensure_topics, make_codec
from infra.settings import Settings
from schemas.codec import CodecError, UnknownSchemaError
from schemas.topics import CATALOGUE, SCHEMAS_TOPIC
from streams.runtime.group_reader import Commit, GroupReader, read_ranges
from streams.runtime.kafka_log import read_compacted
from streams.runtime.log import TopicPart
from streams.runtime.metrics import LoopMetrics, start_health_server
from streams.runtime.step import Record

log = structlog.get_logger()

TOPICS = tuple(t.name for t in CATALOGUE if t.name != SCHEMAS_TOPIC)

#: A batch is inserted when its first record has waited this long, or when it is this large.
FLUSH_SEC = 2.0
FLUSH_ROWS = 10_000
FLUSH_BYTES = 32 * 1024 * 1024
_POLL_RECORDS = 2_000
_POLL_SEC, _BUSY_POLL_SEC = 0.25, 0.05
_SWITCH_SEC = 0.0005
#: A batch spans at most 64 partitions: its note must fit the broker's `offset.metadata.max.bytes` of 4,096.
_BATCH_PARTITIONS_LOG2 = 6


class SinkError(RuntimeError):
    """The sink cannot go on: says why and what to do."""


class StoppedError(Exception):
    """The service was asked to stop while it waited for ClickHouse."""


@dataclass(frozen=True)
class _Cut:
    """Batches on their way into ClickHouse, and the offsets to commit when they are in."""

    batches: tuple[TopicBatch, ...]
    offsets: dict[TopicPart, int]
    done: Future[None]


class Sink:
    """One instance of the sink. A second thread inserts while this one fetches and decodes."""

    def __init__(
        self,
        settings: Settings,
        client: Any,
        stop: threading.Event,
        instance: int = 0,
        *,
        flush_sec: float = FLUSH_SEC,
    ) -> None:
        self._settings, self._client, self._stop, self._flush_sec = settings, client, stop, flush_sec
        self._metrics = LoopMetrics(SERVICE, instance)
        self._writer = EventWriter(settings)  # used by the inserting thread alone
        self._codec = make_codec(settings)
        self._decoder = Decoder(self._codec, self._learn_schemas)
        self._database = str(client.command("SELECT uuid FROM system.databases WHERE name = currentDatabase()"))
        for event in all_events():
            event_columns(event)  # describes the columns once, before the first batch instead of within it
        self._batches: dict[TopicPart, TopicBatch] = {}
        self._first_at = 0.0
        self._broken = False
        self._cut: _Cut | None = None
        self._committed: dict[TopicPart, int] = {}
        self._inserter = ThreadPoolExecutor(1, thread_name_prefix="insert")
        self._reader = GroupReader(
            settings,
            SERVICE,
            TOPICS,
            on_assigned=self._on_assigned,
            on_revoked=self._on_revoked,
            should_stop=stop.is_set,
            # A restarted instance gets its partitions back at once instead of after the session timeout.
            **{"group.instance.id": f"{SERVICE}-{instance}"},
        )

    @property
    def ready(self) -> bool:
        """The group gave this instance its partitions."""
        return self._reader.joined

    # -- the loop

    def run(self) -> None:
        """Until `stop` is set; then what was read is inserted and committed."""
        # The inserting thread mostly waits for answers and must get the interpreter soon when one comes.
        sys.setswitchinterval(_SWITCH_SEC)
        try:
            while not self._stop.is_set():
                busy = bool(self._batches) or self._cut is not None
                records = self._reader.poll(_POLL_RECORDS, _BUSY_POLL_SEC if busy else _POLL_SEC)
                for record in records:
                    self._take(record)
                for topic, num in Counter(record.topic for record in records).items():
                    self._metrics.count_in(topic, num)
                self._advance()
            self.flush()
        except StoppedError:
            self._broken = True
            log.info("sink_stopped_without_clickhouse", remedy="the batch is replayed at the next start")
        except BaseException:
            self._broken = True
            raise
        finally:
            self._reader.close()
            self._inserter.shutdown(wait=True)

    def _take(self, record: Record) -> None:
        if not self._batches:
            self._first_at = time.monotonic()
        key = (record.topic, record.partition >> _BATCH_PARTITIONS_LOG2)
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = TopicBatch(record.topic)
        self._decode(batch, record)

    def _decode(self, batch: TopicBatch, record: Record) -> None:
        try:
            self._decoder.add(batch, record)
        except UnknownSchemaError as exc:
            raise SinkError(
                f"{record.topic} partition {record.partition} offset {record.offset}: {exc}; its writer is newer than "
                "this sink: upgrade and start again, nothing is lost"
            ) from exc

    def _advance(self) -> None:
        """Begin the next insert when it is due and the last one is in; commit the last one when none is due."""
        batches = self._batches.values()
        full = sum(b.num_rows for b in batches) >= FLUSH_ROWS or sum(b.num_bytes for b in batches) >= FLUSH_BYTES
        waited = time.monotonic() - self._first_at
        if full or (self._inserted() and waited >= self._flush_sec):
            self._begin()
        elif self._cut is not None and self._cut.done.done():
            self._settle()

    def _inserted(self) -> bool:
        return self._cut is None or self._cut.done.done()

    def flush(self) -> None:
        """Insert what was read, wait until it is in, and commit it."""
        self._begin()
        self._settle()

    def _begin(self) -> None:
        """One commit moves past the last batch and notes the bounds of the next one; then its insert begins.

        Offsets also move over transaction markers, which carry no record.
        """
        inserted = self._wait_inserted()
        positions = self._reader.positions()
        batches, self._batches, self._first_at = tuple(self._batches.values()), {}, time.monotonic()
        offsets = {(b.topic, number): last + 1 for b in batches for number, (_, last) in b.bounds.items()}
        for part, at in positions.items():
            if at > max(self._committed.get(part, 0), inserted.get(part, 0), offsets.get(part, 0)):
                offsets[part] = at
        notes: dict[TopicPart, tuple[int, str]] = {}
        for batch in batches:
            note = Note(self._database, format_bounds(batch.bounds)).format()
            notes |= {(batch.topic, number): (first, note) for number, (first, _) in batch.bounds.items()}
        self._commit(inserted, notes)
        if batches or offsets:
            self._cut = _Cut(batches, offsets, self._inserter.submit(self._insert_all, batches))

    def _settle(self) -> None:
        """Commit the batch that is in."""
        self._commit(self._wait_inserted(), {})

    def _wait_inserted(self) -> dict[TopicPart, int]:
        """The offsets behind the last batch, once it is in; raises what its insert raised."""
        if self._cut is None:
            return {}
        self._cut.done.result()
        cut, self._cut = self._cut, None
        return cut.offsets

    def _commit(self, offsets: Mapping[TopicPart, int], notes: Mapping[TopicPart, tuple[int, str]]) -> None:
        note = Note(self._database).format()
        self._reader.commit({part: (offset, note) for part, offset in offsets.items()} | dict(notes))
        self._committed.update(offsets)

    # -- inserting, in a thread of its own

    def _insert_all(self, batches: tuple[TopicBatch, ...]) -> None:
        if not batches:
            return
        began = time.monotonic()
        for batch in batches:
            self._insert(batch)
        self._metrics.committed.inc()
        self._metrics.batch_sec.observe(time.monotonic() - began)

    def _insert(self, batch: TopicBatch) -> None:
        for table, token, data in build_tables(batch):
            self._insert_table(table, token, data)
            self._metrics.count_out(batch.topic, data.num_rows)
        if batch.dead:  # they are written before the offsets that they belong to are committed
            first = batch.dead[0]
            log.warning(
                "dead_letters",
                num=len(batch.dead),
                topic=batch.topic,
                offset=first.original_offset,
                detail=first.detail,
            )
            for event in batch.dead:
                self._writer.write(event)
            self._writer.flush()
            self._metrics.dead_letters.inc(len(batch.dead))

    def _insert_table(self, table: str, token: str, data: Any) -> None:
        from clickhouse_connect.driver.exceptions import ClickHouseError

        pause_sec, failed = 0.1, False
        while True:
            try:
                self._client.insert_arrow(
                    table, data, settings={"insert_deduplication_token": token, "async_insert": 0}
                )
                if failed:
                    log.info("clickhouse_answers_again", table=table)
                return
            except (ClickHouseError, OSError) as exc:
                if getattr(exc, "code", None) in _GONE:
                    raise SinkError(f"{table}: {exc}; the database was removed: start again to fill a new one") from exc
                if not failed:
                    log.warning("clickhouse_insert_failed", table=table, detail=reason_of(exc), remedy="trying again")
                failed = True
            if self._stop.wait(pause_sec):
                raise StoppedError
            pause_sec = min(2.0, pause_sec * 2)

    def _learn_schemas(self) -> None:
        for _, value in read_compacted(self._settings, SCHEMAS_TOPIC):
            try:
                self._codec.add_schema(json.loads(value))
            except CodecError as exc:  # an event type of a newer version: matters only when one arrives
                log.debug("schema_not_known_here", detail=str(exc))

    # -- partitions come and go

    def _on_assigned(self, commits: dict[TopicPart, Commit]) -> dict[TopicPart, int | None]:
        notes = {part: Note.parse(note) for part, (_, note) in commits.items()}
        for (topic, text), bounds in pending_batches(notes, self._database).items():
            log.info("sink_replays_batch", topic=topic, bounds=text)
            self._replay(topic, bounds)
        start: dict[TopicPart, int | None] = {}
        for part, (offset, _) in commits.items():
            note = notes[part]
            if offset is None or note.database != self._database:
                start[part] = None
            else:
                start[part] = parse_end(note, part[1], offset)
        fresh = [f"{topic}/{number}" for (topic, number), offset in start.items() if offset is None]
        log.info("sink_assigned", partitions=len(start), from_the_beginning=len(fresh))
        self._metrics.units.set(len(start))
        return start

    def _replay(self, topic: str, bounds: Bounds) -> None:
        batch = TopicBatch(topic)
        for record in read_ranges(self._settings, topic, bounds):
            self._decode(batch, record)
        batch.bounds = dict(bounds)  # the token is that of the batch that was begun
        self._inserter.submit(self._insert, batch).result()

    def _on_revoked(self, parts: list[TopicPart], lost: bool) -> None:
        if self._broken:
            return  # what was read may not be in the database: its offsets must stay
        if lost:  # another instance has them already, and finds the note if a batch was begun
            for topic, number in parts:
                batch = self._batches.get((topic, number >> _BATCH_PARTITIONS_LOG2))
                if batch is not None:
                    batch.drop(number)
                if self._cut is not None:
                    self._cut.offsets.pop((topic, number), None)
        else:
            self.flush()
        for part in parts:
            self._committed.pop(part, None)


#: UNKNOWN_TABLE and UNKNOWN_DATABASE.
_GONE = frozenset({60, 81})


def parse_end(note: Note, partition: int, committed: int) -> int:
    """Where to read on: after the batch that was begun and has been replayed, else at the committed offset."""
    if not note.pending:
        return committed
    return parse_bounds(note.pending)[partition][1] + 1


def serve(settings: Settings, instance: int, stop: threading.Event) -> None:
    """Run the sink until `stop`. Waits for ClickHouse; raises MigrationError or SinkError with the remedy."""
    state: dict[str, Sink] = {}
    health = start_health_server(SERVICE, instance, settings, ready=lambda: "sink" in state and state["sink"].ready)
    try:
        client = wait_for_clickhouse(settings, stop)
        if client is None:
            return
        applied = migrate(client)
        if applied:
            log.info("clickhouse_migrated", database=settings.clickhouse.database, applied=applied)
        ensure_topics(settings)
        state["sink"] = Sink(settings, client, stop, instance)
        state["sink"].run()
        client.close()
    finally:
        health.close()
