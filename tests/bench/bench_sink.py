"""The sink from Kafka to ClickHouse against bare `insert_arrow` of the very same Arrow tables, interleaved.

The events are those of whole runs, calls and trajectories at realistic sizes (400 new tokens, 200 sampled). Each round
the sink fills a database of its own from the same topics: it fetches, decodes, builds the tables, notes the bounds,
inserts with a token, commits. The bare side inserts the tables that the sink had built, and nothing else. Both talk to
one embedded engine over HTTP. A sink's time runs from its first fetched record to its last insert.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from consumers.clickhouse.connect import wait_for_clickhouse
from consumers.clickhouse.migrate import migrate
from consumers.clickhouse.service import Sink
from infra.kafka import EventWriter, drop_topics, ensure_topics, warm_up
from infra.local.kafka import start_kafka, stop_kafka
from infra.local.ports import free_port
from infra.settings import ClickHouseSection, DataSection, KafkaSection, Settings
from schemas.base import Event
from schemas.events import ModelCallCompleted, RoutingRecorded, TrajectoryAssembled
from schemas.ids import EventId, TrialId
from schemas.packing import all_bits, pack_floats, pack_ints
from tests.unit.consumers.engine_process import OwnerProcess
from tests.unit.consumers.synthetic import make_history

NUM_RUNS, NUM_CALLS = 60, 8_000
NEW_TOKENS, SAMPLED = 400, 200
ROUNDS = 5
AIM = 0.8
#: Sooner than live, so that the last batch does not wait for its time; a batch is what came during the last insert.
FLUSH_SEC = 0.1
_DEADLINE_SEC = 180.0


class _Recorder:
    """Stands before the client: keeps what is inserted, and when the last row was in."""

    def __init__(self, client: Any, num_rows: int) -> None:
        self._client, self._left = client, num_rows
        self.tables: list[tuple[str, Any, str]] = []
        self.done = threading.Event()
        self.ended = 0.0

    def command(self, sql: str) -> Any:
        """Passed on."""
        return self._client.command(sql)

    def insert_arrow(self, table: str, data: Any, settings: dict[str, Any]) -> None:
        """Passed on and counted."""
        self._client.insert_arrow(table, data, settings=settings)
        self.tables.append((table, data, settings["insert_deduplication_token"]))
        self._left -= data.num_rows
        if self._left <= 0 and not self.done.is_set():
            self.ended = time.perf_counter()
            self.done.set()


class _TimedSink(Sink):
    """Knows when its first record came."""

    began = 0.0

    def _take(self, record: Any) -> None:
        self.began = self.began or time.perf_counter()
        super()._take(record)


@contextmanager
def _stack() -> Iterator[Settings]:
    """A broker (or the running one named in ROLLSTREAM_TEST_BOOTSTRAP), an engine, topics of our own."""
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
                yield replace(settings, clickhouse=ClickHouseSection(url=owner.url))
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
    """Calls alone: rows of about 4 KB."""
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


def _run_sink(settings: Settings, number: int, num_rows: int) -> tuple[float, list[tuple[str, Any, str]]]:
    """(seconds, inserted tables) of a sink that fills a new database."""
    made, client = _database(settings, f"sink_{number}")
    stop, recorder = threading.Event(), _Recorder(client, num_rows)
    sink = _TimedSink(made, recorder, stop, flush_sec=FLUSH_SEC)
    thread = threading.Thread(target=sink.run)
    thread.start()
    try:
        if not recorder.done.wait(_DEADLINE_SEC):
            raise TimeoutError(f"the sink did not insert {num_rows} rows within {_DEADLINE_SEC} s")
    finally:
        stop.set()
        thread.join()
    seconds = recorder.ended - sink.began
    client.command(f"DROP DATABASE {made.clickhouse.database}")
    client.close()
    return seconds, recorder.tables


def _run_bare(settings: Settings, number: int, tables: list[tuple[str, Any, str]]) -> float:
    made, client = _database(settings, f"bare_{number}")
    began = time.perf_counter()
    for table, data, token in tables:
        client.insert_arrow(table, data, settings={"insert_deduplication_token": token, "async_insert": 0})
    seconds = time.perf_counter() - began
    client.command(f"DROP DATABASE {made.clickhouse.database}")
    client.close()
    return seconds


def _compare(what: str, events: Iterator[Event]) -> dict[str, Any]:
    sink_rates, bare_rates = [], []
    with _stack() as settings:
        num_rows = _fill(settings, events)
        for number in range(ROUNDS):
            seconds, tables = _run_sink(settings, number, num_rows)
            sink_rates.append(num_rows / seconds)
            bare_rates.append(num_rows / _run_bare(settings, number, tables))
    ratio = statistics.median(s / b for s, b in zip(sink_rates, bare_rates, strict=True))
    return {
        "name": f"sink: {what}, Kafka to ClickHouse vs bare insert_arrow of the same tables",
        "value": round(statistics.median(sink_rates)),
        "unit": "rows/s",
        "baseline": round(statistics.median(bare_rates)),
        "ratio": round(ratio, 3),
        "aim": AIM,
        "met": ratio >= AIM,
    }


def rows() -> list[dict[str, Any]]:
    """Rows per second of the sink and of bare inserts, medians over interleaved rounds."""
    return [_compare("model calls of 4 KB", _model_calls()), _compare("all events of runs", _whole_runs())]


if __name__ == "__main__":
    for row in rows():
        print(row)
