"""The codec against bare fastavro doing the same work on the events of one trial, interleaved in one run.

Same work: framed bytes from a value held in memory, and a value from framed bytes, with the writer's schema found by
the fingerprint. Bare fastavro works on dicts; the codec on frozen dataclasses whose types it checks on the way.
Times are of the process's own CPU, so that a busy neighbour does not count.
"""

from __future__ import annotations

import dataclasses
import io
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fastavro

from schemas.avro_types import load_schema
from schemas.base import EVENTS, Event
from schemas.codec import Codec
from schemas.events import ModelCallCompleted, RoutingRecorded
from schemas.examples_gen import example_event

NUM_ROUNDS = 15
NUM_TRIALS = 40
AIM = 0.9

#: What one trial of four model calls writes, by event and how often.
EVENTS_OF_A_TRIAL = {
    "TrialOffered": 1,
    "TrialLeased": 1,
    "StageStarted": 5,
    "StageFinished": 5,
    "ConversationOpened": 1,
    "ModelCallCompleted": 4,
    "RoutingRecorded": 4,
    "RewardGraded": 1,
    "AttemptFinished": 1,
    "TrialFinished": 1,
    "TrajectoryAssembled": 1,
    "TrajectoryAdmitted": 1,
}


def _typical(value: Any) -> Any:
    """The example with counts and indices of the usual size; timestamps and the like stay."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _typical(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if isinstance(value, tuple):
        return tuple(_typical(item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool) and not 1_600_000_000_000 < value < 2_000_000_000_000:
        return value % 3000
    return value


def events_of_a_trial() -> list[Event]:
    """Events of realistic sizes: a call reads 400 new tokens and samples 200."""
    events: list[Event] = []
    for name, count in EVENTS_OF_A_TRIAL.items():
        event = _typical(example_event(EVENTS[name]))
        if isinstance(event, ModelCallCompleted):
            event = replace(
                event,
                prompt_delta_ids=bytes(range(100)) * 16,
                sampled_ids=bytes(range(100)) * 8,
                logprobs=bytes(range(100)) * 8,
                logprob_valid=bytes(25),
                version_spans=event.version_spans[:1],
                request_json='{"role":"user","content":"..."}' * 60,
                response_json='{"role":"assistant","content":"..."}' * 20,
            )
        if isinstance(event, RoutingRecorded):
            event = replace(event, expert_ids=bytes(600 * 2 * 2), valid=bytes(75))
        events += [event] * count
    return events


def _plain(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {k: _plain(v) for k, v in schema.items() if k != "logicalType"}
    return [_plain(v) for v in schema] if isinstance(schema, list) else schema


class BareFastavro:
    """Framing and schema look-up in the fewest lines, on dicts."""

    def __init__(self, codec: Codec, events: list[Event]) -> None:
        self._schemas: dict[bytes, Any] = {}
        self.prefixes: dict[str, bytes] = {}
        for event in events:
            name, prefix = type(event).__name__, codec.encode(event)[:10]
            self.prefixes[name] = prefix
            self._schemas[prefix] = fastavro.parse_schema(_plain(load_schema(name, type(event).VERSION)))

    def encode(self, item: tuple[bytes, dict[str, Any]]) -> bytes:
        """(prefix, record) to framed bytes."""
        prefix, record = item
        out = io.BytesIO()
        out.write(prefix)
        fastavro.schemaless_writer(out, self._schemas[prefix], record)
        return out.getvalue()

    def decode(self, data: bytes) -> Any:
        """Framed bytes to a dict."""
        body = io.BytesIO(data)
        body.seek(10)
        return fastavro.schemaless_reader(body, self._schemas[data[:10]], None)


def _cpu_sec(work: Callable[[Any], Any], items: list[Any]) -> float:
    start = time.process_time()
    for _ in range(NUM_TRIALS):
        for item in items:
            work(item)
    return time.process_time() - start


def rows() -> list[dict[str, Any]]:
    """Bench rows: both together, encode, decode."""
    codec, events = Codec(), events_of_a_trial()
    bare = BareFastavro(codec, events)
    framed = [codec.encode(event) for event in events]
    records = [(data[:10], bare.decode(data)) for data in framed]
    if [bare.encode(item) for item in records] != framed or [codec.decode(data) for data in framed] != events:
        raise AssertionError("the two do not do the same work")
    seconds: dict[str, list[float]] = {"encode": [], "decode": [], "bare encode": [], "bare decode": []}
    for _ in range(NUM_ROUNDS):
        seconds["encode"].append(_cpu_sec(codec.encode, events))
        seconds["bare encode"].append(_cpu_sec(bare.encode, records))
        seconds["decode"].append(_cpu_sec(codec.decode, framed))
        seconds["bare decode"].append(_cpu_sec(bare.decode, framed))
    seconds["round trip"] = [a + b for a, b in zip(seconds["encode"], seconds["decode"], strict=True)]
    seconds["bare round trip"] = [a + b for a, b in zip(seconds["bare encode"], seconds["bare decode"], strict=True)]
    num_events = NUM_TRIALS * len(events)
    return [
        _row(what, num_events, seconds[what], seconds[f"bare {what}"]) for what in ("round trip", "encode", "decode")
    ]


def _row(what: str, num_events: int, ours: list[float], bare: list[float]) -> dict[str, Any]:
    ratio = statistics.median(b / o for o, b in zip(ours, bare, strict=True))
    return {
        "name": f"codec {what}, one trial's events",
        "value": round(num_events / statistics.median(ours)),
        "unit": "events/s",
        "baseline": round(num_events / statistics.median(bare)),
        "ratio": round(ratio, 3),
        "aim": AIM,
        "met": ratio >= AIM,
    }


if __name__ == "__main__":
    for row in rows():
        print(row)
