"""Grades by what decides them: task, diff and grader. An equal triple is graded once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from producers.trials.verifier.grader import Grade
from schemas.ids import EventId

#: (task digest, diff SHA-256, grader digest)
GradeKey = tuple[str, str, str]


@dataclass(frozen=True)
class KnownGrade:
    """A grade and the event that recorded it first."""

    event_id: EventId
    grade: Grade


class GradeCache:
    """The newest `capacity` grades. While one thread grades a triple, others that need it wait for that grade."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._known: OrderedDict[GradeKey, KnownGrade] = OrderedDict()
        self._pending: dict[GradeKey, threading.Lock] = {}

    def add(self, key: GradeKey, known: KnownGrade) -> None:
        """Remember a grade."""
        with self._lock:
            self._known[key] = known
            self._known.move_to_end(key)
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)

    def get(self, key: GradeKey) -> KnownGrade | None:
        """A remembered grade."""
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
            return found

    def grade_once(self, key: GradeKey, event_id: EventId, grade: Callable[[], Grade]) -> tuple[Grade, EventId | None]:
        """The grade of `key` and the event it is reused from (None: graded now, to be recorded as `event_id`)."""
        with self._lock:
            pending = self._pending.setdefault(key, threading.Lock())
        try:
            with pending:
                found = self.get(key)
                if found is not None:
                    return found.grade, found.event_id
                made = grade()
                self.add(key, KnownGrade(event_id, made))
                return made, None
        finally:
            with self._lock:
                self._pending.pop(key, None)
