"""The process of admission: the loop around its core."""

from __future__ import annotations

import threading

from infra.settings import Settings
from streams.admission.core import AdmissionStage
from streams.runtime.loop import TransactionalLoop
from streams.runtime.metrics import start_health_server


def serve(settings: Settings, instance: int, stop: threading.Event) -> None:
    """Admit or reject trajectories until `stop` is set."""
    loop = TransactionalLoop(AdmissionStage(settings), settings, instance)
    health = start_health_server("admission", instance, settings, ready=lambda: loop.ready)
    try:
        loop.run(stop)
    finally:
        health.close()
