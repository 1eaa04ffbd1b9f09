"""The command line on a real stack, over the log of a small finished run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra import paths
from infra.kafka import EventWriter, drop_topics
from infra.local.ports import accepts_connections, free_port
from infra.local.process import is_alive
from infra.local.stack import down
from infra.run import Run
from infra.settings import ClickHouseSection, DataSection, KafkaSection, Settings
from infra.watch import Progress
from schemas.base import Event
from schemas.events import ModelCallCompleted, RunStarted, TaskRetired
from schemas.ids import RunId, TaskId, make_event_id, now_ms
from schemas.packing import unpack_ints
from tests.integration.command_line import (
    assert_refused,
    on_a_terminal,
    read_until,
    rollstream,
    start,
)
from tests.unit.consumers.synthetic import make_history
from tests.unit.proxy import tiny

RUN = "run-x"
TRIAL = "run-x.t00001.000.02"
COMMANDS = (
    (),
    ("up",),
    ("down",),
    ("run",),
    ("serve",),
    ("tail",),
    ("status",),
    ("trace",),
    ("sql",),
    ("demo",),
    ("config",),
    ("config", "show"),
    ("replay",),
    ("replay", "verify"),
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tokenizer(tmp_path_factory.mktemp("policy") / "p")


def with_policy(event: Event, policy: Path) -> Event:
    """RunStarted as a run with this policy would have written it."""
    if not isinstance(event, RunStarted):
        return event
    return replace(event, config_json=json.dumps({"policy": {"path": str(policy)}, "schedule": {"num_steps": 2}}))


@pytest.fixture(scope="module")
def stack(broker: str, tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Iterator[Settings]:
    """`rollstream up` by the command, a finished run on the log, and `rollstream serve sink` that has taken it in."""
    settings = replace(
        Settings(),
        data=DataSection(dir=str(tmp_path_factory.mktemp("cli"))),
        kafka=KafkaSection(bootstrap=broker, topic_prefix=f"t{uuid.uuid4().hex[:10]}-", partitions=2),
        clickhouse=ClickHouseSection(port=free_port()),
    )
    done = rollstream("up", settings=settings)
    assert done.returncode == 0, done.stderr
    writer = EventWriter(settings)
    for event in make_history(RUN):
        writer.write(with_policy(event, policy))
    writer.flush()
    sink = start("serve", "sink", settings=settings)
    try:
        read_until(sink, "service starting")
        assert Run.wait_for_sink(_Sunk(settings), 60.0)  # type: ignore[arg-type]
        yield settings
    finally:
        sink.send_signal(signal.SIGTERM)
        assert sink.wait(30) == 0
        stopped = rollstream("down", settings=settings)
        assert stopped.returncode == 0 and "clickhouse" in stopped.stdout, stopped.stderr
        assert not accepts_connections(settings.clickhouse.port)
        drop_topics(settings)


class _Sunk:
    """What `Run.wait_for_sink` needs of a run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: "-".join(c) or "rollstream")
def test_help_shows_an_example(command: tuple[str, ...]) -> None:
    done = rollstream(*command, "--help")
    assert done.returncode == 0
    assert "Example: rollstream" in done.stdout


