"""Runs the services of a run as processes: starts them, restarts what dies, stops them in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from infra.config import dump_toml
from infra.settings import Settings
from streams.pipeline import BY_NAME, PIPELINE

log = structlog.get_logger()

#: A service that dies this often within the window is given up, with its log named.
MAX_RESTARTS = 6
RESTART_WINDOW_SEC = 120.0
#: After SIGTERM a service has this long to drain before it is killed.
DRAIN_SEC = 20.0


class ServiceFailedError(RuntimeError):
    """A service keeps dying: names it, its exit code and its log."""


@dataclass
class _Child:
    name: str
    instance: int
    process: subprocess.Popen[bytes]
    log_path: Path
    started: list[float] = field(default_factory=list)
    restart_at: float | None = None


class Supervisor:
    """Keeps one process per (service, instance) alive until `stop`."""

    def __init__(self, settings: Settings, services: Sequence[tuple[str, int]] | None = None) -> None:
        self._settings = settings
        self._wanted = list(services) if services is not None else [(s.name, 0) for s in PIPELINE]
        for name, _ in self._wanted:
            if name not in BY_NAME:
                raise ValueError(f"unknown service {name!r}; known: {', '.join(BY_NAME)}")
        self._children: dict[tuple[str, int], _Child] = {}
        self._lock = threading.Lock()
        data = Path(settings.data.dir)
        self._logs, self._run_file = data / "logs", data / "run" / f"{settings.run.id}.toml"
        self.num_restarts = 0

    @property
    def wanted(self) -> tuple[tuple[str, int], ...]:
        """(service, instance) of every process it keeps alive."""
        return tuple(self._wanted)

    def start(self) -> None:
        """Start every service that is not running yet."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._run_file.parent.mkdir(parents=True, exist_ok=True)
        self._run_file.touch(mode=0o600)
        self._run_file.write_text(dump_toml(self._settings))
        for name, instance in self._wanted:
            self._spawn(name, instance, [])

    def _spawn(self, name: str, instance: int, started: list[float]) -> None:
        path = self._logs / f"{name}-{instance}.log"
        command = [sys.executable, "-m", "infra.cli", "serve", name, "--instance", str(instance)]
        command += ["--config", str(self._run_file), "--parent", str(os.getpid())]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_") or k == "ROLLSTREAM_LOG"}
        with path.open("ab") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True, env=environ
            )
        with self._lock:
            self._children[name, instance] = _Child(name, instance, process, path, [*started, time.monotonic()])

    def pids(self) -> dict[tuple[str, int], int]:
        """Process ids of the running services."""
        with self._lock:
            return {key: c.process.pid for key, c in self._children.items() if c.process.poll() is None}

    def check(self) -> None:
        """Restart what died. Raises ServiceFailedError when something keeps dying."""
        now = time.monotonic()
        for child in list(self._children.values()):
            code = child.process.poll()
            if code is None:
                continue
            recent = [t for t in child.started if now - t < RESTART_WINDOW_SEC]
            if len(recent) > MAX_RESTARTS:
                raise ServiceFailedError(
                    f"service {child.name} died {len(recent)} times within {RESTART_WINDOW_SEC:.0f} s "
                    f"(exit code {code}); its log: {child.log_path}{_last_line(child.log_path)}"
                )
            if child.restart_at is None:
                child.restart_at = now + min(8.0, 0.25 * 2 ** len(recent))
                log.warning("service died, restarting", service=child.name, instance=child.instance, exit_code=code)
            elif now >= child.restart_at:
                self.num_restarts += 1
                self._spawn(child.name, child.instance, recent)

    def stop(self) -> None:
        """SIGTERM in data-flow order (sources first), then SIGKILL for what does not drain."""
        with self._lock:
            children = [self._children[key] for key in self._wanted if key in self._children]
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + DRAIN_SEC
        for child in children:
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("service did not drain in time, killed", service=child.name, seconds=DRAIN_SEC)
                child.process.kill()
                child.process.wait()


def _last_line(path: Path) -> str:
    try:
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return f"\n  last line: {lines[-1][:600]}" if lines else ""
