"""Events to bytes and back: laws, framing, and every way in which bytes or values are refused."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import io
import json
import math
import struct
from dataclasses import dataclass, replace
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.avro_types import Schema, load_schema
from schemas.base import EVENTS, Event
from schemas.codec import SINGLE_OBJECT_MAGIC, Codec, CodecError, UnknownSchemaError, fingerprint
from schemas.encoder import encode_long
from schemas.events import ModelCallCompleted, StepCompleted, TaskRegistered, TrialLeased, VersionSpan
from schemas.examples_gen import example_event
from schemas.records import values_function
from tests.schemas.strategies import events

CALL = example_event(ModelCallCompleted)
TASK = example_event(TaskRegistered)


def plain(schema: Any) -> Any:
    """Without logical types, so that fastavro takes and gives the integers themselves."""
    if isinstance(schema, dict):
        return {k: plain(v) for k, v in schema.items() if k != "logicalType"}
    return [plain(v) for v in schema] if isinstance(schema, list) else schema


def body_by_fastavro(event: Event) -> bytes:
    out = io.BytesIO()
    schema = plain(load_schema(type(event).__name__, type(event).VERSION))
    fastavro.schemaless_writer(out, schema, dataclasses.asdict(event), strict=True)
    return out.getvalue()


def in_utf8(value: Any) -> Any:
    """The value with its texts as `decode_values` leaves them."""
    if isinstance(value, dict):
        return {in_utf8(key): in_utf8(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(in_utf8(item) for item in value)
    return value.encode() if isinstance(value, str) else value


@pytest.mark.parametrize("name", EVENTS)
def test_decode_inverts_encode_and_the_bytes_are_fastavros(name: str) -> None:
    cls, codec = EVENTS[name], Codec()

    @settings(max_examples=30, deadline=None)
    @given(events(cls))
    def check(event: Event) -> None:
        data = codec.encode(event)
        decoded = codec.decode(data)
        assert decoded == event
        assert type(decoded) is cls
        assert data[10:] == body_by_fastavro(event)
        schema = plain(load_schema(name, cls.VERSION))
        record = fastavro.schemaless_reader(io.BytesIO(data[10:]), schema, None)
        assert codec.decode_values(data) == (name, in_utf8(values_function(cls)(record)))

    check()


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_long_is_the_varint_of_its_zigzag(value: int) -> None:
    decoded, shift = 0, 0
    for byte in encode_long(value):
        decoded |= (byte & 0x7F) << shift
        shift += 7
    assert (decoded >> 1) ^ -(decoded & 1) == value


@pytest.mark.parametrize(
    ("value", "written"),
    # Avro specification, "Primitive Types": the table of zigzag examples.
    [(0, "00"), (-1, "01"), (1, "02"), (-2, "03"), (2, "04"), (-64, "7f"), (64, "8001")],
)
def test_longs_of_the_specification(value: int, written: str) -> None:
    assert encode_long(value).hex() == written


def test_a_nan_stays_a_nan() -> None:
    decoded = Codec().decode(Codec().encode(replace(CALL, temperature=math.nan)))
    assert math.isnan(decoded.temperature)


def test_decoded_events_are_as_good_as_new() -> None:
    decoded = Codec().decode(Codec().encode(CALL))
    with pytest.raises(dataclasses.FrozenInstanceError):
        decoded.attempt = 3
    assert replace(decoded, attempt=3) == replace(CALL, attempt=3)
    assert isinstance(decoded.version_spans, tuple)
    assert hash(decoded) == hash(CALL)


# -- framing


def test_single_object_framing() -> None:
    data = Codec().encode(CALL)
    schema = load_schema("ModelCallCompleted", ModelCallCompleted.VERSION)
    assert data[:2] == b"\xc3\x01"
    assert data[2:10] == fingerprint(schema)
    assert fastavro.schemaless_reader(io.BytesIO(data[10:]), plain(schema), None)["call_id"] == CALL.call_id


def test_the_fingerprint_of_the_specification() -> None:
    """Avro 1.11, "Schema Fingerprints": CRC-64-AVRO of `"int"`, from the reference implementations' test data."""
    assert int.from_bytes(fingerprint("int"), "little") == 0x7275D51A3F395C8F  # type: ignore[arg-type]


