"""Where everything under `data.dir` lies. The only module that knows the layout."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from infra.settings import Settings

#: Linux allows 107 bytes in the path of a Unix socket; the margin is for suffixes added by a server.
MAX_SOCKET_PATH_BYTES = 100


def data_dir(settings: Settings) -> Path:
    """The data directory, absolute: services may change their working directory."""
    return Path(settings.data.dir).expanduser().absolute()


def run_dir(settings: Settings) -> Path:
    """Pid, port and lock files of running processes."""
    return data_dir(settings) / "run"


def services_dir(settings: Settings) -> Path:
    """One JSON file per running service instance: port, pid, started_at."""
    return run_dir(settings) / "services"


def service_file(settings: Settings, name: str, instance: int) -> Path:
    """The JSON file of one running service instance."""
    return services_dir(settings) / f"{name}-{instance}.json"


def logs_dir(settings: Settings) -> Path:
    """Logs of the stack and of the services."""
    return data_dir(settings) / "logs"


def service_log(settings: Settings, name: str, instance: int) -> Path:
    """The log file of one service instance."""
    return logs_dir(settings) / f"{name}-{instance}.log"


def kafka_dir(settings: Settings) -> Path:
    """The local broker's log segments and its generated configuration."""
    return data_dir(settings) / "kafka"


def clickhouse_dir(settings: Settings) -> Path:
    """The embedded engine's data; exactly one process may open it."""
    return data_dir(settings) / "clickhouse"


def _run_id(settings: Settings) -> str:
    if not settings.run.id:
        raise ValueError("run.id is empty: resolve the run before asking for its directories")
    return settings.run.id


def policies_dir(settings: Settings) -> Path:
    """Published weights of the run, one directory per version."""
    return data_dir(settings) / "policies" / _run_id(settings)


def policy_dir(settings: Settings, version: int) -> Path:
    """The published weights of one policy version."""
    return policies_dir(settings) / f"v{version}"


def checkpoints_dir(settings: Settings) -> Path:
    """The learner's checkpoints of the run."""
    return data_dir(settings) / "checkpoints" / _run_id(settings)


def checkpoint_dir(settings: Settings, step: int) -> Path:
    """The checkpoint written after `step` steps."""
    return checkpoints_dir(settings) / f"step{step:05d}"


def proxy_socket_path(settings: Settings, instance: int) -> Path:
    """The proxy's control socket; its directory exists afterwards.

    `<data.dir>/run/proxy-<instance>.sock`, or, where that is too long for a Unix socket, a short path in a private
    directory of the system's temporary directory, keyed by a digest of the long one. Raises PermissionError when that
    directory belongs to someone else.
    """
    path = run_dir(settings) / f"proxy-{instance}.sock"
    if len(os.fsencode(path)) < MAX_SOCKET_PATH_BYTES:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:24]
    name = Path(f"rollstream-{os.getuid()}") / f"{digest}.sock"
    short = Path(tempfile.gettempdir()) / name
    if len(os.fsencode(short)) >= MAX_SOCKET_PATH_BYTES:  # a long TMPDIR
        short = Path("/tmp") / name
    short.parent.mkdir(mode=0o700, exist_ok=True)
    owner = short.parent.stat().st_uid
    if owner != os.getuid():
        raise PermissionError(f"{short.parent} belongs to user {owner}; set data.dir to a shorter path")
    return short
