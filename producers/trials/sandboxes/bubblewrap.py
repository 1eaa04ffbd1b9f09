"""The worker's side of a container: start it, run trials in it, know when it is gone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from producers.trials.sandboxes import channel, launcher
from producers.trials.sandboxes.cgroups import Bounds, Cgroup, make_cgroup
from producers.trials.sandboxes.collect import Entry
from producers.trials.sandboxes.inside import Limits
from producers.trials.sandboxes.layout import (
    Layout,
    SandboxUnavailableError,
    bubblewrap_arguments,
    find_bubblewrap,
    sandbox_uid,
)

_ZYGOTE = "/host/code/producers/trials/sandboxes/zygote.py"
_RESULT_GRACE_SEC = 20.0


class SandboxLostError(RuntimeError):
    """The container or the trial's process disappeared."""


class SandboxSetupError(RuntimeError):
    """A trial's sandbox could not be built as closed as it must be; nothing ran in it."""


class SandboxTimeoutError(RuntimeError):
    """A sandbox did not answer in time."""


@dataclass(frozen=True)
class TrialResult:
    """How a trial's process ended and what it left. `exit_code` is negative for a signal."""

    exit_code: int
    killed: bool
    cpu_sec: float
    peak_memory_bytes: int
    entered: bool
    changes: list[Entry] = field(default_factory=list)
    truncated: bool = False
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def log_tail(self) -> str:
        """The end of what the program printed."""
        return self.files.get("log", b"").decode("utf-8", "replace")


class TrialProcess:
    """One fork of a container's program."""

    def __init__(self, trial: socket.socket, life: socket.socket, container: Container | None = None) -> None:
        self._trial, self._life, self._container = trial, life, container

    def wait_started(self, timeout_sec: float) -> socket.socket | None:
        """Wait until the isolation stands and was verified; the listening socket, when one was asked for.

        Raises SandboxSetupError, SandboxTimeoutError, SandboxLostError.
        """
        self._trial.settimeout(timeout_sec)
        try:
            header, _, fds = channel.receive_frame(self._trial)
        except channel.ChannelClosedError as exc:
            raise SandboxLostError(f"the sandbox ended while it was built: {exc}") from exc
        except TimeoutError:
            raise SandboxTimeoutError(f"the sandbox was not built within {timeout_sec:g} s") from None
        finally:
            self._trial.close()
        if not header["ok"]:
            raise SandboxSetupError(f"{header['error']}: {header['detail']}")
        return socket.socket(fileno=fds[0]) if fds else None

    def wait_result(self, timeout_sec: float) -> tuple[TrialResult, bool]:
        """Wait for the end; past `timeout_sec` the process is killed. Returns the result and whether it was."""
        timed_out = False
        self._life.settimeout(timeout_sec)
        try:
            try:
                header, blob, _ = channel.receive_frame(self._life)
            except TimeoutError:
                timed_out = True
                self._life.settimeout(_RESULT_GRACE_SEC)
                self._life.send(b"k")
                header, blob, _ = channel.receive_frame(self._life)
        except (channel.ChannelClosedError, BrokenPipeError) as exc:
            raise SandboxLostError(f"the container ended while a trial ran in it: {exc}") from exc
        except TimeoutError:
            raise SandboxLostError("the container does not answer") from None
        finally:
            self._life.close()
        if self._container is not None:
            self._container.cpu_sec = max(self._container.cpu_sec, header["container_cpu_sec"])
        return _parse_result(header, blob), timed_out and header["killed"]

    def abandon(self) -> None:
        """Kill it and forget it."""
        self._trial.close()
        self._life.close()


def _parse_result(header: dict[str, Any], blob: bytes) -> TrialResult:
    position = 0

    def take(size: int) -> bytes:
        nonlocal position
        position += size
        return blob[position - size : position]

    changes = [Entry(path, kind, take(size)) for path, kind, size in header.get("changes", [])]
    files = {name: take(size) for name, size in header.get("files", {}).items()}
    return TrialResult(
        exit_code=header["exit_code"],
        killed=header["killed"],
        cpu_sec=header["cpu_sec"],
        peak_memory_bytes=header["peak_memory_bytes"],
        entered=header["entered"],
        changes=changes,
        truncated=header.get("truncated", False),
        files=files,
    )


