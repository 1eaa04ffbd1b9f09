"""What people ask of a run: SQL, status, the demo's summary. Times are UTC without a zone, as ClickHouse gives them.

`fetch_trace` (one trial's whole life) is in `consumers.clickhouse.trace` and re-exported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from consumers.clickhouse.session import QueryError, ask, ask_dicts, run_sql
from consumers.clickhouse.trace import Trace, fetch_trace
from infra.settings import Settings

__all__ = [
    "Alert",
    "QueryError",
    "SolveRate",
    "Status",
    "Trace",
    "fetch_status",
    "fetch_summary",
    "fetch_trace",
    "run_sql",
]

#: Rates are measured over the last so many seconds of the run's own events.
RATE_WINDOW_SEC = 60


@dataclass(frozen=True)
class SolveRate:
    """Solved trials of one step and purpose; the denominator is what was offered."""

    step: int
    policy_version: int
    num_offered: int
    num_finished: int
    num_solved: int

    @property
    def rate(self) -> float:
        """Solved by offered."""
        return self.num_solved / self.num_offered if self.num_offered else 0.0

    @property
    def complete(self) -> bool:
        """Every offered trial has ended."""
        return self.num_finished == self.num_offered


@dataclass(frozen=True)
class Alert:
    """An alert that is open."""

    check: str
    severity: str
    subject: str
    detail: str
    occurred_at: datetime


@dataclass(frozen=True)
class Status:
    """A run at a glance."""

    run_id: str
    name: str
    state: str  # running | completed | stopped | failed
    started_at: datetime | None
    last_event_at: datetime | None
    steps: int
    num_steps: int | None
    version: int | None
    held_out: tuple[SolveRate, ...] = ()
    train: tuple[SolveRate, ...] = ()
    num_offered: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_finished: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    tokens_per_sec: float = 0.0
    trials_per_sec: float = 0.0
    staleness_mean: float | None = None
    staleness_max: int | None = None
    pearson: float | None = None
    mean_abs_dlogp: float | None = None
    replay_overlap: float | None = None
    alerts: tuple[Alert, ...] = ()


_RUN = """
SELECT
    (SELECT (min(occurred_at), argMax(name, occurred_at), argMax(config_json, occurred_at), max(occurred_at), count())
     FROM run_started FINAL WHERE run_id = {run:String}) AS started,
    (SELECT (max(occurred_at), argMax(outcome, occurred_at), count())
     FROM run_finished FINAL WHERE run_id = {run:String}) AS finished,
    (SELECT (max(version), count()) FROM policy_published FINAL WHERE run_id = {run:String}) AS policy
"""

_TRIALS = """
SELECT
    purpose, step, min(policy_version) AS policy_version, count() AS num_offered,
    countIf(state = 'waiting') AS num_waiting, countIf(state = 'running') AS num_running,
    countIf(state = 'finished') AS num_finished, countIf(solved) AS num_solved,
    groupArrayIf(assumeNotNull(termination_reason), termination_reason IS NOT NULL) AS reasons
FROM trials WHERE run_id = {run:String} GROUP BY purpose, step ORDER BY purpose, step
"""

_STEPS = """
SELECT step, f.pearson AS pearson, f.mean_abs_dlogp AS mean_abs_dlogp, f.replay_overlap AS replay_overlap,
       f.num_tokens AS num_tokens
FROM (SELECT step, fidelity FROM step_completed FINAL WHERE run_id = {run:String} LIMIT 1 BY step)
LEFT ARRAY JOIN arrayFilter(x -> x.version = -1, fidelity) AS f ORDER BY step
"""

# As the view queue_staleness, for the newest step alone: this is asked every other second.
_STALENESS = """
SELECT
    sum((version_before - assumeNotNull(m.min_version)) * m.num_sampled_tokens) / sum(m.num_sampled_tokens),
    max(version_before - assumeNotNull(m.min_version))
