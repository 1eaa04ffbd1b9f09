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
import functools
import io
import json
import struct
from collections.abc import Iterable
from typing import Any, Protocol

import fastavro

from schemas.avro_types import Schema, SchemaError, derive_schema, load_all_versions, load_schema
from schemas.base import EVENTS, Event
from schemas.decoder import BodyError, Decoder, Form, decoder_function
from schemas.encoder import Encoder, encoder_function
from schemas.records import from_record_function, values_function

SINGLE_OBJECT_MAGIC = b"\xc3\x01"
CONFLUENT_MAGIC = 0
HEADER_TYPE = "event-type"


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


def _parsed(schema: Schema) -> Any:
    return fastavro.parse_schema(copy.deepcopy(_plain(schema)))


class _Reader:
    """Decodes bodies of one writer schema into its event class, resolved to the newest schema."""

    def __init__(self, writer: Schema, newest: Schema, cls: type[Event]) -> None:
        self.name: str = cls.__name__
        self.event_type = cls
        self._schemas = None if fingerprint(writer) == fingerprint(newest) else (_parsed(writer), _parsed(newest))

    @functools.cached_property
    def read(self) -> Decoder:
        """(bytes, position) -> (event, position after the body)."""
        if self._schemas is None:
            return decoder_function(self.event_type)
        read_plain, build = self.read_plain, from_record_function(self.event_type)

        def read(data: bytes, pos: int) -> tuple[Event, int]:
            record, end = read_plain(data, pos)
            return build(record), end

        return read

    @functools.cached_property
    def read_plain(self) -> Decoder:
        """(bytes, position) -> (fields as plain values, position after the body)."""
        if self._schemas is None:
            return decoder_function(self.event_type, Form.DICTS)
        writer, newest = self._schemas

        def read_plain(data: bytes, pos: int) -> tuple[dict[str, Any], int]:
            body = io.BytesIO(data)
            body.seek(pos)
            record: dict[str, Any] = fastavro.schemaless_reader(body, writer, newest)
            return record, body.tell()

        return read_plain

    @functools.cached_property
    def read_values(self) -> Decoder:
        """(bytes, position) -> (field values in order of the newest schema, position after the body)."""
        if self._schemas is None:
            return decoder_function(self.event_type, Form.VALUES)
        read_plain, values_of = self.read_plain, values_function(self.event_type)

        def read_values(data: bytes, pos: int) -> tuple[tuple[Any, ...], int]:
            record, end = read_plain(data, pos)
            return values_of(record), end

        return read_values


@functools.cache
def _newest_schema(name: str) -> Schema:
    """The checked-in schema of an event's version. Raises SchemaError when its class has other fields than it."""
    cls = EVENTS[name]
    schema = load_schema(name, cls.VERSION)
    if fingerprint(schema) != fingerprint(derive_schema(cls)):
        raise SchemaError(
            f"{cls.__name__}: the dataclass differs from {cls.__name__}.v{cls.VERSION}.avsc; raise its version and "
            "run `python -m schemas.avro_types`"
        )
    return schema


@functools.cache
def _known_schemas() -> dict[bytes, tuple[Schema, type[Event]]]:
    """Magic and fingerprint -> (writer schema, class), of every version this code has."""
    return {
        SINGLE_OBJECT_MAGIC + fingerprint(schema): (schema, cls)
        for name, cls in EVENTS.items()
        for schema in load_all_versions(name).values()
    }


@functools.cache
def _known_reader(mark: bytes) -> _Reader | None:
    known = _known_schemas().get(mark)
    return _Reader(known[0], _newest_schema(known[1].__name__), known[1]) if known else None


@functools.cache
def _writer(name: str) -> tuple[bytes, Encoder]:
    return SINGLE_OBJECT_MAGIC + fingerprint(_newest_schema(name)), encoder_function(EVENTS[name])


def _body_error(reader: _Reader, exc: Exception) -> CodecError:
    """Whatever broken bytes lead to, as one kind of error: an index out of range, bad UTF-8, fastavro's many kinds."""
    detail = str(exc) if isinstance(exc, BodyError) else f"{exc!r}, the bytes may be cut off"
    return CodecError(f"{reader.name}: body does not fit its schema: {detail}")


