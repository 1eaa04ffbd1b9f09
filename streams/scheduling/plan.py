"""What may be offered when.

A run is a row of steps and validation passes: pass v evaluates policy version v, before step v is offered. Step s
may be offered when version s - max_staleness serves. That is the bound

    offered <= (max_staleness + version + 1) * groups_per_step

with a fixed place for every group: step s has `groups_per_step` slots, and a slot whose group was dropped gets a
replacement. All conditions are of the kind "has been seen", so what has been offered after a set of events does not
depend on their order, and a scheduler that re-reads its inputs finds itself where it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.settings import ScheduleSection
from schemas.ids import RunId, TaskId, make_group_id
from streams.scheduling.state import SchedulerState

TRAIN_SET = "train"
HELD_OUT_SET = "held_out"

#: A slot whose replacements were dropped this often ends the run: something is broken. Each resume allows it anew.
MAX_REPLACEMENTS = 20


def validation_points(schedule: ScheduleSection) -> list[int]:
    """Policy versions that are evaluated: the first, every `validate_every`-th and the last."""
    if schedule.validate_every <= 0:
        return []
    return sorted({*range(0, schedule.num_steps + 1, schedule.validate_every), schedule.num_steps})


def pass_size(schedule: ScheduleSection, version: int, num_held_out: int) -> int:
    """Held-out tasks of the pass at `version`."""
    size = schedule.validation_tasks
    if version in (0, schedule.num_steps):
        size = schedule.validation_final_tasks or size
    return min(size, num_held_out) if size > 0 else num_held_out


def tasks_of(state: SchedulerState, task_set: str) -> tuple[TaskId, ...]:
    """Tasks of a set that may be offered, sorted. Kept until a registration changes."""
    if task_set not in state.sorted_tasks:
        state.sorted_tasks[task_set] = tuple(
            sorted(t.task_id for t in state.tasks.values() if t.task_set == task_set and t.task_id not in state.retired)
        )
    return state.sorted_tasks[task_set]


def is_registered(state: SchedulerState) -> bool:
    """All tasks that a start of the run announced have been registered. Once true it stays true."""
    if not state.registered:
        counts: dict[str, int] = {}
        for task in state.tasks.values():
            counts[task.task_set] = counts.get(task.task_set, 0) + 1
        state.registered = any(
            start.num_tasks and all(counts.get(task_set, 0) >= num for task_set, num in start.num_tasks.items())
            for start in state.starts
        )
    return state.registered


@dataclass(frozen=True)
class Due:
    """Something that may be offered now: a training step, or the validation pass at a policy version."""

    purpose: str
    step: int
    policy_version: int
    num_groups: int
    occurred_at: int


def next_due(state: SchedulerState, schedule: ScheduleSection, run_id: RunId) -> Due | None:
    """The next pass or step that may be offered; moves `state` past passes that are complete."""
    held_out = tasks_of(state, HELD_OUT_SET)
    points = validation_points(schedule) if held_out else []
    started_at = min(start.occurred_at for start in state.starts)
    while state.num_passes_done < len(points):
        version = points[state.num_passes_done]
        if version not in state.published_at or version not in state.loaded_at:
            break
        size = pass_size(schedule, version, len(held_out))
        ids = [make_group_id(run_id, "validation", version, i) for i in range(size)]
        if any(g not in state.offered for g in ids):
            at = max(started_at, state.published_at[version], state.loaded_at[version])
            return Due("validation", version, version, size, at)
        if any(g not in state.closed_at for g in ids):
            break
        state.pass_done_at[version] = max(state.closed_at[g] for g in ids)
        state.num_passes_done += 1
    barrier = points[state.num_passes_done] if state.num_passes_done < len(points) else schedule.num_steps
    step = state.next_step
    if step >= min(barrier, schedule.num_steps):
        return None
    passed = max((point for point in points if point <= step), default=0)
    version = max(step - schedule.max_staleness, passed, 0)
    served = [at for v, at in state.loaded_at.items() if v >= version]
    if version not in state.published_at or not served:
        return None
    at = max(started_at, state.published_at[version], min(served), state.pass_done_at.get(passed, 0))
    return Due("train", step, version, schedule.groups_per_step, at)


def is_run_complete(state: SchedulerState, schedule: ScheduleSection) -> bool:
    """All steps are committed and all validation passes complete."""
    num_points = len(validation_points(schedule)) if tasks_of(state, HELD_OUT_SET) else 0
    return state.num_steps_done >= schedule.num_steps and state.num_passes_done >= num_points
