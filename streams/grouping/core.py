"""Grouping: the trials of one offer become a group that can be trained, or is dropped with a reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.settings import ScheduleSection, Settings
from schemas.base import Event
from schemas.events import GroupDropped, GroupMember, GroupOffered, GroupReady, TrajectoryAdmitted, TrajectoryRejected
from schemas.ids import GroupId, TrialId, derive_id

PRODUCER = "grouping"

Verdict = TrajectoryAdmitted | TrajectoryRejected


@dataclass
class OpenGroup:
    """A group whose trials have not all ended."""

    offer: GroupOffered | None = None
    verdicts: dict[TrialId, Verdict] = field(default_factory=dict)


@dataclass
class GroupingState:
    """State over all partitions: offers are keyed by group, verdicts by trial."""

    groups: dict[GroupId, OpenGroup] = field(default_factory=dict)
    done: set[GroupId] = field(default_factory=set)


class GroupingStage:
    """Scope single: the trials of a group lie on different partitions."""

    name = "grouping"
    inputs: tuple[str, ...] = ("offers", "trajectories")
    wanted: frozenset[str] = frozenset({"GroupOffered", "TrajectoryAdmitted", "TrajectoryRejected"})
    scope = "single"

    def __init__(self, settings: Settings) -> None:
        self._schedule = settings.schedule

    def initial(self) -> GroupingState:
        """No group was seen."""
        return GroupingState()

    def apply(self, state: GroupingState, event: Event) -> tuple[GroupingState, list[Event]]:
        """The next state and the group that became complete, if one did."""
        if not isinstance(event, GroupOffered | TrajectoryAdmitted | TrajectoryRejected):
            return state, []
        if event.group_id in state.done:
            return state, []
        group = state.groups.setdefault(event.group_id, OpenGroup())
        if isinstance(event, GroupOffered):
            group.offer = group.offer or event
        else:
            group.verdicts.setdefault(event.trial_id, event)
        if group.offer is None or any(t not in group.verdicts for t in group.offer.trial_ids):
            return state, []
        del state.groups[event.group_id]
        state.done.add(event.group_id)
        return state, [close_group(group.offer, [group.verdicts[t] for t in group.offer.trial_ids], self._schedule)]


def close_group(
    offer: GroupOffered, verdicts: Sequence[Verdict], schedule: ScheduleSection
) -> GroupReady | GroupDropped:
    """The group's end. `verdicts` in order of trial index."""
    members = tuple(_member(verdict) for verdict in verdicts)
    rewards = [m.reward for m in members if m.admitted and m.reward is not None]
    reason = drop_reason(offer, members, schedule)
    kind = GroupDropped if reason else GroupReady
    common: dict[str, Any] = {
        "event_id": derive_id(kind.__name__, offer.event_id, *(v.event_id for v in verdicts)),
        "run_id": offer.run_id,
        "occurred_at": max([offer.occurred_at, *(v.occurred_at for v in verdicts)]),
        "producer": PRODUCER,
        "group_id": offer.group_id,
        "task_id": offer.task_id,
        "purpose": offer.purpose,
        "policy_version": offer.policy_version,
        "step": offer.step,
        "members": members,
        "num_admitted": len(rewards),
    }
    if reason:
        return GroupDropped(**common, reason=reason)
    mean, std = compute_mean_std(rewards)
    return GroupReady(**common, reward_mean=mean, reward_std=std, zero_variation=min(rewards) == max(rewards))


def drop_reason(offer: GroupOffered, members: Sequence[GroupMember], schedule: ScheduleSection) -> str | None:
    """Why the group cannot be trained; None when it can.

    Too stale: every token of every admitted member is older than the bound, as far as their newest versions tell;
    single stale tokens are left out by the learner.
    """
    admitted = [m for m in members if m.admitted]
    needed = 1 if offer.purpose == "validation" else min(schedule.min_admitted, offer.num_trials)
    if len(admitted) < max(needed, 1):
        return "too_few_admitted"
    versions = [m.max_version for m in admitted if m.max_version is not None]
    if offer.purpose == "train" and versions and max(versions) < offer.step - schedule.max_staleness:
        return "too_stale"
    return None


def compute_mean_std(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean, and standard deviation with n - 1 (0 when there are fewer than two)."""
    mean = math.fsum(rewards) / len(rewards)
    if len(rewards) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))


def _member(verdict: Verdict) -> GroupMember:
    admitted = isinstance(verdict, TrajectoryAdmitted)
    return GroupMember(
        trial_id=verdict.trial_id,
        trajectory_event_id=verdict.trajectory_event_id,
        admitted=admitted,
        reward=verdict.reward if isinstance(verdict, TrajectoryAdmitted) else None,
        termination_reason=verdict.termination_reason,
        min_version=verdict.min_version,
        max_version=verdict.max_version,
        num_sampled_tokens=verdict.num_sampled_tokens,
    )
