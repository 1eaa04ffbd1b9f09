"""The embedded broker: Apache Kafka itself (KRaft, one node) on a Java runtime that comes with the installation."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path

import structlog

from infra import paths
from infra.kafka import KafkaUnavailableError, check_cluster, wait_for_leaders
from infra.local.artifacts import cache_dir, fetch_artifacts, read_lock
from infra.local.errors import StackError
from infra.local.java import Java, find_java
from infra.local.ports import LOOPBACK, accepts_connections, check_port_free, free_port
from infra.local.process import POLL_SEC, OwnedDirectoryLock, ProcessRecord, forget, log_tail, spawn, stop_process
from infra.settings import KafkaSection, Settings

log = structlog.get_logger()

NAME = "kafka"
LOCK = Path(__file__).parent / "kafka-jars.lock"
LOG_CONFIG = Path(__file__).parent / "log4j2.properties"

#: Opening the logs after an unclean stop takes up to 20 s on two busy cores; more with many partitions.
START_TIMEOUT_SEC = 120.0
MIN_FREE_BYTES = 256 * 1024 * 1024

#: One broker on a small machine: few system partitions, a small cleaner buffer, no waiting for more group members.
#: Offsets of a paused run must outlive the pause (broker default: 7 days).
PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller_port}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller_port}
advertised.listeners=PLAINTEXT://{host}:{port}
log.dirs={log_dir}
auto.create.topics.enable=false
default.replication.factor=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
offsets.retention.minutes=5256000
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=4
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
log.retention.ms=-1
log.cleaner.dedupe.buffer.size=16777216
message.max.bytes=16777216
num.network.threads=2
num.io.threads=4
file.delete.delay.ms=1000
"""

JVM_FLAGS = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true")


def _java_command(java: Java, flags: tuple[str, ...], main: str, *arguments: str | Path) -> list[str]:
    # An explicit list of jars: a class-data archive does not match a wildcard.
    classpath = os.pathsep.join(str(jar) for jar in broker_classpath())
    quiet = ["--sun-misc-unsafe-memory-access=allow"] if java.major >= 24 else []
    if java.major >= 25:
        quiet.append("-Xlog:aot*=error")
    log_flag = f"-Dlog4j2.configurationFile={LOG_CONFIG}"
    command = [java.executable, *JVM_FLAGS, *quiet, *flags, log_flag, "-cp", classpath, main, *arguments]
    return [str(part) for part in command]


def broker_classpath() -> list[Path]:
    """The broker's jars, fetched if need be. Raises DownloadError."""
    return fetch_artifacts(read_lock(LOCK), "Apache Kafka")


# -- quick starts


def _archive_path(java: Java) -> Path:
    key = "\n".join([str(java.executable), java.version, LOCK.read_text(), *JVM_FLAGS])
    return cache_dir() / "class-data" / f"kafka-{hashlib.sha256(key.encode()).hexdigest()[:16]}.cache"


def _archive_flag(java: Java, path: Path, *, write: bool) -> str:
    if java.major >= 25:  # ahead-of-time cache (JEP 514): loaded and linked classes
        return f"-XX:AOTCache{'Output' if write else ''}={path}"
    return f"-XX:{'ArchiveClassesAtExit' if write else 'SharedArchiveFile'}={path}"


def prepare(java: Java | None = None) -> Path | None:
    """Fetch the jars and make the class-data archive (once per user and Java, about 12 s); returns the archive.

    The archive comes from a short run of a broker of its own, and saves three quarters of every later start. Where
    this Java cannot make one (None), the broker starts without.
    """
    java = java or find_java()
    broker_classpath()
    archive = _archive_path(java)
    if archive.exists():
        return archive
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        log.warning("no class-data archive: the broker starts slower", reason=str(exc))
        return None
    if not os.access(archive.parent, os.W_OK):  # a cache that is shared and read-only
        return None
    log.info("preparing the Kafka broker for quick starts (once)", java=java.version)
    part = archive.with_suffix(f".{os.getpid()}.part")
    with tempfile.TemporaryDirectory(prefix="rollstream-kafka-") as scratch:
        settings = replace(Settings(), kafka=KafkaSection(port=free_port()))
        settings = replace(settings, data=replace(settings.data, dir=scratch))
        record = _launch(settings, java, (_archive_flag(java, part, write=True),))
        stop_process(record, 60.0)
        if not part.exists():
            log.warning("no class-data archive: the broker starts slower", java=str(java.executable))
            log.debug("log of the training run", tail=log_tail(record.log))
            return None
        part.replace(archive)
    for leftover in archive.parent.glob(f"{part.stem}*"):  # the ahead-of-time cache is made by way of a .config file
        leftover.unlink(missing_ok=True)
    return archive


