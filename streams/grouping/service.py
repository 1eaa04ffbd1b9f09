"""The process of grouping: the loop around its core."""

from __future__ import annotations

import threading

from infra.settings import Settings
from streams.grouping.core import GroupingStage
from streams.runtime.loop import TransactionalLoop
from streams.runtime.metrics import start_health_server


def serve(settings: Settings, instance: int, stop: threading.Event) -> None:
    """Close groups until `stop` is set."""
    loop = TransactionalLoop(GroupingStage(settings), settings, instance)
    health = start_health_server("grouping", instance, settings, ready=lambda: loop.ready)
    try:
        loop.run(stop)
    finally:
        health.close()
