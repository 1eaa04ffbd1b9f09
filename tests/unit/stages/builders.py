"""Events with sensible defaults, for tests of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from schemas.events import (
    AttemptFinished,
    ConversationOpened,
    FidelitySummary,
    GroupMember,
    GroupOffered,
    GroupReady,
    LeaseLapsed,
    LossTerms,
    ModelCallCompleted,
    ModelCallFailed,
    PolicyLoaded,
    PolicyPublished,
    RewardGraded,
    RunStarted,
    StepCompleted,
    StepTiming,
    TaskRegistered,
    TrajectoryAssembled,
    TrialFinished,
    TrialLeased,
    TrialOffered,
    VersionSpan,
)
from schemas.ids import CallId, ConversationId, EventId, GroupId, RunId, TaskId, TrialId, make_call_id
from schemas.packing import all_bits, pack_floats, pack_ints

RUN = RunId("run-1")
TRIAL = TrialId("run-1.t00000.000.00")
GROUP = GroupId("run-1.t00000.000")
_numbers = count()


def base(at: int = 1000, producer: str = "test", run_id: str = RUN) -> dict[str, Any]:
    """The fields every event has; event ids are distinct."""
    return {
        "event_id": EventId(f"e{next(_numbers)}"),
        "run_id": RunId(run_id),
        "occurred_at": at,
        "producer": producer,
    }


def run_started(num_tasks: dict[str, int], at: int = 1000, **changes: Any) -> RunStarted:
    fields = {"name": "run", "config_json": "{}", "code_version": "0", "seeds": {}, "num_tasks": num_tasks}
    return RunStarted(**(base(at) | fields | changes))


def registered(task_id: str, task_set: str = "train", at: int = 900, **changes: Any) -> TaskRegistered:
    fields = {"task_id": TaskId(task_id), "task_set": task_set, "path": f"/tasks/{task_id}", "digest": f"d-{task_id}"}
    return TaskRegistered(**(base(at) | fields | {"instruction": "fix it"} | changes))


def published(version: int, at: int = 1100, **changes: Any) -> PolicyPublished:
    fields = {"version": version, "step": version, "path": f"/p/v{version}", "files": (), "manifest_sha256": "m"}
    return PolicyPublished(**(base(at) | fields | {"canary_ids": b"", "canary_logprobs": b""} | changes))


def loaded(version: int, at: int = 1200, *, ok: bool = True, replica: str = "engine/0", **changes: Any) -> PolicyLoaded:
    fields = {"version": version, "replica": replica, "ok": ok, "manifest_sha256": "m", "canary_logprobs": b""}
    return PolicyLoaded(**(base(at) | fields | {"canary_max_abs_dlogp": 0.0, "load_sec": 0.1} | changes))


def trial_offered(trial_id: str = TRIAL, at: int = 1300, attempt: int = 1, **changes: Any) -> TrialOffered:
    fields = {
        "trial_id": TrialId(trial_id),
        "group_id": GroupId(trial_id.rpartition(".")[0]),
        "task_id": TaskId("task-a"),
        "task_path": "/tasks/task-a",
        "task_digest": "d",
        "purpose": "train",
        "attempt": attempt,
        "policy_version": 0,
        "harness": "mini-swe-agent",
        "seed": 1,
        "temperature": 1.0,
        "max_turns": 8,
    }
    return TrialOffered(**(base(at) | fields | changes))


def group_offered(group_id: str = GROUP, num_trials: int = 2, at: int = 1300, **changes: Any) -> GroupOffered:
    fields = {
        "group_id": GroupId(group_id),
        "task_id": TaskId("task-a"),
        "task_digest": "d",
        "purpose": "train",
        "policy_version": 0,
        "epoch": 0,
        "step": 0,
        "num_trials": num_trials,
        "trial_ids": tuple(TrialId(f"{group_id}.{i:02d}") for i in range(num_trials)),
    }
    return GroupOffered(**(base(at) | fields | changes))


def leased(attempt: int = 1, lease_id: str = "lease-1", deadline_ms: int = 5000, **changes: Any) -> TrialLeased:
    fields = {"trial_id": TRIAL, "attempt": attempt, "lease_id": lease_id, "worker_id": "w", "deadline_ms": deadline_ms}
    return TrialLeased(**(base(1400) | fields | changes))


def lapsed(attempt: int = 1, lease_id: str = "lease-1", deadline_ms: int = 5000, **changes: Any) -> LeaseLapsed:
    fields = {"trial_id": TRIAL, "attempt": attempt, "lease_id": lease_id, "deadline_ms": deadline_ms}
    return LeaseLapsed(**(base(6000) | fields | changes))


def attempt_finished(attempt: int = 1, at: int = 2000, **changes: Any) -> AttemptFinished:
    """An attempt that completed, was captured whole and graded."""
    fields = {
        "trial_id": TRIAL,
        "attempt": attempt,
        "lease_id": "lease-1",
        "worker_id": "w",
        "setup_ok": True,
        "sandbox_lost": False,
        "agent_timed_out": False,
        "agent_exit_code": 0,
        "agent_exit_status": "Submitted",
        "max_turns_hit": False,
        "verifier_timed_out": False,
        "verifier_ok": True,
        "capture_ok": True,
        "num_calls": 1,
        "num_failed_calls": 0,
        "num_sampled_tokens": 5,
        "num_parser_failures": 0,
        "context_overflow": False,
        "length_stop": False,
        "reward_event_id": EventId("grade-1"),
        "diff": b"",
        "diff_sha256": "0",
    }
    return AttemptFinished(**(base(at) | fields | changes))


def trial_finished(num_calls: int | None, at: int = 2100, **changes: Any) -> TrialFinished:
    fields = {
        "trial_id": TRIAL,
        "group_id": GROUP,
        "task_id": TaskId("task-a"),
        "purpose": "train",
        "policy_version": 0,
        "termination_reason": "agent_completed",
        "attempt": 1,
        "num_attempts": 1,
        "attempt_event_id": EventId("a-1"),
        "reward_event_id": EventId("grade-1"),
        "num_calls": num_calls,
    }
    return TrialFinished(**(base(at) | fields | changes))


def opened(conversation_id: str = "main", kind: str = "main", **changes: Any) -> ConversationOpened:
    fields = {"trial_id": TRIAL, "attempt": 1, "conversation_id": ConversationId(conversation_id), "kind": kind}
    return ConversationOpened(**(base() | fields | {"reason": "first_request"} | changes))


def call(
    index: int,
    delta: Sequence[int],
    sampled: Sequence[int],
    *,
    parent: int | None = None,
    shared: int = 0,
    version: int = 0,
    **changes: Any,
) -> ModelCallCompleted:
    """A completed call. Log-prob of sampled token t is -t / 10."""
    trial_id, attempt = changes.get("trial_id", TRIAL), changes.get("attempt", 1)
    fields = {
        "trial_id": trial_id,
        "attempt": attempt,
        "conversation_id": ConversationId("main"),
        "call_id": make_call_id(trial_id, attempt, index),
        "call_index": index,
        "parent_call_id": None if parent is None else make_call_id(trial_id, attempt, parent),
        "shared_prefix_len": shared,
        "prompt_delta_ids": pack_ints(delta),
        "prompt_len": shared + len(delta),
        "sampled_ids": pack_ints(sampled),
        "logprobs": pack_floats([-t / 10 for t in sampled]),
        "logprob_valid": all_bits(len(sampled)),
        "logprobs_mode": "processed",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 16,
        "seed": 1,
        "version_spans": (VersionSpan(version=version, start=0, end=len(sampled)),) if sampled else (),
        "finish_reason": "stop",
        "request_json": "{}",
        "num_messages": 1,
        "response_json": "{}",
        "parser_outcome": "ok",
        "wire_format": "chat",
        "streamed": False,
        "num_retries": 0,
        "engine_replica": "engine/0",
        "queue_ms": 1.0,
        "prefill_ms": 1.0,
        "decode_ms": 1.0,
    }
    return ModelCallCompleted(**(base(1500 + index) | fields | changes))


def failed_call(index: int, sampled: Sequence[int] = (), **changes: Any) -> ModelCallFailed:
    trial_id, attempt = changes.get("trial_id", TRIAL), changes.get("attempt", 1)
    fields = {
        "trial_id": trial_id,
        "attempt": attempt,
        "conversation_id": None,
        "call_id": CallId(make_call_id(trial_id, attempt, index)),
        "call_index": index,
        "http_status": 500,
        "error_class": "engine_error",
        "detail": "the engine stopped",
        "sampled_ids": pack_ints(sampled) if sampled else None,
    }
    return ModelCallFailed(**(base(1500 + index) | fields | changes))


def graded(reward: float = 1.0, at: int = 1900, **changes: Any) -> RewardGraded:
    fields = {
        "event_id": EventId("grade-1"),
        "trial_id": TRIAL,
        "attempt": 1,
        "task_id": TaskId("task-a"),
        "reward": reward,
        "tests": (),
        "grader_id": "pytest",
        "grader_digest": "g",
        "grade_attempt": 1,
        "diff_sha256": "0",
        "task_digest": "d",
        "reused_from": None,
        "duration_sec": 0.1,
    }
    return RewardGraded(**(base(at) | fields | changes))


def trajectory(reason: str = "agent_completed", at: int = 2200, **changes: Any) -> TrajectoryAssembled:
    """A trajectory as admission sees it: its tokens do not matter there."""
    fields = {
        "trial_id": TRIAL,
        "group_id": GROUP,
        "task_id": TaskId("task-a"),
        "purpose": "train",
        "attempt": 1,
        "termination_reason": reason,
        "trial_finished_event_id": EventId("end-1"),
        "reward_event_id": EventId("grade-1"),
        "policy_version": 0,
        "min_version": 0,
        "max_version": 1,
        "num_calls": 1,
        "num_sampled_tokens": 5,
        "segments": (),
        "excluded": (),
    }
    return TrajectoryAssembled(**(base(at) | fields | changes))


def group_ready(group_id: str, purpose: str = "train", step: int = 0, at: int = 3000, **changes: Any) -> GroupReady:
    fields = {
        "group_id": GroupId(group_id),
        "task_id": TaskId("task-a"),
        "purpose": purpose,
        "policy_version": 0,
        "step": step,
        "members": (),
        "num_admitted": 1,
        "reward_mean": 1.0,
        "reward_std": 0.0,
        "zero_variation": True,
    }
    return GroupReady(**(base(at) | fields | changes))


def member(trial_id: str = TRIAL, **changes: Any) -> GroupMember:
    fields = {
        "trial_id": TrialId(trial_id),
        "trajectory_event_id": EventId("t"),
        "admitted": True,
        "reward": 1.0,
        "termination_reason": "agent_completed",
        "min_version": 0,
        "max_version": 0,
        "num_sampled_tokens": 5,
    }
    return GroupMember(**(fields | changes))


def fidelity(version: int = -1, **changes: Any) -> FidelitySummary:
    fields = {
        "version": version,
        "num_tokens": 100,
        "pearson": 0.99999,
        "mean_abs_dlogp": 1e-6,
        "max_abs_dlogp": 1e-5,
        "k3_kl": 0.0,
        "ess": 1.0,
        "histogram": (100,),
        "replay_overlap": 1.0,
        "replay_top1_agreement": 1.0,
        "replay_coverage": 1.0,
    }
    return FidelitySummary(**(fields | changes))


def step_completed(step: int, at: int = 4000, **changes: Any) -> StepCompleted:
    terms = ("loss", "policy_loss", "kl_loss", "entropy", "ratio_mean", "clip_fraction")
    times = ("wait_sec", "forward_backward_sec", "optimizer_sec", "checkpoint_sec", "total_sec")
    fields = {
        "step": step,
        "version_before": step,
        "version_after": step + 1,
        "group_ids": (),
        "num_informative_groups": 1,
        "num_trajectories": 2,
        "num_tokens": 100,
        "num_stale_tokens": 0,
        "reward_mean": 0.5,
        "learning_rate": 1e-6,
        "grad_norm": 1.0,
        "algorithm": "gspo",
        "loss": LossTerms(**dict.fromkeys((*terms, "advantage_mean", "advantage_std"), 0.0)),
        "fidelity": (fidelity(), fidelity(step)),
        "timing": StepTiming(**dict.fromkeys(times, 0.0)),
        "checkpoint_path": "/c",
        "checkpoint_sha256": "c",
    }
    return StepCompleted(**(base(at) | fields | changes))
