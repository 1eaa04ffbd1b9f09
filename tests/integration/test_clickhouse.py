"""The sink and the queries against the embedded engine's HTTP front, and a server at CLICKHOUSE_URL."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consumers.clickhouse.columns import all_events, table_name
from consumers.clickhouse.connect import connect, wait_for_clickhouse
from consumers.clickhouse.migrate import Migration, MigrationError, load_migrations, migrate
from consumers.clickhouse.service import TOPICS, Sink
from infra.kafka import EventWriter, end_offsets, group_lag, make_producer, topic_name
from infra.settings import ClickHouseSection, Settings
from schemas.base import Event
from tests.unit.consumers.engine_process import OwnerProcess
from tests.unit.consumers.sink_process import spawn
from tests.unit.consumers.synthetic import make_history, many

URL_VARIABLE = "CLICKHOUSE_URL"
WAIT_SEC = 90.0


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnerProcess]:
    """An embedded engine, shared by the module: tests use databases of their own."""
    with OwnerProcess(tmp_path_factory.mktemp("engine") / "clickhouse") as process:
        yield process


@pytest.fixture(params=["embedded", "server"])
def url(request: pytest.FixtureRequest) -> str:
    """Both kinds of ClickHouse."""
    if request.param == "embedded":
        process: OwnerProcess = request.getfixturevalue("owner")
        return process.url
    server = os.environ.get(URL_VARIABLE, "")
    if not server:
        pytest.skip(f"needs a ClickHouse server (a container image): set {URL_VARIABLE}=http://host:port")
    return server


def _with_database(settings: Settings, url: str) -> Settings:
    return replace(settings, clickhouse=ClickHouseSection(url=url, database=f"t_{uuid.uuid4().hex[:10]}"))


@pytest.fixture
def settings(kafka_settings: Settings, url: str) -> Iterator[Settings]:
    """Topics and a database of the test's own."""
    made = _with_database(kafka_settings, url)
    yield made
    client = connect(made, database="default")
    client.command(f"DROP DATABASE IF EXISTS {made.clickhouse.database}")
    client.close()


@pytest.fixture
def embedded(kafka_settings: Settings, owner: OwnerProcess) -> Settings:
    """As `settings`, on the embedded engine alone."""
    return _with_database(kafka_settings, owner.url)


def _client(settings: Settings) -> Any:
    client = wait_for_clickhouse(settings, threading.Event())
    assert client is not None
    migrate(client)
    return client


def _write(settings: Settings, events: tuple[Event, ...]) -> None:
    writer = EventWriter(settings)
    for event in events:
        writer.write(event)
    writer.flush()


class _Running:
    """The sink in a thread; `with` stops it and passes its error on."""

    def __init__(self, settings: Settings, client: Any) -> None:
        self._stop, self._error = threading.Event(), None
        self._sink = Sink(settings, client, self._stop)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._sink.run()
        except BaseException as exc:
            self._error: BaseException | None = exc

    def __enter__(self) -> _Running:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


def _wait(what: str, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SEC
    waiter = threading.Event()
    while not done():
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_SEC} s"
        waiter.wait(0.1)


def _wait_caught_up(settings: Settings) -> None:
    ends = end_offsets(settings, TOPICS)
    _wait("the sink catches up", lambda: group_lag(settings, "sink", ends) == 0)


def _ingest(settings: Settings, events: tuple[Event, ...]) -> Any:
    client = _client(settings)
    _write(settings, events)
    with _Running(settings, client):
        _wait_caught_up(settings)
    return client


def _stored(client: Any, *, final: str = "") -> Counter[str]:
    """Rows per table as they lie there; with FINAL, after replacement."""
    counts: Counter[str] = Counter()
    for event in all_events():
        num = int(client.command(f"SELECT count() FROM {table_name(event)} {final}"))
        if num:
            counts[event] = num
    return counts


def _sent(events: tuple[Event, ...]) -> Counter[str]:
    return Counter(type(event).__name__ for event in events)