class DictRegistry:
    """A registry in memory: ids in the order of registration."""

    def __init__(self) -> None:
        self.schemas: list[Schema] = []
        self.topics: list[str] = []

    def id_of(self, topic: str, schema: Schema) -> int:
        self.topics.append(topic)
        self.schemas.append(schema)
        return len(self.schemas)

    def schema_of(self, schema_id: int) -> Schema:
        return self.schemas[schema_id - 1]


def test_confluent_framing_and_both_are_read() -> None:
    registry = DictRegistry()
    codec = Codec(registry, "prefix-")
    data = codec.encode(CALL)
    assert data[:5] == struct.pack(">bI", 0, 1)
    assert registry.topics == ["prefix-model-calls"]
    assert codec.encode(CALL) == data
    assert len(registry.schemas) == 1, "registered once"
    assert codec.decode(data) == codec.decode(Codec().encode(CALL)) == CALL


def test_confluent_framing_without_a_registry_names_the_setting() -> None:
    with pytest.raises(UnknownSchemaError, match=r"schema id 7: set schema_registry\.url"):
        Codec().decode(b"\x00\x00\x00\x00\x07rest")


def test_a_registry_schema_that_is_no_event() -> None:
    registry = DictRegistry()
    registry.id_of("t", {"type": "record", "name": "Stranger", "fields": []})
    with pytest.raises(UnknownSchemaError, match="'Stranger' names no event"):
        Codec(registry).decode(b"\x00\x00\x00\x00\x01")


# -- bytes that are refused


@pytest.mark.parametrize("data", [b"", b"\xc3", b"\xc3\x01\x00", b"\x00\x00", b"{}", b"\x01" * 20])
def test_bytes_that_are_no_event(data: bytes) -> None:
    with pytest.raises(CodecError, match=r"bytes starting .* neither Avro single-object \(c301\) nor Confluent"):
        Codec().decode(data)


def test_an_unknown_fingerprint_names_the_remedy() -> None:
    with pytest.raises(UnknownSchemaError, match=r"writer schema 0{16} is unknown; read the `schemas` topic"):
        Codec().decode(SINGLE_OBJECT_MAGIC + bytes(8) + b"body")


@pytest.mark.parametrize("name", ["TrialLeased", "ModelCallCompleted", "StepCompleted"])
def test_every_truncation_is_an_error(name: str) -> None:
    data = Codec().encode(example_event(EVENTS[name]))
    for length in range(10, len(data)):
        with pytest.raises(CodecError, match=name):
            Codec().decode(data[:length])


def test_trailing_bytes_are_an_error() -> None:
    with pytest.raises(CodecError, match="ModelCallCompleted: 3 bytes left over"):
        Codec().decode(Codec().encode(CALL) + b"abc")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_noise_is_refused_or_decoded_but_never_anything_else(noise: bytes) -> None:
    data = Codec().encode(example_event(TrialLeased))[:10] + noise
    with contextlib.suppress(CodecError):
        assert type(Codec().decode(data)) is TrialLeased


