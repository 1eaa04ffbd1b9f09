"""One trial's whole life, from its offer to the step that trained it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from consumers.clickhouse.session import QueryError, ask_dicts
from infra.settings import Settings


@dataclass(frozen=True)
class LogprobSummary:
    """Log-probabilities of a call's sampled tokens, nats; over those that were reported."""

    num_valid: int
    mean: float | None
    min: float | None


@dataclass(frozen=True)
class Call:
    """One model call. Failed calls have an `error`."""

    call_id: str
    attempt: int
    conversation_id: str | None
    call_index: int
    occurred_at: datetime
    parent_call_id: str | None
    shared_prefix_len: int
    prompt_len: int
    prompt_delta_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprob_valid: tuple[int, ...]
    versions: tuple[tuple[int, int, int], ...]  # (version, start, end)
    finish_reason: str
    parser_outcome: str
    engine_replica: str
    queue_ms: float | None
    prefill_ms: float | None
    decode_ms: float | None
    request_json: str
    response_json: str
    error: str = ""
    place: str = ""  # trajectory, or why its tokens are not trained

    @property
    def logprob_summary(self) -> LogprobSummary:
        """Mean and smallest reported log-probability."""
        valid = [p for p, ok in zip(self.logprobs, self.logprob_valid, strict=True) if ok]
        mean = sum(valid) / len(valid) if valid else None
        return LogprobSummary(len(valid), mean, min(valid, default=None))


@dataclass(frozen=True)
class Trace:
    """Everything that is known of a trial. What has not happened is empty or None."""

    trial_id: str
    run_id: str
    group: Mapping[str, Any]
    offers: Sequence[Mapping[str, Any]]
    leases: Sequence[Mapping[str, Any]]
    stages: Sequence[Mapping[str, Any]]
    calls: Sequence[Call]
    attempts: Sequence[Mapping[str, Any]]
    finished: Mapping[str, Any] | None
    rewards: Sequence[Mapping[str, Any]]
    trajectory: Mapping[str, Any] | None
    admission: Mapping[str, Any] | None
    group_result: Mapping[str, Any] | None
    trained: Mapping[str, Any] | None
    advantage: float | None = None
    routing: Mapping[str, Any] = field(default_factory=dict)


