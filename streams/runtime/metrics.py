"""Prometheus metrics and the health endpoints of a service."""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from infra.paths import service_file
from infra.settings import Settings
from schemas.ids import now_ms

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


class HealthServer:
    """`/metrics`, `/healthz` and `/readyz` of one service instance, on a free loopback port, in a daemon thread."""

    def __init__(
        self, service: str, instance: int, ready: Callable[[], bool], alive: Callable[[], bool], file: Path | None
    ) -> None:
        self._checks = {"/healthz": alive, "/readyz": ready}
        self._file = file
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name=f"health-{service}-{instance}", daemon=True
        )
        self._thread.start()
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            facts = {
                "service": service,
                "instance": instance,
                "port": self.port,
                "pid": os.getpid(),
                "started_at": now_ms(),
            }
            partial = file.with_suffix(f".{os.getpid()}.tmp")
            partial.write_text(json.dumps(facts) + "\n")
            partial.replace(file)
        atexit.register(self.close)

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        checks = self._checks

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, generate_latest(REGISTRY), CONTENT_TYPE_LATEST)
                elif path in checks:
                    good = checks[path]()
                    self._answer(200 if good else 503, b"ok\n" if good else b"not yet\n", "text/plain")
                else:
                    self._answer(404, b"/metrics, /healthz, /readyz\n", "text/plain")

            def _answer(self, status: int, body: bytes, content_type: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are not logged."""

        return Handler

    def close(self) -> None:
        """Stop serving; remove the service's file unless a newer process wrote it."""
        atexit.unregister(self.close)
        self._server.shutdown()
        self._server.server_close()
        if self._file is not None:
            try:
                if json.loads(self._file.read_text())["pid"] == os.getpid():
                    self._file.unlink()
            except (OSError, ValueError, KeyError):
                return  # gone already, or being replaced


def start_health_server(
    service: str,
    instance: int,
    settings: Settings | None = None,
    *,
    ready: Callable[[], bool],
    alive: Callable[[], bool] = lambda: True,
) -> HealthServer:
    """Serve health and metrics; with `settings`, say where in `<data.dir>/run/services/<service>-<instance>.json`.

    `ready` and `alive` are called from other threads.
    """
    file = service_file(settings, service, instance) if settings is not None else None
    return HealthServer(service, instance, ready, alive, file)
