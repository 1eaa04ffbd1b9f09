"""The program of a cold sandbox: execute a command. Works for any harness. Standard library only."""

from __future__ import annotations

import os
from typing import Any


def warm(options: dict[str, Any]) -> dict[str, Any]:
    """Nothing to warm."""
    return {}


def run(request: dict[str, Any], blob: bytes, fds: list[int]) -> int:
    """Run `argv` with `env` and return its exit code.

    This process stays PID 1: not dumpable, so that its memory and descriptors are out of the agent's reach, and it
    buries orphans. When it returns, the kernel ends the whole PID namespace.
    """
    pid = os.fork()
    if pid == 0:
        try:
            os.execve(request["argv"][0], request["argv"], request["env"])
        finally:
            os._exit(127)
    for fd in fds:
        os.close(fd)
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code  # as a shell reports a signal
