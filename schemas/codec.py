"""Events to bytes and back.

Two framings, told apart by the first byte:

- Avro single-object encoding (Avro 1.11 specification, "Single-object encoding"): `C3 01`, the little-endian
  CRC-64-AVRO fingerprint of the writer schema, the binary body. The default. Writer schemas lie on the `schemas`
  topic, so that a log decodes with nothing but itself.
- Confluent wire format: `00`, the big-endian 32-bit schema id, the body. Written when a Schema Registry is set.

Timestamps stay integers (milliseconds) in the dataclasses: the logical type is in the schema for others to see.
"""

from __future__ import annotations

import copy
import io
import json
import struct
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import fastavro
from fastavro._schema_common import UnknownType

from schemas.avro_types import Schema, load_all_versions
from schemas.base import EVENTS, Event
from schemas.records import from_record_function, to_record_function

SINGLE_OBJECT_MAGIC = b"\xc3\x01"
CONFLUENT_MAGIC = 0
HEADER_TYPE = "event-type"

_write = fastavro.schemaless_writer
_read = fastavro.schemaless_reader


class CodecError(ValueError):
    """Bytes that are no event: says what was found and what to do."""


class UnknownSchemaError(CodecError):
    """The writer schema is neither built in nor known from the log or a registry yet."""


class SchemaIds(Protocol):
    """A Schema Registry, as the codec needs it."""

    def id_of(self, topic: str, schema: Schema) -> int:
        """The id of `schema` for values of `topic`, registering it when new."""

    def schema_of(self, schema_id: int) -> Schema:
        """The schema of an id."""


def fingerprint(schema: Schema) -> bytes:
    """The 8-byte little-endian CRC-64-AVRO fingerprint of a schema's parsing canonical form."""
    canonical = fastavro.schema.to_parsing_canonical_form(schema)
    return bytes.fromhex(fastavro.schema.fingerprint(canonical, "CRC-64-AVRO"))


def _plain(schema: Any) -> Any:
    """The schema without logical types: integers in, integers out."""
    if isinstance(schema, dict):
        return {k: _plain(v) for k, v in schema.items() if k != "logicalType"}
    return [_plain(v) for v in schema] if isinstance(schema, list) else schema


class _Reader:
    """Decodes bodies of one writer schema into its event class, resolved to the newest schema."""

    __slots__ = ("_reader_schema", "_writer_schema", "build", "event_type", "name")

    def __init__(self, writer: Schema, newest: Schema, cls: type[Event]) -> None:
        self.name: str = cls.__name__
        self.event_type = cls
        self._writer_schema = fastavro.parse_schema(copy.deepcopy(_plain(writer)))
        same = fingerprint(writer) == fingerprint(newest)
        self._reader_schema = None if same else fastavro.parse_schema(copy.deepcopy(_plain(newest)))
        self.build = from_record_function(cls)

    def read(self, body: io.BytesIO) -> dict[str, Any]:
        """The fields in `body`, resolved to the newest schema."""
        record: dict[str, Any] = _read(body, self._writer_schema, self._reader_schema)
        return record