def test_blocks_with_their_size_are_read() -> None:
    """Other writers may put a negative count and the block's size in front of the items (specification, "Arrays")."""
    event = replace(TASK, fail_to_pass=("aa", "bb"), pass_to_pass=(), metadata={"k": "v"})
    data = Codec().encode(event)
    items, pair = b"\x04aa\x04bb", b"\x02k\x02v"
    assert data.count(b"\x04" + items) == data.count(b"\x02" + pair) == 1
    sized = data.replace(b"\x04" + items, encode_long(-2) + encode_long(len(items)) + items)
    sized = sized.replace(b"\x02" + pair, encode_long(-1) + encode_long(len(pair)) + pair)
    assert Codec().decode(sized) == event
    split = data.replace(b"\x04" + items, b"\x02\x04aa\x02\x04bb")
    assert Codec().decode(split) == event


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        (b"\x0cSTREAM\x01", b"\x0cSTREAM\x02", "streamed: a boolean that is neither 0 nor 1"),
        (b"\x0cSTREAM", b"\x0bSTREAM", "wire_format: a length beyond the end"),
        (b"\x0cSTREAM", b"\xff\xff\xff\xff\x0f", "wire_format: a length beyond the end"),
        (b"\x0cSTREAM", b"\x0cSTRE\xff\xff", "invalid start byte"),
        (b"\x0cSTREAM", b"\xff" * 10 + b"\x01", "a varint of more than 64 bits"),
        (b"\x02\x0aOTHER", b"\x04\x0aOTHER", "parent_call_id: a branch that is not in the union"),
    ],
)
def test_a_damaged_body_says_what_is_wrong(good: bytes, bad: bytes, message: str) -> None:
    data = Codec().encode(replace(CALL, wire_format="STREAM", streamed=True, parent_call_id="OTHER"))
    assert data.count(good) == 1
    is_text = message == "invalid start byte"  # which `decode_values` leaves to whoever uses the text
    for decode in (Codec().decode,) if is_text else (Codec().decode, Codec().decode_values):
        with pytest.raises(CodecError, match=f"ModelCallCompleted: body does not fit its schema: .*{message}"):
            decode(data.replace(good, bad))


# -- other versions of a schema


def newer_schema() -> Schema:
    """TrialLeased as a later version might be: a field more in the middle, of a type that shifts what follows."""
    schema = copy.deepcopy(load_schema("TrialLeased", 1))
    schema["fields"].insert(4, {"name": "zone", "type": "string"})
    return schema


def written_with(schema: Schema, **more: object) -> bytes:
    out = io.BytesIO()
    out.write(SINGLE_OBJECT_MAGIC + fingerprint(schema))
    fastavro.schemaless_writer(out, plain(schema), dataclasses.asdict(example_event(TrialLeased)) | more, strict=True)
    return out.getvalue()


def test_bytes_of_a_newer_version_are_decoded_with_its_own_schema() -> None:
    """Read as v1 they would decode to something, and it would be wrong."""
    data, codec = written_with(newer_schema(), zone="eu"), Codec()
    with pytest.raises(UnknownSchemaError):
        codec.decode(data)
    codec.add_schema(newer_schema())
    assert codec.decode(data) == example_event(TrialLeased)
    assert codec.decode_values(data) == ("TrialLeased", dataclasses.astuple(example_event(TrialLeased)))
    try:
        misread = codec.decode(Codec().encode(example_event(TrialLeased))[:10] + data[10:])
    except CodecError:
        pass
    else:
        assert misread != example_event(TrialLeased)


def test_bytes_of_an_older_version_get_defaults() -> None:
    old = copy.deepcopy(load_schema("TaskRegistered", 1))
    old["fields"] = [f for f in old["fields"] if f["name"] not in ("image", "fail_to_pass", "metadata")]
    names = {f["name"] for f in old["fields"]}
    out = io.BytesIO()
    out.write(SINGLE_OBJECT_MAGIC + fingerprint(old))
    fastavro.schemaless_writer(out, plain(old), {k: v for k, v in dataclasses.asdict(TASK).items() if k in names})
    codec = Codec()
    codec.add_schema(old)
    assert codec.decode(out.getvalue()) == replace(TASK, image="host", fail_to_pass=(), metadata={})


