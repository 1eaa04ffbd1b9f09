"""What the transactional loop needs of a log. Kafka and the in-memory log both are one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from streams.runtime.step import Record

#: (catalogue topic, partition)
TopicPart = tuple[str, int]

#: Called at named points of a transaction; raising there is a crash at that point. For tests.
Faults = Callable[[str], None]

#: The points, in order.
FAULT_POINTS = ("before_produce", "after_produce", "before_commit", "after_commit")


class FencedError(RuntimeError):
    """Another process took over this instance's identity: this one must stop, and has committed nothing since."""


class AbortedError(RuntimeError):
    """The transaction was aborted and committed nothing; the same batch may be tried again."""


class LogLostError(RuntimeError):
    """The connection's state is gone (a transaction timed out in an outage): open again and restore."""


class LogSetupError(RuntimeError):
    """The log lacks what the stage reads: names the topic and the remedy."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to be written in a transaction. `topic` is the catalogue name."""

    topic: str
    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()


def ignore_faults(point: str) -> None:
    """No faults."""


class Log(Protocol):
    """One member's connection to a log.

    A unit is what has one state: a partition number of co-partitioned inputs, or (scope "single") number 0 for all
    partitions of all inputs.
    """

    @property
    def joined(self) -> bool:
        """The group gave this member its assignment, be it empty."""

    def open(
        self,
        name: str,
        inputs: tuple[str, ...],
        scope: str,
        on_revoked: Callable[[list[int]], None],
        stop: threading.Event,
    ) -> None:
        """Fence an earlier holder of this identity and join the group `name`. `stop` ends waiting for the log.

        Raises LogSetupError when an input is missing or the inputs are not co-partitioned.
        """

    def poll_membership(self) -> list[int]:
        """Units newly assigned. Calls `on_revoked` first for those that were taken away. Raises FencedError."""

    def committed(self, units: Iterable[int]) -> dict[TopicPart, int | None]:
        """Committed offset of every input partition of the units; None where nothing is committed."""

    def read_below(self, upto: Mapping[TopicPart, int]) -> Generator[list[Record], None, None]:
        """Committed records from the low watermark to the given offsets (exclusive), in batches, maybe empty ones."""

    def resume(self, start: Mapping[TopicPart, int | None]) -> None:
        """Begin to fetch these partitions at the offsets; None: at the low watermark."""

    def fetch(self, max_records: int, timeout_sec: float) -> list[Record]:
        """Committed records that are next; waits up to `timeout_sec` for the first one."""

    def commit(self, batch: Iterable[Outgoing], offsets: Mapping[TopicPart, int], faults: Faults) -> None:
        """Write the records and the offsets in one transaction. Raises AbortedError, FencedError or LogLostError."""

    def writer_schemas(self) -> list[dict[str, Any]]:
        """Every schema on the `schemas` topic."""

    def lag(self) -> dict[TopicPart, int | None]:
        """Records not yet fetched, for every partition that is; None where that is not known yet."""

    def close(self) -> None:
        """Leave the group and release everything; an open transaction is left to be aborted by the next holder."""
