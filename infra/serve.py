"""What happens around a service's `serve`: signals, logging, the life line to its parent."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import threading
from collections.abc import Callable

import structlog

from infra.kafka import check_cluster
from infra.logging import configure_logging
from infra.settings import Settings
from streams.pipeline import BY_NAME

PR_SET_PDEATHSIG = 1


def follow_parent(parent: int, stop: threading.Event) -> None:
    """Ask the kernel for SIGTERM when the parent dies (prctl(2)); stop at once if it is already gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        stop.set()


def run_service(settings: Settings, name: str, instance: int = 0, parent: int | None = None) -> None:
    """Run a service until SIGTERM or SIGINT.

    Raises KeyError for an unknown name, and KafkaUnavailableError when it was started by hand and no Kafka answers.
    """
    service = BY_NAME[name]
    stop = threading.Event()

    def on_signal(signum: int, _: object) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    configure_logging(f"{name}-{instance}")
    if parent is not None:
        follow_parent(parent, stop)
    else:  # started by hand: say at once that there is nothing to serve, instead of waiting for it
        check_cluster(settings)
    module, _, function = service.entry.partition(":")
    serve: Callable[[Settings, int, threading.Event], None] = getattr(importlib.import_module(module), function)
    log = structlog.get_logger()
    log.info("service starting", run=settings.run.id)
    serve(settings, instance, stop)
    log.info("service stopped")
