"""Columns agree with the schemas, and packed values come out as they went in."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import fastavro
import pytest

from consumers.clickhouse.columns import (
    PACKED,
    all_events,
    event_columns,
    table_columns,
    table_name,
    to_arrow,
    value_names,
)
from consumers.clickhouse.generate import RAW_TABLES, render
from consumers.clickhouse.migrate import MigrationError, load_migrations
from consumers.clickhouse.sink import (
    Decoder,
    EventRows,
    Note,
    TopicBatch,
    build_tables,
    format_bounds,
    parse_bounds,
    pending_batches,
)
from schemas.avro_types import derive_schema
from schemas.base import EVENTS
from schemas.codec import Codec, UnknownSchemaError, fingerprint
from schemas.events import ModelCallCompleted, TrialLeased
from schemas.ids import EventId
from schemas.packing import pack_bits, pack_floats, pack_ints
from streams.runtime.step import Record
from tests.unit.consumers.synthetic import make_history


def test_the_initial_migration_agrees_with_the_schemas() -> None:
    assert RAW_TABLES.read_text() == render(), "python -m consumers.clickhouse.generate --force (before a release)"


def _bytes_fields(schema: Any) -> Iterator[tuple[str, str]]:
    if isinstance(schema, dict) and schema.get("type") == "record":
        for field in schema["fields"]:
            kinds = field["type"] if isinstance(field["type"], list) else [field["type"]]
            if "bytes" in kinds:
                yield schema["name"], field["name"]
            for kind in kinds:
                yield from _bytes_fields(kind)
    elif isinstance(schema, dict):
        yield from _bytes_fields(schema.get("items"))
        if isinstance(schema.get("type"), dict | list):
            yield from _bytes_fields(schema["type"])


def test_every_bytes_field_says_how_it_is_packed() -> None:
    found = {pair for event in all_events() for pair in _bytes_fields(derive_schema(EVENTS[event]))}
    assert found == set(PACKED)


def test_every_event_has_a_table_of_its_own() -> None:
    assert len({table_name(event) for event in all_events()}) == len(EVENTS)
    assert table_name("ModelCallCompleted") == "model_call_completed"
    for event in all_events():
        names = [c.name for c in table_columns(event)]
        assert len(set(names)) == len(names)


def _decode(events: tuple[Any, ...]) -> dict[str, TopicBatch]:
    decoder, batches, codec = Decoder(Codec(), lambda: None), {}, Codec()
    for offset, event in enumerate(events):
        batch = batches.setdefault(event.TOPIC, TopicBatch(event.TOPIC))
        decoder.add(batch, Record(event.TOPIC, 0, offset, b"k", codec.encode(event), (), event.occurred_at))
    return batches


def test_every_field_of_every_event_survives() -> None:
    events = make_history(num_steps=1)
    rows: dict[str, list[dict[str, Any]]] = {}
    for batch in _decode(events).values():
        for table, _, data in build_tables(batch):
            rows.setdefault(table, []).extend(data.to_pylist())
        assert not batch.dead
    assert sum(map(len, rows.values())) == len(events)
    call = rows["model_call_completed"][0]
    assert call["sampled_ids"] == [7, 8, 9, 10, 2]
    assert call["logprobs"] == [-0.5, -0.25, -1.0, -0.125, 0.0]
    assert call["logprob_valid"] == [1, 1, 0, 1, 1]
    assert call["version_spans"] == [{"version": 0, "start": 0, "end": 5}]
    segment = next(r for r in rows["trajectory_assembled"] if r["segments"])["segments"][0]
    assert segment["ids"][-5:] == [7, 8, 9, 10, 2]
    assert segment["mask"] == [0] * 12 + [1] * 5
    assert segment["logprob_valid"][-5:] == [1, 1, 0, 1, 1]
    assert rows["routing_recorded"][0]["expert_ids"][:9] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert rows["model_call_failed"][0]["sampled_ids"] == [3, 4]
    by_id = {row["event_id"]: row for table in rows.values() for row in table}
    for event in events:
        row = by_id[event.event_id]
        plain = {
            c.name: getattr(event, c.name)
            for c in event_columns(type(event).__name__)
            if isinstance(getattr(event, c.name, ()), str | float | bool) or getattr(event, c.name, 0) is None
        }
        assert {name: row[name] for name in plain} == plain


def _changed(event: str, rows: EventRows, **values: Any) -> list[list[Any]]:
    """The columns of the first row, with other values."""
    names = value_names(event)
    return [[values.get(name, column[0])] for name, column in zip(names, rows.only(0), strict=True)]


def test_uint16_experts_and_absent_arrays() -> None:
    batches = _decode(make_history(num_steps=1))
    narrow = batches["routing"].rows["RoutingRecorded"]
    wide = _changed("RoutingRecorded", narrow, dtype=b"uint16", expert_ids=b"\x00\x01\xff\x00")
    assert to_arrow("RoutingRecorded", wide)["expert_ids"].to_pylist() == [[256, 255]]
    both = [one + other for one, other in zip(wide, narrow.only(0), strict=True)]
    assert to_arrow("RoutingRecorded", both)["expert_ids"].to_pylist()[1][:9] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    failed = _changed("ModelCallFailed", batches["model-calls"].rows["ModelCallFailed"], sampled_ids=None)
    table = to_arrow("ModelCallFailed", failed)
    assert (table["sampled_ids"].to_pylist(), table["sampled_ids_is_null"].to_pylist()) == ([[]], [True])


def test_rows_become_columns_in_their_order_however_many_there_are() -> None:
    call = next(e for e in make_history(num_steps=1) if isinstance(e, ModelCallCompleted))
    lengths = [number % 19 for number in range(1_000)]
    flags = [[(number + i) % 3 == 0 for i in range(num)] for number, num in enumerate(lengths)]
    batch = _decode(
        tuple(
            replace(
                call,
                event_id=EventId(str(number)),
                sampled_ids=pack_ints(range(num)),
                logprobs=pack_floats([-1.0] * num),
                logprob_valid=pack_bits(flags[number]),
            )
            for number, num in enumerate(lengths)
        )
    )["model-calls"]
    ((_, _, data),) = build_tables(batch)
    assert data["event_id"].to_pylist() == [str(number) for number in range(1_000)]
    assert data["_offset"].to_pylist() == list(range(1_000))
    assert data["sampled_ids"].to_pylist() == [list(range(num)) for num in lengths]
    assert data["logprob_valid"].to_pylist() == flags
    assert not batch.dead


def test_records_of_an_older_schema_have_the_same_columns() -> None:
    """They are resolved through fastavro and come as text instead of bytes."""
    older = derive_schema(TrialLeased) | {"doc": "as written by an older version"}
    older["fields"] = [*older["fields"], {"name": "gone", "type": "string"}]
    event = next(e for e in make_history(num_steps=1) if isinstance(e, TrialLeased))
    body = io.BytesIO()
    fastavro.schemaless_writer(body, fastavro.parse_schema(copy.deepcopy(older)), asdict(event) | {"gone": "x"})
    codec, batch = Codec(), TopicBatch("trial-stages")
    codec.add_schema(older)
    decoder = Decoder(codec, lambda: None)
    values = (b"\xc3\x01" + fingerprint(older) + body.getvalue(), codec.encode(event))
    for offset, value in enumerate(values):
        decoder.add(batch, Record("trial-stages", 0, offset, b"k", value, (), event.occurred_at))
    ((_, _, data),) = build_tables(batch)
    first, second = (row | {"_offset": 0} for row in data.to_pylist())
    assert first == second


def test_a_row_that_fits_no_column_is_a_dead_letter_and_its_neighbours_are_rows() -> None:
    good, bad = [e for e in make_history(num_steps=1) if isinstance(e, ModelCallCompleted)][:2]
    object.__setattr__(bad, "logprob_valid", b"\xff\xff")
    batch = _decode((good, bad))["model-calls"]
    ((table, token, data),) = build_tables(batch)
    assert (table, data.num_rows) == ("model_call_completed", 1)
    assert token.startswith("model-calls:0:0-1:ModelCallCompleted.v1.")
    (dead,) = batch.dead
    assert dead.original_offset == 1
    assert "a bitmap of 5 bits has 1 bytes, not 2" in dead.detail


def test_text_that_is_no_utf8_is_a_dead_letter() -> None:
    good, bad = [e for e in make_history(num_steps=1) if isinstance(e, ModelCallCompleted)][:2]
    codec, batch = Codec(), TopicBatch("model-calls")
    broken = codec.encode(bad).replace(bad.response_json.encode()[:2], b"\xff\xfe")
    decoder = Decoder(codec, lambda: None)
    for offset, value in enumerate((broken, codec.encode(good))):
        decoder.add(batch, Record("model-calls", 0, offset, b"k", value))
    ((_, _, data),) = build_tables(batch)
    assert data["_offset"].to_pylist() == [1]
    (dead,) = batch.dead
    assert (dead.original_offset, dead.original_value) == (0, broken)
    assert "UTF8" in dead.detail.upper()


def test_what_is_no_event_is_a_dead_letter_unless_its_header_names_a_newer_schema() -> None:
    batch, learned = TopicBatch("steps"), []
    decoder = Decoder(Codec(), lambda: learned.append(1))
    unknown = b"\xc3\x01" + bytes(8) + b"body"
    decoder.add(batch, Record("steps", 0, 5, b"k", b"junk"))
    decoder.add(batch, Record("steps", 0, 6, b"k", unknown))
    decoder.add(batch, Record("steps", 0, 7, b"k", None))
    assert [d.error_class for d in batch.dead] == ["CodecError", "UnknownSchemaError"]
    assert (batch.bounds, batch.num_rows, learned) == ({0: (5, 7)}, 0, [])
    with pytest.raises(UnknownSchemaError):
        decoder.add(batch, Record("steps", 0, 8, b"k", unknown, (("event-type", b"StepCompleted"),)))
    assert learned == [1]


def test_bounds_notes_and_pending_batches() -> None:
    bounds = {2: (1, 4), 0: (5, 9)}
    assert format_bounds(bounds) == "0:5-9+2:1-4"
    assert parse_bounds("0:5-9+2:1-4") == bounds
    note = Note("db-1", format_bounds(bounds))
    assert Note.parse(note.format()) == note
    assert Note.parse("") == Note("")
    notes = {("a", 0): note, ("a", 2): note, ("b", 0): Note("db-1"), ("c", 0): Note("other", "0:1-2")}
    assert pending_batches(notes, "db-1") == {("a", "0:5-9+2:1-4"): bounds}


def test_a_partition_that_is_lost_is_forgotten() -> None:
    batch = _decode(make_history(num_steps=1))["steps"]
    batch.drop(0)
    assert (batch.bounds, list(build_tables(batch))) == ({}, [])


def test_migrations_are_numbered_without_gaps(tmp_path: Any) -> None:
    assert [m.version for m in load_migrations()] == list(range(1, len(load_migrations()) + 1))
    (tmp_path / "0001_a.sql").write_text("SELECT 1\n-- next statement\nSELECT 2\n")
    (tmp_path / "0003_b.sql").write_text("SELECT 1")
    with pytest.raises(MigrationError, match=r"without gaps, not \[1, 3\]"):
        load_migrations(tmp_path)
    (tmp_path / "0003_b.sql").rename(tmp_path / "0002_b.sql")
    assert [m.statements for m in load_migrations(tmp_path)] == [("SELECT 1", "SELECT 2"), ("SELECT 1",)]
    (tmp_path / "third.sql").write_text("SELECT 1")
    with pytest.raises(MigrationError, match=r"name it NNNN_name\.sql"):
        load_migrations(tmp_path)
