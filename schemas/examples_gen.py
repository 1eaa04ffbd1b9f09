"""Golden bytes: one example of every event version, as JSON and as the bytes the codec wrote at the time.

`python -m schemas.examples_gen` writes the examples that are missing and leaves the others alone: they are what
logs of that version hold, and every later version of the code must read them. `--force` rewrites the current
versions' examples, which is right only before their first release.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
import zlib
from pathlib import Path
from typing import Any, Union

from schemas.base import EVENTS, Event
from schemas.codec import Codec

#: 2026-01-01 00:00 UTC.
FIRST_TIMESTAMP_MS = 1_767_225_600_000
EXAMPLES_DIR = Path(__file__).parent / "examples"


def example_event(cls: type[Event]) -> Event:
    """An instance with every field set, optional ones too; the same one every time."""
    return typing.cast(Event, _example(cls, cls.__name__))


def _example(tp: Any, where: str) -> Any:
    """A value of a field's type that depends on nothing but the field's name."""
    number = zlib.crc32(where.encode())
    if typing.get_origin(tp) is typing.Annotated:
        tp, _, *logical = typing.get_args(tp)
        if logical == ["timestamp-millis"]:
            return FIRST_TIMESTAMP_MS + number
    while isinstance(tp, typing.NewType):
        tp = tp.__supertype__
    simple = {
        str: f"{where.rsplit('.', 1)[-1]}-{number % 1000}-é\n",
        int: number % 100_000 - 5_000 if number % 3 else number * 1_000_000,
        float: number / 2**20,
        bool: bool(number % 2),
        bytes: number.to_bytes(4, "little") + b"\x00\xff",
    }
    if tp in simple:
        return simple[tp]
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if origin in (Union, types.UnionType):
        return _example(next(a for a in args if a is not type(None)), where)
    if origin is tuple:
        return tuple(_example(args[0], f"{where}.{i}") for i in range(2))
    if origin is dict:
        return {f"k{i}": _example(args[1], f"{where}.{i}") for i in range(2)}
    hints = typing.get_type_hints(tp, include_extras=True)
    return tp(**{f.name: _example(hints[f.name], f"{where}.{f.name}") for f in dataclasses.fields(tp)})


def as_json(event: Event) -> str:
    """Readable form of an example; bytes are written as {"hex": ...}."""

    def convert(value: Any) -> Any:
        if isinstance(value, bytes):
            return {"hex": value.hex()}
        if isinstance(value, (list, tuple)):
            return [convert(item) for item in value]
        return {k: convert(v) for k, v in value.items()} if isinstance(value, dict) else value

    return json.dumps(convert(dataclasses.asdict(event)), indent=2, ensure_ascii=False) + "\n"


def example_paths(name: str, version: int) -> tuple[Path, Path]:
    """(JSON, bytes) of the example of an event version."""
    return EXAMPLES_DIR / f"{name}.v{version}.json", EXAMPLES_DIR / f"{name}.v{version}.bin"


def write_missing(*, force: bool = False) -> list[Path]:
    """Write the examples that are missing (with `force`: all current ones that differ); returns the changed files."""
    EXAMPLES_DIR.mkdir(exist_ok=True)
    codec, written = Codec(), []
    for name, cls in EVENTS.items():
        event = example_event(cls)
        readable, binary = example_paths(name, cls.VERSION)
        for path, content in ((readable, as_json(event).encode()), (binary, codec.encode(event))):
            if path.exists() and (not force or path.read_bytes() == content):
                continue
            path.write_bytes(content)
            written.append(path)
    return written


if __name__ == "__main__":
    for made in write_missing(force="--force" in sys.argv):
        print(f"wrote {made.name}")
