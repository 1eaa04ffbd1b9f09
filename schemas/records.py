"""Dataclass <-> plain dict, as fast as the body codec allows.

Only fields that hold nested records need work; for each event class a function is built once that knows them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any, Union

from schemas.base import Event


def _strip(tp: Any) -> Any:
    if typing.get_origin(tp) is typing.Annotated:
        tp = typing.get_args(tp)[0]
    return tp


def _nested(cls: type) -> dict[str, tuple[str, Any]]:
    """Fields that need conversion: name -> ("array" | "record" | "optional" | "tuple", record class)."""
    out: dict[str, tuple[str, Any]] = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if typing.get_origin(hint) is typing.ClassVar:
            continue
        tp = _strip(hint)
        args = typing.get_args(tp)
        if typing.get_origin(tp) is tuple:
            out[name] = ("array", args[0]) if dataclasses.is_dataclass(args[0]) else ("tuple", None)
        elif typing.get_origin(tp) in (Union, types.UnionType):
            inner = next(a for a in args if a is not type(None))
            if dataclasses.is_dataclass(inner):
                out[name] = ("optional", inner)
        elif dataclasses.is_dataclass(tp):
            out[name] = ("record", tp)
    return out


def to_record_function(cls: type) -> Callable[[Any], dict[str, Any]]:
    """A function from an instance of `cls` to a dict that fastavro writes."""
    nested = [
        (name, kind, to_record_function(inner)) for name, (kind, inner) in _nested(cls).items() if inner is not None
    ]
    if not nested:
        return lambda obj: obj.__dict__

    def convert(obj: Any) -> dict[str, Any]:
        record = dict(obj.__dict__)
        for name, kind, inner in nested:
            value = record[name]
            if kind == "array":
                record[name] = [inner(item) for item in value]
            elif value is not None:
                record[name] = inner(value)
        return record

    return convert


def _builder(cls: type) -> Callable[[dict[str, Any]], Any]:
    nested = [
        (name, kind, _builder(inner) if inner is not None else None) for name, (kind, inner) in _nested(cls).items()
    ]
    new: Any = cls.__new__

    def build(record: dict[str, Any]) -> Any:
        for name, kind, inner in nested:
            value = record[name]
            if kind == "tuple":
                record[name] = tuple(value)
            elif inner is not None and value is not None:
                record[name] = tuple(map(inner, value)) if kind == "array" else inner(value)
        obj = new(cls)
        obj.__dict__.update(record)
        return obj

    return build


def from_record_function(cls: type[Event]) -> Callable[[dict[str, Any]], Event]:
    """A function from a decoded dict to an event. The dict belongs to the event afterwards."""
    return _builder(cls)
