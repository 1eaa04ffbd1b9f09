"""Fetching locked artifacts: what is fetched is what the lock says, and failures say what to do."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from infra.local import artifacts
from infra.local.artifacts import MIRROR_VARIABLE, Artifact, fetch_artifacts, read_lock
from infra.local.errors import DownloadError
from infra.local.kafka import LOCK
from infra.local.ports import free_port

CONTENT = b"not really a jar, but bytes are bytes" * 1000


@pytest.fixture
def artifact() -> Artifact:
    return Artifact("org.example:thing:1.0:tar.gz:all", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, artifact: Artifact) -> Path:
    """A repository on disk that has the artifact, and an empty cache; returns the artifact's file."""
    path = tmp_path / "mirror" / artifact.relative_path
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    monkeypatch.setenv(MIRROR_VARIABLE, (tmp_path / "mirror").as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def test_layout_of_a_maven_repository(artifact: Artifact) -> None:
    assert artifact.relative_path == "org/example/thing/1.0/thing-1.0-all.tar.gz"
    assert Artifact("a.b:c:2", "", 0).relative_path == "a/b/c/2/c-2.jar"


def test_fetched_once_then_served_from_the_cache(mirror: Path, artifact: Artifact) -> None:
    (path,) = fetch_artifacts([artifact], "a thing")
    assert path.read_bytes() == CONTENT
    mirror.unlink()
    assert fetch_artifacts([artifact], "a thing") == [path]


def test_a_damaged_cache_is_fetched_again(mirror: Path, artifact: Artifact) -> None:
    (path,) = fetch_artifacts([artifact], "a thing")
    path.write_bytes(b"X" + CONTENT[1:])
    fetch_artifacts([artifact], "a thing")
    assert path.read_bytes() == CONTENT


def test_another_checksum_is_refused_and_leaves_nothing(mirror: Path, artifact: Artifact, tmp_path: Path) -> None:
    mirror.write_bytes(b"X" + CONTENT[1:])
    with pytest.raises(DownloadError, match=f"sha256 .* the lock says {artifact.sha256}"):
        fetch_artifacts([artifact], "a thing")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def test_a_truncated_download_is_an_error(mirror: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "NUM_TRIES", 1)
    mirror.write_bytes(CONTENT[:-1])
    with pytest.raises(DownloadError, match=f"closed after {len(CONTENT) - 1:,} of {len(CONTENT):,} bytes"):
        fetch_artifacts([artifact], "a thing")


def test_without_a_network_the_remedy_is_named(
    mirror: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "NUM_TRIES", 2)
    monkeypatch.setenv(MIRROR_VARIABLE, f"http://127.0.0.1:{free_port()}/maven2")
    with pytest.raises(DownloadError, match=rf"refused.*2 tries.*{MIRROR_VARIABLE}.*kafka\.bootstrap"):
        fetch_artifacts([artifact], "a thing")


def test_a_full_disk_is_named(mirror: Path, artifact: Artifact, tmp_path: Path) -> None:
    cache = tmp_path / "small"
    cache.mkdir()
    code = (
        "from infra.local.artifacts import *\nfrom infra.local.errors import DownloadError\n"
        f"try: fetch_artifacts([Artifact({artifact.coordinates!r}, {artifact.sha256!r}, {artifact.num_bytes})], 'it')\n"
        "except DownloadError as exc: print(exc)"
    )
    script = 'mount -t tmpfs -o size=16k none "$1" && XDG_CACHE_HOME="$1" exec "$2" -c "$3"'
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-ec",
        script,
        "sh",
        cache,
        sys.executable,
        code,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "disk full" in done.stdout and "XDG_CACHE_HOME" in done.stdout, done.stderr


def test_the_lock_of_the_broker() -> None:
    locked = {a.coordinates.rsplit(":", 1)[0]: a for a in read_lock(LOCK)}
    assert locked["org.apache.kafka:kafka_2.13"].coordinates.endswith(":4.4.0")
    assert locked["org.apache.kafka:kafka-clients"].coordinates.endswith(":4.4.0")
    assert len(locked) == 45


def test_a_bad_line_of_a_lock_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.write_text("# comment\na:b:1 abc 12\n")
    with pytest.raises(ValueError, match=r"x\.lock:2"):
        read_lock(path)
