"""Artifacts of Maven Central by a checked-in lock: fetched once per user, never used with another checksum."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from infra.local.errors import DownloadError

#: Layout of a Maven 2 repository. ROLLSTREAM_MAVEN_MIRROR names another one.
MAVEN_REPOSITORY = "https://repo.maven.apache.org/maven2"
MIRROR_VARIABLE = "ROLLSTREAM_MAVEN_MIRROR"

NUM_CONNECTIONS = 8
NUM_TRIES = 4
CHUNK_BYTES = 1 << 18
TIMEOUT_SEC = 30.0


@dataclass(frozen=True)
class Artifact:
    """One file of a Maven repository."""

    #: group:artifact:version[:extension[:classifier]]
    coordinates: str
    sha256: str
    num_bytes: int

    @property
    def relative_path(self) -> str:
        """Its path in a repository, and in the cache."""
        group, artifact, version, *rest = self.coordinates.split(":")
        extension = rest[0] if rest else "jar"
        classifier = f"-{rest[1]}" if len(rest) > 1 else ""
        return f"{group.replace('.', '/')}/{artifact}/{version}/{artifact}-{version}{classifier}.{extension}"


def cache_dir() -> Path:
    """The per-user cache, shared by every data directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rollstream"


def read_lock(path: Path) -> list[Artifact]:
    """The artifacts of a lock file. Raises ValueError naming the line that is none."""
    artifacts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        fields = line.split()
        if len(fields) != 3 or fields[0].count(":") not in (2, 3, 4) or len(fields[1]) != 64 or not fields[2].isdigit():
            raise ValueError(f"{path.name}:{number}: expected `group:artifact:version sha256 bytes`, found {line!r}")
        artifacts.append(Artifact(fields[0], fields[1], int(fields[2])))
    return artifacts


def fetch_artifacts(artifacts: Sequence[Artifact], what: str) -> list[Path]:
    """Paths of the artifacts in the cache, in the given order; missing ones are fetched, all are verified.

    `what` names them in the progress bar. Raises DownloadError with the remedy.
    """
    root = cache_dir() / "maven"
    paths = [root / artifact.relative_path for artifact in artifacts]
    missing = [
        (artifact, path) for artifact, path in zip(artifacts, paths, strict=True) if not _is_intact(artifact, path)
    ]
    if missing:
        _fetch_missing(missing, what)
    return paths


def _is_intact(artifact: Artifact, path: Path) -> bool:
    try:
        if path.stat().st_size != artifact.num_bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == artifact.sha256
    except FileNotFoundError:
        return False


def _fetch_missing(missing: list[tuple[Artifact, Path]], what: str) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"Fetching {what}", total=sum(artifact.num_bytes for artifact, _ in missing))
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            futures = [pool.submit(_fetch, artifact, path, progress, task) for artifact, path in missing]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                for future in futures:
                    future.cancel()
                raise


def _fetch(artifact: Artifact, path: Path, progress: Progress, task: TaskID) -> None:
    base = (os.environ.get(MIRROR_VARIABLE) or MAVEN_REPOSITORY).rstrip("/")
    url = f"{base}/{artifact.relative_path}"
    for attempt in range(1, NUM_TRIES + 1):
        try:
            _fetch_once(url, artifact, path, progress, task)
            return
        except urllib.error.HTTPError as exc:
            if exc.code not in (408, 429, 500, 502, 503, 504) or attempt == NUM_TRIES:
                raise DownloadError(
                    f"{url}: HTTP {exc.code} {exc.reason}; set {MIRROR_VARIABLE} to a Maven repository that has it"
                ) from exc
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DownloadError(
                    f"{path}: disk full ({artifact.num_bytes:,} bytes needed); free some space, or set "
                    "XDG_CACHE_HOME to a directory on another disk"
                ) from exc
            if isinstance(exc, PermissionError):
                raise DownloadError(f"{exc.filename}: not writable; set XDG_CACHE_HOME to a directory that is") from exc
            if attempt == NUM_TRIES:
                reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
                raise DownloadError(
                    f"{url}: {reason} ({NUM_TRIES} tries). Without network access, set {MIRROR_VARIABLE} to a "
                    "reachable Maven repository (https:// or file://), or set kafka.bootstrap to a running Kafka"
                ) from exc
        time.sleep(0.5 * 2 ** (attempt - 1))


def _fetch_once(url: str, artifact: Artifact, path: Path, progress: Progress, task: TaskID) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SEC) as response, part.open("wb") as out:
            while chunk := response.read(CHUNK_BYTES):
                out.write(chunk)
                digest.update(chunk)
                num_bytes += len(chunk)
                progress.advance(task, len(chunk))
        if num_bytes < artifact.num_bytes:
            raise ConnectionError(f"connection closed after {num_bytes:,} of {artifact.num_bytes:,} bytes")
        if digest.hexdigest() != artifact.sha256:
            raise DownloadError(
                f"{url}: sha256 {digest.hexdigest()}, {num_bytes:,} bytes; the lock says {artifact.sha256}, "
                f"{artifact.num_bytes:,} bytes. Something on the way alters downloads: check the proxy or "
                f"{MIRROR_VARIABLE}"
            )
        part.replace(path)
    except BaseException:
        progress.advance(task, -num_bytes)
        part.unlink(missing_ok=True)
        raise
