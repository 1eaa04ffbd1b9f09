"""Runs, tasks, alerts and dead letters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from schemas.base import Event, event
from schemas.ids import TaskId


@event(topic="runs", key="run_id")
@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A run began, or was resumed by a new process."""

    name: Annotated[str, "Name given in the run file"]
    config_json: Annotated[str, "The resolved configuration as canonical JSON"]
    code_version: Annotated[str, "Package version and, in a checkout, the commit"]
    seeds: Annotated[dict[str, int], "Every seed of the run by what it seeds"]
    resumed: Annotated[bool, "True when the run already had events in the log"] = False
    num_tasks: Annotated[
        dict[str, int], "Tasks registered for this run before this event, by task set: offers wait for all of them"
    ] = field(default_factory=dict)


@event(topic="runs", key="run_id")
@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """A run ended."""

    outcome: Annotated[str, "completed | stopped | failed"]
    detail: Annotated[str, "Why, in one sentence"] = ""
    num_steps: Annotated[int, "Steps committed over the whole run"] = 0


@event(topic="tasks", key="task_id")
@dataclass(frozen=True, kw_only=True)
class TaskRegistered(Event):
    """A task became available. The newest registration of a task id wins (compacted topic)."""

    task_id: Annotated[TaskId, "Unique name, also the name of the task directory"]
    task_set: Annotated[str, "train | held_out, or a name of the user's"]
    path: Annotated[str, "Directory of the task in Harbor's layout"]
    digest: Annotated[str, "SHA-256 over the task directory's files, hex"]
    instruction: Annotated[str, "What the agent is told"]
    image: Annotated[str, "Root file system of its sandbox: `host`, or an image reference"] = "host"
    fail_to_pass: Annotated[tuple[str, ...], "Tests that fail before the fix and must pass after it"] = ()
    pass_to_pass: Annotated[tuple[str, ...], "Tests that pass before the fix and must still pass"] = ()
    metadata: Annotated[dict[str, str], "Free-form, from task.toml [metadata]"] = field(default_factory=dict)


@event(topic="tasks", key="task_id")
@dataclass(frozen=True, kw_only=True)
class TaskRetired(Event):
    """A task must not be offered any more."""

    task_id: Annotated[TaskId, "The task"]
    reason: Annotated[str, "Why, in one sentence"]


@event(topic="alerts", key="run_id")
@dataclass(frozen=True, kw_only=True)
class AlertRaised(Event):
    """A health check failed."""

    check: Annotated[str, "Name of the check, e.g. replay_overlap_low"]
    severity: Annotated[str, "warning | critical"]
    subject: Annotated[str, "What it is about: a step, a replica, a trial"]
    detail: Annotated[str, "What was seen and what to do about it"]
    value: Annotated[float | None, "The measured value"] = None
    threshold: Annotated[float | None, "The bound it broke"] = None


@event(topic="alerts", key="run_id")
@dataclass(frozen=True, kw_only=True)
class AlertCleared(Event):
    """A health check that had failed passes again."""

    check: Annotated[str, "Name of the check"]
    subject: Annotated[str, "What it is about"]
    raised_event_id: Annotated[str, "The AlertRaised this clears"]


@event(topic="dead-letters", key="original_key")
@dataclass(frozen=True, kw_only=True)
class DeadLettered(Event):
    """A record that could not be decoded or applied, kept with all that is needed to put it back."""

    service: Annotated[str, "The service that could not read it"]
    original_topic: Annotated[str, "Topic it was read from"]
    original_partition: Annotated[int, "Partition it was read from"]
    original_offset: Annotated[int, "Offset it was read from"]
    original_timestamp_ms: Annotated[int, "Record timestamp, milliseconds since the Unix epoch", "timestamp-millis"]
    original_key: Annotated[str, "Record key, decoded as UTF-8 with replacement (empty when the record had none)"]
    original_key_bytes: Annotated[bytes | None, "Record key"] = None
    original_value: Annotated[bytes | None, "Record value"] = None
    original_headers: Annotated[dict[str, bytes], "Record headers"] = field(default_factory=dict)
    error_class: Annotated[str, "Exception class"] = ""
    detail: Annotated[str, "What was wrong, with the remedy"] = ""
