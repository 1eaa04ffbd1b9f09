"""Laws of a run, checked on its recorded events. Pure.

Each check returns how many things it looked at and what breaks the law. What a run that is still going on (or was
stopped and may be resumed) has not ended yet counts as open, not as broken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from schemas.base import Event
from schemas.events import (
    ExcludedCall,
    GroupDropped,
    GroupOffered,
    GroupReady,
    ModelCallCompleted,
    ModelCallFailed,
    RunFinished,
    StepCompleted,
    TrajectoryAssembled,
    TrialFinished,
    TrialOffered,
)

#: What the checks read.
CHECKED_TYPES = frozenset(
    cls.__name__
    for cls in (
        GroupDropped,
        GroupOffered,
        GroupReady,
        ModelCallCompleted,
        ModelCallFailed,
        RunFinished,
        StepCompleted,
        TrajectoryAssembled,
        TrialFinished,
        TrialOffered,
    )
)


@dataclass(frozen=True)
class Violation:
    """One thing that breaks a law."""

    law: str
    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.law}: {self.subject}: {self.detail}"


@dataclass(frozen=True)
class CheckRow:
    """One law over a run."""

    law: str
    num_checked: int
    num_open: int
    violations: tuple[Violation, ...]


def run_checks(events: Sequence[Event]) -> list[CheckRow]:
    """All laws over the events of one run."""
    ends = [event for event in events if isinstance(event, RunFinished)]
    completed = bool(ends) and max(ends, key=lambda e: e.occurred_at).outcome == "completed"
    return [
        check_trial_ends(events, completed=completed),
        check_sampled_tokens(events, completed=completed),
        check_group_ends(events, completed=completed),
        check_groups_trained_once(events),
        check_version_chain(events),
    ]


def check_trial_ends(events: Iterable[Event], *, completed: bool) -> CheckRow:
    """Every trial offered ends in exactly one TrialFinished."""
    law = "each offered trial ends once"
    offered: set[str] = set()
    ends: Counter[str] = Counter()
    for event in events:
        if isinstance(event, TrialOffered):
            offered.add(event.trial_id)
        elif isinstance(event, TrialFinished):
            ends[event.trial_id] += 1
    violations = [Violation(law, t, f"{num} TrialFinished") for t, num in sorted(ends.items()) if num > 1]
    violations += [Violation(law, t, "TrialFinished without a TrialOffered") for t in sorted(set(ends) - offered)]
    unended = sorted(offered - set(ends))
    if completed:
        violations += [Violation(law, t, "no TrialFinished, and the run is completed") for t in unended]
    return CheckRow(law, len(offered), 0 if completed else len(unended), tuple(violations))


def check_sampled_tokens(events: Iterable[Event], *, completed: bool) -> CheckRow:
    """Every sampled token is in exactly one segment of its trial's trajectory, or its call is excluded with a reason.

    Calls of an attempt that is not the trajectory's are excluded by that: whether they came before the trajectory or
    after it, no segment may hold them.
    """
    law = "each sampled token is trained once or excluded"
    calls: dict[str, ModelCallCompleted | ModelCallFailed] = {}
    trajectories: dict[str, TrajectoryAssembled] = {}
    uncounted: set[str] = set()  # trials that ended without knowing their calls: all of them are excluded by that
    violations: list[Violation] = []
    for event in events:
        if isinstance(event, ModelCallCompleted | ModelCallFailed):
            if calls.setdefault(event.call_id, event).event_id != event.event_id:
                violations.append(Violation(law, event.call_id, "two different calls were recorded with this id"))
        elif isinstance(event, TrajectoryAssembled):
            trajectories[event.trial_id] = event
        elif isinstance(event, TrialFinished) and event.num_calls is None:
            uncounted.add(event.trial_id)
    placed = {trial_id: place_calls(trajectory) for trial_id, trajectory in trajectories.items()}
    num_open = 0
    for call in calls.values():
        trajectory = trajectories.get(call.trial_id)
        if trajectory is None:
            if completed and call.sampled_ids:
                violations.append(Violation(law, call.call_id, "its trial has no trajectory, and the run is completed"))
            num_open += not completed
            continue
        parts, excluded = placed[call.trial_id]
        places = parts.get(call.call_id, []), excluded.get(call.call_id, [])
        if call.trial_id in uncounted and not any(places):
            continue
        violations += [Violation(law, call.call_id, detail) for detail in judge_call(call, trajectory, *places)]
    for trial_id, (parts, excluded) in placed.items():
        for call_id in sorted({*parts, *excluded} - set(calls)):
            violations.append(Violation(law, call_id, f"in the trajectory of {trial_id}, and no such call is recorded"))
    return CheckRow(law, len(calls), num_open, tuple(violations))


def place_calls(
    trajectory: TrajectoryAssembled,
) -> tuple[dict[str, list[tuple[bytes, bytes]]], dict[str, list[ExcludedCall]]]:
    """Call id -> (ids, mask) of each place a segment holds it; call id -> its exclusions."""
    parts: dict[str, list[tuple[bytes, bytes]]] = defaultdict(list)
    excluded: dict[str, list[ExcludedCall]] = defaultdict(list)
    for segment in trajectory.segments:
        for piece in segment.calls:
            start, end = piece.sampled_start, piece.sampled_end
            parts[piece.call_id].append((segment.ids[4 * start : 4 * end], segment.mask[start:end]))
    for entry in trajectory.excluded:
        excluded[entry.call_id].append(entry)
    return parts, excluded


def judge_call(
    call: ModelCallCompleted | ModelCallFailed,
    trajectory: TrajectoryAssembled,
    parts: Sequence[tuple[bytes, bytes]],
    excluded: Sequence[ExcludedCall],
) -> Iterator[str]:
    """What is wrong with where a call's sampled tokens went."""
    sampled = call.sampled_ids or b""
    num_tokens = len(sampled) // 4
    trained = [ids for ids, mask in parts if any(mask)]
    if call.attempt != trajectory.attempt:
        if parts:
            yield f"attempt {call.attempt} lost to attempt {trajectory.attempt}, and a segment holds its tokens"
        return
    if trained and excluded:
        yield f"in a segment and excluded ({excluded[0].reason})"
    if len(trained) > 1 or len(excluded) > 1:
        yield f"trained {len(trained)} times, excluded {len(excluded)} times"
    for ids, mask in parts:
        if any(mask) and (ids != sampled or mask != b"\x01" * num_tokens):
            yield f"the segment holds {sum(mask)} trained tokens that are not the {num_tokens} sampled ones"
    for entry in excluded:
        if entry.num_sampled_tokens != num_tokens:
            yield f"excluded with {entry.num_sampled_tokens} tokens, and {num_tokens} were sampled"
    if num_tokens and not trained and not excluded:
        yield f"{num_tokens} sampled tokens are in no segment and not excluded"


