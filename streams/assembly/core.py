"""Assembly: a finished trial and its model calls become one trajectory.

A trial is assembled when its TrialFinished and all calls of the winning attempt are there, in whatever order they
came. What is assembled depends on those alone: calls of other attempts are excluded by rule, whether they came
before or come after, and so are all calls of a trial whose number of calls is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infra.settings import Settings
from schemas.base import Event
from schemas.events import (
    ConversationOpened,
    ExcludedCall,
    ModelCallCompleted,
    ModelCallFailed,
    TrajectoryAssembled,
    TrialFinished,
)
from schemas.ids import ConversationId, TrialId, derive_id
from streams.alignment.segments import Alignment, AlignmentError, Call, align_calls

PRODUCER = "assembly"


@dataclass
class AttemptCalls:
    """What the log holds of one attempt: calls by index (the first recorded one counts), kinds of conversations."""

    calls: dict[int, Call] = field(default_factory=dict)
    kinds: dict[ConversationId, str] = field(default_factory=dict)


@dataclass
class PendingTrial:
    """A trial that is not assembled yet."""

    attempts: dict[int, AttemptCalls] = field(default_factory=dict)
    finished: TrialFinished | None = None


@dataclass
class AssemblyState:
    """State of one partition."""

    trials: dict[TrialId, PendingTrial] = field(default_factory=dict)
    done: set[TrialId] = field(default_factory=set)


class AssemblyStage:
    """Scope partition: a trial's calls and its end have the same key."""

    name = "assembly"
    inputs: tuple[str, ...] = ("model-calls", "trial-stages")
    wanted: frozenset[str] = frozenset({"ConversationOpened", "ModelCallCompleted", "ModelCallFailed", "TrialFinished"})
    scope = "partition"

    def __init__(self, settings: Settings) -> None:
        self._trained_kinds = frozenset(settings.train.conversations)

    def initial(self) -> AssemblyState:
        """No trial was seen."""
        return AssemblyState()

    def apply(self, state: AssemblyState, event: Event) -> tuple[AssemblyState, list[Event]]:
        """The next state and the trajectory that became complete, if one did."""
        if not isinstance(event, TrialFinished | ConversationOpened | ModelCallCompleted | ModelCallFailed):
            return state, []
        if event.trial_id in state.done:
            return state, []
        trial = state.trials.setdefault(event.trial_id, PendingTrial())
        if isinstance(event, TrialFinished):
            trial.finished = trial.finished or event
            trial.attempts = {a: calls for a, calls in trial.attempts.items() if a == event.attempt}
        elif trial.finished is None or event.attempt == trial.finished.attempt:
            attempt = trial.attempts.setdefault(event.attempt, AttemptCalls())
            if isinstance(event, ConversationOpened):
                attempt.kinds.setdefault(event.conversation_id, event.kind)
            else:
                attempt.calls.setdefault(event.call_index, event)
        trajectory = self._assemble(trial)
        if trajectory is None:
            return state, []
        del state.trials[event.trial_id]
        state.done.add(event.trial_id)
        return state, [trajectory]

    def _assemble(self, trial: PendingTrial) -> TrajectoryAssembled | None:
        """The trajectory, once everything it needs is there."""
        end = trial.finished
        if end is None:
            return None
        if end.num_calls is None:
            return make_trajectory(end, [], Alignment((), (), 0, None, None))
        attempt = trial.attempts.get(end.attempt, AttemptCalls())
        if len(attempt.calls) < end.num_calls or any(i not in attempt.calls for i in range(end.num_calls)):
            return None
        calls = [attempt.calls[i] for i in range(end.num_calls)]
        try:
            return make_trajectory(end, calls, align_calls(calls, attempt.kinds, self._trained_kinds))
        except AlignmentError as exc:
            return make_trajectory(end, calls, exclude_all(calls), broken=str(exc))


def exclude_all(calls: Sequence[Call]) -> Alignment:
    """No call can be trained: what they say of each other does not fit."""
    excluded = tuple(
        ExcludedCall(call_id=call.call_id, reason="capture_broken", num_sampled_tokens=len(call.sampled_ids) // 4)
        for call in calls
        if call.sampled_ids
    )
    return Alignment((), excluded, 0, None, None)


def make_trajectory(
    end: TrialFinished, calls: Sequence[Call], alignment: Alignment, broken: str = ""
) -> TrajectoryAssembled:
    """The derived event. `broken`: why the calls do not fit; the trial then ends capture_broken."""
    return TrajectoryAssembled(
        event_id=derive_id("TrajectoryAssembled", end.event_id, *(call.event_id for call in calls)),
        run_id=end.run_id,
        occurred_at=max([end.occurred_at, *(call.occurred_at for call in calls)]),
        producer=PRODUCER,
        trial_id=end.trial_id,
        group_id=end.group_id,
        task_id=end.task_id,
        purpose=end.purpose,
        attempt=end.attempt,
        termination_reason="capture_broken" if broken else end.termination_reason,
        trial_finished_event_id=end.event_id,
        reward_event_id=end.reward_event_id,
        policy_version=end.policy_version,
        min_version=alignment.min_version,
        max_version=alignment.max_version,
        num_calls=len(calls),
        num_sampled_tokens=alignment.num_sampled_tokens,
        segments=alignment.segments,
        excluded=alignment.excluded,
        detail=broken,
    )