FROM
(
    SELECT version_before, m FROM
    (
        SELECT version_before, arrayJoin(group_ids) AS group_id FROM
        (SELECT version_before, group_ids FROM step_completed FINAL WHERE run_id = {run:String}
         ORDER BY step DESC LIMIT 1)
    ) AS s
    INNER JOIN (SELECT group_id, members FROM group_ready FINAL WHERE run_id = {run:String} LIMIT 1 BY group_id) AS g
    ON s.group_id = g.group_id
    ARRAY JOIN members AS m
)
WHERE m.admitted AND m.min_version IS NOT NULL
HAVING count() > 0
"""

# The window ends at the newest event, so that a look at a run that has ended says how fast it was at its end.
_RATES = """
WITH
    (SELECT max(occurred_at) FROM model_call_completed WHERE run_id = {run:String}) AS last_call,
    (SELECT max(occurred_at) FROM trial_finished WHERE run_id = {run:String}) AS last_trial,
    greatest(last_call, last_trial) AS last
SELECT
    last,
    (SELECT sum(num) FROM (SELECT length(sampled_ids) AS num FROM model_call_completed FINAL
     WHERE run_id = {run:String} AND occurred_at > last - toIntervalSecond({window:UInt32}) LIMIT 1 BY call_id))
     / {window:UInt32} AS tokens_per_sec,
    (SELECT uniqExact(trial_id) FROM trial_finished
     WHERE run_id = {run:String} AND occurred_at > last - toIntervalSecond({window:UInt32})) / {window:UInt32}
     AS trials_per_sec
