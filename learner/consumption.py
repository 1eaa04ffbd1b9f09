"""What the learner has read and not trained yet: groups, their trajectories, the routing of their calls.

Pure bookkeeping without Kafka. A group trains in one step or none: the groups of step s are those offered for it
(the scheduler fills a dropped group's place), taken in order of (step, group id) when all that they need has
arrived. What is taken does not depend on the order of arrival, so a crashed step is repeated exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from schemas.base import Event
from schemas.events import GroupDropped, GroupReady, RoutingRecorded, TrajectoryAssembled
from schemas.ids import CallId, GroupId, RunId, TrialId

#: Catalogue topics the learner reads.
INPUTS = ("groups", "trajectories", "routing")

#: Event types it applies.
WANTED = frozenset({"GroupReady", "GroupDropped", "TrajectoryAssembled", "RoutingRecorded"})

#: Closed trials and groups that are remembered, so that a late or repeated record of one is not kept for ever. Far
#: more than can lie between the offsets of a checkpoint and the end of the log under any staleness bound.
MAX_CLOSED = 50_000

TopicPart = tuple[str, int]
Chunks = dict[CallId, dict[int, RoutingRecorded]]


@dataclass(frozen=True)
class ReadyTrial:
    """An admitted trial with all that training needs."""

    trajectory: TrajectoryAssembled
    reward: float
    routing: Mapping[CallId, list[RoutingRecorded]]


@dataclass(frozen=True)
class ReadyGroup:
    """A group whose admitted trials are all complete, in order of trial index."""

    event: GroupReady
    trials: tuple[ReadyTrial, ...]


@dataclass
class _Trial:
    """What has arrived of a trial, and the first offset of it in each partition."""

    trajectory: TrajectoryAssembled | None = None
    chunks: Chunks = field(default_factory=dict)
    first_offset: dict[TopicPart, int] = field(default_factory=dict)


class GroupBuffer:
    """See the module. `needs_routing`: a group is complete only with the routing of every trained call."""

    def __init__(
        self,
        run_id: RunId,
        *,
        needs_routing: bool,
        next_offsets: Mapping[TopicPart, int] | None = None,
        closed_groups: Iterable[GroupId] = (),
        closed_trials: Iterable[TrialId] = (),
    ) -> None:
        self._run_id, self._needs_routing = run_id, needs_routing
        self._positions: dict[TopicPart, int] = dict(next_offsets or {})
        self._groups: dict[GroupId, tuple[GroupReady, TopicPart, int]] = {}
        self._trials: dict[TrialId, _Trial] = {}
        self._closed_groups: dict[GroupId, None] = dict.fromkeys(closed_groups)
        self._closed_trials: dict[TrialId, None] = dict.fromkeys(closed_trials)

    # -- reading

    def pass_over(self, part: TopicPart, offset: int) -> None:
        """A record was read that is of no use here."""
        self._positions[part] = max(self._positions.get(part, 0), offset + 1)

    def apply(self, event: Event, part: TopicPart, offset: int) -> None:
        """Take an event in. Repeats, other runs and closed groups and trials leave nothing behind."""
        self.pass_over(part, offset)
        if event.run_id != self._run_id:
            return
        if isinstance(event, GroupReady | GroupDropped):
            self._apply_group(event, part, offset)
        elif isinstance(event, TrajectoryAssembled):
            if event.trial_id in self._closed_trials:
                return
            if event.group_id in self._closed_groups or event.purpose != "train":
                self._close_trial(event.trial_id)
                return
            trial = self._touch(event.trial_id, part, offset)
            trial.trajectory = trial.trajectory or event
        elif isinstance(event, RoutingRecorded) and event.trial_id not in self._closed_trials:
            trial = self._touch(event.trial_id, part, offset)
            trial.chunks.setdefault(event.call_id, {}).setdefault(event.chunk_index, event)

    def _apply_group(self, event: GroupReady | GroupDropped, part: TopicPart, offset: int) -> None:
        if event.group_id in self._closed_groups or event.group_id in self._groups:
            return
        if isinstance(event, GroupDropped) or event.purpose != "train":
            self._close_group(event)
        else:
            self._groups[event.group_id] = (event, part, offset)

    def _touch(self, trial_id: TrialId, part: TopicPart, offset: int) -> _Trial:
        trial = self._trials.setdefault(trial_id, _Trial())
        trial.first_offset.setdefault(part, offset)
        return trial

    def _close_trial(self, trial_id: TrialId) -> None:
        self._trials.pop(trial_id, None)
        self._closed_trials[trial_id] = None
        while len(self._closed_trials) > MAX_CLOSED:
            del self._closed_trials[next(iter(self._closed_trials))]

    def _close_group(self, event: GroupReady | GroupDropped) -> None:
        self._groups.pop(event.group_id, None)
        self._closed_groups[event.group_id] = None
        while len(self._closed_groups) > MAX_CLOSED:
            del self._closed_groups[next(iter(self._closed_groups))]
        for member in event.members:
            self._close_trial(member.trial_id)
        # A revoked group may end before all its trials are known to it.
        for trial_id in [
            t for t, x in self._trials.items() if x.trajectory and x.trajectory.group_id == event.group_id
        ]:
            self._close_trial(trial_id)

    # -- choosing

    @property
    def num_waiting_groups(self) -> int:
        """Groups ready for training and not trained yet, complete or not."""
        return len(self._groups)

    def choose_groups(self, step: int, num_groups: int) -> list[ReadyGroup] | None:
        """The groups of a step: the lowest by (step, group id) offered for it or before; None while any is missing."""
        due = sorted(
            (event for event, _, _ in self._groups.values() if event.step <= step), key=lambda g: (g.step, g.group_id)
        )
        if len(due) < num_groups:
            return None
        chosen: list[ReadyGroup] = []
        for event in due[:num_groups]:
            group = self._complete(event)
            if group is None:
                return None
            chosen.append(group)
        return chosen

    def describe_wait(self, step: int, num_groups: int) -> str:
        """What a step is waiting for, in one sentence that names the first thing missing and the remedy."""
        due = sorted((e for e, _, _ in self._groups.values() if e.step <= step), key=lambda g: (g.step, g.group_id))
        text = f"step {step} has {len(due)} of {num_groups} groups"
        for event in due[:num_groups]:
            for member in event.members:
                trial = self._trials.get(member.trial_id)
                if not member.admitted:
                    continue
                if trial is None or trial.trajectory is None:
                    return f"{text}; the trajectory of trial {member.trial_id} has not arrived"
                if self._routing_of(trial) is None:
                    return (
                        f"{text}; routing of trial {member.trial_id} has not all arrived: if the engine records none, "
                        "set engine.record_routing or train.routing_replay to false"
                    )
        return text

    def _complete(self, event: GroupReady) -> ReadyGroup | None:
        trials = []
        for member in event.members:
            if not member.admitted or member.reward is None:
                continue
            trial = self._trials.get(member.trial_id)
            if trial is None or trial.trajectory is None:
                return None
            if trial.trajectory.event_id != member.trajectory_event_id:
                raise ValueError(
                    f"group {event.group_id}: trial {member.trial_id} has trajectory {trial.trajectory.event_id}, the "
                    f"group names {member.trajectory_event_id}; run `rollstream replay verify`"
                )
            routing = self._routing_of(trial)
            if routing is None:
                return None
            trials.append(ReadyTrial(trial.trajectory, member.reward, routing))
        return ReadyGroup(event, tuple(trials))

    def _routing_of(self, trial: _Trial) -> dict[CallId, list[RoutingRecorded]] | None:
        """Routing of the trial's trained calls; None while chunks are missing."""
        out: dict[CallId, list[RoutingRecorded]] = {}
        if not self._needs_routing or trial.trajectory is None:
            return out
        for segment in trial.trajectory.segments:
            if 1 not in segment.mask:
                continue
            for call in segment.calls:
                chunks = trial.chunks.get(call.call_id, {})
                if not chunks or len(chunks) < next(iter(chunks.values())).num_chunks:
                    return None
                out[call.call_id] = [chunks[i] for i in sorted(chunks)]
        return out

    # -- consuming

    def consume(self, groups: Iterable[ReadyGroup]) -> None:
        """The groups were trained: forget them, and remember that they are done."""
        for group in groups:
            self._close_group(group.event)

    def next_offsets(self) -> dict[TopicPart, int]:
        """Where to read from to see again everything that is still waiting, per partition."""
        offsets = dict(self._positions)
        for _, part, offset in self._groups.values():
            offsets[part] = min(offsets[part], offset)
        for trial in self._trials.values():
            for part, offset in trial.first_offset.items():
                offsets[part] = min(offsets[part], offset)
        return offsets

    @property
    def closed_groups(self) -> tuple[GroupId, ...]:
        """Groups that must not be taken again, oldest first."""
        return tuple(self._closed_groups)

    @property
    def closed_trials(self) -> tuple[TrialId, ...]:
        """Trials whose records are no longer wanted, oldest first."""
        return tuple(self._closed_trials)
