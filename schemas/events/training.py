"""Groups, learner steps and policy versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from schemas.base import Event, event
from schemas.ids import EventId, GroupId, TaskId, TrialId


@dataclass(frozen=True, kw_only=True)
class GroupMember:
    """One trial of a group, as the group sees it."""

    trial_id: Annotated[TrialId, "The trial"]
    trajectory_event_id: Annotated[EventId, "Its TrajectoryAssembled"]
    admitted: Annotated[bool, "It counts in the statistics and the loss"]
    reward: Annotated[float | None, "Reward used in training; null when masked"]
    termination_reason: Annotated[str, "Why the trial ended"]
    min_version: Annotated[int | None, "Oldest policy version among its sampled tokens"]
    max_version: Annotated[int | None, "Newest policy version among its sampled tokens"]
    num_sampled_tokens: Annotated[int, "Tokens with mask 1"]


@event(topic="groups", key="group_id")
@dataclass(frozen=True, kw_only=True)
class GroupReady(Event):
    """All trials of a group are terminal and enough of them are admitted (derived)."""

    group_id: Annotated[GroupId, "The group"]
    task_id: Annotated[TaskId, "Its task"]
    purpose: Annotated[str, "train | validation"]
    policy_version: Annotated[int, "Policy version at its offer"]
    step: Annotated[int, "Step it was offered for"]
    members: Annotated[tuple[GroupMember, ...], "Its trials, in order of trial index"]
    num_admitted: Annotated[int, "Members that count"]
    reward_mean: Annotated[float, "Mean reward of the admitted members"]
    reward_std: Annotated[float, "Standard deviation (n - 1) of the admitted rewards; 0 when fewer than two"]
    zero_variation: Annotated[bool, "All admitted rewards are equal: no gradient"]


@event(topic="groups", key="group_id")
@dataclass(frozen=True, kw_only=True)
class GroupDropped(Event):
    """A group that will not be trained (derived). Still part of every denominator."""

    group_id: Annotated[GroupId, "The group"]
    task_id: Annotated[TaskId, "Its task"]
    purpose: Annotated[str, "train | validation"]
    policy_version: Annotated[int, "Policy version at its offer"]
    step: Annotated[int, "Step it was offered for"]
    reason: Annotated[str, "too_few_admitted | too_stale | revoked"]
    members: Annotated[tuple[GroupMember, ...], "Its trials, in order of trial index"]
    num_admitted: Annotated[int, "Members that count"]


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """Terms of the objective over one step, averaged as the loss averages them."""

    loss: Annotated[float, "The loss that was minimised"]
    policy_loss: Annotated[float, "Clipped surrogate term"]
    kl_loss: Annotated[float, "KL term before its coefficient (k3 estimator), nats per token"]
    entropy: Annotated[float | None, "Entropy, nats per token; null when not computed"]
    ratio_mean: Annotated[float, "Mean importance ratio"]
    clip_fraction: Annotated[float, "Share of sequences (tokens for PPO) whose ratio was clipped"]
    advantage_mean: Annotated[float, "Mean advantage"]
    advantage_std: Annotated[float, "Standard deviation of the advantages"]


@dataclass(frozen=True, kw_only=True)
class FidelitySummary:
    """Agreement of rollout and training log-probabilities over the trained tokens of one policy version."""

    version: Annotated[int, "Policy version that sampled the tokens; -1 for all versions together"]
    num_tokens: Annotated[int, "Tokens compared"]
    pearson: Annotated[float | None, "Pearson correlation of the probabilities' logs; null when undefined"]
    mean_abs_dlogp: Annotated[float, "Mean |log p_train - log p_rollout|, nats"]
    max_abs_dlogp: Annotated[float, "Largest |log p_train - log p_rollout|, nats"]
    k3_kl: Annotated[float, "k3 estimate of KL(rollout || train), nats per token"]
    ess: Annotated[float, "Effective sample size of the per-token importance weights, as a share of tokens"]
    histogram: Annotated[tuple[int, ...], "Counts of |dlogp| by decade: <1e-7, <1e-6, ... <1e0, >=1"]
    replay_overlap: Annotated[float | None, "Mean share of replayed experts that the model itself would choose"]
    replay_top1_agreement: Annotated[float | None, "Share of rows whose first expert is the model's own first choice"]
    replay_coverage: Annotated[float | None, "Share of token rows with recorded routing"]


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Wall time of a step by phase, seconds."""

    wait_sec: Annotated[float, "Waiting for groups"]
    forward_backward_sec: Annotated[float, "Reference, forward and backward passes"]
    optimizer_sec: Annotated[float, "Optimizer"]
    checkpoint_sec: Annotated[float, "Writing the checkpoint and the weights"]
    total_sec: Annotated[float, "Whole step"]