# -- start and stop


def start_kafka(settings: Settings) -> ProcessRecord:
    """Start the local broker of `settings.data.dir` on `settings.kafka.port`; returns when it answers.

    Raises a StackError: DataDirectoryOwnedError, PortInUseError, DownloadError, JavaNotFoundError, or with the end of
    the broker's log when it does not come up.
    """
    java = find_java()
    archive = prepare(java)
    return _launch(settings, java, (_archive_flag(java, archive, write=False),) if archive else ())


def stop_kafka(settings: Settings, record: ProcessRecord) -> None:
    """Stop the local broker (it flushes and closes its logs); returns when it is gone."""
    stop_process(record)
    forget(paths.run_dir(settings), NAME)


def _launch(settings: Settings, java: Java, flags: tuple[str, ...]) -> ProcessRecord:
    port, directory = settings.kafka.port, paths.kafka_dir(settings)
    _check_disk(directory)
    with OwnedDirectoryLock(paths.run_dir(settings), NAME) as lock:
        remedy = f"stop it, set kafka.port to a free port, or set kafka.bootstrap={LOOPBACK}:{port} if it is a Kafka"
        check_port_free(port, "Kafka", remedy)
        config = directory / "server.properties"
        _format_once(directory, config, port, java)
        command = _java_command(java, flags, "kafka.Kafka", config)
        record, process = spawn(command, lock, log_path=paths.logs_dir(settings) / "kafka.log", port=port)
    try:
        _wait_ready(settings, record, process)
    except BaseException:
        stop_process(record, 5.0)
        forget(paths.run_dir(settings), NAME)
        raise
    return record


def _check_disk(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
    except OSError as exc:
        raise StackError(f"{directory}: {exc.strerror}; set data.dir to a directory that can be written") from exc
    if free < MIN_FREE_BYTES:
        raise StackError(
            f"{directory}: only {free >> 20} MiB free, at least {MIN_FREE_BYTES >> 20} MiB are needed; free some "
            "space or set data.dir to a directory on another disk"
        )


def _format_once(directory: Path, config: Path, port: int, java: Java) -> None:
    log_dir = directory / "log"
    if any(c in str(log_dir) for c in ",\\\n"):  # a list separator and an escape in Java properties
        raise StackError(f"{log_dir}: Kafka cannot use a path with a comma or a backslash; set data.dir to another one")
    text = PROPERTIES.format(host=LOOPBACK, port=port, controller_port=free_port(), log_dir=log_dir)
    config.write_text(text)
    if (log_dir / "meta.properties").exists():
        return
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    given = f"--cluster-id={cluster_id}"  # one word: an id may begin with a dash
    command = _java_command(java, (), "kafka.tools.StorageTool", "format", given, "-c", config)
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_SEC, check=False)
    if done.returncode:
        raise StackError(f"Kafka could not format {log_dir}:\n{done.stdout}{done.stderr}")


def _wait_ready(settings: Settings, record: ProcessRecord, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SEC
    here = replace(settings, kafka=KafkaSection(port=record.port))
    while process.poll() is None and time.monotonic() < deadline:
        if not accepts_connections(record.port):
            time.sleep(POLL_SEC)
            continue
        try:
            check_cluster(here, timeout_sec=5.0)
            wait_for_leaders(here, deadline - time.monotonic())
            return
        except KafkaUnavailableError as exc:
            log.debug("the broker does not answer yet", reason=str(exc))
    state = "is not ready" if process.poll() is None else f"ended with exit code {process.returncode}"
    raise StackError(f"the Kafka broker {state}; the end of {record.log}:\n{log_tail(record.log)}")
