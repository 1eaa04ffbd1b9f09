"""Avro binary bodies to event dataclasses, by one function generated per class: the counterpart of `encoder`.

It reads what was written with the newest schema; bodies of other versions go through fastavro's schema resolution.
Unlike fastavro it refuses a boolean that is neither 0 nor 1 (Avro 1.11 specification, "Binary encoding").
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import types
import typing
from collections.abc import Callable
from typing import Any, NoReturn, Union

Decoder = Callable[[bytes, int], tuple[Any, int]]


class BodyError(ValueError):
    """Bytes that are no body of the schema: says where and why."""


def _refuse(where: str, why: str) -> NoReturn:
    raise BodyError(f"{where}: {why}")


def _long_rest(data: bytes, pos: int, first: int) -> tuple[int, int]:
    """(zigzag value, next position) of a varint whose first byte had the continuation bit."""
    value, shift = first & 0x7F, 7
    while True:
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    if value >> 64:
        raise BodyError("a varint of more than 64 bits")
    return value, pos


class Form(enum.Enum):
    """What a decoder makes of a record."""

    OBJECTS = enum.auto()  # instances of the event's dataclasses, arrays as tuples
    DICTS = enum.auto()  # dicts of plain values, arrays as lists
    VALUES = enum.auto()  # tuples of the values in order of the schema, arrays as lists, text left as UTF-8 bytes


class _Source:
    """Python source of a decoder, being written."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "long_rest": _long_rest,
            "refuse": _refuse,
            "double": struct.Struct("<d").unpack_from,
            "new": object.__new__,
            "set_attribute": object.__setattr__,
        }
        self._num_locals = 0

    def local(self) -> str:
        """A fresh variable name."""
        self._num_locals += 1
        return f"v{self._num_locals}"

    def constant(self, value: object) -> str:
        """A name for an object the source refers to."""
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def add(self, depth: int, *lines: str) -> None:
        """Add lines."""
        self.lines += ["    " * depth + line for line in lines]

    def zigzag(self, depth: int, var: str) -> None:
        """Read the unsigned value of a varint into `var`. Two bytes are the usual length of texts and arrays."""
        self.add(depth, f"{var} = data[pos]; pos += 1", f"if {var} > 127:")
        self.add(depth + 1, "high = data[pos]")
        self.add(depth + 1, f"if high < 128: {var} += (high << 7) - 128; pos += 1")
        self.add(depth + 1, f"else: {var}, pos = long_rest(data, pos, {var})")

    def chunk(self, depth: int, where: str) -> None:
        """Read a length and set `stop` to where the bytes of that length end."""
        self.zigzag(depth, "n")
        self.add(depth, "stop = pos + (n >> 1)")
        self.add(depth, f"if n & 1 or stop > end: refuse({where!r}, 'a length beyond the end')")


def _read_quickly(src: _Source, depth: int, var: str, where: str) -> None:
    """Bytes as `_read_bytes` reads them. One beyond the end is found by the next read, or by whoever compares ends."""
    src.add(depth, "n = data[pos]", "if n & 129:")  # of more than 63 bytes, or of a negative length
    src.chunk(depth + 1, where)
    src.add(depth + 1, f"{var} = data[pos:stop]; pos = stop")
    src.add(depth, "else:")
    src.add(depth + 1, f"start = pos + 1; pos = start + (n >> 1); {var} = data[start:pos]")


def _read_string(src: _Source, depth: int, var: str, where: str) -> None:
    if src.form is Form.VALUES:
        _read_quickly(src, depth, var, where)
    else:
        src.chunk(depth, where)
        src.add(depth, f"{var} = data[pos:stop].decode(); pos = stop")


def _read_bytes(src: _Source, depth: int, var: str, where: str) -> None:
    src.chunk(depth, where)
    src.add(depth, f"{var} = data[pos:stop]; pos = stop")


def _read_long(src: _Source, depth: int, var: str, where: str) -> None:
    src.zigzag(depth, var)
    src.add(depth, f"{var} = ~({var} >> 1) if {var} & 1 else {var} >> 1")


