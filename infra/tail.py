"""`rollstream tail`: events of a topic as JSON lines."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from infra.kafka import header_type, make_codec, read_topic
from infra.settings import Settings
from schemas.base import EVENTS, Event
from schemas.codec import CodecError
from schemas.packing import unpack_floats, unpack_ints
from schemas.topics import BY_NAME

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

    def matching(*, live: bool) -> Iterator[str]:
        for message in read_topic(settings, topic, follow=live, from_end=live):
            value = message.value()
            if types and header_type(message.headers()) not in types:
                continue
            if key and (message.key() or b"").decode("utf-8", "replace") != key:
                continue
            if value is None:
                continue
            if topic == "schemas":
                yield value.decode()
                continue
            try:
                event = codec.decode(value)
            except CodecError as exc:
                yield json.dumps({"undecodable": str(exc), "partition": message.partition(), "offset": message.offset()})
                continue
            if not run or event.run_id == run:
                yield event_json(event)

    if num or not follow:
        yield from deque(matching(live=False), maxlen=num or None)
    if follow:
        yield from matching(live=True)
