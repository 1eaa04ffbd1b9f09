"""One run from start to end: stack, RunStarted, tasks, services, the wait for RunFinished."""

from __future__ import annotations

import importlib.metadata
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from infra.config import replace_key, settings_json
from infra.kafka import EventWriter, ensure_topics, read_events
from infra.settings import Settings
from infra.supervisor import Supervisor
from schemas.events import RunFinished, RunStarted, StepCompleted
from schemas.ids import RunId, make_event_id, make_run_id, now_ms
from streams.pipeline import PIPELINE

log = structlog.get_logger()

#: A proxy whose `rollstream run` was killed drains for a moment before it lets go of its port.
PROXY_PORT_WAIT_SEC = 5.0


@dataclass(frozen=True)
class RunIdentity:
    """Which run this is."""

    run_id: RunId
    resumed: bool


def find_run(settings: Settings) -> RunIdentity:
    """The configured run id, else the newest unfinished run of this name in the log, else a new id."""
    started = [e for e in read_events(settings, "runs", types=(RunStarted,)) if isinstance(e, RunStarted)]
    if settings.run.id:
        return RunIdentity(RunId(settings.run.id), any(e.run_id == settings.run.id for e in started))
    ended = {
        e.run_id
        for e in read_events(settings, "runs", types=(RunFinished,))
        if isinstance(e, RunFinished) and e.outcome == "completed"
    }
    names = [e.run_id for e in sorted(started, key=lambda e: e.occurred_at) if e.name == settings.run.name]
    if names and names[-1] not in ended:
        return RunIdentity(names[-1], True)
    return RunIdentity(make_run_id(), False)


def newest_run_id(settings: Settings) -> RunId | None:
    """The run that was started last, whatever its name."""
    started = [e for e in read_events(settings, "runs", types=(RunStarted,)) if isinstance(e, RunStarted)]
    return max(started, key=lambda e: e.occurred_at).run_id if started else None


