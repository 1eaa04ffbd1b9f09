"""Hypothesis strategies for events, made from the types of their fields."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Union

from hypothesis import strategies as st

from schemas.base import Event

PRIMITIVES: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=20),
    int: st.integers(-(2**63), 2**63 - 1) | st.integers(-10_000, 10_000),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=40),
}


def values_of(tp: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    while isinstance(tp, typing.NewType) or typing.get_origin(tp) is typing.Annotated:
        tp = tp.__supertype__ if isinstance(tp, typing.NewType) else typing.get_args(tp)[0]
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if tp in PRIMITIVES:
        return PRIMITIVES[tp]
    if origin in (Union, types.UnionType):
        return st.none() | values_of(next(a for a in args if a is not type(None)))
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    hints = typing.get_type_hints(tp, include_extras=True)
    return st.builds(tp, **{field.name: values_of(hints[field.name]) for field in dataclasses.fields(tp)})


def events(cls: type[Event]) -> st.SearchStrategy[Event]:
    """Instances of an event class."""
    return values_of(cls)
