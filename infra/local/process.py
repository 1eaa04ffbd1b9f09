"""Detached processes of the local stack: started once, owned by a data directory, found again, stopped for certain.

Who owns a data directory is a lock (`flock`) that the process itself inherits and so holds for exactly as long as it
lives, however it ends; the JSON file beside it says which process that is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import getpass
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.local.errors import DataDirectoryOwnedError, StackError

POLL_SEC = 0.02
LOG_TAIL_LINES = 12


@dataclass(frozen=True)
class ProcessRecord:
    """A running process of the stack, as written to `<data.dir>/run/<name>.json`."""

    name: str
    pid: int
    #: Kernel start time in clock ticks since boot: tells the process from a later one with the same pid.
    start_ticks: int
    port: int
    #: Unix seconds.
    started_at: float
    user: str
    host: str
    log: str

    def describe(self) -> str:
        """For messages: who, where and since when."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started_at))
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"{self.name}, process {self.pid}{where} of {self.user} on port {self.port}, started {since}"


def _start_ticks(pid: int) -> int | None:
    """Start time of a living process; None when it is gone, or a zombie whose other threads have ended too."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rsplit(")", 1)[1].split()
    num_threads = int(fields[16])
    return None if state in "ZX" and num_threads <= 1 else int(fields[18])


def is_alive(record: ProcessRecord) -> bool:
    """Whether that very process still runs."""
    return _start_ticks(record.pid) == record.start_ticks


def read_record(directory: Path, name: str) -> ProcessRecord | None:
    """The record of a process as last written, dead or alive."""
    try:
        return ProcessRecord(**json.loads((directory / f"{name}.json").read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as exc:
        raise StackError(f"{directory / name}.json is damaged ({exc}); stop the process by hand and delete it") from exc


def running_process(directory: Path, name: str) -> ProcessRecord | None:
    """The record of a process that is alive."""
    record = read_record(directory, name)
    return record if record is not None and is_alive(record) else None


def lock_within(fd: int, timeout_sec: float) -> bool:
    """Take the exclusive lock of an open file, trying for `timeout_sec`; whether that worked."""
    deadline = time.monotonic() + timeout_sec
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SEC)


class OwnedDirectoryLock:
    """The lock of one process name in one directory; a process that inherits `fd` keeps it.

    Raises DataDirectoryOwnedError, naming the owner, when it is taken.
    """

    def __init__(self, directory: Path, name: str, timeout_sec: float = 0.0) -> None:
        self.directory, self.name = directory, name
        directory.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(directory / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not lock_within(self.fd, timeout_sec):
            os.close(self.fd)
            record = read_record(directory, name)
            who = record.describe() if record else "a process that has not said who it is"
            raise DataDirectoryOwnedError(
                f"{directory.parent} is in use by {who}; stop it with `rollstream down` for that data directory, or "
                "set data.dir to another one"
            )

    def __enter__(self) -> OwnedDirectoryLock:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of this process's handle; the lock stays with whoever inherited it."""
        os.close(self.fd)


def spawn(
    command: Sequence[str | Path],
    lock: OwnedDirectoryLock,
    *,
    log_path: Path,
    port: int,
    env: Mapping[str, str] | None = None,
) -> tuple[ProcessRecord, subprocess.Popen[bytes]]:
    """Start a detached process that takes over `lock`; its output is appended to `log_path`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log_file:
        process = subprocess.Popen(
            [os.fspath(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock.fd,),
            env={**os.environ, **(env or {})},
        )
    record = ProcessRecord(
        name=lock.name,
        pid=process.pid,
        start_ticks=_start_ticks(process.pid) or 0,
        port=port,
        started_at=time.time(),
        user=_user_name(),
        host=socket.gethostname(),
        log=str(log_path),
    )
    part = lock.directory / f"{lock.name}.json.part"
    part.write_text(json.dumps(dataclasses.asdict(record)) + "\n")
    part.replace(lock.directory / f"{lock.name}.json")
    return record, process


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a passwd entry, as containers have them
        return f"uid {os.getuid()}"


def stop_process(record: ProcessRecord, timeout_sec: float = 30.0) -> None:
    """SIGTERM to the process's group, SIGKILL after `timeout_sec`; returns when nothing of the group is left.

    Raises StackError when it survives (a process of another user, or one stuck in the kernel).
    """
    for sig, patience_sec in ((signal.SIGTERM, timeout_sec), (signal.SIGKILL, 10.0)):
        if not is_alive(record):
            break
        try:
            os.killpg(record.pid, sig)
        except ProcessLookupError:
            break
        except PermissionError as exc:
            raise StackError(f"cannot stop {record.describe()}: it belongs to another user") from exc
        deadline = time.monotonic() + patience_sec
        while is_alive(record) and time.monotonic() < deadline:
            _reap(record.pid)
            time.sleep(POLL_SEC)
    _reap(record.pid)
    if is_alive(record):
        raise StackError(f"{record.describe()} does not end; see {record.log}")


def forget(directory: Path, name: str) -> None:
    """Delete the record of a process that has ended. The lock file stays: deleting it races with its next owner."""
    (directory / f"{name}.json").unlink(missing_ok=True)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # started by an earlier command, so not our child
        os.waitpid(pid, os.WNOHANG)


def log_tail(path: str | Path) -> str:
    """The last lines of a log, indented, for an error message."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        return "  (no log)"
    return "\n".join(f"  {line}" for line in lines) or "  (the log is empty)"