_ENDING = """
SELECT DISTINCT arrayJoin(trial_ids) AS trial_id FROM group_offered FINAL
WHERE run_id = {run:String} AND endsWith(trial_id, {ending:String}) ORDER BY trial_id LIMIT 50
"""
_NEWEST_RUN = "SELECT run_id FROM run_started ORDER BY occurred_at DESC LIMIT 1"
_POLICY_PATH = """
SELECT JSONExtractString(argMax(config_json, occurred_at), 'policy', 'path') FROM run_started FINAL
WHERE run_id = {run:String}
"""
_GROUP = """
SELECT run_id, group_id, task_id, purpose, policy_version, epoch, step, num_trials,
       indexOf(trial_ids, {trial:String}) - 1 AS trial_index, occurred_at
FROM group_offered FINAL WHERE has(trial_ids, {trial:String}) LIMIT 1
"""
_OFFERS = """
SELECT attempt, occurred_at, harness, seed, temperature, max_turns, policy_version
FROM trial_offered FINAL WHERE trial_id = {trial:String} ORDER BY attempt LIMIT 1 BY attempt
"""
_LEASES = """
SELECT l.attempt AS attempt, l.lease_id AS lease_id, l.worker_id AS worker_id, l.occurred_at AS occurred_at,
       l.deadline_ms AS deadline, r.num_renewals AS num_renewals, x.lapsed_at AS lapsed_at
FROM (SELECT * FROM trial_leased FINAL WHERE trial_id = {trial:String} LIMIT 1 BY lease_id) AS l
LEFT JOIN (SELECT lease_id, uniqExact(event_id) AS num_renewals FROM lease_renewed FINAL
           WHERE trial_id = {trial:String} GROUP BY lease_id) AS r ON l.lease_id = r.lease_id
LEFT JOIN (SELECT lease_id, toNullable(min(occurred_at)) AS lapsed_at FROM lease_lapsed FINAL
           WHERE trial_id = {trial:String} GROUP BY lease_id) AS x ON l.lease_id = x.lease_id
ORDER BY occurred_at
"""
_STAGES = """
SELECT attempt, stage, outcome, duration_sec, error_class, detail, peak_memory_bytes, occurred_at
FROM stage_finished FINAL WHERE trial_id = {trial:String} ORDER BY occurred_at LIMIT 1 BY event_id
"""
_OPEN_STAGES = """
SELECT attempt, stage, occurred_at FROM stage_started FINAL
WHERE trial_id = {trial:String} AND (attempt, stage) NOT IN
    (SELECT attempt, stage FROM stage_finished WHERE trial_id = {trial:String})
ORDER BY occurred_at LIMIT 1 BY event_id
"""
_CALLS = """
SELECT call_id, attempt, conversation_id, call_index, occurred_at, parent_call_id, shared_prefix_len, prompt_len,
       prompt_delta_ids, sampled_ids, logprobs, logprob_valid, version_spans, finish_reason, parser_outcome,
       engine_replica, queue_ms, prefill_ms, decode_ms, request_json, response_json
FROM model_call_completed FINAL WHERE trial_id = {trial:String} ORDER BY attempt, call_index LIMIT 1 BY call_id
"""
_FAILED_CALLS = """
SELECT call_id, attempt, conversation_id, call_index, occurred_at, sampled_ids, request_json, http_status,
       error_class, detail
FROM model_call_failed FINAL WHERE trial_id = {trial:String} ORDER BY attempt, call_index LIMIT 1 BY call_id
"""
_PLACES = "SELECT call_id, place FROM call_accounting WHERE trial_id = {trial:String}"
_ATTEMPTS = """
SELECT attempt, worker_id, occurred_at, setup_ok, sandbox_lost, agent_timed_out, agent_exit_code, agent_exit_status,
       max_turns_hit, verifier_ok, verifier_timed_out, capture_ok, num_calls, num_failed_calls, num_sampled_tokens,
       num_parser_failures, context_overflow, length_stop, diff, detail
FROM attempt_finished FINAL WHERE trial_id = {trial:String} ORDER BY attempt, occurred_at LIMIT 1 BY event_id
"""
_FINISHED = """
SELECT occurred_at, termination_reason, attempt, num_attempts, num_calls
FROM trial_finished FINAL WHERE trial_id = {trial:String} LIMIT 1
"""
_REWARDS = """
SELECT attempt, grade_attempt, reward, tests, grader_id, duration_sec, reused_from, occurred_at
FROM reward_graded FINAL WHERE trial_id = {trial:String} ORDER BY attempt, grade_attempt, occurred_at
LIMIT 1 BY event_id
"""
_TRAJECTORY = """
SELECT event_id, attempt, num_calls, num_sampled_tokens, min_version, max_version, excluded,
       arrayMap(s -> (s.conversation_id, length(s.ids), arraySum(s.mask), length(s.calls)), segments) AS segments
FROM trajectory_assembled FINAL WHERE trial_id = {trial:String} LIMIT 1
"""
_ADMISSION = """
SELECT 'admitted' AS decision, rule, toNullable(reward) AS reward, table_version FROM trajectory_admitted FINAL
WHERE trial_id = {trial:String}
UNION ALL
SELECT 'rejected' AS decision, rule, NULL AS reward, table_version FROM trajectory_rejected FINAL
WHERE trial_id = {trial:String}
LIMIT 1
"""
_GROUP_RESULT = """
SELECT 'ready' AS state, num_admitted, toNullable(reward_mean) AS reward_mean, toNullable(reward_std) AS reward_std,
       toNullable(zero_variation) AS zero_variation, '' AS reason
FROM group_ready FINAL WHERE group_id = {group:String}
UNION ALL
SELECT 'dropped' AS state, num_admitted, NULL AS reward_mean, NULL AS reward_std, NULL AS zero_variation, reason
FROM group_dropped FINAL WHERE group_id = {group:String}
LIMIT 1
"""
_TRAINED = """
SELECT step, version_before, version_after, occurred_at FROM step_completed FINAL
WHERE has(group_ids, {group:String}) LIMIT 1
"""
_ROUTING = """
SELECT count() AS num_chunks, sum(num_tokens) AS num_rows, sum(arraySum(valid)) AS num_valid,
       max(num_layers) AS num_layers, max(top_k) AS top_k, max(num_experts) AS num_experts
FROM (SELECT * FROM routing_recorded FINAL WHERE trial_id = {trial:String} LIMIT 1 BY event_id)
"""


def _call(row: Mapping[str, Any], places: Mapping[str, str]) -> Call:
    values = dict(row)
    spans = values.pop("version_spans")
    return Call(
        **values
        | {
            "prompt_delta_ids": tuple(row["prompt_delta_ids"]),
            "sampled_ids": tuple(row["sampled_ids"]),
            "logprobs": tuple(row["logprobs"]),
            "logprob_valid": tuple(row["logprob_valid"]),
        },
        versions=tuple((s["version"], s["start"], s["end"]) for s in spans),
        place=places.get(str(row["call_id"]), ""),
    )


