"""Registering the task sets of a run: TaskRegistered events on the compacted topic `tasks`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import structlog

from infra.kafka import EventWriter, read_events
from infra.settings import Settings
from producers.tasks.harbor import Task, TaskError, load_tasks
from schemas.events import TaskRegistered
from schemas.ids import RunId, TaskId, make_event_id, now_ms

log = structlog.get_logger()

#: The sets the scheduler knows.
TRAIN, HELD_OUT = "train", "held_out"


class TasksChangedError(ValueError):
    """A run is resumed with other tasks than it was started with: names the first one and the remedy."""


def register_tasks(settings: Settings) -> dict[str, int]:
    """Write one TaskRegistered per task of settings.tasks.train and .held_out; returns the number per set.

    Every task is read and validated before the first event is written. Registering again is harmless: the newest
    wins. Raises TaskError for an invalid task and for a task in both sets, TasksChangedError when this run was started
    with other tasks, DeliveryError when Kafka does not take an event.
    """
    sets = {name: load_tasks(source) for name, source in _sources(settings)}
    twice = {t.task_id for t in sets.get(TRAIN, [])} & {t.task_id for t in sets.get(HELD_OUT, [])}
    if twice:
        where = next(t.path for t in sets[HELD_OUT] if t.task_id in twice)
        raise TaskError(where, f"{where.name!r} is in the training set too", "a held-out task must not be trained on")
    _check_unchanged(settings, {t.task_id: (name, t.digest) for name, tasks in sets.items() for t in tasks})
    writer = EventWriter(settings)
    for name, tasks in sets.items():
        for event in make_registrations(settings.run.id, name, tasks):
            writer.write(event)
    writer.flush()
    counts = {name: len(tasks) for name, tasks in sets.items()}
    log.info("tasks registered", **counts)
    return counts


def _check_unchanged(settings: Settings, now: dict[str, tuple[str, str]]) -> None:
    """`now`: task id -> (set, digest). A run goes on with the tasks it was started with: offers name them by digest."""
    known: dict[str, TaskRegistered] = {}
    for event in read_events(settings, "tasks", types=(TaskRegistered,)):
        assert isinstance(event, TaskRegistered)
        known[event.task_id] = event
    before = {i: (e.task_set, e.digest) for i, e in known.items() if e.run_id == settings.run.id}
    if not before:
        return
    changes = [f"{i} is gone" for i in before if i not in now]
    changes += [f"{i} changed" for i in before if i in now and before[i] != now[i]]
    changes += [f"{i} is new" for i in now if i not in known]
    if changes:
        raise TasksChangedError(
            f"run {settings.run.id} was started with other tasks ({len(changes)} differ; {min(changes)}); point "
            "tasks.train and tasks.held_out at the sets it was started with, or start a new run: --set run.name=NAME"
        )


def make_registrations(run_id: str, task_set: str, tasks: Iterable[Task]) -> Iterator[TaskRegistered]:
    """TaskRegistered events of a set, which is the set of the run file and not the one in task.toml."""
    for task in tasks:
        at_ms = now_ms()
        yield TaskRegistered(
            event_id=make_event_id(at_ms),
            run_id=RunId(run_id),
            occurred_at=at_ms,
            producer="tasks",
            task_id=TaskId(task.task_id),
            task_set=task_set,
            path=str(task.path.resolve()),
            digest=task.digest,
            instruction=task.instruction,
            image=task.image,
            fail_to_pass=task.fail_to_pass,
            pass_to_pass=task.pass_to_pass,
            metadata=task.metadata,
        )


def _sources(settings: Settings) -> list[tuple[str, str]]:
    if not settings.tasks.train:
        raise ValueError("tasks.train is empty; set it to a directory of Harbor tasks or to an index (.parquet)")
    held_out = [(HELD_OUT, settings.tasks.held_out)] if settings.tasks.held_out else []
    return [(TRAIN, settings.tasks.train), *held_out]
