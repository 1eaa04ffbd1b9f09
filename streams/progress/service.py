"""The process of progress and health: a Faust app over the fold, at least once.

At start the state is made again from the log, and alerts that an earlier process could not write any more are
written then; after that Faust goes on from its committed offsets. What it reads twice changes nothing.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import structlog

from infra.kafka import EventWriter, read_events
from infra.paths import data_dir
from infra.settings import Settings
from schemas.base import EVENTS, Event
from schemas.events import AlertCleared, AlertRaised
from streams.progress.core import ProgressStage, ProgressState, make_snapshot
from streams.runtime.faust_app import EventReader, event_topic, make_faust_app, serve_faust_app
from streams.runtime.metrics import start_health_server

log = structlog.get_logger()

#: Seconds between two snapshots while events come in.
SNAPSHOT_SEC = 1.0


class SnapshotFile:
    """`<data.dir>/run/progress.json`, replaced atomically at most once per second, and at the end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._path = data_dir(settings) / "run" / "progress.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._written = 0.0
        self._changed = True

    def note_change(self) -> None:
        """The state is no longer what was written."""
        self._changed = True

    def write(self, state: ProgressState, *, force: bool = False) -> None:
        """Write when something changed and it is time."""
        if not self._changed or (not force and time.monotonic() - self._written < SNAPSHOT_SEC):
            return
        self._written, self._changed = time.monotonic(), False
        partial = self._path.with_suffix(".tmp")
        partial.write_text(json.dumps(make_snapshot(state, self._settings), indent=1) + "\n")
        partial.replace(self._path)


def restore(stage: ProgressStage, settings: Settings) -> ProgressState:
    """The state after all that is in the log; alerts missing there are written."""
    state = stage.initial()
    alerts: dict[str, Event] = {}
    for topic in stage.inputs:
        types = tuple(cls for name, cls in EVENTS.items() if name in stage.wanted and topic == cls.TOPIC)
        for event in read_events(settings, topic, types=types):
            state, outputs = stage.apply(state, event)
            alerts |= {alert.event_id: alert for alert in outputs}
    for event in read_events(settings, "alerts", types=(AlertRaised, AlertCleared)):
        alerts.pop(event.event_id, None)
    if alerts:
        writer = EventWriter(settings)
        for alert in alerts.values():
            writer.write(alert)
        writer.flush()
    return state


def serve(settings: Settings, instance: int, stop: threading.Event) -> None:
    """Follow the run `settings.run.id` until `stop` is set."""
    stage, ready = ProgressStage(settings), threading.Event()
    health = start_health_server("progress", instance, settings, ready=ready.is_set)
    try:
        state = restore(stage, settings)
        snapshot = SnapshotFile(settings)
        snapshot.write(state, force=True)
        app = make_faust_app(settings, "progress", instance)
        reader = EventReader(settings, "progress", stage.wanted, instance)

        async def follow(stream: Any) -> None:
            ready.set()
            async for event in reader.events(stream):
                _, alerts = stage.apply(state, event)
                snapshot.note_change()
                for alert in alerts:
                    await reader.write(alert)
                snapshot.write(state)

        app.agent(event_topic(app, settings, *stage.inputs), name="follow")(follow)

        async def refresh() -> None:
            snapshot.write(state)

        app.timer(interval=SNAPSHOT_SEC)(refresh)
        serve_faust_app(app, stop)
        snapshot.write(state, force=True)
    finally:
        health.close()
