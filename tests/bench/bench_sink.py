"""The sink from Kafka to ClickHouse, against a bare loop and against bare `insert_arrow`, interleaved.

The events are those of whole runs, calls and trajectories at realistic sizes (400 new tokens, 200 sampled). Each round
three of them fill a database of their own over HTTP, one after the other:

- the sink: it fetches, decodes, builds the tables, notes the bounds, inserts with a token, commits;
- bare inserts of the very tables that the sink had built, and nothing else: no Kafka, no Avro. They bound what any
  sink can do where the processors are the limit, since the sink has its own work beside the engine's;
- a bare loop: consume, decode, build, `insert_arrow`, in one thread and with the sink's own decoder, without notes,
  tokens, dead letters or commits.

A time runs from the first fetched record (bare inserts: from the first insert) to the end of the last insert. Beside
the rates stand the processor microseconds per row of this process and of the engine's, which other load moves less.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from consumers.clickhouse.columns import table_name, to_arrow
from consumers.clickhouse.connect import wait_for_clickhouse
from consumers.clickhouse.migrate import migrate
from consumers.clickhouse.service import TOPICS, Sink
from consumers.clickhouse.sink import EventRows
from infra.kafka import EventWriter, drop_topics, ensure_topics, make_codec, make_consumer, topic_name, warm_up
from infra.local.kafka import start_kafka, stop_kafka
from infra.local.ports import free_port
from infra.settings import ClickHouseSection, DataSection, KafkaSection, Settings
from schemas.base import Event
from schemas.events import ModelCallCompleted, RoutingRecorded, TrajectoryAssembled
from schemas.ids import EventId, TrialId
from schemas.packing import all_bits, pack_floats, pack_ints
from streams.runtime.kafka_log import to_record
from tests.unit.consumers.engine_process import OwnerProcess
from tests.unit.consumers.synthetic import make_history

NUM_RUNS, NUM_CALLS = 60, 8_000
NEW_TOKENS, SAMPLED = 400, 200
ROUNDS = 5
#: Rows that the bare loop collects before it inserts.
LOOP_ROWS = 5_000
AIM = 0.8
#: Sooner than live, so that the last batch does not wait for its time; a batch is what came during the last insert.
FLUSH_SEC = 0.1
_DEADLINE_SEC = 180.0


@dataclass(frozen=True)
class _Cost:
    """Seconds by the clock, and of processor time in this process and in the engine's."""

    wall: float
    here: float
    engine: float


class _Meter:
    """Measures from `begin` (the first call counts) to `cost`."""

    def __init__(self, engine_pid: int) -> None:
        self._pid, self._began = engine_pid, (0.0, 0.0, 0.0)

    def _now(self) -> tuple[float, float, float]:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # utime and stime, proc(5)
        return time.perf_counter(), time.process_time(), ticks / os.sysconf("SC_CLK_TCK")

    def begin(self) -> None:
        """Start, unless it has started."""
        if self._began[0] == 0.0:
            self._began = self._now()

    def cost(self) -> _Cost:
        """What it took since."""
        return _Cost(*(now - then for now, then in zip(self._now(), self._began, strict=True)))


class _Recorder:
    """Stands before the client: keeps what is inserted, and when the last row was in."""

    def __init__(self, client: Any, num_rows: int, meter: _Meter) -> None:
        self._client, self._left, self._meter = client, num_rows, meter
        self.tables: list[tuple[str, Any, str]] = []
        self.done = threading.Event()
        self.cost = _Cost(0.0, 0.0, 0.0)

    def command(self, sql: str) -> Any:
        """Passed on."""
        return self._client.command(sql)

    def insert_arrow(self, table: str, data: Any, settings: dict[str, Any]) -> None:
        """Passed on and counted."""
        self._client.insert_arrow(table, data, settings=settings)
        self.tables.append((table, data, settings["insert_deduplication_token"]))
        self._left -= data.num_rows
        if self._left <= 0 and not self.done.is_set():
            self.cost = self._meter.cost()
            self.done.set()


class _TimedSink(Sink):
    """Tells its meter when the first record came."""

    meter: _Meter

    def _take(self, record: Any) -> None:
        self.meter.begin()
        super()._take(record)


