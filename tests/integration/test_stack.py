"""`up` and `down` on real processes: the broker, the embedded ClickHouse engine, and what goes wrong around them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra import paths
from infra.kafka import EventWriter, KafkaUnavailableError, check_cluster, end_offsets, ensure_topics
from infra.local.errors import DataDirectoryOwnedError, PortInUseError, StackError
from infra.local.kafka import start_kafka, stop_kafka
from infra.local.ports import accepts_connections, free_port
from infra.local.process import is_alive
from infra.local.stack import down, stack_status, up
from infra.settings import ClickHouseSection, DataSection, KafkaSection, Settings
from schemas.events import TaskRetired
from schemas.ids import RunId, TaskId, make_event_id, now_ms


@pytest.fixture
def local_settings(data_dir: Path) -> Iterator[Settings]:
    """Settings of a stack of its own; whatever a test left running is stopped."""
    settings = Settings(
        data=DataSection(dir=str(data_dir)),
        kafka=KafkaSection(port=free_port(), partitions=2),
        clickhouse=ClickHouseSection(port=free_port()),
    )
    yield settings
    down(settings)


def write_one(settings: Settings) -> None:
    writer = EventWriter(settings)
    writer.write(
        TaskRetired(
            event_id=make_event_id(),
            run_id=RunId("run"),
            occurred_at=now_ms(),
            producer="test",
            task_id=TaskId("t"),
            reason="test",
        )
    )
    writer.flush()


def wait_for_end(pid: int, deadline_sec: float = 10.0) -> None:
    os.waitpid(pid, 0)
    deadline = time.monotonic() + deadline_sec
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def test_up_is_idempotent_and_down_leaves_no_process(local_settings: Settings) -> None:
    first = up(local_settings)
    assert first.started == ("kafka", "clickhouse")
    assert "model-calls" in first.topics_created
    assert all(part.ready and part.managed for part in stack_status(local_settings))
    write_one(local_settings)

    second = up(local_settings)
    assert second.started == () and second.topics_created == ()
    assert second.kafka.process == first.kafka.process and second.clickhouse.process == first.clickhouse.process

    stopped = down(local_settings)
    assert {record.name for record in stopped} == {"kafka", "clickhouse"}
    for record in stopped:
        assert not is_alive(record)
        assert not accepts_connections(record.port)
        assert not list(Path("/proc").glob(f"{record.pid}/exe"))
    assert down(local_settings) == ()
    assert [part.problem for part in stack_status(local_settings)] == ["not running; start it with `rollstream up`"] * 2


def test_data_outlives_down_a_new_port_and_a_kill(local_settings: Settings) -> None:
    record = start_kafka(local_settings)
    external = replace(local_settings, kafka=replace(local_settings.kafka, bootstrap=f"127.0.0.1:{record.port}"))
    ensure_topics(external)
    write_one(external)
    stop_kafka(local_settings, record)

    moved = replace(local_settings, kafka=replace(local_settings.kafka, port=free_port()))
    record = start_kafka(moved)
    assert end_offsets(moved, ("tasks",))["tasks", 0] == 1
    write_one(moved)
    os.kill(record.pid, signal.SIGKILL)
    wait_for_end(record.pid)
    kafka, _ = stack_status(moved)
    assert not kafka.ready and "ended unexpectedly" in kafka.problem and "kafka.log" in kafka.problem

    start_kafka(moved)
    assert end_offsets(moved, ("tasks",))["tasks", 0] == 2


def test_a_second_stack_on_the_same_directory_is_told_who_owns_it(local_settings: Settings) -> None:
    record = start_kafka(local_settings)
    elsewhere = replace(local_settings, kafka=replace(local_settings.kafka, port=free_port()))
    for attempt in (start_kafka, up):
        with pytest.raises(DataDirectoryOwnedError) as caught:
            attempt(elsewhere)
        for part in (str(paths.data_dir(local_settings)), f"process {record.pid}", str(record.port), "rollstream down"):
            assert part in str(caught.value)
    assert is_alive(record)


def test_two_concurrent_ups_start_one_stack(local_settings: Settings) -> None:
    code = (
        "import json, sys\nfrom infra.local.stack import up\nfrom infra.settings import *\n"
        "d, k, c = sys.argv[1:]\n"
        "info = up(Settings(data=DataSection(dir=d), kafka=KafkaSection(port=int(k)), "
        "clickhouse=ClickHouseSection(port=int(c))))\n"
        "print(json.dumps([info.started, info.kafka.process.pid]))"
    )
    ports = [str(local_settings.kafka.port), str(local_settings.clickhouse.port)]
    command = [sys.executable, "-c", code, local_settings.data.dir, *ports]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    (started_a, pid_a), (started_b, pid_b) = (json.loads(p.communicate(timeout=120)[0]) for p in both)
    assert sorted([started_a, started_b]) == [[], ["kafka", "clickhouse"]]
    assert pid_a == pid_b


@pytest.mark.parametrize("section", ["kafka", "clickhouse"])
def test_a_port_in_use_is_named_with_its_owner(local_settings: Settings, section: str, broker: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = replace(local_settings, **{section: replace(getattr(local_settings, section), port=port)})
        if section == "clickhouse":
            settings = replace(settings, kafka=replace(settings.kafka, bootstrap=broker, topic_prefix="port-in-use-"))
        with pytest.raises(PortInUseError, match=rf"{port} is in use by process {os.getpid()}.*{section}\.port"):
            up(settings)
    assert not any(part.process for part in stack_status(settings))


def test_a_configured_kafka_that_does_not_answer(local_settings: Settings) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = replace(local_settings, kafka=KafkaSection(bootstrap=address))
    with pytest.raises(KafkaUnavailableError, match=f"no Kafka at {address}.*kafka.bootstrap"):
        check_cluster(settings, timeout_sec=1.0)


def test_a_full_disk_is_said_before_anything_starts(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom infra.local.stack import up\nfrom infra.settings import *\n"
        "from infra.local.errors import StackError\n"
        "try: up(Settings(data=DataSection(dir=sys.argv[1])))\n"
        "except StackError as exc: print(exc)"
    )
    script = 'mount -t tmpfs -o size=8m none "$1" && exec "$2" -c "$3" "$1"'
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-ec",
        script,
        "sh",
        tmp_path,
        sys.executable,
        code,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "only" in done.stdout and "MiB free" in done.stdout and "set data.dir" in done.stdout, done.stderr


def test_a_data_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = Settings(data=DataSection(dir=str(tmp_path / "file" / "data")))
    with pytest.raises(StackError, match=r"set data\.dir to a directory that can be written"):
        up(settings)


def test_a_cluster_id_may_begin_with_a_dash(local_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen once in 64 first starts: `-t -EyW...` was read as an option."""
    monkeypatch.setattr("infra.local.kafka.uuid.uuid4", lambda: uuid.UUID(bytes=b"\xf8" + bytes(14) + b"\x01"))
    record = start_kafka(local_settings)
    try:
        text = (paths.kafka_dir(local_settings) / "log" / "meta.properties").read_text()
        assert "cluster.id=-" in text
    finally:
        stop_kafka(local_settings, record)


def test_a_broker_that_cannot_start_shows_the_end_of_its_log(local_settings: Settings) -> None:
    record = start_kafka(local_settings)
    stop_kafka(local_settings, record)
    meta = paths.kafka_dir(local_settings) / "log" / "meta.properties"
    meta.write_text(meta.read_text().replace("node.id=1", "node.id=7"))
    with pytest.raises(StackError, match=r"(?s)ended with exit code.*kafka\.log.*node"):
        start_kafka(local_settings)
