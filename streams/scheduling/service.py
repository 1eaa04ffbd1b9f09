"""The scheduler's process: the loop, and the clock that sees leases lapse."""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import Any

from infra.kafka import read_events
from infra.settings import Settings
from schemas.events import RunStarted
from schemas.ids import RunId
from streams.runtime.loop import TransactionalLoop
from streams.runtime.metrics import start_health_server
from streams.scheduling.clock import LeaseClock
from streams.scheduling.core import SchedulingStage

#: What a run cannot change once it has begun: ids and order of its offers follow from these.
FIXED = (
    *("groups_per_step", "group_size", "max_staleness"),
    *("validate_every", "validation_tasks", "validation_final_tasks"),
)


class ScheduleChangedError(ValueError):
    """A resumed run was given another schedule: names the keys."""


def check_unchanged(settings: Settings, started: dict[str, Any]) -> None:
    """Raise ScheduleChangedError when the schedule differs from the one the run began with.

    `started` is the configuration in the run's first RunStarted. `num_steps` may change: a run can be extended.
    """
    was, now = started.get("schedule", {}), dataclasses.asdict(settings.schedule)
    changed = [f"schedule.{k} was {was[k]}, is {now[k]}" for k in FIXED if was.get(k, now[k]) != now[k]]
    seed = started.get("run", {}).get("seed", settings.run.seed)
    if seed != settings.run.seed:
        changed.append(f"run.seed was {seed}, is {settings.run.seed}")
    if changed:
        raise ScheduleChangedError(
            f"run {settings.run.id} began with another schedule: {'; '.join(changed)}; "
            "set it back, or start a new run with another run.name"
        )


def serve(settings: Settings, instance: int, stop: threading.Event) -> None:
    """Schedule the run `settings.run.id` until `stop` is set. Raises ScheduleChangedError."""
    for event in read_events(settings, "runs", types=(RunStarted,)):
        if isinstance(event, RunStarted) and event.run_id == settings.run.id:
            check_unchanged(settings, json.loads(event.config_json))
            break
    clock = LeaseClock(RunId(settings.run.id))
    loop = TransactionalLoop(SchedulingStage(settings), settings, instance, tick=clock.tick)
    health = start_health_server("scheduler", instance, settings, ready=lambda: loop.ready)
    try:
        loop.run(stop)
    finally:
        health.close()
