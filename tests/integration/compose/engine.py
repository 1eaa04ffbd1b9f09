"""A Docker engine with compose v2 for the tests: the machine's own, else one installed and started here.

Installing needs root and Debian's or Ubuntu's packages; compose v2 is built from its Go module where no plugin is
installed (once per user, some minutes). Nothing needs a container registry.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from infra.local.artifacts import cache_dir
from infra.local.process import OwnedDirectoryLock, log_tail, spawn, stop_process

COMPOSE_VERSION = "v2.40.3"
COMPOSE_MODULE = "github.com/docker/compose/v2/cmd"
START_TIMEOUT_SEC = 60.0


class DockerMissingError(RuntimeError):
    """No Docker engine can be had here: says why."""


def call(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command to its end; its standard output. Raises RuntimeError with all of its output."""
    done = subprocess.run(
        [os.fspath(part) for part in command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def works(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a command can be run and succeeds."""
    try:
        call(command, env=env)
    except (RuntimeError, FileNotFoundError):
        return False
    return True


def install_packages(*names: str) -> None:
    """Install distribution packages. Raises DockerMissingError without root or apt."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise DockerMissingError(f"{', '.join(names)} not installed, and installing needs root and apt-get")
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    call(["apt-get", "update", "-qq"], env=env)
    call(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *names], env=env)


def compose_environment() -> dict[str, str]:
    """The environment under which `docker compose` is version 2; builds the plugin where there is none."""
    if works(["docker", "compose", "version"], {}):
        return {}
    config = cache_dir() / f"docker-compose-{COMPOSE_VERSION}"
    plugin = config / "cli-plugins" / "docker-compose"
    if not plugin.exists():
        if shutil.which("go") is None:
            raise DockerMissingError("no docker compose plugin, and no Go toolchain to build it with")
        build = cache_dir() / "build" / "docker-compose"
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir(parents=True)
        call(["go", "mod", "init", "plugin"], cwd=build)
        call(["go", "get", f"{COMPOSE_MODULE}@{COMPOSE_VERSION}"], cwd=build, env={"GOFLAGS": "-mod=mod"})
        part = build / "docker-compose"
        call(["nice", "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", part, COMPOSE_MODULE], cwd=build)
        plugin.parent.mkdir(parents=True, exist_ok=True)
        part.replace(plugin)
    return {"DOCKER_CONFIG": str(config)}


@contextmanager
def docker_engine(directory: Path) -> Iterator[dict[str, str]]:
    """The environment in which `docker` and `docker compose` work; an engine started here keeps all in `directory`."""
    if works(["docker", "info"], {}):
        yield compose_environment()
        return
    if shutil.which("dockerd") is None:
        install_packages("docker.io", "iptables")
    if os.geteuid() != 0:
        raise DockerMissingError("no Docker engine runs, and starting one needs root")
    socket = directory / "d.sock"
    arguments = ["--data-root", directory / "data", "--exec-root", directory / "exec"]
    arguments += ["--pidfile", directory / "pid", "-H", f"unix://{socket}"]
    with OwnedDirectoryLock(directory, "dockerd") as lock:
        record, process = spawn(["dockerd", *arguments], lock, log_path=directory / "dockerd.log", port=0)
    env = {"DOCKER_HOST": f"unix://{socket}"}
    try:
        deadline = time.monotonic() + START_TIMEOUT_SEC
        while not works(["docker", "info"], env):
            if process.poll() is not None or time.monotonic() > deadline:
                raise DockerMissingError(f"dockerd does not start; its log ends:\n{log_tail(record.log)}")
            time.sleep(0.1)
        yield env | compose_environment()
    finally:
        stop_process(record)


def base_rootfs() -> Path:
    """A small Debian root file system as a tar file, made once per user."""
    path = cache_dir() / "rootfs" / "bookworm-minbase.tar"
    if not path.exists():
        if shutil.which("mmdebstrap") is None:
            install_packages("mmdebstrap")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"part-{path.name}")
        call(["nice", "mmdebstrap", "--variant=minbase", "bookworm", part])
        part.replace(path)
    return path
