"""From Avro schemas to ClickHouse columns and to Arrow arrays: one description serves the DDL and the sink.

Packed arrays are expanded (ids `Array(Int32)`, log-probabilities `Array(Float32)`, bitmaps and masks `Array(UInt8)`),
nested records become named tuples. A nullable packed array is an empty array plus `<name>_is_null`, because
ClickHouse has no nullable arrays and absent must not look like empty.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any

import pyarrow as pa

from schemas.avro_types import Schema, derive_schema
from schemas.base import EVENTS, event_type
from schemas.packing import PackingError

Row = Mapping[str, Any]
Build = Callable[[Sequence[Row]], "pa.Array"]


@dataclass(frozen=True)
class Packed:
    """How a `bytes` field is packed. `length`: the sibling whose length (or value) is the number of bits."""

    kind: str  # ints | floats | uint8 | bits | experts | raw
    length: str = ""


#: Every `bytes` field of the catalogue; a test says that none is missing.
PACKED: dict[tuple[str, str], Packed] = {
    ("ModelCallCompleted", "prompt_delta_ids"): Packed("ints"),
    ("ModelCallCompleted", "sampled_ids"): Packed("ints"),
    ("ModelCallCompleted", "logprobs"): Packed("floats"),
    ("ModelCallCompleted", "logprob_valid"): Packed("bits", "logprobs"),
    ("ModelCallFailed", "sampled_ids"): Packed("ints"),
    ("RoutingRecorded", "expert_ids"): Packed("experts"),
    ("RoutingRecorded", "valid"): Packed("bits", "num_tokens"),
    ("Segment", "ids"): Packed("ints"),
    ("Segment", "mask"): Packed("uint8"),
    ("Segment", "logprobs"): Packed("floats"),
    ("Segment", "logprob_valid"): Packed("bits", "logprobs"),
    ("PolicyPublished", "canary_ids"): Packed("ints"),
    ("PolicyPublished", "canary_logprobs"): Packed("floats"),
    ("PolicyLoaded", "canary_logprobs"): Packed("floats"),
    ("AttemptFinished", "diff"): Packed("raw"),
    ("DeadLettered", "original_key_bytes"): Packed("raw"),
    ("DeadLettered", "original_value"): Packed("raw"),
}

#: Text columns with few distinct values.
LOW_CARDINALITY = frozenset(
    {"run_id", "producer", "purpose", "termination_reason", "stage", "outcome", "error_class", "kind", "harness"}
    | {"worker_id", "task_set", "finish_reason", "logprobs_mode", "parser_outcome", "wire_format", "engine_replica"}
    | {"replica", "rule", "table_version", "dtype", "algorithm", "check", "severity", "grader_id", "image", "service"}
    | {"original_topic", "task_digest", "grader_digest", "code_version"}
)

_TIMESTAMP = pa.timestamp("ms", "UTC")
_PRIMITIVES: dict[str, tuple[str, pa.DataType]] = {
    "string": ("String", pa.string()),
    "bytes": ("String", pa.binary()),
    "long": ("Int64", pa.int64()),
    "double": ("Float64", pa.float64()),
    "boolean": ("Bool", pa.bool_()),
}
_PACKED_TYPES: dict[str, tuple[str, pa.DataType, int]] = {
    "ints": ("Int32", pa.int32(), 4),
    "floats": ("Float32", pa.float32(), 4),
    "uint8": ("UInt8", pa.uint8(), 1),
    "bits": ("UInt8", pa.uint8(), 1),
}
_BIT_BYTES = [bytes(byte >> i & 1 for i in range(8)) for byte in range(256)]


@dataclass(frozen=True)
class Column:
    """A column: its name, ClickHouse type, doc, and how an Arrow array is built from decoded records."""

    name: str
    type: str
    doc: str
    build: Build


class ColumnError(TypeError):
    """A schema that has no columns here: names the field and the remedy."""


def table_name(event: str) -> str:
    """The raw table of an event: `ModelCallCompleted` -> `model_call_completed`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", event).lower()


# -- builders: a sequence of records in, an Arrow array out


