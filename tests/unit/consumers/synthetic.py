"""A small run as events, with known numbers: what the views must say is computed by hand in the tests.

Two training groups and two validation groups per step; trial 0 of a group solves its task when (step + group) is odd,
trial 1 always does, trial 2 ends parser_failed (reward 0) and trial 3 env_setup_failed (masked).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.base import Event
from schemas.events import (
    AlertCleared,
    AlertRaised,
    AttemptFinished,
    CallSlice,
    ConversationOpened,
    ExcludedCall,
    FidelitySummary,
    FileDigest,
    GroupMember,
    GroupOffered,
    GroupReady,
    LossTerms,
    ModelCallCompleted,
    ModelCallFailed,
    PolicyLoaded,
    PolicyPublished,
    RewardGraded,
    RoutingRecorded,
    RunFinished,
    RunStarted,
    Segment,
    StageFinished,
    StageStarted,
    StepCompleted,
    StepTiming,
    TaskRegistered,
    TestResult,
    TrajectoryAdmitted,
    TrajectoryAssembled,
    TrajectoryRejected,
    TrialFinished,
    TrialLeased,
    TrialOffered,
    VersionSpan,
)
from schemas.ids import (
    CallId,
    ConversationId,
    EventId,
    GroupId,
    RunId,
    TaskId,
    TrialId,
    derive_id,
    make_call_id,
    make_group_id,
    make_trial_id,
)
from schemas.packing import all_bits, pack_bits, pack_floats, pack_ints

#: 2026-01-01T00:00:00Z
START_MS = 1_767_225_600_000
PROMPT = tuple(range(100, 112))
SAMPLED = (7, 8, 9, 10, 2)
LOGPROBS = (-0.5, -0.25, -1.0, -0.125, 0.0)
REASONS = ("agent_completed", "agent_completed", "parser_failed", "env_setup_failed")
GROUPS_PER_STEP = 2
GROUP_SIZE = len(REASONS)
STAGE_SEC = {"prepare": 0.5, "setup": 1.0, "agent": 2.0, "verify": 0.5}


@dataclass
class History:
    """Events in the order in which they happen; `now` moves by 100 ms per event."""

    run: RunId
    now: int = START_MS
    num: int = 0
    events: list[Event] = field(default_factory=list)

    def base(self, producer: str) -> dict[str, object]:
        """The common fields of the next event."""
        self.now += 100
        self.num += 1
        event_id = derive_id("synthetic", self.run, str(self.num))
        return {"event_id": event_id, "run_id": self.run, "occurred_at": self.now, "producer": producer}

    def add(self, event: Event) -> EventId:
        """Append; returns the event's id."""
        self.events.append(event)
        return event.event_id


def _offer(h: History, purpose: str, step: int, index: int) -> tuple[GroupId, TaskId, list[TrialId]]:
    group = make_group_id(h.run, purpose, step, index)
    task = TaskId(f"{purpose}-task-{index}")
    size = GROUP_SIZE if purpose == "train" else 2
    trials = [make_trial_id(group, i) for i in range(size)]
    h.add(
        GroupOffered(
            **h.base("scheduler"),  # type: ignore[arg-type]
            group_id=group,
            task_id=task,
            task_digest="d" * 64,
            purpose=purpose,
            policy_version=step,
            epoch=0,
            step=step,
            num_trials=size,
            trial_ids=tuple(trials),
        )
    )
    for number, trial in enumerate(trials):
        h.add(
            TrialOffered(
                **h.base("scheduler"),  # type: ignore[arg-type]
                trial_id=trial,
                group_id=group,
                task_id=task,
                task_path=f"/tasks/{task}",
                task_digest="d" * 64,
                purpose=purpose,
                attempt=1,
                policy_version=step,
                harness="mini-swe-agent",
                seed=number,
                temperature=1.0,
                max_turns=4,
            )
        )
    return group, task, trials


