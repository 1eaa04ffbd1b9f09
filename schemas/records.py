"""Decoded dicts to dataclasses, as fast as the body codec allows.

Only fields that hold nested records need work; for each class a function is built once that knows them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any, Union


def _nested(cls: type) -> list[tuple[str, type | None]]:
    """Fields that need conversion: (name, record class); no class: a tuple of primitives."""
    out: list[tuple[str, type | None]] = []
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        tp = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
        if typing.get_origin(tp) in (Union, types.UnionType):
            tp = next(a for a in typing.get_args(tp) if a is not type(None))
        item = typing.get_args(tp)[0] if typing.get_origin(tp) is tuple else tp
        if dataclasses.is_dataclass(item):
            out.append((name, typing.cast(type, item)))
        elif typing.get_origin(tp) is tuple:
            out.append((name, None))
    return out


def from_record_function(cls: type) -> Callable[[dict[str, Any]], Any]:
    """A function from a decoded dict to an instance of `cls`. The dict becomes the instance's own."""
    nested = [(name, from_record_function(inner) if inner else None) for name, inner in _nested(cls)]
    new: Callable[[type], Any] = object.__new__
    set_attribute = object.__setattr__

    def build(record: dict[str, Any]) -> Any:
        for name, inner in nested:
            value = record[name]
            if inner is None:
                if value is not None:
                    record[name] = tuple(value)
            elif isinstance(value, list):
                record[name] = tuple([inner(item) for item in value])
            elif value is not None:
                record[name] = inner(value)
        obj = new(cls)
        set_attribute(obj, "__dict__", record)  # no copy, and what is frozen stays frozen
        return obj

    return build


def values_function(cls: type) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """A function from a decoded dict to the field values of `cls` in order, nested records as tuples too."""
    names = [field.name for field in dataclasses.fields(cls)]
    nested = {name: values_function(inner) for name, inner in _nested(cls) if inner}

    def value_of(name: str, value: Any) -> Any:
        inner = nested.get(name)
        if inner is None or value is None:
            return value
        return [inner(item) for item in value] if isinstance(value, list) else inner(value)

    return lambda record: tuple([value_of(name, record[name]) for name in names])
