"""Directories that are complete or absent: written under a temporary name, synced, renamed."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from schemas.events.training import FileDigest

#: Prefix of directories that are still being written; a crash may leave one.
TEMPORARY_PREFIX = ".writing-"

_READ_BYTES = 1 << 20


class DiskFullError(OSError):
    """A directory could not be written for want of space: names it, what is free and the remedy."""


class DigestError(RuntimeError):
    """Files on disk are not those that were written: names the file and what differs."""


def digest_file(path: Path) -> FileDigest:
    """Name, SHA-256 and size of a file."""
    sha = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(_READ_BYTES):
            sha.update(block)
    return FileDigest(name=path.name, sha256=sha.hexdigest(), size_bytes=path.stat().st_size)


def digest_files(directory: Path, *, skip: Iterable[str] = ()) -> tuple[FileDigest, ...]:
    """Digests of the files of a flat directory, sorted by name."""
    names = sorted(p.name for p in directory.iterdir() if p.is_file() and p.name not in set(skip))
    return tuple(digest_file(directory / name) for name in names)


def verify_files(directory: Path, files: Iterable[FileDigest], remedy: str) -> None:
    """Raise DigestError unless every file is there with its size and digest. `remedy` ends the message."""
    for want in files:
        path = directory / want.name
        if not path.is_file():
            raise DigestError(f"{path}: missing; {remedy}")
        got = digest_file(path)
        if got != want:
            what = f"{got.size_bytes} bytes, sha256 {got.sha256[:12]}"
            raise DigestError(f"{path}: {what}, expected {want.size_bytes} bytes, {want.sha256[:12]}; {remedy}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a directory and put it at `target` in one step, durably; what was there is replaced.

    After a crash `target` is either complete or as before. Only one process may write below the parent. Raises
    DiskFullError, with nothing left behind, when there is no space.
    """
    temporary = target.parent / f"{TEMPORARY_PREFIX}{target.name}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_directory(temporary)
        temporary.mkdir()
        fill(temporary)
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
    except Exception as exc:
        if not _is_disk_full(exc):
            raise
        remove_directory(temporary)
        raise DiskFullError(
            f"{target}: no space left on the device to write it; free some space, or move data.dir to a larger disk, "
            "and start again: nothing that was committed is lost, what was being written is done again"
        ) from exc
    remove_directory(target)
    temporary.rename(target)
    _sync(target.parent)


def _is_disk_full(exc: Exception) -> bool:
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return f"(os error {errno.ENOSPC})" in str(exc)  # safetensors reports the error of its writer as text


def remove_directory(path: Path) -> None:
    """Remove a directory and all in it, if it exists."""
    if path.exists():
        shutil.rmtree(path)
