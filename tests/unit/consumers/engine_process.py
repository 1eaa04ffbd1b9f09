"""An embedded engine's owner as a process of its own, on a free port, for tests."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from infra.local.ports import free_port

READY_SEC = 60.0


class OwnerProcess:
    """Starts `consumers.clickhouse.owner` on a directory; `with` waits until it answers and ends it."""

    def __init__(self, directory: Path, port: int | None = None) -> None:
        self.directory, self.port = directory, port or free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start and wait for /ping."""
        command = [sys.executable, "-m", "consumers.clickhouse.owner", "--dir", str(self.directory)]
        self.process = subprocess.Popen([*command, "--port", str(self.port)], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + READY_SEC
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the owner ended with {self.process.returncode}")
            try:
                with urllib.request.urlopen(f"{self.url}/ping", timeout=1) as answer:
                    if answer.read() == b"Ok.\n":
                        return
            except (urllib.error.URLError, OSError):
                select_free_wait()
        raise TimeoutError(f"no answer from {self.url} in {READY_SEC} s")

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(30)

    def __enter__(self) -> OwnerProcess:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()


def select_free_wait() -> None:
    """Give the other process a moment between two looks."""
    import select

    select.select([], [], [], 0.05)