class Container:
    """A bubblewrap container with one program in it. Trials may run side by side, from any thread.

    It dies with the thread that started it: start it from one that lives as long as the worker.
    """

    def __init__(
        self,
        layout: Layout,
        program: str,
        limits: Limits,
        log_path: Path,
        options: dict[str, Any] | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self._layout, self._limits, self._log_path = layout, limits, log_path
        self.program = program
        self._options, self._bounds = options or {}, bounds
        self._cgroup = Cgroup([], [])
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        #: Processor time of the container so far: warming up and every trial that has ended.
        self.cpu_sec = 0.0
        #: Facts the program reported when it was warm.
        self.info: dict[str, Any] = {}

    def launch(self) -> None:
        """Start the container without waiting for it."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = json.dumps({"limits": asdict(self._limits), "options": self._options})
        command = [self._layout.python, "-I", "-B", _ZYGOTE, str(its.fileno()), self.program, setup]
        if self._bounds is not None:
            self._cgroup = make_cgroup(self._bounds)
        with open(self._log_path, "ab") as log:
            self._process = subprocess.Popen(
                self._cgroup.wrap(self._outer_command(command)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[its.fileno()],
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
                start_new_session=True,
            )
        its.close()
        self._control = mine

    def wait_ready(self, timeout_sec: float) -> dict[str, Any]:
        """Wait until the program is warm. Raises SandboxUnavailableError with the end of its log."""
        control, process = self._control, self._process
        if control is None or process is None:
            raise RuntimeError("launch() the container first")
        control.settimeout(timeout_sec)
        try:
            message = control.recv(65536)
        except TimeoutError:
            self.close()
            raise SandboxUnavailableError(
                f"the sandbox's program was not ready within {timeout_sec:g} s; see {self._log_path}"
            ) from None
        if not message:
            code = process.wait()
            raise SandboxUnavailableError(
                f"bubblewrap ended with code {code} before the sandbox was ready: {self._last_lines()}; "
                "user namespaces must be allowed (sysctl user.max_user_namespaces, "
                "kernel.apparmor_restrict_unprivileged_userns)"
            )
        control.settimeout(30)
        self.info = json.loads(message)
        return self.info

    def _outer_command(self, command: list[str]) -> list[str]:
        bwrap, sources = find_bubblewrap(), dict(self._layout.sources)
        if os.geteuid() != 0:
            return [str(bwrap), *bubblewrap_arguments(self._layout, sources, command)]
        sources["bwrap"] = bwrap.parent  # may itself lie where only root can reach
        # Its shared library is found relative to the binary: run it from inside the bound site-packages if there.
        site = self._layout.sources["site"]
        staged = {name: Path(launcher.STAGE, name) for name in sources}
        inner = bwrap.resolve()
        binary = (
            staged["site"] / inner.relative_to(site) if inner.is_relative_to(site) else staged["bwrap"] / bwrap.name
        )
        plan = {
            "binds": {name: str(path) for name, path in sources.items()},
            "uid": sandbox_uid(),
            "argv": [str(binary), *bubblewrap_arguments(self._layout, staged, command)],
        }
        return [sys.executable, "-I", "-S", str(Path(launcher.__file__)), json.dumps(plan)]

    @property
    def limits_in_force(self) -> str:
        """Which bounds hold, for the log."""
        cgroup = ", ".join(self._cgroup.controllers) or "none"
        return f"per trial: rlimits, tmpfs size; per container: cgroup {cgroup}"

    def alive(self) -> bool:
        """Whether the container is there."""
        return self._process is not None and self._process.poll() is None

    def start_trial(
        self,
        request: dict[str, Any],
        blob: bytes = b"",
        fds: Sequence[int] = (),
        *,
        collect_changes: bool = False,
        collect_files: Sequence[str] = (),
    ) -> TrialProcess:
        """Fork a trial. `request` needs `tree` (path below /host) and `listen`; the rest is the program's.

        Raises SandboxLostError.
        """
        trial, its_trial = socket.socketpair()
        life, its_life = socket.socketpair()
        message = json.dumps({"collect_changes": collect_changes, "collect_files": list(collect_files)}).encode()
        try:
            with self._lock:
                if self._control is None:
                    raise SandboxLostError("the container is not running")
                socket.send_fds(self._control, [message], [its_trial.fileno(), its_life.fileno()])
            trial.settimeout(30)
            channel.send_frame(trial, request, blob, fds)
        except (OSError, TimeoutError) as exc:
            trial.close()
            life.close()
            raise SandboxLostError(f"the container is gone: {exc}; {self._last_lines()}") from exc
        finally:
            its_trial.close()
            its_life.close()
        return TrialProcess(trial, life, self)

    def _last_lines(self) -> str:
        try:
            lines = self._log_path.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return " | ".join(lines[-3:])

    def close(self, timeout_sec: float = 5.0) -> None:
        """End the container and everything in it."""
        with self._lock:
            if self._control is not None:
                self._control.close()
                self._control = None
        if self._process is not None:
            deadline = time.monotonic() + timeout_sec
            try:
                self._process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._cgroup.remove()