def test_config_show_names_the_origin_of_each_value(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text("[schedule]\nnum_steps = 7\ngroup_size = 3\n\n[clickhouse]\npassword = 'hush'\n")
    done = rollstream(
        "config",
        "show",
        "--config",
        str(run_file),
        "--set",
        "schedule.group_size=5",
        env={"ROLLSTREAM_TRAIN__LR": "0.5", "COLUMNS": "400"},
    )
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert re.search(rf"num_steps +7 +{re.escape(str(run_file))}", rows["schedule.num_steps"])
    assert re.search(r"group_size +5 +--set schedule\.group_size", rows["schedule.group_size"])
    assert re.search(r"lr +0\.5 +environment variable ROLLSTREAM_TRAIN__LR", rows["train.lr"])
    assert re.search(r"port +8090 +default", rows["proxy.port"])
    assert "hush" not in done.stdout


def test_config_show_as_a_run_file_reads_back(tmp_path: Path) -> None:
    done = rollstream("config", "show", "--toml", "--set", "schedule.num_steps=9")
    again = tmp_path / "again.toml"
    again.write_text(done.stdout)
    second = rollstream("config", "show", "--toml", "--config", str(again))
    assert second.returncode == 0 and second.stdout == done.stdout and "num_steps = 9" in done.stdout


def test_up_again_changes_nothing_and_another_directory_hears_who_has_the_port(stack: Settings, tmp_path: Path) -> None:
    record = json.loads((paths.run_dir(stack) / "clickhouse.json").read_text())
    again = rollstream("up", settings=stack)
    assert again.returncode == 0, again.stderr
    assert f"pid {record['pid']}" in again.stdout and again.stdout.count("ready") == 2
    assert json.loads((paths.run_dir(stack) / "clickhouse.json").read_text()) == record
    other = replace(stack, data=DataSection(dir=str(tmp_path / "other")))
    refused = rollstream("up", settings=other)
    assert_refused(refused, f"port {stack.clickhouse.port} is in use by process {record['pid']}", "clickhouse.port")


def test_down_leaves_no_process(broker: str, tmp_path: Path) -> None:
    settings = Settings(
        data=DataSection(dir=str(tmp_path)),
        kafka=KafkaSection(bootstrap=broker, topic_prefix=f"t{uuid.uuid4().hex[:10]}-", partitions=1),
        clickhouse=ClickHouseSection(port=free_port()),
    )
    try:
        assert rollstream("up", settings=settings).returncode == 0
        first = rollstream("down", settings=settings)
        assert first.returncode == 0 and "stopped clickhouse" in first.stdout
        assert not accepts_connections(settings.clickhouse.port)
        owners = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _cmdline(p)]
        assert owners == []
        second = rollstream("down", settings=settings)
        assert second.returncode == 0 and "nothing was running" in second.stdout
    finally:
        assert not any(is_alive(record) for record in down(settings))
        drop_topics(settings)


def _cmdline(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has just ended
        return b""


def test_status_shows_the_run_and_the_lag(stack: Settings) -> None:
    done = rollstream("status", settings=stack)
    assert done.returncode == 0, done.stderr
    for part in ("kafka", "clickhouse", RUN, "completed", "2 of 2", "agent_completed", "staleness", "tokens/s"):
        assert part in done.stdout, part
    lag = next(line for line in done.stdout.splitlines() if line.startswith("lag "))
    assert "sink 0" in lag
    assert re.search(r"assembly [1-9]", lag), "no assembly service runs here: all of its input is unread"

    plain = json.loads(rollstream("status", "--json", "--run", RUN, settings=stack).stdout)
    assert plain["run_id"] == RUN and plain["steps"] == 2 and plain["lag"]["sink"] == 0
    assert sum(plain["outcomes"].values()) == plain["num_finished"] == plain["num_offered"]


def test_status_watch_draws_on_a_terminal(stack: Settings) -> None:
    screen = on_a_terminal(["status", "--watch"], stack, until=["trials by outcome", "lag  scheduler"])
    assert RUN in screen and "completed" in screen


def test_without_a_terminal_the_live_table_is_lines(stack: Settings) -> None:
    process = start("status", "--watch", settings=stack)
    text = read_until(process, "step 2/2", 30.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert "\x1b" not in text
    assert re.search(r"^step 2/2 · v2 · held-out .* · trials (\d+)/\1 \(0 running\) · ", text.splitlines()[-1])


def test_progress_needs_a_terminal_to_draw(stack: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    with Progress(replace(stack, run=replace(stack.run, id=RUN)), Console(), plain=False) as progress:
        progress.tick()
    said = capsys.readouterr().out
    assert said.count("step 2") == 1, "an unchanged line is not said again"


def retired(number: int) -> TaskRetired:
    return TaskRetired(
        event_id=make_event_id(),
        run_id=RunId("tail"),
        occurred_at=now_ms(),
        producer="test",
        task_id=TaskId(f"task-{number}"),
        reason="test",
    )


def test_tail_shows_the_last_and_then_the_new_ones_once(stack: Settings) -> None:
    writer = EventWriter(stack)
    for number in range(5):
        writer.write(retired(number))
        writer.flush()
    options = ("tail", "tasks", "--num", "3", "--run", "tail", "--type", "TaskRetired")
    done = rollstream(*options, settings=stack)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["task_id"] for line in done.stdout.splitlines()] == ["task-2", "task-3", "task-4"]

    process = start(*options, "--follow", settings=stack, stderr=subprocess.PIPE)
    lines = read_until(process, "task-4").splitlines()
    for number in (5, 6, 7):
        writer.write(retired(number))
        writer.flush()
    lines += read_until(process, "task-7").splitlines()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=30)
    assert [json.loads(line)["task_id"] for line in lines] == [f"task-{n}" for n in range(2, 8)]
    assert rest == "" and "Traceback" not in errors and process.returncode == 130


def test_tail_expands_packed_arrays_and_ends_quietly_in_a_pipe(stack: Settings) -> None:
    done = rollstream("tail", "model-calls", "--num", "1", "--type", "ModelCallCompleted", settings=stack)
    event = json.loads(done.stdout)
    assert event["event"] == "ModelCallCompleted" and all(isinstance(i, int) for i in event["sampled_ids"])
    process = start("tail", "model-calls", "--num", "0", settings=stack, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == ""


def test_sql_as_table_and_json(stack: Settings) -> None:
    query = "SELECT purpose, count() AS num FROM trials GROUP BY purpose ORDER BY purpose"
    table = rollstream("sql", query, settings=stack)
    assert table.returncode == 0, table.stderr
    assert "validation" in table.stdout and "2 rows" in table.stdout
    rows = [json.loads(line) for line in rollstream("sql", query, "--json", settings=stack).stdout.splitlines()]
    assert [row["purpose"] for row in rows] == ["train", "validation"]
    assert all(row["num"] > 0 for row in rows)


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO run_started (run_id) VALUES ('x')",
        "DROP TABLE run_started",
        "ALTER TABLE run_started DELETE WHERE 1",
        "SELECT 1 INTO OUTFILE '/tmp/x'",
    ],
)
def test_sql_only_reads(stack: Settings, query: str) -> None:
    done = rollstream("sql", query, settings=stack)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    count = rollstream("sql", "SELECT count() AS n FROM run_started", "--json", settings=stack)
    assert json.loads(count.stdout)["n"] == 1


