"""The process of assembly: the loop around its core."""

from __future__ import annotations

import threading

from infra.settings import Settings
from streams.assembly.core import AssemblyStage
from streams.runtime.loop import TransactionalLoop
from streams.runtime.metrics import start_health_server


def serve(settings: Settings, instance: int, stop: threading.Event) -> None:
    """Assemble trajectories until `stop` is set."""
    loop = TransactionalLoop(AssemblyStage(settings), settings, instance)
    health = start_health_server("assembly", instance, settings, ready=lambda: loop.ready)
    try:
        loop.run(stop)
    finally:
        health.close()