def test_every_record_is_a_row_with_its_values(settings: Settings) -> None:
    events = make_history()
    client = _ingest(settings, events)
    assert _stored(client) == _sent(events)
    call = client.query("SELECT * FROM model_call_completed ORDER BY occurred_at LIMIT 1").named_results()
    row = next(iter(call))
    assert row["sampled_ids"] == [7, 8, 9, 10, 2]
    assert row["logprobs"] == [-0.5, -0.25, -1.0, -0.125, 0.0]
    assert row["logprob_valid"] == [1, 1, 0, 1, 1]
    assert row["version_spans"] == [{"version": 0, "start": 0, "end": 5}]
    assert row["request_json"] == '{"messages":[{"role":"user","content":"fix\\n\\nit; DROP TABLE x;"}]}'
    assert row["seed"] is None
    assert row["_topic"] == "model-calls"
    assert row["_headers"]["event-type"] == "ModelCallCompleted"
    experts = client.query("SELECT expert_ids, valid FROM routing_recorded LIMIT 1").first_row
    assert experts[0][:9] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert sum(experts[1]) == 17
    failed = client.query("SELECT sampled_ids, sampled_ids_is_null FROM model_call_failed LIMIT 1").first_row
    assert tuple(failed) == ([3, 4], False)


def test_the_same_records_again_change_nothing(settings: Settings) -> None:
    events = make_history(num_steps=1)
    client = _ingest(settings, events)
    _write(settings, events)  # a producer that lost its acknowledgement writes the same events again
    with _Running(settings, client):
        _wait_caught_up(settings)
    assert _stored(client) == Counter({name: 2 * num for name, num in _sent(events).items()})
    solve = client.query("SELECT sum(num_offered), sum(num_solved) FROM solve_rate WHERE purpose = 'train'").first_row
    assert tuple(solve) == (8, 3)
    tokens = dict(client.query("SELECT place, num_tokens FROM token_accounting").result_rows)
    assert tokens == {"trajectory": 50, "failed": 4}
    mean, share = client.query("SELECT num_stages, share FROM stage_timing WHERE stage = 'agent'").first_row
    assert mean == 10
    assert share == pytest.approx(20.0 / (20.0 + 16 * 1.5 + 10 * 0.5))


KILLS = ("before_note:1", "after_note:2", "after_insert:4", "after_insert:13", "before_commit:2", "after_commit:2")


def test_kill_9_at_every_point_gives_exact_rows(embedded: Settings) -> None:
    client = _client(embedded)
    sent: Counter[str] = Counter()
    for number, point in enumerate(KILLS):
        events = tuple(many(1)) if number == 0 else make_history(f"run-kill-{number}", num_steps=1)
        _write(embedded, events)
        sent += _sent(events)
        process = spawn(embedded, point)
        more = make_history(f"run-more-{number}", num_steps=1)
        try:
            ends = end_offsets(embedded, TOPICS)
            _wait(
                "the sink dies or catches up",
                lambda p=process, e=ends: p.poll() is not None or group_lag(embedded, "sink", e) == 0,
            )
            _write(embedded, more)
            sent += _sent(more)
            _wait(f"the sink dies at {point}", lambda p=process: p.poll() is not None)
        finally:
            process.kill()
        assert process.returncode == -9
    last = make_history("run-last", num_steps=1)
    _write(embedded, last)
    sent += _sent(last)
    process = spawn(embedded)
    try:
        _wait_caught_up(embedded)
    finally:
        process.terminate()
        assert process.wait(30) == 0
    assert _stored(client) == sent, "rows as stored, without FINAL: the tokens alone keep repeats out"
    assert _stored(client, final="FINAL") == sent


def test_two_instances_share_the_partitions_and_lose_nothing(embedded: Settings) -> None:
    client = _client(embedded)
    sent: Counter[str] = Counter()
    processes = [spawn(embedded, instance=0)]
    try:
        for number in range(3):
            events = make_history(f"run-two-{number}", num_steps=1)
            _write(embedded, events)
            sent += _sent(events)
            _wait_caught_up(embedded)
            if number == 0:
                processes.append(spawn(embedded, instance=1))
            if number == 1:
                processes[0].terminate()
                assert processes[0].wait(30) == 0
    finally:
        for process in processes:
            process.terminate()
            process.wait(30)
    assert _stored(client, final="FINAL") == sent


