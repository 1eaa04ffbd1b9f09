"""A log in memory with the semantics the loop relies on: for tests, and for trying a stage without a broker.

Partitions by murmur2 of the key, transactions with markers that take up an offset, readers that stop at the first open
transaction, offsets that are committed with it, groups that move partitions cooperatively, and fencing by identity.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from schemas.base import Event
from schemas.codec import HEADER_TYPE, Codec
from schemas.topics import CATALOGUE, SCHEMAS_TOPIC
from streams.runtime.log import (
    AbortedError,
    Faults,
    FencedError,
    LogSetupError,
    Outgoing,
    TopicPart,
    ignore_faults,
)
from streams.runtime.loop import Loop, LoopOptions
from streams.runtime.partitions import partition_of
from streams.runtime.step import Record, Stage

S = TypeVar("S")


@cache
def _schema_records() -> tuple[tuple[bytes, bytes], ...]:
    return tuple(Codec().schema_records())


@dataclass(eq=False)
class _Transaction:
    owner: str
    status: str = "open"
    offsets: dict[TopicPart, int] = field(default_factory=dict)
    parts: set[TopicPart] = field(default_factory=set)


@dataclass
class _Entry:
    record: Record | None  # None: a transaction marker
    transaction: _Transaction | None


@dataclass(eq=False)
class _Member:
    identity: str
    owned: set[int] = field(default_factory=set)
    alive: bool = True
    fenced: bool = False


@dataclass
class _Group:
    committed: dict[TopicPart, int] = field(default_factory=dict)
    members: list[_Member] = field(default_factory=list)
    num_units: int = 0

    def target(self, member: _Member) -> set[int]:
        index = self.members.index(member)
        return {unit for unit in range(self.num_units) if unit % len(self.members) == index}


class MemoryLog:
    """All topics of the catalogue. Thread-safe."""

    def __init__(self, partitions: int = 4) -> None:
        """`partitions`: of the topics keyed by trial."""
        self.num_partitions = {topic.name: topic.partitions(partitions) for topic in CATALOGUE}
        self._parts: dict[TopicPart, list[_Entry]] = {
            (name, number): [] for name, num in self.num_partitions.items() for number in range(num)
        }
        self.changed = threading.Condition()
        self._groups: dict[str, _Group] = {}
        self._epochs: dict[str, int] = {}
        self._open: dict[str, _Transaction] = {}
        for key, value in _schema_records():
            self.produce(SCHEMAS_TOPIC, key, value)

    # -- plain producing and reading

    def produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: tuple[tuple[str, bytes], ...] = (),
        partition: int | None = None,
    ) -> None:
        """Append a record outside any transaction."""
        with self.changed:
            self._append(Outgoing(topic, key, value or b"", headers), None, partition, tombstone=value is None)
            self.changed.notify_all()

    def write(self, event: Event, codec: Codec) -> None:
        """Append an event, as EventWriter does."""
        header = (HEADER_TYPE, type(event).__name__.encode())
        self.produce(event.TOPIC, event.key.encode(), codec.encode(event), (header,))

    def _append(
        self, out: Outgoing, transaction: _Transaction | None, partition: int | None = None, *, tombstone: bool = False
    ) -> None:
        if out.topic not in self.num_partitions:
            raise LogSetupError(f"topic {out.topic} does not exist")
        if partition is None:
            partition = partition_of(out.key, self.num_partitions[out.topic]) if out.key is not None else 0
        part = (out.topic, partition)
        entries = self._parts[part]
        value = None if tombstone else out.value
        millis = time.time_ns() // 1_000_000
        record = Record(out.topic, partition, len(entries), out.key, value, out.headers, millis)
        entries.append(_Entry(record, transaction))
        if transaction is not None:
            transaction.parts.add(part)

    def committed_records(self, part: TopicPart, start: int = 0) -> tuple[list[Record], int]:
        """Records of committed transactions from `start` to the last stable offset, and that offset."""
        with self.changed:
            entries = self._parts[part]
            found: list[Record] = []
            for offset in range(start, len(entries)):
                entry = entries[offset]
                if entry.transaction is not None and entry.transaction.status == "open":
                    return found, offset
                if entry.record is not None and (entry.transaction is None or entry.transaction.status == "committed"):
                    found.append(entry.record)
            return found, len(entries)

    def read(self, topic: str) -> list[Record]:
        """Every committed record of a topic, partition by partition."""
        return [r for number in range(self.num_partitions[topic]) for r in self.committed_records((topic, number))[0]]

    # -- transactions

    def fence(self, identity: str) -> int:
        """Abort what an earlier holder of the identity left open, and return the new holder's epoch."""
        with self.changed:
            if (left := self._open.get(identity)) is not None:
                self.end(left, "aborted")
            self._epochs[identity] = self._epochs.get(identity, -1) + 1
            return self._epochs[identity]

    def begin(self, identity: str, epoch: int) -> _Transaction:
        """Open a transaction. Raises FencedError for an old epoch."""
        with self.changed:
            self.check_epoch(identity, epoch)
            transaction = self._open[identity] = _Transaction(identity)
            return transaction

    def check_epoch(self, identity: str, epoch: int) -> None:
        """Raise FencedError unless `epoch` is the newest."""
        if self._epochs[identity] != epoch:
            raise FencedError(f"{identity}: another process runs as this instance; this one stops")

    def append(self, transaction: _Transaction, out: Outgoing) -> None:
        """Append a record that shows when the transaction is committed."""
        with self.changed:
            self._append(out, transaction)

    def end(self, transaction: _Transaction, status: str, group: str | None = None) -> None:
        """Commit or abort: a marker goes to every partition written to."""
        with self.changed:
            transaction.status = status
            if self._open.get(transaction.owner) is transaction:
                del self._open[transaction.owner]
            if status == "committed" and group is not None:
                self.group(group).committed.update(transaction.offsets)
            for part in transaction.parts:
                self._parts[part].append(_Entry(None, None))
            self.changed.notify_all()

    # -- groups

    def group(self, name: str) -> _Group:
        """A consumer group, made when first named."""
        return self._groups.setdefault(name, _Group())

    def expire(self, name: str, identity: str) -> None:
        """What a broker does when a member's heartbeats stop: its partitions are free for others."""
        with self.changed:
            group = self.group(name)
            for member in [m for m in group.members if m.identity == identity]:
                member.alive = False
                group.members.remove(member)


