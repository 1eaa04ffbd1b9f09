"""Wiring of the worker: queue, containers, capture proxy, event log."""

from __future__ import annotations

import threading
from pathlib import Path

import structlog
from prometheus_client import Gauge

from infra.kafka import check_cluster, make_codec, read_newest
from infra.paths import data_dir, logs_dir, proxy_socket_path
from infra.settings import Settings
from producers.trials.attempt import AttemptRunner
from producers.trials.harnesses.base import make_harness
from producers.trials.pool import SandboxPool
from producers.trials.proxy_client import proxy_answers
from producers.trials.queue import make_queue
from producers.trials.verifier.grader import GRADER_ID, Grade
from producers.trials.verifier.grades import GradeCache, KnownGrade
from producers.trials.worker import EventLog, Worker
from schemas.codec import CodecError
from schemas.events import RewardGraded
from streams.runtime.metrics import REGISTRY, start_health_server

log = structlog.get_logger()

#: Running trials get this long to end after SIGTERM.
DRAIN_SEC = 12.0
_PROXY_CHECK_SEC = 0.5
#: Grades read back at the start, per partition.
_GRADES_READ = 2000

_RUNNING = Gauge("rollstream_trials_running", "Trials held by this worker", ["instance"], registry=REGISTRY)
_FINISHED = Gauge("rollstream_attempts_finished", "Attempts finished by this worker", ["instance"], registry=REGISTRY)


class UnknownSandboxError(ValueError):
    """trials.sandbox names no backend of this version."""


def serve(settings: Settings, instance: int, stop: threading.Event) -> None:
    """Run trials until `stop` is set. Blocks.

    Raises SandboxUnavailableError, HarnessError, KafkaUnavailableError before the first trial when it cannot work.
    """
    if settings.trials.sandbox != "bubblewrap":
        raise UnknownSandboxError(f"trials.sandbox = {settings.trials.sandbox!r}: available is bubblewrap")
    check_cluster(settings)
    harness = make_harness(settings)
    proxy_socket = proxy_socket_path(settings, 0)
    ready = threading.Event()
    health = start_health_server("worker", instance, settings, ready=ready.is_set)
    pool = SandboxPool(settings.trials, harness, _state_dir(settings), logs_dir(settings), f"worker-{instance}")
    events = EventLog(settings)
    try:
        pool.start()
        if not _await_proxy(proxy_socket, stop):
            return
        work = make_queue(settings)
        grades = load_grades(settings) if settings.trials.reuse_grades else GradeCache()
        runner = AttemptRunner(settings.trials, harness, pool, grades, proxy_socket, events.write)
        worker = Worker(settings, instance, work, runner, events)
        ready.set()
        log.info("worker ready", lanes=settings.trials.lanes, warm=pool.is_warm)
        try:
            while not stop.is_set():
                if not pool.alive():
                    pool.revive()
                worker.tick(claim=proxy_answers(proxy_socket))
                _RUNNING.labels(str(instance)).set(worker.num_running)
                _FINISHED.labels(str(instance)).set(worker.num_finished)
            worker.drain(DRAIN_SEC)
        finally:
            work.close()
    finally:
        pool.close()
        events.close()
        health.close()


def load_grades(settings: Settings) -> GradeCache:
    """The newest grades in the log, of any run and worker: what decides them is in their key."""
    cache, codec = GradeCache(), make_codec(settings)
    for value in read_newest(settings, "rewards", _GRADES_READ):
        try:
            event = codec.decode(value)
        except CodecError:
            continue  # the stages that live on this topic keep it as a dead letter
        if isinstance(event, RewardGraded) and event.reused_from is None and event.grader_id == GRADER_ID:
            key = (event.task_digest, event.diff_sha256, event.grader_digest)
            cache.add(key, KnownGrade(event.event_id, Grade(event.reward, event.tests)))
    return cache


def _state_dir(settings: Settings) -> Path:
    path = data_dir(settings) / "sandbox"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _await_proxy(path: Path, stop: threading.Event) -> bool:
    """Wait until a capture proxy answers on its control socket; False when stopped first."""
    waited = False
    while not stop.is_set():
        if proxy_answers(path):
            return True
        if not waited:
            log.info("waiting for the capture proxy", socket=str(path))
            waited = True
        stop.wait(_PROXY_CHECK_SEC)
    return False
