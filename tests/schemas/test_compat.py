"""Every released schema stays readable and unchanged, and the checks that say so catch what they must."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pytest

from schemas.avro_types import AVRO_DIR, derive_schema, load_all_versions, load_schema
from schemas.base import EVENTS
from schemas.compat import (
    check_all,
    find_incompatibilities,
    find_release_problems,
    find_version_problems,
    freeze_release,
    released_hashes,
)
from schemas.topics import BY_NAME


def test_the_checked_in_schemas() -> None:
    check_all()


@pytest.mark.parametrize("name", EVENTS)
def test_the_newest_schema_is_its_dataclass(name: str) -> None:
    cls = EVENTS[name]
    assert load_schema(name, cls.VERSION) == json.loads(json.dumps(derive_schema(cls)))
    assert max(load_all_versions(name)) == cls.VERSION
    assert cls.TOPIC in BY_NAME


def test_no_schema_without_an_event() -> None:
    assert {path.name.split(".v")[0] for path in AVRO_DIR.glob("*.avsc")} == set(EVENTS)


def record(*fields: dict[str, Any], name: str = "Thing") -> dict[str, Any]:
    return {"type": "record", "name": name, "namespace": "rollstream", "fields": list(fields)}


A = {"name": "a", "type": "string"}
INNER = record({"name": "x", "type": "long"}, name="Inner")

GOOD = {
    "same": (record(A), record(A)),
    "new field with default": (record(A), record(A, {"name": "b", "type": ["null", "long"], "default": None})),
    "field dropped": (record(A, {"name": "b", "type": "long"}), record(A)),
    "made optional": (record(A), record({"name": "a", "type": ["null", "string"]})),
    "promoted": (record({"name": "n", "type": "long"}), record({"name": "n", "type": "double"})),
    "renamed with alias": (record(A), record({"name": "b", "type": "string", "aliases": ["a"]})),
    "logical type added": (
        record({"name": "t", "type": "long"}),
        record({"name": "t", "type": {"type": "long", "logicalType": "timestamp-millis"}}),
    ),
    "field order": (record(A, {"name": "b", "type": "long"}), record({"name": "b", "type": "long"}, A)),
    "nested by name": (
        record({"name": "p", "type": INNER}, {"name": "q", "type": "rollstream.Inner"}),
        record({"name": "p", "type": INNER}, {"name": "q", "type": "rollstream.Inner"}),
    ),
}
BAD = {
    "new field without default": (record(A), record(A, {"name": "b", "type": "long"}), "Thing.b: is new and has no"),
    "type changed": (record(A), record({"name": "a", "type": "long"}), "Thing.a: string cannot be read as long"),
    "narrowed": (record({"name": "n", "type": "double"}), record({"name": "n", "type": "long"}), "double cannot"),
    "made required": (record({"name": "a", "type": ["null", "string"]}), record(A), "Thing.a: null cannot be read"),
    "renamed record": (record(A), record(A, name="Other"), "without an alias"),
    "array item": (
        record({"name": "a", "type": {"type": "array", "items": "string"}}),
        record({"name": "a", "type": {"type": "array", "items": "long"}}),
        r"Thing.a\[\]: string cannot",
    ),
    "map value": (
        record({"name": "a", "type": {"type": "map", "values": "string"}}),
        record({"name": "a", "type": {"type": "map", "values": "long"}}),
        r"Thing.a\{\}: string cannot",
    ),
    "inside an optional nested record": (
        record({"name": "p", "type": ["null", INNER]}),
        record({"name": "p", "type": ["null", record({"name": "y", "type": "long"}, name="Inner")]}),
        "no branch",
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_a_good_change_is_let_through_and_is_really_readable(case: str) -> None:
    writer, reader = GOOD[case]
    assert find_incompatibilities(writer, reader) == []
    values = {"string": "s", "long": 3, "double": 1.5}
    datum = {f["name"]: {"x": 1} if f["name"] in "pq" else values.get(f["type"], 5) for f in writer["fields"]}
    out = io.BytesIO()
    fastavro.schemaless_writer(out, copy.deepcopy(writer), datum)
    out.seek(0)
    fastavro.schemaless_reader(out, copy.deepcopy(writer), copy.deepcopy(reader))
    assert not out.read()


@pytest.mark.parametrize("case", BAD)
def test_a_bad_change_is_caught(case: str) -> None:
    writer, reader, message = BAD[case]
    with pytest.raises(AssertionError, match=message):
        problems = find_incompatibilities(writer, reader)
        assert not problems, problems


def test_a_bad_change_of_a_real_event_is_caught() -> None:
    """All pairs are looked at: v3 puts back, as another type, what v2 had dropped."""
    first = load_schema("TrialLeased", 1)
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    second["fields"] = [f for f in second["fields"] if f["name"] != "worker_id"]
    worker = next(f for f in third["fields"] if f["name"] == "worker_id")
    worker |= {"type": "long", "default": 0}
    assert find_version_problems("TrialLeased", {1: first, 2: second}) == []
    assert find_version_problems("TrialLeased", {1: second, 2: third}) == []
    problems = find_version_problems("TrialLeased", {1: first, 2: second, 3: third})
    assert problems == ["v1 -> v3: TrialLeased.worker_id: string cannot be read as long"]


def test_a_default_that_is_not_read_back_is_caught() -> None:
    """fastavro gives the string of a bytes default."""
    newer = record(A, {"name": "b", "type": "bytes", "default": "x"})
    out = io.BytesIO()
    fastavro.schemaless_writer(out, record(A), {"a": "s"})
    out.seek(0)
    assert fastavro.schemaless_reader(out, record(A), copy.deepcopy(newer))["b"] == "x"
    assert (
        "Thing v2.b: a bytes field may not have a default"
        in find_version_problems("Thing", {1: record(A), 2: newer})[0]
    )


def test_a_gap_in_the_versions_is_caught() -> None:
    schema = load_schema("TrialLeased", 1)
    assert "not 1 to 2" in find_version_problems("TrialLeased", {1: schema, 3: schema})[0]


def test_a_changed_default_of_a_released_schema_is_caught(tmp_path: Path) -> None:
    schema = record(A, {"name": "b", "type": "long", "default": 0})
    (tmp_path / "Thing.v1.avsc").write_text(json.dumps(schema))
    released = tmp_path / "RELEASED.sha256"
    assert freeze_release(tmp_path, released) == ["Thing.v1.avsc"]
    assert find_release_problems(tmp_path, released) == []

    schema["fields"][1]["default"] = 1
    (tmp_path / "Thing.v1.avsc").write_text(json.dumps(schema))
    assert "was changed" in find_release_problems(tmp_path, released)[0]
    before = released_hashes(released)
    assert freeze_release(tmp_path, released) == []
    assert released_hashes(released) == before

    (tmp_path / "Thing.v2.avsc").write_text(json.dumps(schema))
    assert any("Thing.v2.avsc: is not in" in p for p in find_release_problems(tmp_path, released))
    (tmp_path / "Thing.v1.avsc").unlink()
    assert any("is released and gone" in p for p in find_release_problems(tmp_path, released))