def check_group_ends(events: Iterable[Event], *, completed: bool) -> CheckRow:
    """Every group offered ends in exactly one GroupReady or GroupDropped."""
    law = "each offered group ends once"
    offered: set[str] = set()
    ends: Counter[str] = Counter()
    for event in events:
        if isinstance(event, GroupOffered):
            offered.add(event.group_id)
        elif isinstance(event, GroupReady | GroupDropped):
            ends[event.group_id] += 1
    violations = [Violation(law, g, f"{num} ends") for g, num in sorted(ends.items()) if num > 1]
    violations += [Violation(law, g, "ended without a GroupOffered") for g in sorted(set(ends) - offered)]
    unended = sorted(offered - set(ends))
    if completed:
        violations += [Violation(law, g, "neither ready nor dropped, and the run is completed") for g in unended]
    return CheckRow(law, len(offered), 0 if completed else len(unended), tuple(violations))


def check_groups_trained_once(events: Iterable[Event]) -> CheckRow:
    """A group is trained in one step or none, and only when it was ready for training."""
    law = "each group trains once at most"
    trained: dict[str, list[int]] = defaultdict(list)
    purposes: dict[str, str] = {}
    for event in events:
        if isinstance(event, StepCompleted):
            for member in event.group_ids:
                trained[member].append(event.step)
        elif isinstance(event, GroupReady):
            purposes[event.group_id] = event.purpose
    violations = []
    for group, at in sorted(trained.items()):
        if len(at) > 1:
            violations.append(Violation(law, group, f"trained in steps {', '.join(map(str, sorted(at)))}"))
        if group not in purposes:
            violations.append(Violation(law, group, f"trained in step {at[0]}, and never ready"))
        elif purposes[group] != "train":
            violations.append(Violation(law, group, f"a {purposes[group]} group, trained in step {at[0]}"))
    return CheckRow(law, len(trained), 0, tuple(violations))


def check_version_chain(events: Iterable[Event]) -> CheckRow:
    """Each step is completed once, and starts from the version the step before it made."""
    law = "each step follows the one before"
    steps = sorted((event for event in events if isinstance(event, StepCompleted)), key=lambda e: e.step)
    violations = []
    for index, event in enumerate(steps):
        before = steps[index - 1] if index else None
        if before is None:
            if event.step != 0:
                violations.append(Violation(law, f"step {event.step}", "the first step in the log is not step 0"))
        elif event.step == before.step:
            violations.append(Violation(law, f"step {event.step}", "completed more than once"))
        elif event.step != before.step + 1:
            violations.append(Violation(law, f"step {event.step}", f"follows step {before.step}"))
        elif event.version_before != before.version_after:
            detail = f"starts from version {event.version_before}; step {before.step} made {before.version_after}"
            violations.append(Violation(law, f"step {event.step}", detail))
    return CheckRow(law, len(steps), 0, tuple(violations))
