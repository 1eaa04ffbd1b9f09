"""Avro binary bodies from event dataclasses, by one function generated per class.

fastavro's writer looks at the schema of every field of every record again, and is lenient: it writes 1.5 as the long
1, any object as a boolean and a string as an array of its letters. Here the types are known when the function is
made, so it is several times as fast and refuses a value of another type by the field's name. The bytes are the same
as fastavro's (Avro 1.11 specification, "Binary encoding"; a property test compares the two).
"""

from __future__ import annotations

import dataclasses
import struct
import types
import typing
from collections.abc import Callable
from typing import Any, NoReturn, Union

Encoder = Callable[[Any, Callable[[bytes], None]], None]

#: Zigzag varints of 0 ... NUM_SMALL - 1, most of what is written: lengths, indices, counts.
NUM_SMALL = 8192
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class FieldTypeError(TypeError):
    """A field that holds a value of another type than it is declared with: names it."""


def encode_long(value: int) -> bytes:
    """The zigzag varint of a 64-bit integer. Raises OverflowError outside 64 bits."""
    if not INT64_MIN <= value <= INT64_MAX:
        raise OverflowError(f"{value} does not fit 64 bits")
    rest = (value << 1) ^ (value >> 63)
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


_SMALL = tuple(encode_long(n) for n in range(NUM_SMALL))


def _refuse(where: str, expected: str, value: object) -> NoReturn:
    shown = repr(value)
    raise FieldTypeError(f"{where}: {shown if len(shown) <= 80 else shown[:77] + '...'} is no {expected}")


def _as_bytes(value: Any, where: str) -> bytes:
    return bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else _refuse(where, "bytes", value)


def _number(value: Any, where: str, expected: type) -> Any:
    """The rare cases: an int for a float, a subclass (an enum member, numpy.float64)."""
    if isinstance(value, (int, float) if expected is float else int) and not isinstance(value, bool):
        return expected(value)
    return _refuse(where, expected.__name__, value)


class _Source:
    """Python source of an encoder, being written."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "small": _SMALL,
            "long": encode_long,
            "refuse": _refuse,
            "as_bytes": _as_bytes,
            "number": _number,
            "double": struct.Struct("<d").pack,
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

    def line(self, depth: int, text: str) -> None:
        """Add one line."""
        self.lines.append("    " * depth + text)

    def length(self, depth: int, of: str) -> None:
        """Write the length of something."""
        self.line(depth, f"n = len({of})")
        self.line(depth, f"w(small[n] if n < {NUM_SMALL} else long(n))")


def _emit_string(src: _Source, depth: int, var: str, where: str) -> None:
    src.line(depth, f"if {var}.__class__ is not str and not isinstance({var}, str): refuse({where!r}, 'str', {var})")
    src.line(depth, f"{var} = {var}.encode()")
    src.length(depth, var)
    src.line(depth, f"w({var})")


def _emit_bytes(src: _Source, depth: int, var: str, where: str) -> None:
    src.line(depth, f"if {var}.__class__ is not bytes: {var} = as_bytes({var}, {where!r})")
    src.length(depth, var)
    src.line(depth, f"w({var})")


def _emit_long(src: _Source, depth: int, var: str, where: str) -> None:
    src.line(depth, f"if {var}.__class__ is not int: {var} = number({var}, {where!r}, int)")
    src.line(depth, f"w(small[{var}] if 0 <= {var} < {NUM_SMALL} else long({var}))")


def _emit_double(src: _Source, depth: int, var: str, where: str) -> None:
    src.line(depth, f"if {var}.__class__ is not float: {var} = number({var}, {where!r}, float)")
    src.line(depth, f"w(double({var}))")


def _emit_boolean(src: _Source, depth: int, var: str, where: str) -> None:
    src.line(depth, f"if {var} is True: w(b'\\1')")
    src.line(depth, f"elif {var} is False: w(b'\\0')")
    src.line(depth, f"else: refuse({where!r}, 'bool', {var})")


_PRIMITIVES: dict[Any, Callable[[_Source, int, str, str], None]] = {
    str: _emit_string,
    bytes: _emit_bytes,
    int: _emit_long,
    float: _emit_double,
    bool: _emit_boolean,
}


def _emit(src: _Source, depth: int, tp: Any, var: str, where: str) -> None:
    """Write the lines that encode the local variable `var` of type `tp`; they may assign to it."""
    while isinstance(tp, typing.NewType) or typing.get_origin(tp) is typing.Annotated:
        tp = tp.__supertype__ if isinstance(tp, typing.NewType) else typing.get_args(tp)[0]
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if tp in _PRIMITIVES:
        _PRIMITIVES[tp](src, depth, var, where)
    elif origin in (Union, types.UnionType):
        src.line(depth, f"if {var} is None: w(b'\\0')")
        src.line(depth, "else:")
        src.line(depth + 1, "w(b'\\2')")
        _emit(src, depth + 1, next(a for a in args if a is not type(None)), var, where)
    elif origin in (tuple, dict):
        _emit_container(src, depth, origin, args, var, where)
    else:
        known = src.constant(tp)
        src.line(depth, f"if {var}.__class__ is not {known}: refuse({where!r}, {tp.__name__!r}, {var})")
        _emit_fields(src, depth, tp, var, where + ".")


def _emit_container(src: _Source, depth: int, origin: Any, args: tuple[Any, ...], var: str, where: str) -> None:
    allowed, item = ("(tuple, list)", src.local()) if origin is tuple else ("dict", src.local())
    expected = "tuple" if origin is tuple else "dict"
    src.line(depth, f"if not isinstance({var}, {allowed}): refuse({where!r}, {expected!r}, {var})")
    src.line(depth, f"if {var}:")
    src.length(depth + 1, var)
    if origin is tuple:
        src.line(depth + 1, f"for {item} in {var}:")
    else:
        key = src.local()
        src.line(depth + 1, f"for {key}, {item} in {var}.items():")
        _emit_string(src, depth + 2, key, where + " key")
    _emit(src, depth + 2, args[0] if origin is tuple else args[1], item, where + " item")
    src.line(depth, "w(b'\\0')")


def _emit_fields(src: _Source, depth: int, cls: type, var: str, where: str) -> None:
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        value = src.local()
        src.line(depth, f"{value} = {var}.{field.name}")
        _emit(src, depth, hints[field.name], value, where + field.name)


def encoder_function(cls: type) -> Encoder:
    """A function (instance of `cls`, append) that passes the pieces of the Avro body to `append`, in order.

    It raises FieldTypeError, OverflowError or UnicodeEncodeError for a value that cannot be written.
    """
    src = _Source()
    src.line(0, "def encode(obj, w):")
    _emit_fields(src, 1, cls, "obj", "")
    source = "\n".join(src.lines)
    scope = dict(src.names)
    exec(compile(source, f"<encoder of {cls.__name__}>", "exec"), scope)
    return typing.cast(Encoder, scope["encode"])