def _failed_call(row: Mapping[str, Any], places: Mapping[str, str]) -> Call:
    num = len(row["sampled_ids"])
    return Call(
        call_id=row["call_id"],
        attempt=row["attempt"],
        conversation_id=row["conversation_id"],
        call_index=row["call_index"],
        occurred_at=row["occurred_at"],
        parent_call_id=None,
        shared_prefix_len=0,
        prompt_len=0,
        prompt_delta_ids=(),
        sampled_ids=tuple(row["sampled_ids"]),
        logprobs=(0.0,) * num,
        logprob_valid=(0,) * num,
        versions=(),
        finish_reason="",
        parser_outcome="",
        engine_replica="",
        queue_ms=None,
        prefill_ms=None,
        decode_ms=None,
        request_json=row["request_json"],
        response_json="",
        error=f"{row['http_status']} {row['error_class']}: {row['detail']}",
        place=places.get(str(row["call_id"]), ""),
    )


def _first(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return rows[0] if rows else None


def _advantage(admission: Mapping[str, Any] | None, result: Mapping[str, Any] | None) -> float | None:
    """(r - mean) / (std + 1e-6) over the admitted members of the group."""
    if not admission or not result or admission["reward"] is None or result["reward_std"] is None:
        return None
    return float((admission["reward"] - result["reward_mean"]) / (result["reward_std"] + 1e-6))


def _stages(settings: Settings, trial: Mapping[str, str]) -> list[dict[str, Any]]:
    ended = ask_dicts(settings, _STAGES, trial)
    unended = [
        row | {"outcome": "started", "duration_sec": None, "error_class": None, "detail": "", "peak_memory_bytes": None}
        for row in ask_dicts(settings, _OPEN_STAGES, trial)
    ]
    return sorted(ended + unended, key=lambda row: row["occurred_at"])


#: Candidates that the message for an ambiguous end lists.
_MAX_CANDIDATES = 10


def find_trial(settings: Settings, ending: str) -> str:
    """The one trial of the run (settings.run.id, else the newest) whose id ends so. Raises QueryError."""
    newest = [row["run_id"] for row in ask_dicts(settings, _NEWEST_RUN)]
    run_id = settings.run.id or (str(newest[0]) if newest else "")
    rows = ask_dicts(settings, _ENDING, {"run": run_id, "ending": ending}) if ending else []
    found = [str(row["trial_id"]) for row in rows]
    # Whole parts first: "2.05" means ...002.05 only when no id has the parts 2 and 05.
    found = [t for t in found if t.endswith(f".{ending}")] or found
    if len(found) == 1:
        return found[0]
    if not found:
        raise QueryError(
            f"no trial {ending!r} was offered, and none of run {run_id or '(none)'} ends so (the views are about a "
            'second behind); ids: rollstream sql "SELECT trial_id, termination_reason FROM trials '
            'ORDER BY offered_at DESC LIMIT 20"'
        )
    listed = ", ".join(found[:_MAX_CANDIDATES]) + (", ..." if len(found) > _MAX_CANDIDATES else "")
    raise QueryError(f"{ending!r} is the end of several trials of run {run_id}; give more of one: {listed}")


def fetch_policy_path(settings: Settings, run_id: str) -> str:
    """`policy.path` with which the run was started last; empty when it is not known. Raises QueryError."""
    rows = ask_dicts(settings, _POLICY_PATH, {"run": run_id})
    return str(next(iter(rows[0].values()))) if rows else ""


def fetch_trace(settings: Settings, trial_id: str) -> Trace:
    """The life of one trial, named by its id or the end of it (see `find_trial`). Raises QueryError."""
    offered = _first(ask_dicts(settings, _GROUP, {"trial": trial_id}))
    if offered is None:
        trial_id = find_trial(settings, trial_id)
        offered = ask_dicts(settings, _GROUP, {"trial": trial_id})[0]
    trial = {"trial": trial_id}
    group = {"group": str(offered["group_id"])}
    places = {row["call_id"]: row["place"] for row in ask_dicts(settings, _PLACES, trial)}
    calls = [_call(row, places) for row in ask_dicts(settings, _CALLS, trial)]
    calls += [_failed_call(row, places) for row in ask_dicts(settings, _FAILED_CALLS, trial)]
    admission = _first(ask_dicts(settings, _ADMISSION, trial))
    result = _first(ask_dicts(settings, _GROUP_RESULT, group))
    return Trace(
        trial_id=trial_id,
        run_id=str(offered["run_id"]),
        group=offered,
        offers=ask_dicts(settings, _OFFERS, trial),
        leases=ask_dicts(settings, _LEASES, trial),
        stages=_stages(settings, trial),
        calls=sorted(calls, key=lambda c: (c.attempt, c.call_index)),
        attempts=ask_dicts(settings, _ATTEMPTS, trial),
        finished=_first(ask_dicts(settings, _FINISHED, trial)),
        rewards=ask_dicts(settings, _REWARDS, trial),
        trajectory=_first(ask_dicts(settings, _TRAJECTORY, trial)),
        admission=admission,
        group_result=result,
        trained=_first(ask_dicts(settings, _TRAINED, group)),
        advantage=_advantage(admission, result),
        routing=_first(ask_dicts(settings, _ROUTING, trial)) or {},
    )