def _read_double(src: _Source, depth: int, var: str, where: str) -> None:
    src.add(depth, f"{var} = double(data, pos)[0]; pos += 8")


def _read_boolean(src: _Source, depth: int, var: str, where: str) -> None:
    src.add(depth, "n = data[pos]; pos += 1")
    src.add(depth, f"if n > 1: refuse({where!r}, 'a boolean that is neither 0 nor 1')", f"{var} = n == 1")


_PRIMITIVES: dict[Any, Callable[[_Source, int, str, str], None]] = {
    str: _read_string,
    bytes: _read_bytes,
    int: _read_long,
    float: _read_double,
    bool: _read_boolean,
}


def _read(src: _Source, depth: int, tp: Any, var: str, where: str) -> None:
    """Write the lines that read a value of type `tp` into the local variable `var`."""
    while isinstance(tp, typing.NewType) or typing.get_origin(tp) is typing.Annotated:
        tp = tp.__supertype__ if isinstance(tp, typing.NewType) else typing.get_args(tp)[0]
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if tp in _PRIMITIVES:
        _PRIMITIVES[tp](src, depth, var, where)
    elif origin in (Union, types.UnionType):
        src.add(depth, "n = data[pos]; pos += 1", f"if n == 0: {var} = None", "elif n == 2:")
        _read(src, depth + 1, next(a for a in args if a is not type(None)), var, where)
        src.add(depth, f"else: refuse({where!r}, 'a branch that is not in the union')")
    elif origin in (tuple, dict):
        _read_blocks(src, depth, tp, var, where)
    else:
        _read_fields(src, depth, tp, var, where + ".")


def _read_blocks(src: _Source, depth: int, tp: Any, var: str, where: str) -> None:
    """Arrays and maps: blocks of items until an empty one; a negative count is followed by the block's size."""
    item, count, is_map = src.local(), src.local(), typing.get_origin(tp) is dict
    src.add(depth, f"{var} = {'{}' if is_map else '[]'}", "while True:")
    _read_long(src, depth + 1, count, where)
    src.add(depth + 1, f"if {count} == 0: break", f"if {count} < 0:")
    _read_long(src, depth + 2, item, where)
    src.add(depth + 2, f"{count} = -{count}")
    src.add(depth + 1, f"for _ in range({count}):")
    if is_map:
        key = src.local()
        _read_string(src, depth + 2, key, where + " key")
    _read(src, depth + 2, typing.get_args(tp)[1 if is_map else 0], item, where + " item")
    src.add(depth + 2, f"{var}[{key}] = {item}" if is_map else f"{var}.append({item})")
    if not is_map and src.form is Form.OBJECTS:
        src.add(depth, f"{var} = tuple({var})")


def _read_fields(src: _Source, depth: int, cls: type, var: str, where: str) -> None:
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {field.name: src.local() for field in dataclasses.fields(cls)}
    for name, value in values.items():
        _read(src, depth, hints[name], value, where + name)
    record = "{" + ", ".join(f"{name!r}: {value}" for name, value in values.items()) + "}"
    if src.form is Form.VALUES:
        src.add(depth, f"{var} = ({', '.join(values.values())},)")
    elif src.form is Form.DICTS:
        src.add(depth, f"{var} = {record}")
    else:  # the instance takes the dict over: no copy, and what is frozen stays frozen
        src.add(depth, f"{var} = new({src.constant(cls)})", f"set_attribute({var}, '__dict__', {record})")


def decoder_function(cls: type, form: Form = Form.OBJECTS) -> Decoder:
    """A function (bytes, position of the body) -> (the record of `cls` in that form, position after the body).

    It raises BodyError, IndexError, struct.error or UnicodeDecodeError for bytes that are no such body. Form.VALUES
    leaves it to its caller to check that text is UTF-8.
    """
    src = _Source(form)
    src.add(0, "def decode(data, pos):", "    end = len(data)")
    _read_fields(src, 1, cls, "obj", "")
    src.add(1, "return obj, pos")
    scope = dict(src.names)
    exec(compile("\n".join(src.lines), f"<decoder of {cls.__name__}>", "exec"), scope)
    return typing.cast(Decoder, scope["decode"])
