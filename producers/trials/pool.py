"""What a worker's attempts share: the warm containers, the task trees and the grader."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import structlog

from infra.settings import TrialsSection
from producers.tasks.harbor import Task, TaskError, load_task
from producers.trials.harnesses.base import Harness
from producers.trials.sandboxes.bubblewrap import Container
from producers.trials.sandboxes.cgroups import Bounds
from producers.trials.sandboxes.inside import Limits
from producers.trials.sandboxes.layout import make_layout
from producers.trials.verifier import grader as grading
from producers.trials.worktree import Worktrees

log = structlog.get_logger()

WARM_UP_SEC = 300.0
#: Room for the warm program itself.
_PROGRAM_MB = 1024
_COLD_PROGRAM = "producers.trials.sandboxes.exec_command"


class SandboxPool:
    """Containers of one worker. `start` and `revive` belong to the thread that lives as long as the worker."""

    def __init__(self, settings: TrialsSection, harness: Harness, state_dir: Path, log_dir: Path, name: str) -> None:
        self._settings, self._harness, self._log_dir, self._name = settings, harness, log_dir, name
        self.worktrees = Worktrees(state_dir / "trees")
        self.worktrees.root.mkdir(parents=True, exist_ok=True)
        log_dir.mkdir(parents=True, exist_ok=True)
        self.layout = make_layout(state_dir, self.worktrees.root)
        self._limits = Limits(
            disk_mb=settings.disk_mb, memory_mb=settings.memory_mb, max_processes=settings.max_processes
        )
        self._tasks: dict[tuple[str, str], Task] = {}
        self._lock = threading.Lock()
        self._cold_cpu_sec = 0.0
        self._agent = self._make_agent() if self.is_warm else None
        self._grading = self._make_grading()
        self.grader = grading.Grader(self._grading)

    @property
    def is_warm(self) -> bool:
        """Whether trials are forks of a warm harness."""
        return self._settings.warm and self._harness.warm_program is not None

    def start(self) -> None:
        """Start what is shared and wait until it is warm. Raises SandboxUnavailableError."""
        containers = [c for c in (self._agent, self._grading) if c is not None]
        for container in containers:
            container.launch()
        for container in containers:
            info = container.wait_ready(WARM_UP_SEC)
            log.info("sandbox warm", program=container.program, limits=container.limits_in_force, **info)

    def trial_cpu_sec(self) -> float:
        """Processor time that ended trials and their grading took inside the containers, warming up left out."""
        shared = [c for c in (self._agent, self._grading) if c is not None]
        warm: list[float] = [max(0.0, c.cpu_sec - c.info.get("warm_cpu_sec", 0.0)) for c in shared]
        return self._cold_cpu_sec + sum(warm)

    def alive(self) -> bool:
        """Whether trials can be started."""
        return self._grading.alive() and (self._agent is None or self._agent.alive())

    def revive(self) -> None:
        """Replace containers that are gone. Raises SandboxUnavailableError."""
        if self._agent is not None and not self._agent.alive():
            log.warning("the harness's container is gone; starting another")
            self._agent.close()
            self._agent = self._make_agent()
            self._agent.launch()
            self._agent.wait_ready(WARM_UP_SEC)
        if not self._grading.alive():
            log.warning("the grader's container is gone; starting another")
            self._grading.close()
            self._grading = self._make_grading()
            self._grading.launch()
            self._grading.wait_ready(WARM_UP_SEC)
            self.grader = grading.Grader(self._grading)

    @contextlib.contextmanager
    def agent_container(self) -> Iterator[Container]:
        """The container to run an attempt's agent in: the warm one, or one that lives as long as the context."""
        if self._agent is not None:
            yield self._agent
            return
        log_path = self._log(f"cold-{uuid.uuid4().hex[:8]}")
        cold = Container(self.layout, _COLD_PROGRAM, self._limits, log_path, bounds=self._bounds(1))
        try:
            cold.launch()
            cold.wait_ready(self._settings.setup_timeout_sec)
            yield cold
        finally:
            cold.close()
            with self._lock:
                self._cold_cpu_sec += cold.cpu_sec
            log_path.unlink(missing_ok=True)

    def _bounds(self, lanes: int) -> Bounds:
        trials = self._settings
        return Bounds(
            memory_bytes=(lanes * trials.memory_mb + _PROGRAM_MB) << 20,
            max_processes=lanes * trials.max_processes + 64,
            cpus=lanes * trials.cpus,
        )

    def close(self) -> None:
        """End every container."""
        for container in (self._agent, self._grading):
            if container is not None:
                container.close()

    def load_task(self, path: str, digest: str) -> Task:
        """The task of a directory, read once per digest. Raises TaskError when it is not what was offered."""
        with self._lock:
            task = self._tasks.get((path, digest))
            if task is None:
                task = load_task(path)
                if task.digest != digest:
                    remedy = "register the task set again, or restore the files"
                    raise TaskError(Path(path), f"its files changed since it was registered ({digest[:12]})", remedy)
                self._tasks[path, digest] = task
            return task

    def _log(self, kind: str) -> Path:
        return self._log_dir / f"{self._name}-{kind}.log"

    def _make_agent(self) -> Container:
        program = self._harness.warm_program
        assert program is not None
        options = self._harness.warm_options(self.layout.env)
        bounds = self._bounds(self._settings.lanes)
        return Container(self.layout, program, self._limits, self._log("harness"), options, bounds)

    def _make_grading(self) -> Container:
        options: dict[str, object] = {"env": self.layout.env}
        bounds = self._bounds(self._settings.lanes)
        return Container(self.layout, grading.PROGRAM, self._limits, self._log("grader"), options, bounds)
