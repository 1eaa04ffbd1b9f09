"""From Avro schemas to ClickHouse columns and to Arrow arrays: one description serves the DDL and the sink.

Packed arrays are expanded (ids `Array(Int32)`, log-probabilities `Array(Float32)`, bitmaps and masks `Array(UInt8)`),
nested records become named tuples. A nullable packed array is an empty array plus `<name>_is_null`, because
ClickHouse has no nullable arrays and absent must not look like empty.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa

from schemas.avro_types import Schema, derive_schema
from schemas.base import EVENTS, event_type
from schemas.packing import PackingError

#: Field name -> its values, one per row; nested records are tuples of their fields, text is UTF-8 bytes or str.
Columns = Mapping[str, Sequence[Any]]
Build = Callable[[Columns], "pa.Array"]


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


@dataclass(frozen=True)
class Column:
    """A column: its name, ClickHouse type, doc, and how an Arrow array is built from decoded values."""

    name: str
    type: str
    doc: str
    build: Build


class ColumnError(TypeError):
    """A schema that has no columns here: names the field and the remedy."""


def table_name(event: str) -> str:
    """The raw table of an event: `ModelCallCompleted` -> `model_call_completed`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", event).lower()


# -- builders: columns of values in, an Arrow array out


def _plain(name: str, arrow: pa.DataType) -> Build:
    return lambda columns: pa.array(columns[name], arrow)


def _offsets(lengths: Iterable[int]) -> pa.Array:
    ends = array("i", accumulate(lengths, initial=0))
    return pa.Array.from_buffers(pa.int32(), len(ends), [None, pa.py_buffer(ends)])


def _list_of_chunks(chunks: Sequence[bytes | memoryview], arrow: pa.DataType, width: int) -> pa.Array:
    data = b"".join(chunks)
    lengths = list(map(len, chunks))
    if width > 1:
        if any(num % width for num in lengths):
            raise PackingError(f"a chunk of bytes is no array of {arrow}")
        lengths = [num // width for num in lengths]
    values = pa.Array.from_buffers(arrow, len(data) // width, [None, pa.py_buffer(data)])
    return pa.ListArray.from_arrays(_offsets(lengths), values)


def _bits(name: str, length: str) -> Build:
    def build(columns: Columns) -> pa.Array:
        bitmaps = columns[name]
        nums = [value if isinstance(value, int) else len(value) // 4 for value in columns[length]]
        for bitmap, num in zip(bitmaps, nums, strict=True):
            if len(bitmap) != (num + 7) >> 3:
                raise PackingError(f"{name}: a bitmap of {num} bits has {(num + 7) >> 3} bytes, not {len(bitmap)}")
        data = b"".join(bitmaps)
        bits = pa.Array.from_buffers(pa.bool_(), 8 * len(data), [None, pa.py_buffer(data)]).cast(pa.uint8())
        if any(num & 7 for num in nums):  # the bits that fill the last byte are no elements
            expanded = memoryview(bits.buffers()[1])
            starts = accumulate((8 * len(bitmap) for bitmap in bitmaps), initial=0)
            chunks = [expanded[start : start + num] for start, num in zip(starts, nums, strict=False)]
            return _list_of_chunks(chunks, pa.uint8(), 1)
        return pa.ListArray.from_arrays(_offsets(nums), bits)

    return build


def _experts(name: str) -> Build:
    def wide(dtype: bytes | str, ids: bytes) -> bytes:
        if dtype in (b"uint16", "uint16"):
            return ids
        out = bytearray(2 * len(ids))
        out[::2] = ids
        return bytes(out)

    def build(columns: Columns) -> pa.Array:
        dtypes, ids = columns["dtype"], columns[name]
        if not any(dtype in (b"uint16", "uint16") for dtype in dtypes):  # the usual case: widened all at once
            narrow = _list_of_chunks(ids, pa.uint8(), 1)
            return pa.ListArray.from_arrays(narrow.offsets, narrow.values.cast(pa.uint16()))
        return _list_of_chunks(list(map(wide, dtypes, ids)), pa.uint16(), 2)

    return build


def _packed(record: str, name: str, packed: Packed) -> tuple[str, Build]:
    if packed.kind == "experts":
        return "Array(UInt16)", _experts(name)
    kind, arrow, width = _PACKED_TYPES[packed.kind]
    if packed.kind == "bits":
        return f"Array({kind})", _bits(name, packed.length)
    return f"Array({kind})", lambda columns: _list_of_chunks([v or b"" for v in columns[name]], arrow, width)


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
            return f"Map(String, {kind})", lambda cols: pa.array([list(v.items()) for v in cols[name]], arrow_map)
        if isinstance(avro, dict) and avro["type"] == "array":
            items = avro["items"]
            if isinstance(items, str) and items in _PRIMITIVES:
                kind, arrow = _PRIMITIVES[items]
                return f"Array({kind})", _plain(name, pa.list_(arrow))
            kind, build = self._record(items)

            def build_list(columns: Columns) -> pa.Array:
                lists = columns[name]
                return pa.ListArray.from_arrays(_offsets(map(len, lists)), build(list(chain.from_iterable(lists))))

            return f"Array({kind})", build_list
        kind, build = self._record(avro)
        return kind, lambda columns: build(columns[name])

    def _record(self, avro: Any) -> tuple[str, Callable[[Sequence[tuple[Any, ...]]], pa.Array]]:
        """(ClickHouse type, builder of a struct array from records as tuples)."""
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

        def build_struct(records: Sequence[tuple[Any, ...]]) -> pa.Array:
            columns: Columns = dict(zip(names, zip(*records, strict=True), strict=True)) if records else no_records
            return pa.StructArray.from_arrays([build(columns) for build in builds], names)

        no_records: Columns = dict.fromkeys(names, ())
        return tuple_type, build_struct


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
    return lambda columns: pa.array([value is None for value in columns[name]], pa.bool_())


def _headers(columns: Columns) -> pa.Array:
    headers = columns["_headers"]
    keys, values = zip(*chain.from_iterable(headers), strict=True) if any(headers) else ((), ())
    offsets = _offsets(map(len, headers))
    return pa.MapArray.from_arrays(offsets, pa.array(keys, pa.string()), pa.array(values, pa.binary()))


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


@functools.cache
def value_names(event: str) -> tuple[str, ...]:
    """Names of the values that make a row: the event's fields, then those of RECORD_COLUMNS."""
    fields = derive_schema(event_type(event))["fields"]
    return tuple(f["name"] for f in fields) + tuple(c.name for c in RECORD_COLUMNS)


def to_arrow(event: str, columns: Sequence[Sequence[Any]]) -> pa.Table:
    """Columns of decoded values, in order of `value_names`, as one Arrow table of the event's raw table.

    Raises PackingError when a packed field does not fit its length, ArrowException for text that is no UTF-8.
    """
    named = dict(zip(value_names(event), columns, strict=True))
    made = table_columns(event)
    return pa.Table.from_arrays([c.build(named) for c in made], [c.name for c in made])


def all_events() -> tuple[str, ...]:
    """Every event of the catalogue, in order of definition."""
    import schemas.events  # noqa: F401  (registers them)

    return tuple(EVENTS)
