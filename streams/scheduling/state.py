"""What the scheduler knows. Changed by recorded events only."""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.events import AttemptFinished, GroupDropped, LeaseLapsed, RunStarted, TaskRegistered, TrialOffered
from schemas.ids import GroupId, TaskId, TrialId


@dataclass(frozen=True)
class Lease:
    """Who holds a trial until when."""

    attempt: int
    lease_id: str
    deadline_ms: int


@dataclass
class TrialState:
    """An unfinished trial. `offer` is its recorded offer (first seen attempt); None until it was read back."""

    offer: TrialOffered | None = None
    #: The attempt that may run now; counts on with each lapsed lease.
    attempt: int = 1
    #: Leases that were seen.
    lease_ids: set[str] = field(default_factory=set)
    elected: AttemptFinished | None = None
    #: The lapse that used up the last attempt.
    lost: LeaseLapsed | None = None
    #: Lapses whose next attempt waits for `offer`.
    pending: list[LeaseLapsed] = field(default_factory=list)


@dataclass
class SchedulerState:
    """State of one run's schedule."""

    starts: list[RunStarted] = field(default_factory=list)
    tasks: dict[TaskId, TaskRegistered] = field(default_factory=dict)
    retired: set[TaskId] = field(default_factory=set)
    #: Made from the two above: tasks of a set that may be offered; all announced tasks are there.
    sorted_tasks: dict[str, tuple[TaskId, ...]] = field(default_factory=dict)
    registered: bool = False
    #: Policy version -> when it was published / first served by a replica.
    published_at: dict[int, int] = field(default_factory=dict)
    loaded_at: dict[int, int] = field(default_factory=dict)
    #: Steps committed by the learner, and when the newest was.
    num_steps_done: int = 0
    step_done_at: int = 0
    #: Groups that were offered: decided here, or read back from the log.
    offered: set[GroupId] = field(default_factory=set)
    #: Groups that ended -> when.
    closed_at: dict[GroupId, int] = field(default_factory=dict)
    dropped: dict[GroupId, GroupDropped] = field(default_factory=dict)
    #: Number of validation passes that are complete, when each was (by version), and the next step to offer.
    num_passes_done: int = 0
    pass_done_at: dict[int, int] = field(default_factory=dict)
    next_step: int = 0
    trials: dict[TrialId, TrialState] = field(default_factory=dict)
    done: set[TrialId] = field(default_factory=set)
    #: Leases that are held now, for the clock.
    leases: dict[TrialId, Lease] = field(default_factory=dict)
    #: The run's end was emitted: completed; or failed, after that many starts.
    finished: bool = False
    num_starts_failed: int = 0