def _call(h: History, trial: TrialId, version: int) -> CallId:
    conversation = ConversationId(f"{trial}/k0")
    h.add(
        ConversationOpened(
            **h.base("proxy/0"),  # type: ignore[arg-type]
            trial_id=trial,
            attempt=1,
            conversation_id=conversation,
            kind="main",
            reason="first request",
        )
    )
    call = make_call_id(trial, 1, 0)
    h.add(
        ModelCallCompleted(
            **h.base("proxy/0"),  # type: ignore[arg-type]
            trial_id=trial,
            attempt=1,
            conversation_id=conversation,
            call_id=call,
            call_index=0,
            parent_call_id=None,
            shared_prefix_len=0,
            prompt_delta_ids=pack_ints(PROMPT),
            prompt_len=len(PROMPT),
            sampled_ids=pack_ints(SAMPLED),
            logprobs=pack_floats(LOGPROBS),
            logprob_valid=pack_bits((1, 1, 0, 1, 1)),
            logprobs_mode="processed",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=512,
            seed=None,
            version_spans=(VersionSpan(version=version, start=0, end=len(SAMPLED)),),
            finish_reason="tool_calls",
            request_json='{"messages":[{"role":"user","content":"fix\\n\\nit; DROP TABLE x;"}]}',
            num_messages=1,
            response_json='{"role":"assistant"}',
            parser_outcome="ok",
            wire_format="chat",
            streamed=False,
            num_retries=0,
            engine_replica="engine/0",
            queue_ms=1.0,
            prefill_ms=2.0,
            decode_ms=10.0,
        )
    )
    num = len(PROMPT) + len(SAMPLED)
    h.add(
        RoutingRecorded(
            **h.base("proxy/0"),  # type: ignore[arg-type]
            trial_id=trial,
            attempt=1,
            call_id=call,
            chunk_index=0,
            num_chunks=1,
            token_start=0,
            num_tokens=num,
            num_layers=2,
            top_k=2,
            num_experts=8,
            dtype="uint8",
            expert_ids=bytes(i % 8 for i in range(num * 4)),
            valid=all_bits(num),
            version_spans=(VersionSpan(version=version, start=0, end=num),),
        )
    )
    return call


def _failed_call(h: History, trial: TrialId) -> CallId:
    call = make_call_id(trial, 1, 1)
    h.add(
        ModelCallFailed(
            **h.base("proxy/0"),  # type: ignore[arg-type]
            trial_id=trial,
            attempt=1,
            conversation_id=None,
            call_id=call,
            call_index=1,
            http_status=499,
            error_class="client_disconnected",
            detail="the harness hung up",
            sampled_ids=pack_ints((3, 4)),
        )
    )
    return call


def _segment(trial: TrialId, call: CallId, version: int) -> Segment:
    num, start = len(PROMPT) + len(SAMPLED), len(PROMPT)
    return Segment(
        conversation_id=ConversationId(f"{trial}/k0"),
        ids=pack_ints(PROMPT + SAMPLED),
        mask=bytes(start) + b"\x01" * len(SAMPLED),
        logprobs=pack_floats((0.0,) * start + LOGPROBS),
        logprob_valid=pack_bits([0] * start + [1, 1, 0, 1, 1]),
        version_spans=(VersionSpan(version=version, start=start, end=num),),
        calls=(CallSlice(call_id=call, prompt_start=0, sampled_start=start, sampled_end=num),),
    )


def _grade(h: History, trial: TrialId, task: TaskId, reward: float) -> EventId:
    passed = "passed" if reward else "failed"
    return h.add(
        RewardGraded(
            **h.base("verifier"),  # type: ignore[arg-type]
            trial_id=trial,
            attempt=1,
            task_id=task,
            reward=reward,
            tests=(
                TestResult(test_id="t.py::a", outcome=passed, expected="fail_to_pass", duration_sec=0.01),
                TestResult(test_id="t.py::b", outcome="passed", expected="pass_to_pass"),
            ),
            grader_id="pytest",
            grader_digest="g" * 64,
            grade_attempt=1,
            diff_sha256="f" * 64,
            task_digest="d" * 64,
            reused_from=None,
            duration_sec=0.2,
        )
    )


