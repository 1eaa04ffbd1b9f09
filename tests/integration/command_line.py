"""The `rollstream` command as a user starts it: a process of its own."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.config import KEYS, get_key
from infra.settings import Settings

REPOSITORY = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "infra.cli")
TIMEOUT_SEC = 120.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Without the run file of the shell the tests were started from; wide, so that no message is wrapped."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}
    return {**kept, "COLUMNS": "200", "PYTHONPATH": str(REPOSITORY), **(extra or {})}


def set_options(settings: Settings) -> list[str]:
    """--set options for every key that is not its default."""
    values = {name: get_key(settings, name) for name, spec in KEYS.items() if get_key(settings, name) != spec.default}
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def rollstream(
    *arguments: str,
    settings: Settings | None = None,
    timeout_sec: float = TIMEOUT_SEC,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    options = set_options(settings) if settings else []
    return subprocess.run(
        [*COMMAND, *arguments, *options],
        cwd=cwd or REPOSITORY,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_sec,
    )


def start(*arguments: str, settings: Settings | None = None, stderr: int | None = None) -> subprocess.Popen[str]:
    """Start the command; its output is read from `.stdout`."""
    return subprocess.Popen(
        [*COMMAND, *arguments, *(set_options(settings) if settings else [])],
        cwd=REPOSITORY,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if stderr is None else stderr,
        text=True,
    )


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str, code: int = 2) -> None:
    """The command ended with `code` and one message that names every part, without a traceback."""
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert "Traceback" not in said, said
    for part in parts:
        assert part in said, f"{part!r} is not in: {said}"


def read_until(process: subprocess.Popen[str], text: str, timeout_sec: float = TIMEOUT_SEC) -> str:
    """What the process prints up to the line with `text`; fails when it ends, or does not say it in time."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    seen = b""
    deadline = time.monotonic() + timeout_sec
    # Byte by byte: what follows the line stays in the pipe for whoever reads on.
    while not (seen.endswith(b"\n") and text in seen.splitlines()[-1].decode("utf-8", "replace")):
        left = deadline - time.monotonic()
        assert left > 0 and select.select([pipe], [], [], left)[0], f"no {text!r} in {timeout_sec:.0f} s: {seen!r}"
        byte = os.read(pipe, 1)
        assert byte, f"ended without {text!r}: {seen.decode('utf-8', 'replace')}"
        seen += byte
    return seen.decode("utf-8", "replace")


def on_a_terminal(arguments: Sequence[str], settings: Settings, until: Sequence[str], timeout_sec: float = 60.0) -> str:
    """Run the command on a pseudo-terminal until its screen showed every text of `until`, then press Ctrl-C.

    Returns what it printed, without escape sequences.
    """
    main, side = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments, *set_options(settings)],
        cwd=REPOSITORY,
        env=environment({"TERM": "xterm-256color", "LINES": "60"}),
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
    )
    os.close(side)
    printed = ""
    deadline = time.monotonic() + timeout_sec
    asked = False
    try:
        while True:
            assert time.monotonic() < deadline, printed
            if select.select([main], [], [], 0.2)[0]:
                try:
                    data = os.read(main, 65536)
                except OSError:  # the terminal is gone with the process
                    break
                if not data:
                    break
                printed += data.decode("utf-8", "replace")
            if not asked and all(text in _ESCAPES.sub("", printed) for text in until):
                process.send_signal(signal.SIGINT)
                asked = True
        assert asked, f"ended before it showed {until}: {printed}"
        assert process.wait(timeout_sec) == 0, printed
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(main)
    return _ESCAPES.sub("", printed)
