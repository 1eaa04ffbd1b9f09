"""The event base class and the registry of event types."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

from schemas.ids import EventId, RunId

E = TypeVar("E", bound="type[Event]")
R = TypeVar("R", bound=type)


@dataclass(frozen=True, kw_only=True)
class Event:
    """A fact. Immutable, named in the past tense, one Avro record on one topic."""

    TOPIC: ClassVar[str] = ""
    KEY: ClassVar[str] = ""
    VERSION: ClassVar[int] = 1

    event_id: Annotated[EventId, "UUIDv7 of a source event, deterministic UUIDv8 of a derived one"]
    run_id: Annotated[RunId, "The run this fact belongs to"]
    occurred_at: Annotated[int, "When the fact happened: milliseconds since the Unix epoch, UTC", "timestamp-millis"]
    producer: Annotated[str, "Service that wrote it, e.g. proxy/0 or assembly"]

    @property
    def key(self) -> str:
        """The Kafka key: decides the partition, and so the order."""
        return str(getattr(self, self.KEY))


#: Event type name -> class, in the order of definition.
EVENTS: dict[str, type[Event]] = {}


def event(*, topic: str, key: str, version: int = 1) -> Callable[[E], E]:
    """Register a frozen dataclass as an event written to `topic`, keyed by its field `key`."""

    def register(cls: E) -> E:
        cls.TOPIC, cls.KEY, cls.VERSION = topic, key, version
        names = {f.name for f in dataclasses.fields(cls)}
        if key not in names:
            raise TypeError(f"{cls.__name__}: key field {key!r} does not exist")
        if cls.__name__ in EVENTS:
            raise TypeError(f"two events are called {cls.__name__}")
        EVENTS[cls.__name__] = cls
        return cls

    return register


def event_type(name: str) -> type[Event]:
    """The class of an event type name; KeyError names the known types."""
    try:
        return EVENTS[name]
    except KeyError:
        raise KeyError(f"unknown event type {name!r}; known: {', '.join(sorted(EVENTS))}") from None
