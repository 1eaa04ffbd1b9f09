"""Identifiers.

Source events (facts that happen once, at one place) carry a UUIDv7 (RFC 9562, section 5.7): unique and sortable
by the time the fact happened. Derived events carry a UUIDv8 (RFC 9562, section 5.8) that is a hash of the event
type and of the ids it was derived from, so that deriving it again gives the same id and consumers drop repeats.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from typing import NewType

EventId = NewType("EventId", str)
RunId = NewType("RunId", str)
TaskId = NewType("TaskId", str)
GroupId = NewType("GroupId", str)
TrialId = NewType("TrialId", str)
CallId = NewType("CallId", str)
ConversationId = NewType("ConversationId", str)


def now_ms() -> int:
    """Wall clock in whole milliseconds since the Unix epoch (UTC)."""
    return time.time_ns() // 1_000_000


def make_event_id(at_ms: int | None = None) -> EventId:
    """A UUIDv7 for a fact that happened at `at_ms` (default: now)."""
    millis = now_ms() if at_ms is None else at_ms
    rand = int.from_bytes(os.urandom(10), "big")
    value = (millis & (2**48 - 1)) << 80 | 0x7 << 76 | (rand >> 68 & 0xFFF) << 64 | 0b10 << 62 | rand & (2**62 - 1)
    return EventId(str(uuid.UUID(int=value)))


def derive_id(kind: str, *sources: str) -> EventId:
    """A UUIDv8 that depends on nothing but `kind` and the ordered `sources`.

    >>> derive_id("TrialFinished", "t1") == derive_id("TrialFinished", "t1")
    True
    """
    payload = "\x1f".join((kind, *sources)).encode()
    value = int.from_bytes(hashlib.sha256(payload).digest()[:16], "big")
    value = value & ~(0xF << 76) | 0x8 << 76
    value = value & ~(0b11 << 62) | 0b10 << 62
    return EventId(str(uuid.UUID(int=value)))


def make_run_id() -> RunId:
    """A run id that sorts by start time, e.g. `run-20261130-014223-3f9c`."""
    return RunId(time.strftime("run-%Y%m%d-%H%M%S-", time.gmtime()) + os.urandom(2).hex())


def make_group_id(run_id: RunId, purpose: str, step: int, index: int) -> GroupId:
    """Deterministic: the same offer decided again (after a crash) has the same id."""
    return GroupId(f"{run_id}.{purpose[0]}{step:05d}.{index:03d}")


def make_trial_id(group_id: GroupId, index: int) -> TrialId:
    """Trial `index` of a group. Url-safe: it is a path segment of the proxy's base URL."""
    return TrialId(f"{group_id}.{index:02d}")


def make_call_id(trial_id: TrialId, attempt: int, call_index: int) -> CallId:
    """Deterministic per (trial, attempt, call index): gaps and repeats show in the ids themselves."""
    return CallId(f"{trial_id}/a{attempt}/c{call_index:04d}")
