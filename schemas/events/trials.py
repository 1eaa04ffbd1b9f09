"""Offers, the stages of a trial, and its reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from schemas.base import Event, event
from schemas.ids import EventId, GroupId, TaskId, TrialId


@event(topic="offers", key="group_id")
@dataclass(frozen=True, kw_only=True)
class GroupOffered(Event):
    """The scheduler decided to sample `num_trials` trials of one task. Denominators are counted from here."""

    group_id: Annotated[GroupId, "The group"]
    task_id: Annotated[TaskId, "The task all its trials work on"]
    task_digest: Annotated[str, "Content digest of the task as registered"]
    purpose: Annotated[str, "train | validation"]
    policy_version: Annotated[int, "Policy version the offer waited for: its tokens come from this or a newer one"]
    epoch: Annotated[int, "Pass over the task set, from 0"]
    step: Annotated[int, "Training step it is meant for; for validation, the step it evaluates"]
    num_trials: Annotated[int, "G, the group size"]
    trial_ids: Annotated[tuple[TrialId, ...], "The trials, in order"]


@event(topic="offers", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class TrialOffered(Event):
    """One trial (or its next attempt) is to be run by whichever worker claims it: the unit of dispatch."""

    trial_id: Annotated[TrialId, "The trial"]
    group_id: Annotated[GroupId, "Its group"]
    task_id: Annotated[TaskId, "Its task"]
    task_path: Annotated[str, "Directory of the task"]
    task_digest: Annotated[str, "Content digest of the task as registered"]
    purpose: Annotated[str, "train | validation"]
    attempt: Annotated[int, "1 for the first; a lapsed lease is offered again with the next number"]
    policy_version: Annotated[int, "Policy version at the time of the group's offer"]
    harness: Annotated[str, "Harness to run, e.g. mini-swe-agent"]
    seed: Annotated[int, "Seed of this trial's sampling"]
    temperature: Annotated[float, "Sampling temperature"]
    max_turns: Annotated[int, "Model calls the harness may make"]


@event(topic="offers", key="group_id")
@dataclass(frozen=True, kw_only=True)
class GroupRevoked(Event):
    """Trials of this group that have not been leased yet must not be run."""

    group_id: Annotated[GroupId, "The group"]
    reason: Annotated[str, "Why, in one sentence"]


@event(topic="trial-stages", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class TrialLeased(Event):
    """A worker claimed a trial."""

    trial_id: Annotated[TrialId, "The trial"]
    attempt: Annotated[int, "The attempt of the offer that was claimed"]
    lease_id: Annotated[str, "Unique per claim"]
    worker_id: Annotated[str, "Who claimed it"]
    deadline_ms: Annotated[int, "The lease lapses then unless renewed", "timestamp-millis"]


@event(topic="trial-stages", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class LeaseRenewed(Event):
    """Heartbeat: the worker still holds the trial."""

    trial_id: Annotated[TrialId, "The trial"]
    attempt: Annotated[int, "The attempt"]
    lease_id: Annotated[str, "The lease"]
    deadline_ms: Annotated[int, "New deadline", "timestamp-millis"]


@event(topic="trial-stages", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class LeaseLapsed(Event):
    """The scheduler's clock passed a lease's deadline without a renewal or an end (recorded, so that replay agrees)."""

    trial_id: Annotated[TrialId, "The trial"]
    attempt: Annotated[int, "The attempt that was lost"]
    lease_id: Annotated[str, "The lease; empty when the offer was never claimed"]
    deadline_ms: Annotated[int, "The deadline that passed", "timestamp-millis"]


@event(topic="trial-stages", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class StageStarted(Event):
    """A stage of a trial began."""

    trial_id: Annotated[TrialId, "The trial"]
    attempt: Annotated[int, "The attempt"]
    stage: Annotated[str, "prepare | setup | agent | verify | cleanup"]


@event(topic="trial-stages", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class StageFinished(Event):
    """A stage of a trial ended."""

    trial_id: Annotated[TrialId, "The trial"]
    attempt: Annotated[int, "The attempt"]
    stage: Annotated[str, "prepare | setup | agent | verify | cleanup"]
    outcome: Annotated[str, "ok | failed | timeout"]
    duration_sec: Annotated[float, "Wall time of the stage"]
    error_class: Annotated[str | None, "Class of the error when it failed"] = None
    detail: Annotated[str, "What went wrong, in one sentence"] = ""
    peak_memory_bytes: Annotated[int | None, "Peak memory of the stage's processes, when measured"] = None


@event(topic="trial-stages", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class AttemptFinished(Event):
    """The raw facts of one attempt, as its worker saw them. What they mean is decided in TrialFinished."""

    trial_id: Annotated[TrialId, "The trial"]
    attempt: Annotated[int, "The attempt"]
    lease_id: Annotated[str, "The lease it ran under"]
    worker_id: Annotated[str, "Who ran it"]
    setup_ok: Annotated[bool, "The sandbox was built with its isolation verified"]
    sandbox_lost: Annotated[bool, "The sandbox disappeared while the agent ran"]
    agent_timed_out: Annotated[bool, "The agent stage hit its wall limit"]
    agent_exit_code: Annotated[int | None, "Exit code of the harness; null when it did not exit by itself"]
    agent_exit_status: Annotated[str | None, "The harness's own word for how it ended, when it has one"]
    max_turns_hit: Annotated[bool, "The harness stopped because its turn limit was reached"]
    verifier_timed_out: Annotated[bool, "The verify stage hit its wall limit"]
    verifier_ok: Annotated[bool, "The verifier ran to its end and gave a grade"]
    capture_ok: Annotated[bool, "The proxy closed the session with every call acknowledged by the log"]
    num_calls: Annotated[int | None, "Model calls recorded for this attempt (completed and failed); null when unknown"]
    num_failed_calls: Annotated[int | None, "Of these, calls that failed on the inference side"]
    num_sampled_tokens: Annotated[int | None, "Tokens the policy sampled in this attempt"]
    num_parser_failures: Annotated[int | None, "Replies in which a tool call was begun and could not be parsed"]
    context_overflow: Annotated[bool, "A call was refused because the context was full"]
    length_stop: Annotated[bool, "The last reply ended at the token limit"]
    reward_event_id: Annotated[EventId | None, "The RewardGraded of this attempt"]
    diff: Annotated[bytes | None, "The agent's change as a git patch, filtered; kept so that it can be graded again"]
    diff_sha256: Annotated[str | None, "Digest of the patch, hex"]
    detail: Annotated[str, "Anything a person should read"] = ""


@event(topic="trial-stages", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class TrialFinished(Event):
    """The one end of a trial, elected by the scheduler from its attempts (derived)."""

    trial_id: Annotated[TrialId, "The trial"]
    group_id: Annotated[GroupId, "Its group"]
    task_id: Annotated[TaskId, "Its task"]
    purpose: Annotated[str, "train | validation"]
    policy_version: Annotated[int, "Policy version at the group's offer"]
    termination_reason: Annotated[
        str,
        "agent_completed | max_turns_reached | overlong | agent_timeout | verifier_timeout | env_setup_failed | "
        "sandbox_lost | inference_failed | agent_crashed | parser_failed | no_tokens | capture_broken",
    ]
    attempt: Annotated[int, "The winning attempt"]
    num_attempts: Annotated[int, "Attempts offered"]
    attempt_event_id: Annotated[EventId | None, "The AttemptFinished that won; null when every lease lapsed"]
    reward_event_id: Annotated[EventId | None, "The RewardGraded of the winning attempt"]
    num_calls: Annotated[int | None, "Model calls of the winning attempt; null when unknown"]


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """One test of a grade."""

    __test__ = False

    test_id: Annotated[str, "pytest node id"]
    outcome: Annotated[str, "passed | failed | error | skipped | missing"]
    expected: Annotated[str, "fail_to_pass | pass_to_pass"]
    duration_sec: Annotated[float | None, "Wall time"] = None


@event(topic="rewards", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class RewardGraded(Event):
    """A verifier graded an attempt's diff. A later grade of the same trial supersedes an earlier one in views."""

    trial_id: Annotated[TrialId, "The trial"]
    attempt: Annotated[int, "The attempt"]
    task_id: Annotated[TaskId, "Its task"]
    reward: Annotated[float, "1.0 when every required test passed, else 0.0, unless the task defines otherwise"]
    tests: Annotated[tuple[TestResult, ...], "Per-test results"]
    grader_id: Annotated[str, "Name of the grader"]
    grader_digest: Annotated[str, "Digest of the grader's code and of the task's tests, hex"]
    grade_attempt: Annotated[int, "1 for the trial's own grade; regrades count on"]
    diff_sha256: Annotated[str, "Digest of the patch that was graded, hex"]
    task_digest: Annotated[str, "Content digest of the task"]
    reused_from: Annotated[
        EventId | None, "An earlier grade of an equal (task, diff, grader) whose results were reused"
    ]
    duration_sec: Annotated[float, "Wall time of grading; 0 when reused"]