class MemoryClient:
    """One instance's connection to a MemoryLog. See `streams.runtime.log.Log` for the contract of each method."""

    def __init__(self, memory: MemoryLog, instance: int = 0) -> None:
        self._memory, self._instance = memory, instance
        self._identity = self._name = ""
        self._epoch = -1
        self._inputs: tuple[str, ...] = ()
        self._scope = "single"
        self._member: _Member | None = None
        self._assigned: list[int] = []
        self._next: dict[TopicPart, int] = {}
        self._on_revoked: Callable[[list[int]], None] = lambda units: None

    @property
    def joined(self) -> bool:
        """Joining takes no time here."""
        return self._name != ""

    def open(
        self,
        name: str,
        inputs: tuple[str, ...],
        scope: str,
        on_revoked: Callable[[list[int]], None],
        stop: threading.Event,
    ) -> None:
        """Fence an earlier holder of the identity and join the group."""
        known = self._memory.num_partitions
        for topic in inputs:
            if topic not in known:
                raise LogSetupError(f"{name}: topic {topic} does not exist")
        if scope == "partition" and len({known[topic] for topic in inputs}) > 1:
            counts = {topic: known[topic] for topic in inputs}
            raise LogSetupError(f"{name}: its inputs must have equal numbers of partitions, and have {counts}")
        self._name, self._inputs, self._scope, self._on_revoked = name, inputs, scope, on_revoked
        self._identity = f"{name}-{self._instance}"
        self._epoch = self._memory.fence(self._identity)
        if scope == "single":
            self._assigned = [0]
            return
        with self._memory.changed:
            group = self._memory.group(name)
            group.num_units = known[inputs[0]]
            for member in [m for m in group.members if m.identity == self._identity]:
                member.fenced = True
                group.members.remove(member)
            self._member = _Member(self._identity)
            group.members.append(self._member)

    def poll_membership(self) -> list[int]:
        """Give up what belongs to others now, take what is free."""
        if self._member is None:
            assigned, self._assigned = self._assigned, []
            return assigned
        with self._memory.changed:
            group, member = self._memory.group(self._name), self._member
            if member.fenced:
                raise FencedError(f"{self._identity}: another process runs as this instance; this one stops")
            if not member.alive:  # lost: join again
                self._give_up(sorted(member.owned))
                self._member = member = _Member(self._identity)
                group.members.append(member)
            target = group.target(member)
            self._give_up(sorted(member.owned - target))
            taken = {unit for other in group.members if other is not member for unit in other.owned}
            added = sorted(target - member.owned - taken)
            member.owned.update(added)
            return added

    def _give_up(self, units: list[int]) -> None:
        if units and self._member is not None:
            for unit in units:
                for part in self._partitions_of(unit):
                    self._next.pop(part, None)
            self._on_revoked(units)
            self._member.owned.difference_update(units)

    def _partitions_of(self, unit: int) -> list[TopicPart]:
        if self._scope == "partition":
            return [(topic, unit) for topic in self._inputs]
        return [(topic, number) for topic in self._inputs for number in range(self._memory.num_partitions[topic])]

    def committed(self, units: Iterable[int]) -> dict[TopicPart, int | None]:
        """Committed offsets."""
        with self._memory.changed:
            committed = self._memory.group(self._name).committed
            return {part: committed.get(part) for unit in units for part in self._partitions_of(unit)}

    def read_below(self, upto: Mapping[TopicPart, int]) -> Generator[list[Record], None, None]:
        """Committed records below the offsets."""
        for part, limit in upto.items():
            yield [record for record in self._memory.committed_records(part)[0] if record.offset < limit]

    def resume(self, start: Mapping[TopicPart, int | None]) -> None:
        """Begin to fetch."""
        self._next.update({part: offset or 0 for part, offset in start.items()})

    def fetch(self, max_records: int, timeout_sec: float) -> list[Record]:
        """The next records; waits for the first one."""
        deadline = time.monotonic() + timeout_sec
        with self._memory.changed:
            while True:
                found: list[Record] = []
                for part, start in self._next.items():
                    records, end = self._memory.committed_records(part, start)
                    room = max_records - len(found)
                    found.extend(records[:room])
                    self._next[part] = end if len(records) <= room else records[room].offset
                left = deadline - time.monotonic()
                if found or left <= 0:
                    return found
                self._memory.changed.wait(left)

    def commit(self, batch: Iterable[Outgoing], offsets: Mapping[TopicPart, int], faults: Faults) -> None:
        """One transaction."""
        transaction = self._memory.begin(self._identity, self._epoch)
        faults("before_produce")
        for out in batch:
            self._memory.append(transaction, out)
        faults("after_produce")
        transaction.offsets.update(offsets)
        faults("before_commit")
        with self._memory.changed:
            self._memory.check_epoch(self._identity, self._epoch)
            if self._member is not None and not self._member.alive:
                self._memory.end(transaction, "aborted")
                raise AbortedError("no member of the group any more")
            self._memory.end(transaction, "committed", self._name)
        faults("after_commit")

    def writer_schemas(self) -> list[dict[str, Any]]:
        """Every schema on the `schemas` topic."""
        return [json.loads(record.value) for record in self._memory.read(SCHEMAS_TOPIC) if record.value]

    def lag(self) -> dict[TopicPart, int | None]:
        """Records not fetched yet."""
        return {part: len(self._memory.committed_records(part, start)[0]) for part, start in self._next.items()}

    def close(self) -> None:
        """Leave the group; an open transaction is left."""
        with self._memory.changed:
            members = self._memory.group(self._name).members
            if self._member in members:
                members.remove(self._member)
            self._member = None
            self._assigned, self._name = [], ""
            self._next.clear()
            self._memory.changed.notify_all()


class MemoryLoop(Loop[S]):
    """A stage on a MemoryLog."""

    def __init__(
        self,
        stage: Stage[S],
        memory: MemoryLog,
        instance: int = 0,
        *,
        codec: Codec | None = None,
        options: LoopOptions | None = None,
        tick: Callable[[S], list[Event]] | None = None,
        faults: Faults = ignore_faults,
    ) -> None:
        super().__init__(
            stage,
            MemoryClient(memory, instance),
            codec or Codec(),
            instance=instance,
            options=options,
            tick=tick,
            faults=faults,
        )