def _trial(
    h: History, purpose: str, step: int, group: GroupId, task: TaskId, trial: TrialId, reason: str, reward: float
) -> GroupMember:
    h.add(
        TrialLeased(
            **h.base("worker/0"),  # type: ignore[arg-type]
            trial_id=trial,
            attempt=1,
            lease_id=f"lease-{trial}",
            worker_id="worker/0",
            deadline_ms=h.now + 30_000,
        )
    )
    broken = reason == "env_setup_failed"
    for stage, seconds in STAGE_SEC.items():
        if broken and stage in ("agent", "verify"):
            continue
        h.add(StageStarted(**h.base("worker/0"), trial_id=trial, attempt=1, stage=stage))  # type: ignore[arg-type]
        h.add(
            StageFinished(
                **h.base("worker/0"),  # type: ignore[arg-type]
                trial_id=trial,
                attempt=1,
                stage=stage,
                outcome="failed" if broken and stage == "setup" else "ok",
                duration_sec=seconds,
                error_class="IsolationError" if broken and stage == "setup" else None,
                peak_memory_bytes=None if broken else 1_000_000,
            )
        )
    calls = [] if broken else [_call(h, trial, step)]
    failed = [_failed_call(h, trial)] if reason == "parser_failed" else []
    reward_id = None if broken else _grade(h, trial, task, reward)
    attempt_id = h.add(
        AttemptFinished(
            **h.base("worker/0"),  # type: ignore[arg-type]
            trial_id=trial,
            attempt=1,
            lease_id=f"lease-{trial}",
            worker_id="worker/0",
            setup_ok=not broken,
            sandbox_lost=False,
            agent_timed_out=False,
            agent_exit_code=None if broken else 0,
            agent_exit_status=None,
            max_turns_hit=False,
            verifier_timed_out=False,
            verifier_ok=not broken,
            capture_ok=True,
            num_calls=len(calls) + len(failed),
            num_failed_calls=len(failed),
            num_sampled_tokens=len(SAMPLED) * len(calls),
            num_parser_failures=int(reason == "parser_failed"),
            context_overflow=False,
            length_stop=False,
            reward_event_id=reward_id,
            diff=None if broken else b"--- a\n\n+++ b\n",
            diff_sha256=None if broken else "f" * 64,
        )
    )
    finished_id = h.add(
        TrialFinished(
            **h.base("scheduler"),  # type: ignore[arg-type]
            trial_id=trial,
            group_id=group,
            task_id=task,
            purpose=purpose,
            policy_version=step,
            termination_reason=reason,
            attempt=1,
            num_attempts=1,
            attempt_event_id=attempt_id,
            reward_event_id=reward_id,
            num_calls=len(calls) + len(failed),
        )
    )
    num_tokens, version = len(SAMPLED) * len(calls), None if broken else step
    trajectory_id = h.add(
        TrajectoryAssembled(
            **h.base("assembly"),  # type: ignore[arg-type]
            trial_id=trial,
            group_id=group,
            task_id=task,
            purpose=purpose,
            attempt=1,
            termination_reason=reason,
            trial_finished_event_id=finished_id,
            reward_event_id=reward_id,
            policy_version=step,
            min_version=version,
            max_version=version,
            num_calls=len(calls) + len(failed),
            num_sampled_tokens=num_tokens,
            segments=tuple(_segment(trial, call, step) for call in calls),
            excluded=tuple(ExcludedCall(call_id=call, reason="failed", num_sampled_tokens=2) for call in failed),
        )
    )
    if broken:
        h.add(
            TrajectoryRejected(
                **h.base("admission"),  # type: ignore[arg-type]
                trial_id=trial,
                group_id=group,
                trajectory_event_id=trajectory_id,
                termination_reason=reason,
                rule="mask",
                table_version="v1",
                min_version=version,
                max_version=version,
                num_sampled_tokens=num_tokens,
            )
        )
    else:
        h.add(
            TrajectoryAdmitted(
                **h.base("admission"),  # type: ignore[arg-type]
                trial_id=trial,
                group_id=group,
                trajectory_event_id=trajectory_id,
                reward_event_id=reward_id,
                reward=reward,
                termination_reason=reason,
                rule="zero_reward" if reason == "parser_failed" else "keep",
                table_version="v1",
                min_version=version,
                max_version=version,
                num_sampled_tokens=num_tokens,
            )
        )
    return GroupMember(
        trial_id=trial,
        trajectory_event_id=trajectory_id,
        admitted=not broken,
        reward=None if broken else reward,
        termination_reason=reason,
        min_version=version,
        max_version=version,
        num_sampled_tokens=num_tokens,
    )


def _group(h: History, purpose: str, step: int, index: int) -> tuple[GroupId, tuple[GroupMember, ...]]:
    group, task, trials = _offer(h, purpose, step, index)
    members = []
    for number, trial in enumerate(trials):
        reason = REASONS[number] if purpose == "train" else REASONS[(number + index) % 2 * 3]
        solved = reason == "agent_completed" and (number > 0 or (step + index) % 2 == 1)
        members.append(_trial(h, purpose, step, group, task, trial, reason, float(solved)))
    rewards = [m.reward for m in members if m.reward is not None]
    h.add(
        GroupReady(
            **h.base("grouping"),  # type: ignore[arg-type]
            group_id=group,
            task_id=task,
            purpose=purpose,
            policy_version=step,
            step=step,
            members=tuple(members),
            num_admitted=len(rewards),
            reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
            reward_std=0.5,
            zero_variation=len(set(rewards)) <= 1,
        )
    )
    return group, tuple(members)


def fidelity(version: int, num_tokens: int, pearson: float | None, mean: float) -> FidelitySummary:
    """One fidelity entry."""
    return FidelitySummary(
        version=version,
        num_tokens=num_tokens,
        pearson=pearson,
        mean_abs_dlogp=mean,
        max_abs_dlogp=mean * 4,
        k3_kl=1e-9,
        ess=0.99,
        histogram=(num_tokens, 0, 0, 0, 0, 0, 0, 0, 0),
        replay_overlap=0.995,
        replay_top1_agreement=0.99,
        replay_coverage=1.0,
    )


