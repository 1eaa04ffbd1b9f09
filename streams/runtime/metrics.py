"""Prometheus metrics and the health endpoints of a service."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

#: The registry of this process; a process runs one service.
REGISTRY = CollectorRegistry()

_LABELS = ("service", "instance")

RECORDS_IN = Counter("rollstream_records_in", "Records read", [*_LABELS, "topic"], registry=REGISTRY)
RECORDS_OUT = Counter("rollstream_records_out", "Events written", [*_LABELS, "topic"], registry=REGISTRY)
DEAD_LETTERS = Counter("rollstream_dead_letters", "Records sent to dead-letters", _LABELS, registry=REGISTRY)
TRANSACTIONS = Counter("rollstream_transactions", "Transactions by outcome", [*_LABELS, "outcome"], registry=REGISTRY)
RESTORED = Counter("rollstream_records_restored", "Records re-read to restore state", _LABELS, registry=REGISTRY)
UNITS = Gauge("rollstream_units", "Partitions (1 for a single stage) held by this instance", _LABELS, registry=REGISTRY)
LAG = Gauge("rollstream_lag_records", "Records not yet read", [*_LABELS, "topic"], registry=REGISTRY)
BATCH_SEC = Histogram(
    "rollstream_batch_seconds",
    "From the first record of a batch to its commit",
    _LABELS,
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
    registry=REGISTRY,
)


class LoopMetrics:
    """The metrics of one loop, labels bound."""

    def __init__(self, service: str, instance: int) -> None:
        self._labels = (service, str(instance))
        self.dead_letters = DEAD_LETTERS.labels(*self._labels)
        self.restored = RESTORED.labels(*self._labels)
        self.units = UNITS.labels(*self._labels)
        self.batch_sec = BATCH_SEC.labels(*self._labels)
        self.committed = TRANSACTIONS.labels(*self._labels, "committed")
        self.aborted = TRANSACTIONS.labels(*self._labels, "aborted")

    def count_in(self, topic: str, num: int) -> None:
        """`num` records were read from `topic`."""
        RECORDS_IN.labels(*self._labels, topic).inc(num)

    def count_out(self, topic: str, num: int = 1) -> None:
        """`num` events were written to `topic`."""
        RECORDS_OUT.labels(*self._labels, topic).inc(num)

    def set_lag(self, topic: str, num: int) -> None:
        """`num` records of `topic` are still to be read."""
        LAG.labels(*self._labels, topic).set(num)
