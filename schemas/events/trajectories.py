"""Trajectories: what can be trained, and whether it will be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from schemas.base import Event, event
from schemas.events.calls import VersionSpan
from schemas.ids import CallId, ConversationId, EventId, GroupId, TaskId, TrialId


@dataclass(frozen=True, kw_only=True)
class CallSlice:
    """Where one call's tokens lie in a segment."""

    call_id: Annotated[CallId, "The call"]
    prompt_start: Annotated[int, "Position of the call's first new prompt token"]
    sampled_start: Annotated[int, "Position of its first sampled token"]
    sampled_end: Annotated[int, "One past its last sampled token"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A token sequence that the engine really had as context, from its first token to the last sampled one."""

    conversation_id: Annotated[ConversationId, "The conversation"]
    ids: Annotated[bytes, "Token ids [T]: int32, little endian"]
    mask: Annotated[bytes, "[T] uint8: 1 = sampled by the policy in a recorded call and trained here"]
    logprobs: Annotated[bytes, "Rollout log-probabilities [T]: float32, little endian; meaningful where valid"]
    logprob_valid: Annotated[bytes, "Bit i (least significant first) is 1 when logprobs[i] was reported"]
    version_spans: Annotated[
        tuple[VersionSpan, ...], "Policy version of the sampled tokens, by position in the segment"
    ]
    calls: Annotated[tuple[CallSlice, ...], "The calls of the segment, in order"]


@dataclass(frozen=True, kw_only=True)
class ExcludedCall:
    """A call with sampled tokens that no segment trains, and why."""

    call_id: Annotated[CallId, "The call"]
    reason: Annotated[str, "orphaned_retry | failed | conversation_not_trained | aborted | capture_broken"]
    num_sampled_tokens: Annotated[int, "Sampled tokens it holds"]


@event(topic="trajectories", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class TrajectoryAssembled(Event):
    """A finished trial's model calls, aligned into segments (derived)."""

    trial_id: Annotated[TrialId, "The trial"]
    group_id: Annotated[GroupId, "Its group"]
    task_id: Annotated[TaskId, "Its task"]
    purpose: Annotated[str, "train | validation"]
    attempt: Annotated[int, "The winning attempt"]
    termination_reason: Annotated[str, "As in TrialFinished; capture_broken when calls are missing or do not fit"]
    trial_finished_event_id: Annotated[EventId, "The TrialFinished it was made from"]
    reward_event_id: Annotated[EventId | None, "The grade that belongs to it"]
    policy_version: Annotated[int, "Policy version at the group's offer"]
    min_version: Annotated[int | None, "Oldest policy version among its sampled tokens"]
    max_version: Annotated[int | None, "Newest policy version among its sampled tokens"]
    num_calls: Annotated[int, "Calls of the winning attempt"]
    num_sampled_tokens: Annotated[int, "Tokens with mask 1 over all segments"]
    segments: Annotated[tuple[Segment, ...], "The token sequences"]
    excluded: Annotated[
        tuple[ExcludedCall, ...],
        "Calls of the winning attempt that are not trained, each with its reason. All calls of other attempts, and all "
        "calls of a trial whose number of calls is unknown, are excluded by rule and not listed",
    ]
    detail: Annotated[str, "What did not fit when termination_reason became capture_broken here; names the call"] = ""


@event(topic="trajectories", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class TrajectoryAdmitted(Event):
    """A trajectory counts in its group's statistics and in the loss (derived)."""

    trial_id: Annotated[TrialId, "The trial"]
    group_id: Annotated[GroupId, "Its group"]
    trajectory_event_id: Annotated[EventId, "The TrajectoryAssembled"]
    reward_event_id: Annotated[EventId | None, "The grade used; null when the rule set the reward"]
    reward: Annotated[float, "Reward used in training"]
    termination_reason: Annotated[str, "Why the trial ended"]
    rule: Annotated[str, "keep | zero_reward"]
    table_version: Annotated[str, "Version of the admission table"]
    min_version: Annotated[int | None, "Oldest policy version among its sampled tokens"]
    max_version: Annotated[int | None, "Newest policy version among its sampled tokens"]
    num_sampled_tokens: Annotated[int, "Tokens with mask 1"]


@event(topic="trajectories", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class TrajectoryRejected(Event):
    """A trajectory stays in its group for consistency, and out of its statistics and the loss (derived)."""

    trial_id: Annotated[TrialId, "The trial"]
    group_id: Annotated[GroupId, "Its group"]
    trajectory_event_id: Annotated[EventId, "The TrajectoryAssembled"]
    termination_reason: Annotated[str, "Why the trial ended"]
    rule: Annotated[str, "mask | no_grade: the rule was keep, and no grade exists"]
    table_version: Annotated[str, "Version of the admission table"]
    min_version: Annotated[int | None, "Oldest policy version among its sampled tokens"]
    max_version: Annotated[int | None, "Newest policy version among its sampled tokens"]
    num_sampled_tokens: Annotated[int, "Tokens with mask 1"]