@contextmanager
def _stack() -> Iterator[tuple[Settings, int]]:
    """A broker (or the running one named in ROLLSTREAM_TEST_BOOTSTRAP), an engine and its pid, topics of our own."""
    with tempfile.TemporaryDirectory() as directory:
        base = Settings(data=DataSection(dir=directory), kafka=KafkaSection(port=free_port()))
        running = os.environ.get("ROLLSTREAM_TEST_BOOTSTRAP", "")
        record = None if running else start_kafka(base)
        try:
            prefix = f"bench{uuid.uuid4().hex[:8]}-"
            bootstrap = running or f"127.0.0.1:{base.kafka.port}"
            settings = replace(base, kafka=KafkaSection(bootstrap=bootstrap, topic_prefix=prefix, partitions=2))
            warm_up(settings)
            ensure_topics(settings)
            with OwnerProcess(Path(directory) / "clickhouse") as owner:
                assert owner.process is not None
                yield replace(settings, clickhouse=ClickHouseSection(url=owner.url)), owner.process.pid
            drop_topics(settings)
        finally:
            if record is not None:
                stop_kafka(base, record)


def _grown(event: Event, generator: random.Random) -> Event:
    """The event with tokens and texts of the usual size."""
    if isinstance(event, ModelCallCompleted):
        return replace(
            event,
            prompt_delta_ids=pack_ints(generator.choices(range(512), k=NEW_TOKENS)),
            sampled_ids=pack_ints(generator.choices(range(512), k=SAMPLED)),
            logprobs=pack_floats(generator.random() for _ in range(SAMPLED)),
            logprob_valid=all_bits(SAMPLED),
            request_json=event.request_json * 20,
            response_json=event.response_json * 20,
        )
    num = NEW_TOKENS + SAMPLED
    if isinstance(event, RoutingRecorded):
        experts = generator.randbytes(num * 4)
        return replace(event, num_tokens=num, expert_ids=experts, valid=all_bits(num))
    if isinstance(event, TrajectoryAssembled):
        grown = (
            replace(
                event.segments[0],
                ids=pack_ints(generator.choices(range(512), k=num)),
                mask=bytes(NEW_TOKENS) + b"\x01" * SAMPLED,
                logprobs=pack_floats(generator.random() for _ in range(num)),
                logprob_valid=all_bits(num),
            )
            if event.segments
            else None
        )
        return replace(event, segments=(grown,) if grown else ())
    return event


def _whole_runs() -> Iterator[Event]:
    """Everything that happens in runs: mostly small events."""
    generator = random.Random(0)
    for number in range(NUM_RUNS):
        for event in make_history(f"run-{number:03d}"):
            yield _grown(event, generator)


def _model_calls() -> Iterator[Event]:
    """Calls alone: rows of about 5 KB."""
    generator = random.Random(0)
    calls = [event for event in make_history() if isinstance(event, ModelCallCompleted)]
    for number in range(NUM_CALLS):
        call = calls[number % len(calls)]
        yield replace(_grown(call, generator), event_id=EventId(str(number)), trial_id=TrialId(f"trial-{number}"))


def _fill(settings: Settings, events: Iterator[Event]) -> int:
    writer, num = EventWriter(settings), 0
    for event in events:
        writer.write(event)
        num += 1
    writer.flush(60)
    return num


def _database(settings: Settings, name: str) -> tuple[Settings, Any]:
    made = replace(settings, clickhouse=replace(settings.clickhouse, database=name))
    client = wait_for_clickhouse(made, threading.Event())
    assert client is not None
    migrate(client)
    return made, client


@contextmanager
def _filled(settings: Settings, name: str) -> Iterator[tuple[Settings, Any]]:
    """A new database to fill; it is dropped afterwards."""
    made, client = _database(settings, name)
    yield made, client
    client.command(f"DROP DATABASE {made.clickhouse.database}")
    client.close()


