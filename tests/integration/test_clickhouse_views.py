"""What the views and the queries say of a small run, against numbers computed by hand."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from consumers.cli_views import render_rows, render_status, render_trace, status_line
from consumers.clickhouse.connect import connect
from consumers.clickhouse.migrate import migrate
from consumers.clickhouse.queries import QueryError, fetch_status, fetch_summary, fetch_trace, run_sql
from consumers.clickhouse.sink import Decoder, TopicBatch, build_tables
from infra.settings import ClickHouseSection, Settings
from schemas.base import Event
from schemas.codec import Codec
from schemas.events import ModelCallCompleted, RewardGraded, TrialFinished, TrialOffered
from schemas.ids import EventId
from streams.runtime.step import Record
from tests.unit.consumers.engine_process import OwnerProcess
from tests.unit.consumers.synthetic import make_history

URL_VARIABLE = "CLICKHOUSE_URL"
RUN = "run-x"
TRIAL = "run-x.t00001.000.02"  # ended parser_failed


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnerProcess]:
    with OwnerProcess(tmp_path_factory.mktemp("engine") / "clickhouse") as process:
        yield process


@pytest.fixture(scope="module", params=["embedded", "server"])
def url(request: pytest.FixtureRequest) -> str:
    """Both kinds of ClickHouse."""
    if request.param == "embedded":
        process: OwnerProcess = request.getfixturevalue("owner")
        return process.url
    server = os.environ.get(URL_VARIABLE, "")
    if not server:
        pytest.skip(f"needs a ClickHouse server (a container image): set {URL_VARIABLE}=http://host:port")
    return server


def _database(url: str) -> tuple[Settings, Any]:
    settings = replace(Settings(), clickhouse=ClickHouseSection(url=url, database=f"v_{uuid.uuid4().hex[:10]}"))
    admin = connect(settings, database="default")
    admin.command(f"CREATE DATABASE {settings.clickhouse.database}")
    admin.close()
    client = connect(settings)
    migrate(client)
    return settings, client


def _insert(client: Any, events: tuple[Event, ...], first_offset: int = 0) -> None:
    batches: dict[str, TopicBatch] = {}
    decoder, codec = Decoder(Codec(), lambda: None), Codec()
    for offset, event in enumerate(events, first_offset):
        batch = batches.setdefault(event.TOPIC, TopicBatch(event.TOPIC))
        decoder.add(batch, Record(event.TOPIC, 0, offset, b"k", codec.encode(event), (), event.occurred_at))
    for batch in batches.values():
        for table, token, data in build_tables(batch):
            client.insert_arrow(table, data, settings={"insert_deduplication_token": token})


@pytest.fixture(scope="module")
def filled(url: str) -> Iterator[Settings]:
    """The synthetic run, and all of it once more at other offsets: repeats must not count."""
    settings, client = _database(url)
    events = make_history(RUN)
    _insert(client, events)
    _insert(client, events, first_offset=len(events))
    yield settings
    client.command(f"DROP DATABASE {settings.clickhouse.database}")
    client.close()


def _rows(settings: Settings, sql: str) -> list[tuple[Any, ...]]:
    return run_sql(settings, sql)[1]


def test_progress_counts_what_was_offered(filled: Settings) -> None:
    rows = _rows(
        filled,
        "SELECT purpose, step, num_groups, num_offered, num_finished, num_setup_failures, num_solved, outcomes "
        "FROM progress ORDER BY purpose, step",
    )
    assert rows[0] == (
        *("train", 0, 2, 8, 8, 2, 3),
        {"agent_completed": 4, "env_setup_failed": 2, "parser_failed": 2},
    )
    assert [row[:7] for row in rows[2:]] == [
        ("validation", 0, 2, 4, 4, 2, 1),
        ("validation", 1, 2, 4, 4, 2, 2),
        ("validation", 2, 2, 4, 4, 2, 1),
    ]


def test_solve_rate_is_over_offers_not_over_what_came_back(filled: Settings) -> None:
    sql = (
        "SELECT step, sum(num_offered), sum(num_admitted), sum(num_solved) FROM solve_rate "
        "WHERE purpose = 'validation' GROUP BY step ORDER BY step"
    )
    assert _rows(filled, sql) == [(0, 4, 2, 1), (1, 4, 2, 2), (2, 4, 2, 1)]
    task = "SELECT solve_rate FROM solve_rate WHERE purpose = 'train' AND task_set = 'train' ORDER BY step"
    assert _rows(filled, task) == [(0.25,), (0.5,)]


def test_termination_mix_and_stage_timing(filled: Settings) -> None:
    mix = (
        "SELECT termination_reason, num_trials, share FROM termination_mix "
        "WHERE purpose = 'train' AND step = 1 ORDER BY 1"
    )
    assert _rows(filled, mix) == [
        ("agent_completed", 4, 0.5),
        ("env_setup_failed", 2, 0.25),
        ("parser_failed", 2, 0.25),
    ]
    timing = "SELECT stage, num_stages, num_failed, mean_sec, share, p50_sec, p99_sec FROM stage_timing ORDER BY stage"
    total = 18 * 2.0 + 28 * 0.5 + 28 * 1.0 + 18 * 0.5
    assert _rows(filled, timing) == [
        ("agent", 18, 0, 2.0, pytest.approx(36 / total), 2.0, 2.0),
        ("prepare", 28, 0, 0.5, pytest.approx(14 / total), 0.5, 0.5),
        ("setup", 28, 10, 1.0, pytest.approx(28 / total), 1.0, 1.0),
        ("verify", 18, 0, 0.5, pytest.approx(9 / total), 0.5, 0.5),
    ]
    by_step = "SELECT sum(share), sum(num_not_ok) FROM stage_timing_by_step WHERE purpose = 'train' AND step = 0"
    assert _rows(filled, by_step) == [(pytest.approx(1.0), 2)]


def test_fidelity_and_steps(filled: Settings) -> None:
    rows = _rows(filled, "SELECT step, version, num_tokens, histogram FROM fidelity ORDER BY step, version")
    assert rows == [
        (0, -1, 30, [30] + [0] * 8),
        (0, 0, 30, [30] + [0] * 8),
        (1, -1, 60, [60] + [0] * 8),
        (1, 1, 60, [60] + [0] * 8),
    ]
    assert _rows(filled, "SELECT step, num_groups, loss, total_sec, entropy FROM steps ORDER BY step") == [
        (0, 2, 0.1, 3.75, None),
        (1, 2, 0.1, 3.75, None),
    ]


def test_each_sampled_token_is_in_one_place(filled: Settings) -> None:
    accounting = "SELECT place, num_calls, num_tokens FROM token_accounting ORDER BY place"
    assert _rows(filled, accounting) == [("failed", 4, 8), ("trajectory", 18, 90)]


def test_lineage_goes_from_the_step_to_the_call(filled: Settings) -> None:
    rows = _rows(
        filled, f"SELECT step, version_after, group_id, reward, call_id FROM lineage WHERE trial_id = '{TRIAL}'"
    )
    assert rows == [(1, 2, "run-x.t00001.000", 0.0, f"{TRIAL}/a1/c0000")]
    assert _rows(filled, "SELECT step, count(), countIf(call_id IS NULL) FROM lineage GROUP BY step ORDER BY step") == [
        (0, 8, 2),
        (1, 8, 2),
    ]


def test_groups_staleness_weights_alerts_and_throughput(filled: Settings) -> None:
    groups = (
        "SELECT num_groups, num_zero_variation, solved_histogram FROM group_distribution "
        "WHERE step = 0 ORDER BY purpose"
    )
    assert _rows(filled, groups) == [(2, 0, [0, 1, 1, 0, 0]), (2, 2, [1, 1, 0])]
    assert _rows(filled, "SELECT step, num_trials, staleness_max FROM queue_staleness ORDER BY step") == [
        (0, 8, 0),
        (1, 8, 0),
    ]
    assert _rows(
        filled, "SELECT version, replica, sync_sec, ok, manifest_agrees FROM weight_sync ORDER BY version"
    ) == [(version, "engine/0", 0.1, True, 1) for version in range(3)]
    assert _rows(filled, "SELECT DISTINCT check FROM alerts_open") == [("setup_failures_high",)]
    assert _rows(filled, "SELECT num_calls, num_failed_calls, num_sampled_tokens, num_trials FROM throughput") == [
        (18, 4, 90, 28)
    ]


def test_status(filled: Settings) -> None:
    status = fetch_status(filled, RUN)
    assert (status.state, status.steps, status.version) == ("completed", 2, 2)
    assert [(r.step, r.num_solved, r.num_offered, r.complete) for r in status.held_out] == [
        (0, 1, 4, True),
        (1, 2, 4, True),
        (2, 1, 4, True),
    ]
    assert [(r.num_solved, r.num_offered) for r in status.train] == [(3, 8), (3, 8)]
    assert (status.num_offered, status.num_finished, status.num_running) == (28, 28, 0)
    assert status.outcomes == {"agent_completed": 14, "env_setup_failed": 10, "parser_failed": 4}
    assert (status.staleness_mean, status.staleness_max) == (0.0, 0)
    assert status.tokens_per_sec == pytest.approx(90 / 60)
    assert [a.check for a in status.alerts] == ["setup_failures_high"]
    assert fetch_status(filled, "") == status
    assert "step 2 · v2 · held-out 25.0 % (1/4) · train 37.5 % (3/8)" in status_line(status)
    text = _text(render_status(status, datetime(2026, 1, 1, 0, 1, tzinfo=UTC).replace(tzinfo=None)))
    for part in ("held-out", "25.0 % (1/4)", "37.5 % (3/8)", "env_setup_failed", "35.7 %", "! setup_failures_high"):
        assert part in text


def _text(renderable: Any) -> str:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_trace_shows_the_whole_life(filled: Settings) -> None:
    trace = fetch_trace(filled, TRIAL)
    assert [stage["stage"] for stage in trace.stages] == ["prepare", "setup", "agent", "verify"]
    assert [(call.error[:3], call.place) for call in trace.calls] == [("", "trajectory"), ("499", "failed")]
    summary = trace.calls[0].logprob_summary
    assert (summary.num_valid, summary.mean, summary.min) == (4, -0.21875, -0.5)
    assert trace.calls[0].versions == ((1, 0, 5),)
    assert (trace.trained or {})["step"] == 1
    assert trace.advantage == pytest.approx((0 - 2 / 3) / (0.5 + 1e-6))
    text = _text(render_trace(trace))
    for part in (
        *("run-x.t00001.000, trial 2 of 4", "worker/0", "mean -0.2188, min -0.5000, 4/5 reported", "v1 [0:5)"),
        *("t.py::a", "admitted by rule zero_reward: reward 0", "step 1: v1 → v2", "499 client_disconnected"),
    ):
        assert part in text


def test_summary(filled: Settings) -> None:
    summary = fetch_summary(filled, RUN)
    assert summary["evaluations"][1] == {"step": 1, "version": 1, "n": 4, "solved": 2, "rate": 0.5}
    assert (summary["held_out_before"], summary["held_out_after"]) == (0.25, 0.25)
    assert (summary["steps"], summary["trials"], summary["tokens"]) == (2, 28, 90)
    assert summary["pearson"] == pytest.approx(1 - 1e-6, abs=1e-12)
    assert summary["pearson_mean"] == pytest.approx((30 * 1.0 + 60 * (1 - 1e-6)) / 90, abs=1e-12)
    assert summary["mean_abs_dlogp"] == pytest.approx((30 * 1e-6 + 60 * 2e-6) / 90)
    assert summary["wall_sec"] == pytest.approx(46.2)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("DROP TABLE trials", "only questions"),
        ("INSERT INTO trials VALUES (1)", "only questions"),
        ("SELECT * FROM nope", "UNKNOWN_TABLE"),
        ("SELECT 1 FORMAT JSON", "leave out the FORMAT clause"),
        ("SELECT 1; SELECT 2", "Multi-statements"),
        ("SELECT * FROM file('/etc/passwd', 'LineAsString') INTO OUTFILE 'x'", "OUTFILE is not allowed"),
    ],
)
def test_sql_is_read_only_and_errors_say_why(filled: Settings, sql: str, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        run_sql(filled, sql)


def test_sql_rows_are_shown_as_a_table(filled: Settings) -> None:
    text = _text(render_rows(*run_sql(filled, "SELECT 1 AS a, NULL AS b, '[x]' AS c;")))
    assert "[x]" in text
    assert "1 row" in text
    assert ("trials",) in _rows(filled, "SHOW TABLES")


def test_what_is_not_there_is_said(filled: Settings) -> None:
    with pytest.raises(QueryError, match="no trial 'nope' was offered"):
        fetch_trace(filled, "nope")
    with pytest.raises(QueryError, match="run nope is not in ClickHouse"):
        fetch_status(filled, "nope")
    missing = replace(filled, clickhouse=replace(filled.clickhouse, database="not_there"))
    with pytest.raises(QueryError, match="has no tables yet"):
        fetch_status(missing, RUN)
    away = replace(filled, clickhouse=ClickHouseSection(port=1))
    with pytest.raises(QueryError, match=r"no ClickHouse at http://127\.0\.0\.1:1 .*rollstream up"):
        fetch_status(away, RUN)


def _late_facts() -> tuple[Event, ...]:
    """A trial of two attempts: the first lost its lease, and its call came in late; then a better grade."""
    events = make_history("run-late", num_steps=1)
    trial = "run-late.t00000.000.00"
    offer = next(e for e in events if isinstance(e, TrialOffered) and e.trial_id == trial)
    call = next(e for e in events if isinstance(e, ModelCallCompleted) and e.trial_id == trial)
    grade = next(e for e in events if isinstance(e, RewardGraded) and e.trial_id == trial)
    open_trial = "run-late.t00000.001.01"
    kept = tuple(
        e
        for e in events
        if not (
            getattr(e, "trial_id", "") == open_trial
            and (isinstance(e, TrialFinished) or type(e).__name__.startswith("Trajectory"))
        )
    )
    return (
        *kept,
        replace(offer, event_id=EventId("offer-2"), attempt=2),
        replace(call, event_id=EventId("late"), attempt=2, call_id=f"{trial}/a2/c0000"),  # type: ignore[arg-type]
        replace(grade, event_id=EventId("regrade"), reward=1.0, grade_attempt=2),
    )


def test_late_calls_open_trials_and_regrades(url: str) -> None:
    settings, client = _database(url)
    _insert(client, _late_facts())
    accounting = dict(run_sql(settings, "SELECT place, num_calls FROM token_accounting")[1])
    assert accounting == {"trajectory": 9, "failed": 2, "losing_attempt": 1, "trial_open": 1}
    trial = "SELECT reward, num_grades, training_reward, solved, state FROM trials WHERE trial_id = '{}'"
    assert run_sql(settings, trial.format("run-late.t00000.000.00"))[1] == [(1.0, 2, 0.0, 1, "finished")]
    assert run_sql(settings, trial.format("run-late.t00000.001.01"))[1] == [(None, None, None, 0, "running")]
    status = fetch_status(settings, "run-late")
    assert (status.num_offered, status.num_finished, status.num_running) == (16, 15, 1)
    assert not status.train[0].complete
    assert "train 3 solved, 7/8 ended" in status_line(status)
    client.command(f"DROP DATABASE {settings.clickhouse.database}")