"""

_ALERTS = """
SELECT check, severity, subject, detail, occurred_at FROM alerts_open
WHERE run_id = {run:String} ORDER BY severity = 'critical' DESC, occurred_at DESC LIMIT 20
"""


def newest_run(settings: Settings) -> str:
    """The run that started last. Raises QueryError when there is none."""
    rows = ask(settings, "SELECT run_id FROM run_started ORDER BY occurred_at DESC LIMIT 1")
    if not rows:
        raise QueryError("no run has started yet; `rollstream run` or `rollstream demo` starts one")
    return str(rows[0][0])


def _num_steps(config_json: str) -> int | None:
    import json

    try:
        value = json.loads(config_json)["schedule"]["num_steps"]
    except (ValueError, KeyError, TypeError):
        return None
    return int(value)


def _rates(rows: Sequence[Mapping[str, Any]], purpose: str) -> tuple[SolveRate, ...]:
    return tuple(
        SolveRate(
            int(row["step"]),
            int(row["policy_version"]),
            int(row["num_offered"]),
            int(row["num_finished"]),
            int(row["num_solved"]),
        )
        for row in rows
        if row["purpose"] == purpose
    )


def _outcomes(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for row in rows:
        for reason in row["reasons"]:
            out[str(reason)] = out.get(str(reason), 0) + 1
    return dict(sorted(out.items(), key=lambda item: -item[1]))


def fetch_status(settings: Settings, run_id: str) -> Status:
    """The state of a run (empty: the newest). Raises QueryError when the views or the run are not there (yet)."""
    run_id = run_id or newest_run(settings)
    run = {"run": run_id}
    started, finished, policy = ask(settings, _RUN, run)[0]
    if not started[4]:
        raise QueryError(f"run {run_id} is not in ClickHouse (yet)")
    trials = ask_dicts(settings, _TRIALS, run)
    steps = ask_dicts(settings, _STEPS, run)
    last_at, tokens_per_sec, trials_per_sec = ask(settings, _RATES, run | {"window": RATE_WINDOW_SEC})[0]
    staleness = ask(settings, _STALENESS, run) if steps else []
    last = steps[-1] if steps else {}
    ended = finished[2] and finished[0] >= started[3]
    return Status(
        run_id=run_id,
        name=str(started[1]),
        state=str(finished[1]) if ended else "running",
        started_at=started[0],
        last_event_at=last_at if trials else None,
        steps=len(steps),
        num_steps=_num_steps(str(started[2])),
        version=int(policy[0]) if policy[1] else None,
        held_out=_rates(trials, "validation"),
        train=_rates(trials, "train"),
        num_offered=sum(int(row["num_offered"]) for row in trials),
        num_waiting=sum(int(row["num_waiting"]) for row in trials),
        num_running=sum(int(row["num_running"]) for row in trials),
        num_finished=sum(int(row["num_finished"]) for row in trials),
        outcomes=_outcomes(trials),
        tokens_per_sec=float(tokens_per_sec or 0.0),
        trials_per_sec=float(trials_per_sec or 0.0),
        staleness_mean=staleness[0][0] if staleness else None,
        staleness_max=staleness[0][1] if staleness else None,
        pearson=last.get("pearson"),
        mean_abs_dlogp=last.get("mean_abs_dlogp"),
        replay_overlap=last.get("replay_overlap"),
        alerts=tuple(Alert(*row) for row in ask(settings, _ALERTS, run)),
    )


# -- the demo's summary

_SESSIONS = """
SELECT occurred_at, kind FROM
(
    SELECT occurred_at, 'start' AS kind FROM run_started FINAL WHERE run_id = {run:String}
    UNION ALL
    SELECT occurred_at, 'end' AS kind FROM run_finished FINAL WHERE run_id = {run:String}
    UNION ALL
    SELECT occurred_at, 'work' AS kind FROM trial_finished FINAL WHERE run_id = {run:String}
    UNION ALL
    SELECT occurred_at, 'work' AS kind FROM step_completed FINAL WHERE run_id = {run:String}
)
ORDER BY occurred_at
"""

_TOKENS = """
SELECT sum(num) FROM
(SELECT length(sampled_ids) AS num FROM model_call_completed FINAL WHERE run_id = {run:String} LIMIT 1 BY call_id)
"""


def wall_sec(marks: Sequence[tuple[datetime, str]]) -> float:
    """Seconds that the run was at work: from each start to its end, or to the last work before the next start."""
    total, began, last = 0.0, None, None
    for at, kind in marks:
        if kind == "start":
            if began is not None and last is not None:
                total += (last - began).total_seconds()
            began = last = at
        elif began is not None:
            last = at
            if kind == "end":
                total += (at - began).total_seconds()
                began = last = None
    if began is not None and last is not None:
        total += (last - began).total_seconds()
    return total


def combine_fidelity(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Over all trained tokens: the smallest and the token-weighted mean Pearson, and the mean |dlogp|."""
    weighted = [(s["num_tokens"], s["pearson"], s["mean_abs_dlogp"]) for s in steps if s["num_tokens"]]
    total = sum(num for num, _, _ in weighted)
    defined = [(num, pearson) for num, pearson, _ in weighted if pearson is not None]
    return {
        "pearson": min((pearson for _, pearson in defined), default=None),
        "pearson_mean": sum(n * p for n, p in defined) / sum(n for n, _ in defined) if defined else None,
        "mean_abs_dlogp": sum(num * mean for num, _, mean in weighted) / total if total else None,
    }


def fetch_summary(settings: Settings, run_id: str) -> dict[str, Any]:
    """The demo's summary.json. An evaluation is a validation pass all of whose offered trials have ended."""
    run = {"run": run_id}
    trials = ask_dicts(settings, _TRIALS, run)
    steps = ask_dicts(settings, _STEPS, run)
    evaluations = [
        {"step": r.step, "version": r.policy_version, "n": r.num_offered, "solved": r.num_solved, "rate": r.rate}
        for r in _rates(trials, "validation")
        if r.complete
    ]
    return {
        "run_id": run_id,
        "held_out_before": evaluations[0]["rate"] if evaluations else None,
        "held_out_after": evaluations[-1]["rate"] if len(evaluations) > 1 else None,
        "evaluations": evaluations,
        **combine_fidelity(steps),
        "steps": len(steps),
        "trials": sum(int(row["num_offered"]) for row in trials),
        "tokens": int(ask(settings, _TOKENS, run)[0][0] or 0),
        "wall_sec": wall_sec([(row[0], str(row[1])) for row in ask(settings, _SESSIONS, run)]),
    }
