"""Admission: which trajectories count, and with what reward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from infra.settings import Settings
from schemas.base import Event
from schemas.events import RewardGraded, TrajectoryAdmitted, TrajectoryAssembled, TrajectoryRejected
from schemas.ids import EventId, TrialId, derive_id
from streams.admission.table import make_table
from streams.runtime.step import PoisonError

PRODUCER = "admission"


@dataclass
class AdmissionState:
    """State of one partition. Trajectories wait without their tokens; grades are kept until their trial is decided."""

    waiting: dict[TrialId, TrajectoryAssembled] = field(default_factory=dict)
    grades: dict[TrialId, dict[EventId, RewardGraded]] = field(default_factory=dict)
    done: set[TrialId] = field(default_factory=set)


class AdmissionStage:
    """Scope partition: a trial's trajectory and its grades have the same key."""

    name = "admission"
    inputs: tuple[str, ...] = ("trajectories", "rewards")
    wanted: frozenset[str] = frozenset({"TrajectoryAssembled", "RewardGraded"})
    scope = "partition"

    def __init__(self, settings: Settings) -> None:
        self._version, self._table = make_table(settings.admission.table, settings.admission.overrides)

    def initial(self) -> AdmissionState:
        """No trial was seen."""
        return AdmissionState()

    def apply(self, state: AdmissionState, event: Event) -> tuple[AdmissionState, list[Event]]:
        """The next state and the decision that became possible, if one did."""
        if not isinstance(event, TrajectoryAssembled | RewardGraded) or event.trial_id in state.done:
            return state, []  # a repeat, or a later grade of a trial that is decided
        if isinstance(event, RewardGraded):
            state.grades.setdefault(event.trial_id, {}).setdefault(event.event_id, event)
        elif event.termination_reason not in self._table:
            raise PoisonError(
                f"trial {event.trial_id}: admission table {self._version} has no rule for the termination reason "
                f"{event.termination_reason!r}"
            )
        else:
            state.waiting.setdefault(event.trial_id, replace(event, segments=(), excluded=()))
        trajectory = state.waiting.get(event.trial_id)
        if trajectory is None:
            return state, []
        verdict = self._decide(trajectory, state.grades.get(event.trial_id, {}))
        if verdict is None:
            return state, []
        state.done.add(event.trial_id)
        del state.waiting[event.trial_id]
        state.grades.pop(event.trial_id, None)
        return state, [verdict]

    def _decide(
        self, trajectory: TrajectoryAssembled, grades: dict[EventId, RewardGraded]
    ) -> TrajectoryAdmitted | TrajectoryRejected | None:
        """The verdict; None while the grade that it needs is not there."""
        rule = self._table[trajectory.termination_reason]
        if rule == "mask":
            return self._reject(trajectory, "mask")
        if rule == "zero_reward":
            return self._admit(trajectory, None)
        if trajectory.reward_event_id is None:
            return self._reject(trajectory, "no_grade")
        grade = grades.get(trajectory.reward_event_id)
        return self._admit(trajectory, grade) if grade is not None else None

    def _admit(self, trajectory: TrajectoryAssembled, grade: RewardGraded | None) -> TrajectoryAdmitted:
        sources = [trajectory.event_id] + ([grade.event_id] if grade else [])
        return TrajectoryAdmitted(
            event_id=derive_id("TrajectoryAdmitted", *sources),
            run_id=trajectory.run_id,
            occurred_at=max(trajectory.occurred_at, grade.occurred_at if grade else 0),
            producer=PRODUCER,
            trial_id=trajectory.trial_id,
            group_id=trajectory.group_id,
            trajectory_event_id=trajectory.event_id,
            reward_event_id=grade.event_id if grade else None,
            reward=grade.reward if grade else 0.0,
            termination_reason=trajectory.termination_reason,
            rule="keep" if grade else "zero_reward",
            table_version=self._version,
            min_version=trajectory.min_version,
            max_version=trajectory.max_version,
            num_sampled_tokens=trajectory.num_sampled_tokens,
        )

    def _reject(self, trajectory: TrajectoryAssembled, rule: str) -> TrajectoryRejected:
        return TrajectoryRejected(
            event_id=derive_id("TrajectoryRejected", trajectory.event_id),
            run_id=trajectory.run_id,
            occurred_at=trajectory.occurred_at,
            producer=PRODUCER,
            trial_id=trajectory.trial_id,
            group_id=trajectory.group_id,
            trajectory_event_id=trajectory.event_id,
            termination_reason=trajectory.termination_reason,
            rule=rule,
            table_version=self._version,
            min_version=trajectory.min_version,
            max_version=trajectory.max_version,
            num_sampled_tokens=trajectory.num_sampled_tokens,
        )
