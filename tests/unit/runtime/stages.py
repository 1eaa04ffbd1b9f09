"""A small stage for the runtime's tests: a trial is admitted when both its grade and a lease renewal are there."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.base import Event
from schemas.events import LeaseRenewed, RewardGraded, TrajectoryAdmitted
from schemas.ids import EventId, GroupId, RunId, TaskId, TrialId, derive_id
from streams.runtime.step import PoisonError

State = dict[str, dict[str, Event]]


class JoinStage:
    """Joins `rewards` and `trial-stages` by trial. A negative reward is poison."""

    name = "join"
    inputs = ("rewards", "trial-stages")
    wanted = frozenset({"RewardGraded", "LeaseRenewed"})

    def __init__(self, scope: str = "partition") -> None:
        self.scope = scope
        #: Every state ever made, so that tests can look at them after the loop has ended.
        self.made: list[State] = []

    def initial(self) -> State:
        state: State = {}
        self.made.append(state)
        return state

    def apply(self, state: State, event: Event) -> tuple[State, list[Event]]:
        assert isinstance(event, RewardGraded | LeaseRenewed)
        if isinstance(event, RewardGraded) and event.reward < 0:
            raise PoisonError(f"reward {event.reward} is negative")
        facts = state.setdefault(event.trial_id, {})
        facts.setdefault(type(event).__name__, event)
        if len(facts) == 2:
            grade, renewal = facts["RewardGraded"], facts["LeaseRenewed"]
            facts["done"] = admit(grade, renewal)
            return state, [facts["done"]]
        return state, []

    @property
    def num_done(self) -> int:
        """Trials joined over all states that were ever made."""
        return sum("done" in facts for state in self.made for facts in state.values())


def admit(grade: Event, renewal: Event) -> TrajectoryAdmitted:
    """The derived event of a trial."""
    assert isinstance(grade, RewardGraded)
    return TrajectoryAdmitted(
        event_id=derive_id("TrajectoryAdmitted", grade.event_id, renewal.event_id),
        run_id=grade.run_id,
        occurred_at=max(grade.occurred_at, renewal.occurred_at),
        producer="join",
        trial_id=grade.trial_id,
        group_id=GroupId("g"),
        trajectory_event_id=EventId("t"),
        reward_event_id=grade.event_id,
        reward=grade.reward,
        termination_reason="agent_completed",
        rule="keep",
        table_version="v1",
        min_version=None,
        max_version=None,
        num_sampled_tokens=0,
    )


def make_grade(number: int, reward: float = 1.0) -> RewardGraded:
    """The grade of trial `number`; always the same event."""
    return RewardGraded(
        event_id=derive_id("RewardGraded", str(number)),
        run_id=RunId("run"),
        occurred_at=1000 + number,
        producer="test",
        trial_id=TrialId(f"trial-{number}"),
        attempt=1,
        task_id=TaskId("task"),
        reward=reward,
        tests=(),
        grader_id="g",
        grader_digest="d",
        grade_attempt=1,
        diff_sha256="",
        task_digest="",
        reused_from=None,
        duration_sec=0.0,
    )


def make_renewal(number: int) -> LeaseRenewed:
    """A renewal of trial `number`'s lease; always the same event."""
    return LeaseRenewed(
        event_id=derive_id("LeaseRenewed", str(number)),
        run_id=RunId("run"),
        occurred_at=2000 + number,
        producer="test",
        trial_id=TrialId(f"trial-{number}"),
        attempt=1,
        lease_id="lease",
        deadline_ms=0,
    )


def make_events(numbers: Sequence[int]) -> list[Event]:
    """Both facts of each trial, grades first."""
    return [*(make_grade(n) for n in numbers), *(make_renewal(n) for n in numbers)]