def _run_sink(settings: Settings, meter: _Meter, num_rows: int) -> tuple[_Cost, list[tuple[str, Any, str]]]:
    """(cost, inserted tables) of a sink that fills a new database."""
    with _filled(settings, "sink") as (made, client):
        stop, recorder = threading.Event(), _Recorder(client, num_rows, meter)
        sink = _TimedSink(made, recorder, stop, flush_sec=FLUSH_SEC)
        sink.meter = meter
        thread = threading.Thread(target=sink.run)
        thread.start()
        try:
            if not recorder.done.wait(_DEADLINE_SEC):
                raise TimeoutError(f"the sink did not insert {num_rows} rows within {_DEADLINE_SEC} s")
        finally:
            stop.set()
            thread.join()
    return recorder.cost, recorder.tables


def _run_inserts(settings: Settings, meter: _Meter, tables: list[tuple[str, Any, str]]) -> _Cost:
    with _filled(settings, "inserts") as (_, client):
        meter.begin()
        for table, data, token in tables:
            client.insert_arrow(table, data, settings={"insert_deduplication_token": token, "async_insert": 0})
        return meter.cost()


def _run_loop(settings: Settings, meter: _Meter, num_rows: int) -> _Cost:
    """Consume, decode, build, insert: what is left of a sink without what makes it exact."""
    names = {topic_name(settings, topic): topic for topic in TOPICS}
    consumer, codec = make_consumer(settings, group=f"loop-{uuid.uuid4().hex}"), make_codec(settings)
    consumer.subscribe(list(names))
    left = num_rows
    try:
        with _filled(settings, "loop") as (_, client):
            while left:
                rows: dict[str, EventRows] = {}
                num = 0
                while num < min(left, LOOP_ROWS):
                    for message in consumer.consume(LOOP_ROWS, 0.05):
                        meter.begin()
                        record = to_record(message, names[str(message.topic())])
                        event, values = codec.decode_values(record.value or b"")
                        rows.setdefault(event, EventRows(event)).append(values, record)
                        num += 1
                for event, found in rows.items():
                    data = to_arrow(event, found.columns())
                    client.insert_arrow(table_name(event), data, settings={"async_insert": 0})
                left -= num
            return meter.cost()
    finally:
        consumer.close()


def _per_row(costs: list[_Cost], num_rows: int) -> str:
    here, engine = (statistics.median(getattr(cost, name) for cost in costs) for name in ("here", "engine"))
    return f"{here / num_rows * 1e6:.0f} + {engine / num_rows * 1e6:.0f}"


def _row(name: str, num_rows: int, sink: list[_Cost], other: list[_Cost]) -> dict[str, Any]:
    ratio = statistics.median(o.wall / s.wall for s, o in zip(sink, other, strict=True))
    return {
        "name": name,
        "value": round(num_rows / statistics.median(s.wall for s in sink)),
        "unit": "rows/s",
        "baseline": round(num_rows / statistics.median(o.wall for o in other)),
        "ratio": round(ratio, 3),
        "aim": AIM,
        "met": ratio >= AIM,
        "cpu_us_per_row": f"this process + engine: sink {_per_row(sink, num_rows)}, other {_per_row(other, num_rows)}",
    }


def _compare(what: str, events: Iterator[Event]) -> list[dict[str, Any]]:
    sinks, inserts, loops = [], [], []
    with _stack() as (settings, pid):
        num_rows = _fill(settings, events)
        for _ in range(ROUNDS):
            cost, tables = _run_sink(settings, _Meter(pid), num_rows)
            sinks.append(cost)
            inserts.append(_run_inserts(settings, _Meter(pid), tables))
            loops.append(_run_loop(settings, _Meter(pid), num_rows))
    return [
        _row(f"sink: {what}, Kafka to ClickHouse vs bare insert_arrow of the same tables", num_rows, sinks, inserts),
        _row(f"sink: {what}, vs a bare loop of consume, decode, insert_arrow", num_rows, sinks, loops),
    ]


def rows() -> list[dict[str, Any]]:
    """Rows per second of the sink, bare inserts and a bare loop, medians over interleaved rounds."""
    return _compare("model calls of 5 KB", _model_calls()) + _compare("all events of runs", _whole_runs())


if __name__ == "__main__":
    for row in rows():
        print(row)