def test_sql_says_what_is_wrong_with_a_question(stack: Settings) -> None:
    assert_refused(rollstream("sql", "SELECT nothing FROM trials", settings=stack), "nothing")
    assert_refused(rollstream("sql", "SELECT 1 FROM no_such_table", settings=stack), "no_such_table")


def test_trace_by_the_end_of_an_id_with_the_tokenizer_of_the_run(stack: Settings, policy: Path) -> None:
    whole = rollstream("trace", TRIAL, settings=stack)
    assert whole.returncode == 0, whole.stderr
    for part in (TRIAL, "parser_failed", "stages", "log-probs", "weights", "reward", "admission", "group"):
        assert part in whole.stdout, part
    by_end = rollstream("trace", "t00001.000.02", settings=stack)
    assert by_end.stdout == whole.stdout
    plain = json.loads(rollstream("trace", "t00001.000.02", "--json", settings=stack).stdout)
    assert plain["trial_id"] == TRIAL and plain["calls"]

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))
    decoded = tokenizer.decode(plain["calls"][0]["sampled_ids"], skip_special_tokens=False)
    assert decoded.strip() and decoded.strip()[:20] in whole.stdout
    ids = rollstream("trace", TRIAL, "--no-text", settings=stack)
    assert " ".join(map(str, plain["calls"][0]["sampled_ids"][:8])) in ids.stdout


def test_trace_of_several_or_no_trials(stack: Settings) -> None:
    several = rollstream("trace", "000.02", settings=stack)
    assert_refused(several, "several trials", TRIAL, "run-x.t00000.000.02")
    assert_refused(rollstream("trace", "t00099.000.00", settings=stack), "t00099.000.00", "rollstream sql")
    assert_refused(rollstream("trace", "000.02", "--json", settings=stack), "several trials")
    assert_refused(rollstream("trace", "000.02", "--run", "run-y", settings=stack), "run-y")


def test_replay_verify_counts_differences(stack: Settings) -> None:
    done = rollstream("replay", "verify", settings=stack)
    said = done.stdout.splitlines()
    num = int(said[-1].removesuffix(" differences"))
    assert done.returncode == (1 if num else 0), done.stderr
    assert "trajectories" in done.stdout and "Traceback" not in done.stderr


def test_a_call_of_the_log_is_what_trace_shows(stack: Settings) -> None:
    plain = json.loads(rollstream("trace", TRIAL, "--json", settings=stack).stdout)
    written = [e for e in make_history(RUN) if isinstance(e, ModelCallCompleted) and e.trial_id == TRIAL]
    assert [c["sampled_ids"] for c in plain["calls"] if not c["error"]] == [
        list(unpack_ints(e.sampled_ids)) for e in sorted(written, key=lambda e: (e.attempt, e.call_index))
    ]