def test_a_log_decodes_with_nothing_but_its_schemas_topic() -> None:
    """Keys are fingerprints, values schemas: enough for any Avro reader."""
    schemas = {bytes.fromhex(key.decode()): json.loads(value) for key, value in Codec().schema_records()}
    for cls in EVENTS.values():
        data = Codec().encode(example_event(cls))
        record = fastavro.schemaless_reader(io.BytesIO(data[10:]), plain(schemas[data[2:10]]), None)
        assert record["event_id"] == example_event(cls).event_id


# -- values that are refused


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (replace(CALL, call_index=1.5), "call_index: 1.5 is no int"),
        (replace(CALL, call_index="3"), "call_index: '3' is no int"),
        (replace(CALL, call_index=True), "call_index: True is no int"),
        (replace(CALL, call_index=2**63), "9223372036854775808 does not fit 64 bits"),
        (replace(CALL, temperature="1.5"), "temperature: '1.5' is no float"),
        (replace(CALL, streamed="no"), "streamed: 'no' is no bool"),
        (replace(CALL, streamed=0), "streamed: 0 is no bool"),
        (replace(CALL, wire_format=b"chat"), "wire_format: b'chat' is no str"),
        (replace(CALL, wire_format="\ud800"), "surrogates not allowed"),
        (replace(CALL, sampled_ids="abc"), "sampled_ids: 'abc' is no bytes"),
        (replace(CALL, sampled_ids=5), "sampled_ids: 5 is no bytes"),
        (replace(CALL, call_id=None), "call_id: None is no str"),
        (replace(CALL, seed=1.5), "seed: 1.5 is no int"),
        (replace(CALL, version_spans=({"version": 1},)), "version_spans item: .* is no VersionSpan"),
        (replace(CALL, version_spans=(VersionSpan(version=1, start=0, end=None),)), "version_spans item.end: None"),
        (replace(TASK, fail_to_pass="abc"), "fail_to_pass: 'abc' is no tuple"),
        (replace(TASK, fail_to_pass=(1,)), "fail_to_pass item: 1 is no str"),
        (replace(TASK, metadata=[("a", "b")]), "metadata: .* is no dict"),
        (replace(TASK, metadata={"a": 1}), "metadata item: 1 is no str"),
        (replace(TASK, metadata={1: "a"}), "metadata key: 1 is no str"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(event: Event, message: str) -> None:
    with pytest.raises(CodecError, match=rf"^{type(event).__name__} .*(?s:.)*{message}"):
        Codec().encode(event)


@pytest.mark.parametrize(
    ("event", "same_as"),
    [
        (replace(CALL, temperature=1), replace(CALL, temperature=1.0)),
        (replace(CALL, sampled_ids=bytearray(b"abc")), replace(CALL, sampled_ids=b"abc")),
        (replace(CALL, sampled_ids=memoryview(struct.pack("<2i", 1, 2)).cast("i")), None),
        (replace(CALL, call_index=Color.RED), replace(CALL, call_index=1)),
        (replace(TASK, fail_to_pass=["a"]), replace(TASK, fail_to_pass=("a",))),
    ],
)
def test_values_that_mean_the_same_are_taken(event: Event, same_as: Event | None) -> None:
    expected = same_as or replace(CALL, sampled_ids=struct.pack("<2i", 1, 2))
    assert Codec().decode(Codec().encode(event)) == expected


def test_a_nested_record_is_checked_too() -> None:
    step = example_event(StepCompleted)
    assert isinstance(step, StepCompleted)
    broken = replace(step, loss=replace(step.loss, **{dataclasses.fields(step.loss)[0].name: "high"}))
    with pytest.raises(CodecError, match=rf"loss\.{dataclasses.fields(step.loss)[0].name}: 'high' is no float"):
        Codec().encode(broken)


def test_an_event_that_is_not_in_the_catalogue() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Unlisted(Event):
        """Not registered."""

    with pytest.raises(CodecError, match="Unlisted is not in the catalogue; register it with @event"):
        Codec().encode(Unlisted(event_id="e", run_id="r", occurred_at=0, producer="p"))
