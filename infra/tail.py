"""`rollstream tail`: events of a topic as JSON lines."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from infra.kafka import header_type, make_codec, read_topic_marking_end
from infra.settings import Settings
from schemas.base import EVENTS, Event
from schemas.codec import Codec, CodecError
from schemas.packing import unpack_floats, unpack_ints
from schemas.topics import BY_NAME, SCHEMAS_TOPIC

INT_FIELDS = frozenset({"prompt_delta_ids", "sampled_ids", "ids", "canary_ids"})
FLOAT_FIELDS = frozenset({"logprobs", "canary_logprobs"})
TEXT_FIELDS = frozenset({"diff"})


def to_plain(value: Any, name: str = "") -> Any:
    """JSON-ready: packed arrays as lists, other bytes as hex, nested records as objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name), f.name) for f in dataclasses.fields(value)}
    if isinstance(value, bytes):
        if name in INT_FIELDS:
            return list(unpack_ints(value))
        if name in FLOAT_FIELDS:
            return list(unpack_floats(value))
        return value.decode("utf-8", "replace") if name in TEXT_FIELDS else value.hex()
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def event_json(event: Event) -> str:
    """One event as a JSON line, its type first."""
    return json.dumps({"event": type(event).__name__, **to_plain(event)}, separators=(",", ":"))


def tail_topic(
    settings: Settings, topic: str, *, follow: bool, num: int, types: list[str], run: str, key: str
) -> Iterator[str]:
    """The newest `num` matching events (0: all), then, with `follow`, those that come.

    Raises ValueError for an unknown topic or event type, naming the known ones.
    """
    if topic not in BY_NAME:
        raise ValueError(f"unknown topic {topic!r}; known: {', '.join(BY_NAME)}")
    for name in types:
        if name not in EVENTS:
            raise ValueError(f"unknown event type {name!r}; on {topic}: {', '.join(BY_NAME[topic].events)}")
    codec = make_codec(settings)

    recent: deque[str] = deque(maxlen=num or None)
    live = False
    for message in read_topic_marking_end(settings, topic, follow=follow):
        if message is None:  # everything that was there at the start has been read
            live = True
            yield from recent
            recent.clear()
            continue
        line = _line(codec, message, topic, types, run, key)
        if line is None:
            continue
        if live:
            yield line
        else:
            recent.append(line)
    yield from recent


def _line(codec: Codec, message: Any, topic: str, types: list[str], run: str, key: str) -> str | None:
    """The JSON line of a record, or None when it does not match."""
    value = message.value()
    if value is None or (types and header_type(message.headers()) not in types):
        return None
    if key and (message.key() or b"").decode("utf-8", "replace") != key:
        return None
    if topic == SCHEMAS_TOPIC:
        return str(value.decode())
    try:
        event = codec.decode(value)
    except CodecError as exc:
        return json.dumps({"undecodable": str(exc), "partition": message.partition(), "offset": message.offset()})
    return event_json(event) if not run or event.run_id == run else None