def code_version() -> str:
    """Package version, and in a checkout the commit."""
    version = importlib.metadata.version("rollstream")
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return version
    found = subprocess.run(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return f"{version}+{found.stdout.strip()}" if found.returncode == 0 else version


def check_inputs(settings: Settings) -> None:
    """Raise ValueError, naming the key and the remedy, when the run's inputs do not exist."""
    if settings.engine.kind == "torch":
        check_policy(settings.policy.path)
    if settings.engine.kind == "scripted" and not Path(settings.engine.script).is_file():
        raise ValueError(
            f"`engine.script` = {settings.engine.script!r}: no such file; it holds one JSON reply per line"
        )
    for key, source in (("tasks.train", settings.tasks.train), ("tasks.held_out", settings.tasks.held_out)):
        if (not source and key == "tasks.train") or not Path(source).exists():
            raise ValueError(
                f"`{key}` = {source!r}: no such task directory or index; set it to a directory of Harbor tasks or to "
                "an index (.parquet); docs/tasks.md shows the layout"
            )


def check_policy(path: str) -> None:
    """Raise ValueError unless `policy.path` is a directory with configuration, weights and tokenizer."""
    directory = Path(path).expanduser()
    missing = ""
    if not path or not directory.is_dir():
        missing = "no such directory"
    elif not (directory / "config.json").is_file():
        missing = "no model there (config.json is missing)"
    elif not any(directory.glob("*.safetensors")):
        missing = "no weights there (*.safetensors is missing); save_pretrained writes them"
    elif not (directory / "tokenizer.json").is_file():
        missing = "no tokenizer there (tokenizer.json is missing)"
    if missing:
        raise ValueError(
            f"`policy.path` = {path!r}: {missing}; set it to a directory with config.json, safetensors and a "
            "tokenizer; `rollstream demo` makes one"
        )


class Run:
    """A run being driven by this process."""

    def __init__(
        self, settings: Settings, *, workers: int = 1, services: Sequence[tuple[str, int]] | None = None
    ) -> None:
        check_inputs(settings)
        ensure_topics(settings)
        self.identity = find_run(settings)
        self.settings = replace_key(settings, "run.id", self.identity.run_id)
        if services is None:
            services = [(s.name, i) for s in PIPELINE for i in range(workers if s.name == "worker" else 1)]
        self.supervisor = Supervisor(self.settings, services)
        self._finished = threading.Event()
        self._stopping = threading.Event()

    def start(self) -> None:
        """Record the start, register the tasks, start the services."""
        from producers.tasks.register import register_tasks

        self._check_proxy_port()
        num_tasks = register_tasks(self.settings)  # before RunStarted: the scheduler waits for as many as it names
        writer = EventWriter(self.settings)
        writer.write(
            RunStarted(
                event_id=make_event_id(),
                run_id=self.identity.run_id,
                occurred_at=now_ms(),
                producer="cli",
                name=self.settings.run.name,
                config_json=settings_json(self.settings),
                code_version=code_version(),
                seeds={"run": self.settings.run.seed},
                resumed=self.identity.resumed,
                num_tasks=num_tasks,
            )
        )
        writer.flush()
        self.supervisor.start()
        threading.Thread(target=self._watch_end, name="run-end", daemon=True).start()

    def _check_proxy_port(self) -> None:
        """Say who has the proxy's port before anything is written; an earlier proxy of ours gets time to drain."""
        from infra.local.errors import PortInUseError
        from infra.local.ports import check_port_free

        if not self.settings.proxy.port:
            return
        deadline = time.monotonic() + PROXY_PORT_WAIT_SEC
        for _, instance in (s for s in self.supervisor.wanted if s[0] == "proxy"):
            while True:
                try:
                    check_port_free(
                        self.settings.proxy.port + instance, "proxy", "stop it, or set proxy.port to a free port"
                    )
                    break
                except PortInUseError:
                    if time.monotonic() > deadline:
                        raise
                time.sleep(0.1)

    def _watch_end(self) -> None:
        from infra.kafka import header_type, make_codec, read_topic

        codec = make_codec(self.settings)
        for message in read_topic(self.settings, "runs", follow=True, should_stop=self._stopping.is_set):
            if header_type(message.headers()) != RunFinished.__name__:
                continue
            event = codec.decode(message.value())
            if isinstance(event, RunFinished) and event.run_id == self.identity.run_id and event.outcome != "stopped":
                self._finished.set()
                return

    def wait(self, stop: Callable[[], bool], on_tick: Callable[[], None] = lambda: None) -> bool:
        """Keep services alive until the run is finished (True) or `stop()` (False). Raises ServiceFailedError."""
        while not self._finished.is_set():
            if stop():
                return False
            self.supervisor.check()
            on_tick()
            self._finished.wait(0.25)
        return True

    def stop(self, *, outcome: str | None = None, detail: str = "") -> None:
        """Stop the services; with `outcome`, record how the run ended here."""
        self._stopping.set()
        self.supervisor.stop()
        if outcome is None:
            return
        steps = [
            e for e in read_events(self.settings, "steps", types=(StepCompleted,)) if e.run_id == self.identity.run_id
        ]
        writer = EventWriter(self.settings)
        writer.write(
            RunFinished(
                event_id=make_event_id(),
                run_id=self.identity.run_id,
                occurred_at=now_ms(),
                producer="cli",
                outcome=outcome,
                detail=detail,
                num_steps=len(steps),
            )
        )
        writer.flush()

    def wait_for_sink(self, timeout_sec: float = 60.0) -> bool:
        """Wait until the sink has committed everything that was in the log when called."""
        from infra.kafka import end_offsets, group_lag
        from schemas.topics import CATALOGUE, SCHEMAS_TOPIC

        topics = tuple(t.name for t in CATALOGUE if t.name != SCHEMAS_TOPIC)
        ends = end_offsets(self.settings, topics)
        deadline = time.monotonic() + timeout_sec
        while time.monotonic() < deadline:
            if group_lag(self.settings, "sink", ends) == 0:
                return True
            time.sleep(0.3)
        return False