def _plain(name: str, arrow: pa.DataType) -> Build:
    get = itemgetter(name)
    return lambda rows: pa.array(list(map(get, rows)), arrow)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(accumulate(lengths, initial=0), pa.int32())


def _list_of_chunks(chunks: Sequence[bytes], arrow: pa.DataType, width: int) -> pa.Array:
    lengths = [len(chunk) // width for chunk in chunks]
    data = b"".join(chunks)
    if sum(lengths) * width != len(data):
        raise PackingError(f"{len(data)} bytes are no array of {arrow}")
    values = pa.Array.from_buffers(arrow, sum(lengths), [None, pa.py_buffer(data)])
    return pa.ListArray.from_arrays(_offsets(lengths), values)


def _bits(name: str, length: str) -> Build:
    def num_bits(row: Row) -> int:
        value = row[length]
        return value if isinstance(value, int) else len(value) // 4

    def expand(row: Row) -> bytes:
        bitmap, num = row[name], num_bits(row)
        if len(bitmap) != (num + 7) // 8:
            raise PackingError(f"{name}: a bitmap of {num} bits has {(num + 7) // 8} bytes, not {len(bitmap)}")
        return b"".join([_BIT_BYTES[byte] for byte in bitmap])[:num]

    return lambda rows: _list_of_chunks([expand(row) for row in rows], pa.uint8(), 1)


def _experts(name: str) -> Build:
    def wide(row: Row) -> bytes:
        if row["dtype"] == "uint16":
            return row[name]  # type: ignore[no-any-return]
        out = bytearray(2 * len(row[name]))
        out[::2] = row[name]
        return bytes(out)

    return lambda rows: _list_of_chunks([wide(row) for row in rows], pa.uint16(), 2)


def _packed(record: str, name: str, packed: Packed) -> tuple[str, Build]:
    if packed.kind == "experts":
        return "Array(UInt16)", _experts(name)
    kind, arrow, width = _PACKED_TYPES[packed.kind]
    if packed.kind == "bits":
        return f"Array({kind})", _bits(name, packed.length)
    return f"Array({kind})", lambda rows: _list_of_chunks([row[name] or b"" for row in rows], arrow, width)


# -- Avro types


class _Describer:
    """Walks one event's schema; named records are remembered for references."""

    def __init__(self) -> None:
        self._records: dict[str, Schema] = {}

    def column(self, record: str, field: Schema, *, top: bool) -> tuple[str, Build]:
        """(ClickHouse type, builder) of a field."""
        name, avro = field["name"], field["type"]
        nullable = isinstance(avro, list)
        if nullable:
            (avro,) = [t for t in avro if t != "null"]
        if isinstance(avro, dict) and avro.get("logicalType") == "timestamp-millis":
            return ("Nullable(DateTime64(3, 'UTC'))" if nullable else "DateTime64(3, 'UTC')"), _plain(name, _TIMESTAMP)
        if avro == "bytes":
            packed = PACKED.get((record, name))
            if packed is None:
                raise ColumnError(f"{record}.{name}: say in consumers/clickhouse/columns.py PACKED how it is packed")
            if packed.kind != "raw":
                return _packed(record, name, packed)
        if isinstance(avro, str) and avro in _PRIMITIVES:
            kind, arrow = _PRIMITIVES[avro]
            kind = f"Nullable({kind})" if nullable else kind
            low = top and avro == "string" and name in LOW_CARDINALITY
            return (f"LowCardinality({kind})" if low else kind), _plain(name, arrow)
        if nullable:
            raise ColumnError(f"{record}.{name}: nullable arrays and records have no ClickHouse column")
        return self._compound(record, name, avro)

    def _compound(self, record: str, name: str, avro: Any) -> tuple[str, Build]:
        if isinstance(avro, dict) and avro["type"] == "map":
            kind, arrow = _PRIMITIVES[avro["values"]]
            arrow_map = pa.map_(pa.string(), arrow)
            return f"Map(String, {kind})", lambda rows: pa.array([list(r[name].items()) for r in rows], arrow_map)
        if isinstance(avro, dict) and avro["type"] == "array":
            items = avro["items"]
            if isinstance(items, str) and items in _PRIMITIVES:
                kind, arrow = _PRIMITIVES[items]
                return f"Array({kind})", _plain(name, pa.list_(arrow))
            kind, build = self._record(items)

            def build_list(rows: Sequence[Row]) -> pa.Array:
                flat = [item for row in rows for item in row[name]]
                return pa.ListArray.from_arrays(_offsets([len(row[name]) for row in rows]), build(flat))

            return f"Array({kind})", build_list
        kind, build = self._record(avro)
        return kind, lambda rows: build([row[name] for row in rows])

    def _record(self, avro: Any) -> tuple[str, Build]:
        if isinstance(avro, str):
            avro = self._records[avro.rsplit(".", 1)[-1]]
        self._records[avro["name"]] = avro
        names, kinds, builds = [], [], []
        for field in avro["fields"]:
            kind, build = self.column(avro["name"], field, top=False)
            names.append(field["name"])
            kinds.append(kind)
            builds.append(build)
        tuple_type = "Tuple(" + ", ".join(f"{n} {k}" for n, k in zip(names, kinds, strict=True)) + ")"
        return tuple_type, lambda rows: pa.StructArray.from_arrays([b(rows) for b in builds], names)


@functools.cache
def event_columns(event: str) -> tuple[Column, ...]:
    """The columns of an event's own fields, in order of the schema. KeyError for an unknown event."""
    describer, columns = _Describer(), []
    for field in derive_schema(event_type(event))["fields"]:
        name = field["name"]
        kind, build = describer.column(event, field, top=True)
        columns.append(Column(name, kind, _expanded_doc(field["doc"]), build))
        if isinstance(field["type"], list) and kind.startswith("Array("):
            columns.append(Column(f"{name}_is_null", "Bool", f"{name} was absent", _is_null(name)))
    return tuple(columns)


def _expanded_doc(doc: str) -> str:
    """The field's doc without the packing, which its column does not have."""
    doc = re.sub(r": (int32|float32), little endian", "", doc)
    return doc.replace("Bit i (least significant first) is 1 when", "Element i is 1 when")


def _is_null(name: str) -> Build:
    return lambda rows: pa.array([row[name] is None for row in rows], pa.bool_())


def _headers(rows: Sequence[Row]) -> pa.Array:
    headers = [row["_headers"] for row in rows]
    flat = [pair for pairs in headers for pair in pairs]
    keys = pa.array([key for key, _ in flat], pa.string())
    return pa.MapArray.from_arrays(_offsets(list(map(len, headers))), keys, pa.array([v for _, v in flat], pa.binary()))


#: Where a row came from; (_partition, _offset) is the row's identity within its topic.
RECORD_COLUMNS: tuple[Column, ...] = (
    Column("_topic", "LowCardinality(String)", "Kafka topic, without prefix", _plain("_topic", pa.string())),
    Column("_partition", "Int32", "Kafka partition", _plain("_partition", pa.int32())),
    Column("_offset", "Int64", "Kafka offset", _plain("_offset", pa.int64())),
    Column("_timestamp", "DateTime64(3, 'UTC')", "Kafka record timestamp", _plain("_timestamp", _TIMESTAMP)),
    Column("_headers", "Map(String, String)", "Kafka headers", _headers),
)


def table_columns(event: str) -> tuple[Column, ...]:
    """All columns of an event's raw table."""
    return event_columns(event) + RECORD_COLUMNS


def to_arrow(event: str, rows: Sequence[Row]) -> pa.Table:
    """Decoded records (with the `_...` keys of RECORD_COLUMNS) as one Arrow table of the event's raw table.

    Raises PackingError when a packed field does not fit its length.
    """
    columns = table_columns(event)
    return pa.Table.from_arrays([c.build(rows) for c in columns], [c.name for c in columns])


def all_events() -> tuple[str, ...]:
    """Every event of the catalogue, in order of definition."""
    import schemas.events  # noqa: F401  (registers them)

    return tuple(EVENTS)