class Codec:
    """Encodes and decodes every event of the catalogue. Not thread-safe; make one per thread."""

    def __init__(self, registry: SchemaIds | None = None, topic_prefix: str = "") -> None:
        self._registry = registry
        self._prefix = topic_prefix
        self._writers: dict[type[Event], tuple[bytes, Any, Callable[[Any], dict[str, Any]]]] = {}
        self._readers: dict[bytes, _Reader] = {}
        self._by_id: dict[int, _Reader] = {}
        self._prefixes: dict[type[Event], bytes] = {}
        self._newest: dict[str, Schema] = {}
        for name, cls in EVENTS.items():
            versions = load_all_versions(name)
            newest = versions[cls.VERSION]
            self._newest[name] = newest
            for schema in versions.values():
                self._readers[fingerprint(schema)] = _Reader(schema, newest, cls)
            body_schema = fastavro.parse_schema(copy.deepcopy(_plain(newest)))
            self._writers[cls] = (
                SINGLE_OBJECT_MAGIC + fingerprint(newest),
                body_schema,
                to_record_function(cls),
            )

    # -- writing

    def encode(self, event: Event) -> bytes:
        """The framed bytes of an event. Raises CodecError when a field does not fit its schema."""
        cls = type(event)
        try:
            prefix, schema, to_record = self._writers[cls]
        except KeyError:
            raise CodecError(f"{cls.__name__} is not in the catalogue; register it with @event") from None
        if self._registry is not None:
            prefix = self._confluent_prefix(cls)
        out = io.BytesIO()
        out.write(prefix)
        try:
            _write(out, schema, to_record(event))
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError, UnknownType) as exc:
            raise CodecError(f"{cls.__name__} {event.event_id}: {exc}") from exc
        return out.getvalue()

    def _confluent_prefix(self, cls: type[Event]) -> bytes:
        prefix = self._prefixes.get(cls)
        if prefix is None:
            assert self._registry is not None
            schema_id = self._registry.id_of(self._prefix + cls.TOPIC, self._newest[cls.__name__])
            prefix = self._prefixes[cls] = struct.pack(">bI", CONFLUENT_MAGIC, schema_id)
        return prefix

    # -- reading

    def decode(self, data: bytes) -> Event:
        """The event in `data`, either framing. Raises CodecError on anything else."""
        reader, record = self._read(data)
        return reader.build(record)

    def decode_record(self, data: bytes) -> tuple[str, dict[str, Any]]:
        """(event type, fields as plain values, nested records as dicts): for readers that make columns of them."""
        reader, record = self._read(data)
        return reader.name, record

    def _read(self, data: bytes) -> tuple[_Reader, dict[str, Any]]:
        if len(data) >= 10 and data[:2] == SINGLE_OBJECT_MAGIC:
            reader, start = self._readers.get(data[2:10]), 10
            if reader is None:
                raise UnknownSchemaError(
                    f"writer schema {data[2:10].hex()} is unknown; read the `schemas` topic first, or upgrade"
                )
        elif len(data) >= 5 and data[0] == CONFLUENT_MAGIC:
            reader, start = self._reader_of_id(struct.unpack_from(">I", data, 1)[0]), 5
        else:
            raise CodecError(
                f"{len(data)} bytes starting {data[:4].hex() or '(empty)'} are neither Avro single-object (c301) "
                "nor Confluent framing (00)"
            )
        body = io.BytesIO(data)
        body.seek(start)
        try:
            record = reader.read(body)
        except Exception as exc:  # fastavro raises many kinds on broken input
            raise CodecError(f"{reader.name}: body does not fit its schema: {exc!r}") from exc
        if body.tell() != len(data):
            raise CodecError(f"{reader.name}: {len(data) - body.tell()} bytes left over after the record")
        return reader, record

    def _reader_of_id(self, schema_id: int) -> _Reader:
        reader = self._by_id.get(schema_id)
        if reader is None:
            if self._registry is None:
                raise UnknownSchemaError(f"schema id {schema_id}: set schema_registry.url to read Confluent framing")
            reader = self.add_schema(self._registry.schema_of(schema_id))
            self._by_id[schema_id] = reader
        return reader

    # -- the schemas topic

    def add_schema(self, schema: Schema) -> _Reader:
        """Learn a writer schema (from the `schemas` topic or a registry)."""
        name = str(schema["name"]).rsplit(".", 1)[-1]
        if name not in EVENTS:
            raise UnknownSchemaError(f"schema {name!r} names no event of this version; upgrade to read it")
        mark = fingerprint(schema)
        if mark not in self._readers:
            self._readers[mark] = _Reader(schema, self._newest[name], EVENTS[name])
        return self._readers[mark]

    def schema_records(self) -> Iterable[tuple[bytes, bytes]]:
        """(key, value) records for the `schemas` topic: every schema version this code can write or read."""
        for name in EVENTS:
            for schema in load_all_versions(name).values():
                yield fingerprint(schema).hex().encode(), json.dumps(schema, sort_keys=True).encode()
