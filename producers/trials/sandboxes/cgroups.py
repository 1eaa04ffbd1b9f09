"""A cgroup around a container, where one can be had: as root, or in a delegated part of the v2 tree.

It bounds all trials of a container together (memory and processes of every lane, and the processor share); what bounds
each trial by itself are rlimits, the size of its tmpfs and its user namespace. One cgroup per container and not per
trial: moving a process costs more than the whole rest of a warm trial's set-up. Versions 1 and 2 are supported.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_V1_CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000


@dataclass(frozen=True)
class Bounds:
    """Limits of a whole container."""

    memory_bytes: int
    max_processes: int
    cpus: float


class Cgroup:
    """Directories of one cgroup, one per hierarchy. Empty: none could be had."""

    def __init__(self, directories: list[Path], controllers: list[str]) -> None:
        self.directories, self.controllers = directories, controllers

    def wrap(self, command: list[str]) -> list[str]:
        """The command, started inside the cgroup."""
        if not self.directories:
            return command
        script = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ > "$1/cgroup.procs"; shift; n=$((n-1)); done; exec "$@"'
        count = str(len(self.directories))
        return ["/bin/sh", "-c", script, "sh", count, *(str(d) for d in self.directories), *command]

    def remove(self, timeout_sec: float = 2.0) -> None:
        """Remove it once it is empty."""
        deadline = time.monotonic() + timeout_sec
        for directory in self.directories:
            while directory.exists() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    directory.rmdir()
                    break
                time.sleep(0.01)
        self.directories = []


def make_cgroup(bounds: Bounds) -> Cgroup:
    """A cgroup of this process's, or an empty one where the machine gives none. Removes what dead processes left."""
    name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        _remove_stale()
        return _make_v1(name, bounds) if (_ROOT / "memory").is_dir() else _make_v2(name, bounds)
    except OSError:
        return Cgroup([], [])


def _remove_stale() -> None:
    found = [*_ROOT.glob("*/rollstream/*-*"), *_ROOT.glob("rollstream-*-*")]
    for directory in found:
        owner = directory.name.removeprefix("rollstream-").split("-")[0]
        if directory.is_dir() and owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):  # not empty yet: the next worker's turn
                directory.rmdir()


def _make_v1(name: str, bounds: Bounds) -> Cgroup:
    values = {
        "memory": {"memory.limit_in_bytes": bounds.memory_bytes, "memory.memsw.limit_in_bytes": bounds.memory_bytes},
        "pids": {"pids.max": bounds.max_processes},
        "cpu": {"cpu.cfs_period_us": _CPU_PERIOD_US, "cpu.cfs_quota_us": int(bounds.cpus * _CPU_PERIOD_US)},
    }
    made: list[Path] = []
    controllers: list[str] = []
    for controller in _V1_CONTROLLERS:
        directory = _ROOT / controller / "rollstream" / name
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        made.append(directory)
        controllers.append(controller)
        for file, value in values[controller].items():
            with contextlib.suppress(OSError):  # memsw is not there on every kernel
                (directory / file).write_text(str(value))
    return Cgroup(made, controllers)


def _make_v2(name: str, bounds: Bounds) -> Cgroup:
    parent = _ROOT if os.geteuid() == 0 else _own_v2_cgroup().parent
    enabled = (parent / "cgroup.subtree_control").read_text().split()
    if "memory" not in enabled and os.geteuid() == 0:
        (parent / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        enabled = (parent / "cgroup.subtree_control").read_text().split()
    directory = parent / f"rollstream-{name}"
    directory.mkdir(exist_ok=True)
    values = {
        "memory": {"memory.max": str(bounds.memory_bytes), "memory.swap.max": "0"},
        "pids": {"pids.max": str(bounds.max_processes)},
        "cpu": {"cpu.max": f"{int(bounds.cpus * _CPU_PERIOD_US)} {_CPU_PERIOD_US}"},
    }
    controllers = []
    for controller, files in values.items():
        if controller not in enabled:
            continue
        for file, value in files.items():
            with contextlib.suppress(OSError):
                (directory / file).write_text(value)
        controllers.append(controller)
    if not controllers or not os.access(parent / "cgroup.procs", os.W_OK):
        directory.rmdir()
        return Cgroup([], [])
    return Cgroup([directory], controllers)


def _own_v2_cgroup() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return _ROOT / line[3:].lstrip("/")
    raise OSError("no unified cgroup hierarchy")