class Codec:
    """Encodes and decodes every event of the catalogue. Not thread-safe; make one per thread (that is cheap)."""

    def __init__(self, registry: SchemaIds | None = None, topic_prefix: str = "") -> None:
        self._registry = registry
        self._prefix = topic_prefix
        #: Filled at first use.
        self._writers: dict[type[Event], tuple[bytes, Encoder]] = {}
        #: Magic and fingerprint -> reader; filled at first use and by `add_schema`.
        self._readers: dict[bytes, _Reader] = {}
        self._by_id: dict[int, _Reader] = {}

    # -- writing

    def encode(self, event: Event) -> bytes:
        """The framed bytes of an event. Raises CodecError, naming the field, when a value does not fit its schema."""
        cls = type(event)
        writer = self._writers.get(cls)
        if writer is None:
            writer = self._writers[cls] = self._make_writer(cls)
        pieces = [writer[0]]
        try:
            writer[1](event, pieces.append)
        except (TypeError, ValueError, AttributeError, OverflowError) as exc:
            raise CodecError(f"{cls.__name__} {event.event_id}: {exc}") from exc
        return b"".join(pieces)

    def _make_writer(self, cls: type[Event]) -> tuple[bytes, Encoder]:
        if EVENTS.get(cls.__name__) is not cls:
            raise CodecError(f"{cls.__name__} is not in the catalogue; register it with @event")
        prefix, encode_body = _writer(cls.__name__)
        if self._registry is not None:
            schema_id = self._registry.id_of(self._prefix + cls.TOPIC, _newest_schema(cls.__name__))
            prefix = struct.pack(">bI", CONFLUENT_MAGIC, schema_id)
        return prefix, encode_body

    # -- reading

    def decode(self, data: bytes) -> Event:
        """The event in `data`, either framing. Raises CodecError on anything else."""
        reader, start = self._readers.get(data[:10]), 10
        if reader is None:
            reader, start = self._other_reader(data)
        try:
            event, end = reader.read(data, start)
        except Exception as exc:
            raise _body_error(reader, exc) from exc
        if end != len(data):
            raise CodecError(f"{reader.name}: {len(data) - end} bytes left over after the record")
        return event  # type: ignore[no-any-return]

    def decode_values(self, data: bytes) -> tuple[str, tuple[Any, ...]]:
        """(event type, field values in order of the newest schema), the quickest form, for readers of whole columns.

        Nested records are tuples too. Text is bytes that are meant to be UTF-8: whoever uses it finds out.
        """
        reader, start = self._readers.get(data[:10]), 10
        if reader is None:
            reader, start = self._other_reader(data)
        try:
            values, end = reader.read_values(data, start)
        except Exception as exc:
            raise _body_error(reader, exc) from exc
        if end != len(data):
            raise CodecError(f"{reader.name}: {len(data) - end} bytes left over after the record")
        return reader.name, values

    def _other_reader(self, data: bytes) -> tuple[_Reader, int]:
        """(reader, where the body starts) of bytes that do not begin with a known fingerprint."""
        if len(data) >= 5 and data[0] == CONFLUENT_MAGIC:
            return self._reader_of_id(struct.unpack_from(">I", data, 1)[0]), 5
        if len(data) >= 10 and data[:2] == SINGLE_OBJECT_MAGIC:
            if known := _known_reader(data[:10]):
                self._readers[data[:10]] = known
                return known, 10
            raise UnknownSchemaError(
                f"writer schema {data[2:10].hex()} is unknown; read the `schemas` topic first, or upgrade"
            )
        raise CodecError(
            f"{len(data)} bytes starting {data[:4].hex() or '(empty)'} are neither Avro single-object (c301) "
            "nor Confluent framing (00)"
        )

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
        mark = SINGLE_OBJECT_MAGIC + fingerprint(schema)
        if mark not in self._readers:
            self._readers[mark] = _known_reader(mark) or _Reader(schema, _newest_schema(name), EVENTS[name])
        return self._readers[mark]

    def schema_records(self) -> Iterable[tuple[bytes, bytes]]:
        """(key, value) records for the `schemas` topic: every schema version this code can write or read."""
        for mark, (schema, _) in _known_schemas().items():
            yield mark[len(SINGLE_OBJECT_MAGIC) :].hex().encode(), json.dumps(schema, sort_keys=True).encode()