@dataclass(frozen=True, kw_only=True)
class SourceOffset:
    """Where the learner must read from after this step."""

    topic: Annotated[str, "Topic"]
    partition: Annotated[int, "Partition"]
    offset: Annotated[int, "Next offset to read"]


@event(topic="steps", key="run_id")
@dataclass(frozen=True, kw_only=True)
class StepCompleted(Event):
    """The learner updated the policy; written in the transaction that commits the step."""

    step: Annotated[int, "Training step, from 0"]
    version_before: Annotated[int, "Policy version it started from"]
    version_after: Annotated[int, "Policy version it made"]
    group_ids: Annotated[tuple[GroupId, ...], "Groups it consumed: each in one step or none"]
    num_informative_groups: Annotated[int, "Groups with reward variation"]
    num_trajectories: Annotated[int, "Trajectories in the loss"]
    num_tokens: Annotated[int, "Trained tokens (mask 1)"]
    num_stale_tokens: Annotated[int, "Tokens left out by the per-token staleness bound"]
    reward_mean: Annotated[float, "Mean reward over the admitted trajectories"]
    learning_rate: Annotated[float, "Learning rate used"]
    grad_norm: Annotated[float, "Gradient norm before clipping"]
    algorithm: Annotated[str, "gspo | grpo | ppo"]
    loss: Annotated[LossTerms, "Terms of the objective"]
    fidelity: Annotated[tuple[FidelitySummary, ...], "All versions together first, then each version"]
    timing: Annotated[StepTiming, "Wall time by phase"]
    checkpoint_path: Annotated[str, "Directory of the checkpoint"]
    checkpoint_sha256: Annotated[str, "Digest of the checkpoint's manifest, hex"]
    next_offsets: Annotated[tuple[SourceOffset, ...], "Offsets that the checkpoint holds"] = field(
        default_factory=tuple
    )


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """A file of a published policy."""

    name: Annotated[str, "File name within the policy directory"]
    sha256: Annotated[str, "Digest, hex"]
    size_bytes: Annotated[int, "Size"]


@event(topic="policy-versions", key="run_id")
@dataclass(frozen=True, kw_only=True)
class PolicyPublished(Event):
    """New weights are ready to be served."""

    version: Annotated[int, "Policy version, from 0 (the starting policy)"]
    step: Annotated[int, "Steps completed when it was made; version 0 has 0"]
    path: Annotated[str, "Directory with safetensors, config and tokenizer"]
    files: Annotated[tuple[FileDigest, ...], "The manifest"]
    manifest_sha256: Annotated[str, "Digest of the manifest, hex"]
    canary_ids: Annotated[bytes, "A fixed prompt [N]: int32, little endian"]
    canary_logprobs: Annotated[bytes, "The learner's log-probabilities of its tokens 1..N-1: float32, little endian"]
    dtype: Annotated[str, "float32 | bfloat16"] = "float32"


@event(topic="policy-versions", key="run_id")
@dataclass(frozen=True, kw_only=True)
class PolicyLoaded(Event):
    """An engine replica serves a policy version; written after digests and canary were checked."""

    version: Annotated[int, "Policy version"]
    replica: Annotated[str, "Engine replica"]
    ok: Annotated[bool, "False: the replica is fenced and serves no call"]
    manifest_sha256: Annotated[str, "Digest of the manifest it loaded, hex"]
    canary_logprobs: Annotated[bytes, "The replica's log-probabilities of the canary: float32, little endian"]
    canary_max_abs_dlogp: Annotated[float | None, "Largest difference to the published canary, nats"]
    load_sec: Annotated[float, "Pause, load, check and resume"]
    detail: Annotated[str, "Why it was refused"] = ""
