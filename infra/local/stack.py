"""`rollstream up` and `down`: the local broker and the embedded ClickHouse engine, provisioned and ready."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from infra import paths
from infra.kafka import KafkaUnavailableError, bootstrap_servers, check_cluster, ensure_topics, warm_up
from infra.local import kafka as broker
from infra.local.errors import DataDirectoryOwnedError, StackError
from infra.local.ports import LOOPBACK, check_port_free
from infra.local.process import (
    POLL_SEC,
    OwnedDirectoryLock,
    ProcessRecord,
    forget,
    lock_within,
    log_tail,
    read_record,
    running_process,
    spawn,
    stop_process,
)
from infra.settings import Settings

log = structlog.get_logger()

CLICKHOUSE = "clickhouse"
CLICKHOUSE_START_TIMEOUT_SEC = 60.0
UP_LOCK_TIMEOUT_SEC = 180.0
PING_TIMEOUT_SEC = 2.0


@dataclass(frozen=True)
class ComponentStatus:
    """One part of the stack."""

    name: str
    #: Where clients reach it: host:port of Kafka, a URL of ClickHouse.
    address: str
    #: False: configured as an already running service, which the stack neither starts nor stops.
    managed: bool
    #: Whether it answers.
    ready: bool
    #: The process, where the stack runs it.
    process: ProcessRecord | None
    #: Why it is not ready; empty when it is.
    problem: str = ""


@dataclass(frozen=True)
class StackInfo:
    """What `up` made or found."""

    data_dir: Path
    kafka: ComponentStatus
    clickhouse: ComponentStatus
    #: Names of the processes this call started; the others ran already.
    started: tuple[str, ...]
    #: Topics this call created.
    topics_created: tuple[str, ...]


def clickhouse_url(settings: Settings) -> str:
    """Where ClickHouse is: the configured server, else the embedded engine's front."""
    return settings.clickhouse.url or f"http://{LOOPBACK}:{settings.clickhouse.port}"


def up(settings: Settings) -> StackInfo:
    """Bring the stack up and return when it is ready. Does nothing to what already runs.

    A configured `kafka.bootstrap` or `clickhouse.url` is used instead of a local process. Raises a StackError, or
    KafkaUnavailableError for a configured cluster that does not answer; what this call started is stopped again then.
    """
    started: list[ProcessRecord] = []
    with _only_one_up(settings):
        try:
            kafka_process = None if settings.kafka.bootstrap else _ensure_kafka(settings, started)
            topics = ensure_topics(settings)
            if kafka_process in started:
                warm_up(settings)
            clickhouse_process = None if settings.clickhouse.url else _ensure_clickhouse(settings, started)
        except BaseException:
            for record in reversed(started):
                stop_process(record)
                forget(paths.run_dir(settings), record.name)
            raise
    return StackInfo(
        data_dir=paths.data_dir(settings),
        kafka=ComponentStatus("kafka", bootstrap_servers(settings), kafka_process is not None, True, kafka_process),
        clickhouse=ComponentStatus(
            CLICKHOUSE, clickhouse_url(settings), clickhouse_process is not None, True, clickhouse_process
        ),
        started=tuple(record.name for record in started),
        topics_created=tuple(topics),
    )


def down(settings: Settings) -> tuple[ProcessRecord, ...]:
    """Stop the stack's processes of this data directory; returns what was stopped, when nothing of it is left.

    Data stays. A configured Kafka or ClickHouse server is left alone.
    """
    stopped = []
    run_dir = paths.run_dir(settings)
    if not run_dir.is_dir():
        return ()
    with _only_one_up(settings):
        for name in (CLICKHOUSE, broker.NAME):
            if record := running_process(run_dir, name):
                stop_process(record)
                stopped.append(record)
            with OwnedDirectoryLock(run_dir, name, timeout_sec=5.0):  # raises if some process still has the directory
                forget(run_dir, name)
    return tuple(stopped)


def stack_status(settings: Settings) -> tuple[ComponentStatus, ...]:
    """The state of every part, within a few seconds; starts nothing."""
    return (_kafka_status(settings), _clickhouse_status(settings))