def _step(h: History, step: int, groups: list[tuple[GroupId, tuple[GroupMember, ...]]]) -> None:
    tokens = sum(m.num_sampled_tokens for _, members in groups for m in members)
    admitted = [m for _, members in groups for m in members if m.reward is not None]
    h.add(
        StepCompleted(
            **h.base("learner"),  # type: ignore[arg-type]
            step=step,
            version_before=step,
            version_after=step + 1,
            group_ids=tuple(group for group, _ in groups),
            num_informative_groups=len(groups),
            num_trajectories=len(admitted),
            num_tokens=tokens,
            num_stale_tokens=0,
            reward_mean=sum(m.reward or 0.0 for m in admitted) / len(admitted),
            learning_rate=1e-6,
            grad_norm=0.1,
            algorithm="gspo",
            loss=LossTerms(
                loss=0.1,
                policy_loss=0.1,
                kl_loss=0.0,
                entropy=None,
                ratio_mean=1.0,
                clip_fraction=0.0,
                advantage_mean=0.0,
                advantage_std=1.0,
            ),
            fidelity=(
                fidelity(-1, tokens * (step + 1), 1.0 - 1e-6 * step, 1e-6 * (step + 1)),
                fidelity(step, tokens * (step + 1), 1.0 - 1e-6 * step, 1e-6 * (step + 1)),
            ),
            timing=StepTiming(
                wait_sec=1.0, forward_backward_sec=2.0, optimizer_sec=0.5, checkpoint_sec=0.25, total_sec=3.75
            ),
            checkpoint_path=f"/checkpoints/{step}",
            checkpoint_sha256="c" * 64,
        )
    )
    _publish(h, step + 1)


def _publish(h: History, version: int) -> None:
    h.add(
        PolicyPublished(
            **h.base("learner"),  # type: ignore[arg-type]
            version=version,
            step=version,
            path=f"/policies/v{version}",
            files=(FileDigest(name="model.safetensors", sha256="a" * 64, size_bytes=4),),
            manifest_sha256="b" * 64,
            canary_ids=pack_ints((1, 2, 3)),
            canary_logprobs=pack_floats((-1.0, -2.0)),
        )
    )
    h.add(
        PolicyLoaded(
            **h.base("engine/0"),  # type: ignore[arg-type]
            version=version,
            replica="engine/0",
            ok=True,
            manifest_sha256="b" * 64,
            canary_logprobs=pack_floats((-1.0, -2.0)),
            canary_max_abs_dlogp=1e-7,
            load_sec=0.3,
        )
    )


def make_history(run: str = "run-x", num_steps: int = 2) -> tuple[Event, ...]:
    """A finished run with a validation pass before each step and after the last."""
    return tuple(_history(History(RunId(run)), num_steps).events)


def _history(h: History, num_steps: int) -> History:
    h.add(
        RunStarted(
            **h.base("cli"),  # type: ignore[arg-type]
            name="synthetic",
            config_json="{}",
            code_version="0.1.0",
            seeds={"scheduler": 1, "learner": 2},
        )
    )
    for index, task_set in enumerate(("train", "held_out")):
        h.add(
            TaskRegistered(
                **h.base("tasks"),  # type: ignore[arg-type]
                task_id=TaskId(f"{task_set}-task-{index}"),
                task_set=task_set,
                path="/tasks",
                digest="d" * 64,
                instruction="fix it",
                fail_to_pass=("t.py::a",),
                metadata={"seed": "1"},
            )
        )
    _publish(h, 0)
    for step in range(num_steps + 1):
        for index in range(2):
            _group(h, "validation", step, index)
        if step < num_steps:
            _step(h, step, [_group(h, "train", step, index) for index in range(GROUPS_PER_STEP)])
    raised = h.add(
        AlertRaised(
            **h.base("progress"),  # type: ignore[arg-type]
            check="replay_overlap_low",
            severity="critical",
            subject="step 1",
            detail="overlap 0.5",
            value=0.5,
            threshold=0.98,
        )
    )
    h.add(
        AlertCleared(
            **h.base("progress"),  # type: ignore[arg-type]
            check="replay_overlap_low",
            subject="step 1",
            raised_event_id=raised,
        )
    )
    h.add(
        AlertRaised(
            **h.base("progress"),  # type: ignore[arg-type]
            check="setup_failures_high",
            severity="warning",
            subject="run",
            detail="25 % of trials lost",
            value=0.25,
            threshold=0.2,
        )
    )
    h.add(RunFinished(**h.base("cli"), outcome="completed", num_steps=num_steps))  # type: ignore[arg-type]
    return h


def many(num_runs: int, num_steps: int = 2) -> Iterator[Event]:
    """Several runs, for volume."""
    for number in range(num_runs):
        yield from make_history(f"run-{number:04d}", num_steps)
