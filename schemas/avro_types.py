"""From event dataclasses to Avro schemas.

The dataclass is written by hand; its `.avsc` is generated from it once, checked in and never changed after a
release. `python -m schemas.avro_types` writes the files that are missing and refuses to alter one that exists.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any, Union

from schemas.base import Event
from schemas.events import EVENTS

AVRO_DIR = Path(__file__).parent / "avro"
NAMESPACE = "rollstream"
PRIMITIVES: dict[type, str] = {str: "string", int: "long", float: "double", bool: "boolean", bytes: "bytes"}

Schema = dict[str, Any]


class SchemaError(TypeError):
    """A dataclass that cannot be written as an Avro schema, or an `.avsc` that disagrees with its dataclass."""


def _unwrap(annotation: Any) -> tuple[Any, str, str | None]:
    """(type, doc, logical type) of an `Annotated[type, doc, logical type]`."""
    if typing.get_origin(annotation) is typing.Annotated:
        base, doc, *rest = typing.get_args(annotation)
        return base, doc, (rest[0] if rest else None)
    return annotation, "", None


def _avro_type(tp: Any, where: str, seen: set[str]) -> Any:
    while isinstance(tp, typing.NewType):
        tp = tp.__supertype__
    if tp in PRIMITIVES:
        return PRIMITIVES[tp]
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if origin in (Union, types.UnionType):
        rest = [a for a in args if a is not type(None)]
        if len(rest) != 1 or len(args) != 2:
            raise SchemaError(f"{where}: only `T | None` unions are allowed, not {tp}")
        return ["null", _avro_type(rest[0], where, seen)]
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return {"type": "array", "items": _avro_type(args[0], where, seen)}
    if origin is dict and args[0] is str:
        return {"type": "map", "values": _avro_type(args[1], where, seen)}
    if dataclasses.is_dataclass(tp) and isinstance(tp, type):
        if tp.__name__ in seen:
            return f"{NAMESPACE}.{tp.__name__}"
        return _record(tp, seen)
    raise SchemaError(f"{where}: {tp!r} has no Avro type here")


def _default(field: dataclasses.Field[Any]) -> Any:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if isinstance(value, tuple):
        return list(value)
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _record(cls: type, seen: set[str]) -> Schema:
    seen.add(cls.__name__)
    hints = typing.get_type_hints(cls, include_extras=True)
    fields: list[Schema] = []
    for field in dataclasses.fields(cls):
        where = f"{cls.__name__}.{field.name}"
        tp, doc, logical = _unwrap(hints[field.name])
        if not doc:
            raise SchemaError(f"{where}: has no doc; write Annotated[type, 'what it is, with its unit']")
        avro = _avro_type(tp, where, seen)
        if logical:
            avro = {"type": avro, "logicalType": logical}
        entry: Schema = {"name": field.name, "type": avro, "doc": doc}
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if has_default:
            entry["default"] = _default(field)
        elif isinstance(avro, list):
            entry["default"] = None
        fields.append(entry)
    doc = " ".join((cls.__doc__ or "").split())
    return {"type": "record", "name": cls.__name__, "namespace": NAMESPACE, "doc": doc, "fields": fields}


def derive_schema(cls: type[Event]) -> Schema:
    """The Avro record schema of an event class."""
    return _record(cls, set())


def schema_path(name: str, version: int) -> Path:
    """Where the `.avsc` of an event version lies."""
    return AVRO_DIR / f"{name}.v{version}.avsc"


def load_schema(name: str, version: int) -> Schema:
    """The checked-in schema of an event version. Raises FileNotFoundError with the remedy."""
    path = schema_path(name, version)
    try:
        loaded: Schema = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: missing; run `python -m schemas.avro_types`") from None
    return loaded


def load_all_versions(name: str) -> dict[int, Schema]:
    """Every checked-in version of an event's schema, oldest first."""
    versions = sorted(int(p.name.split(".v")[1].removesuffix(".avsc")) for p in AVRO_DIR.glob(f"{name}.v*.avsc"))
    return {v: load_schema(name, v) for v in versions}


def write_missing(*, force: bool = False) -> list[Path]:
    """Write the `.avsc` of every event whose current version has none; refuse when one disagrees.

    `force` overwrites the current version: only before its first release.
    """
    AVRO_DIR.mkdir(exist_ok=True)
    written = []
    for name, cls in EVENTS.items():
        path, text = schema_path(name, cls.VERSION), json.dumps(derive_schema(cls), indent=2) + "\n"
        if path.exists() and path.read_text() == text:
            continue
        if path.exists() and not force:
            raise SchemaError(
                f"{path.name}: dataclass {name} differs from its released schema; raise VERSION to {cls.VERSION + 1}"
            )
        path.write_text(text)
        written.append(path)
    return written


if __name__ == "__main__":
    for made in write_missing(force="--force" in sys.argv):
        print(f"wrote {made.name}")