def _kafka_status(settings: Settings) -> ComponentStatus:
    managed = not settings.kafka.bootstrap
    process = running_process(paths.run_dir(settings), broker.NAME) if managed else None
    problem = ""
    if managed and process is None:
        problem = _why_not_running(settings, broker.NAME)
    else:
        try:
            check_cluster(settings, timeout_sec=PING_TIMEOUT_SEC)
        except KafkaUnavailableError as exc:
            problem = str(exc)
    return ComponentStatus("kafka", bootstrap_servers(settings), managed, not problem, process, problem)


def _clickhouse_status(settings: Settings) -> ComponentStatus:
    managed = not settings.clickhouse.url
    process = running_process(paths.run_dir(settings), CLICKHOUSE) if managed else None
    if managed and process is None:
        problem = _why_not_running(settings, CLICKHOUSE)
    else:
        problem = "" if _pings(clickhouse_url(settings)) else f"no answer from {clickhouse_url(settings)}/ping"
    return ComponentStatus(CLICKHOUSE, clickhouse_url(settings), managed, not problem, process, problem)


def _why_not_running(settings: Settings, name: str) -> str:
    last = read_record(paths.run_dir(settings), name)
    return f"ended unexpectedly; see {last.log}" if last else "not running; start it with `rollstream up`"


def _ensure_kafka(settings: Settings, started: list[ProcessRecord]) -> ProcessRecord:
    if running := _reusable(settings, broker.NAME, settings.kafka.port):
        check_cluster(settings)
        return running
    record = broker.start_kafka(settings)
    started.append(record)
    return record


def _ensure_clickhouse(settings: Settings, started: list[ProcessRecord]) -> ProcessRecord:
    port = settings.clickhouse.port
    if running := _reusable(settings, CLICKHOUSE, port):
        return running
    directory = paths.clickhouse_dir(settings)
    directory.mkdir(parents=True, exist_ok=True)
    with OwnedDirectoryLock(paths.run_dir(settings), CLICKHOUSE) as lock:
        remedy = f"stop it, set clickhouse.port to a free port, or set clickhouse.url=http://{LOOPBACK}:{port}"
        check_port_free(port, "ClickHouse", remedy)
        command = [sys.executable, "-m", "consumers.clickhouse.owner", "--dir", str(directory), "--port", str(port)]
        log_path = paths.logs_dir(settings) / "clickhouse.log"
        record, process = spawn(command, lock, log_path=log_path, port=port)
    started.append(record)
    _wait_clickhouse(record, process)
    return record


def _wait_clickhouse(record: ProcessRecord, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + CLICKHOUSE_START_TIMEOUT_SEC
    while process.poll() is None and time.monotonic() < deadline:
        if _pings(f"http://{LOOPBACK}:{record.port}"):
            return
        time.sleep(POLL_SEC)
    state = "is not ready" if process.poll() is None else f"ended with exit code {process.returncode}"
    raise StackError(f"the embedded ClickHouse engine {state}; the end of {record.log}:\n{log_tail(record.log)}")


def _reusable(settings: Settings, name: str, port: int) -> ProcessRecord | None:
    """The running process of this data directory, if there is one and it is what is asked for."""
    running = running_process(paths.run_dir(settings), name)
    if running is not None and running.port != port:
        raise DataDirectoryOwnedError(
            f"{paths.data_dir(settings)} is in use by {running.describe()}, and port {port} was asked for; stop it "
            f"with `rollstream down`, use {name}.port={running.port}, or set data.dir to another directory"
        )
    return running


def _pings(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/ping", timeout=PING_TIMEOUT_SEC) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


@contextmanager
def _only_one_up(settings: Settings) -> Iterator[None]:
    """Let one `up` or `down` at a time work on a data directory; the next waits for it."""
    run_dir = paths.run_dir(settings)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(run_dir / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise StackError(f"{exc.filename}: {exc.strerror}; set data.dir to a directory that can be written") from exc
    try:
        if not lock_within(fd, UP_LOCK_TIMEOUT_SEC):
            who = os.pread(fd, 32, 0).decode(errors="replace").strip()
            raise StackError(f"{run_dir}: another `up` or `down` (process {who}) does not end")
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)
