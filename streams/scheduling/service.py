"""The scheduler's process: the loop, and the clock that sees leases lapse."""

from __future__ import annotations

import threading

from infra.settings import Settings
from schemas.ids import RunId
from streams.runtime.loop import TransactionalLoop
from streams.runtime.metrics import start_health_server
from streams.scheduling.clock import LeaseClock
from streams.scheduling.core import SchedulingStage


def serve(settings: Settings, instance: int, stop: threading.Event) -> None:
    """Schedule the run `settings.run.id` until `stop` is set."""
    clock = LeaseClock(RunId(settings.run.id))
    loop = TransactionalLoop(SchedulingStage(settings), settings, instance, tick=clock.tick)
    health = start_health_server("scheduler", instance, settings, ready=lambda: loop.ready)
    try:
        loop.run(stop)
    finally:
        health.close()