def test_what_cannot_be_decoded_goes_to_the_dead_letters_and_does_not_block(embedded: Settings) -> None:
    client = _client(embedded)
    events = make_history(num_steps=1)
    producer = make_producer(embedded)
    steps = topic_name(embedded, "steps")
    producer.produce(steps, key=b"k1", value=b"no avro", headers=[("x", b"\xff\x00")])
    producer.produce(steps, key=b"k2", value=b"\xc3\x01" + b"12345678" + b"unknown schema, no header")
    producer.flush(10)
    _write(embedded, events)
    with _Running(embedded, client):
        _wait_caught_up(embedded)
        _wait("dead letters become rows", lambda: _stored(client)["DeadLettered"] == 2)
    rows = client.query(
        "SELECT original_key_bytes, original_value, original_headers, error_class FROM dead_lettered "
        "ORDER BY original_key",
        column_formats={"original_value": "bytes"},
    ).result_rows
    assert [(row[0], row[1]) for row in rows] == [
        ("k1", b"no avro"),
        ("k2", b"\xc3\x0112345678unknown schema, no header"),
    ]
    assert [row[3] for row in rows] == ["CodecError", "UnknownSchemaError"]
    assert _stored(client) == _sent(events) + Counter({"DeadLettered": 2})


def test_a_removed_database_is_filled_again_from_the_log(embedded: Settings) -> None:
    events = make_history(num_steps=1)
    client = _ingest(embedded, events)
    client.command(f"DROP DATABASE {embedded.clickhouse.database}")
    client = _client(embedded)
    with _Running(embedded, client):
        _wait("rows are there again", lambda: _stored(client) == _sent(events))


def test_the_engine_dies_and_the_sink_goes_on_when_it_is_back(kafka_settings: Settings, tmp_path: Path) -> None:
    with OwnerProcess(tmp_path / "clickhouse") as process:
        settings = _with_database(kafka_settings, process.url)
        client = _client(settings)
        first, second = make_history("run-before", num_steps=1), make_history("run-after", num_steps=1)
        with _Running(settings, client):
            _write(settings, first)
            _wait("rows arrive", lambda: bool(_stored(client)))
            process.kill()
            _write(settings, second)
            process.start()
            _wait_caught_up(settings)
        assert _stored(client) == _sent(first) + _sent(second)


def test_migrations_are_applied_once_and_never_change(settings: Settings) -> None:
    client = wait_for_clickhouse(settings, threading.Event())
    assert client is not None
    assert migrate(client) == [m.name for m in load_migrations()]
    assert migrate(client) == []
    changed = (replace(load_migrations()[0], checksum="0" * 64), *load_migrations()[1:])
    with pytest.raises(MigrationError, match="0001_raw_tables was changed after it was applied"):
        migrate(client, changed)
    changed = (*load_migrations()[:-1], replace(load_migrations()[-1], checksum="0" * 64))
    assert migrate(client, changed) == [changed[-1].name], "views hold no data: they are made again"
    assert migrate(client, changed) == []
    with pytest.raises(MigrationError, match="which this version does not know; upgrade"):
        migrate(client, load_migrations()[:2])
    broken = (*load_migrations(), Migration(len(load_migrations()) + 1, "bad", ("CREATE TABEL x",), "1"))
    with pytest.raises(MigrationError, match="_bad, statement 1"):
        migrate(client, broken)


def test_a_cut_off_migration_is_run_again(embedded: Settings) -> None:
    client = wait_for_clickhouse(embedded, threading.Event())
    assert client is not None
    for statement in load_migrations()[0].statements[:7]:
        client.command(statement)  # the process died before the ledger was written
    assert migrate(client) == [m.name for m in load_migrations()]
