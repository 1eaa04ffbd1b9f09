"""What a trial left behind, read from our own descriptors after every process of it is dead. Standard library only."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

MAX_FILE_BYTES = 1 << 20
MAX_TOTAL_BYTES = 32 << 20
MAX_ENTRIES = 20_000
_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")


@dataclass
class Entry:
    """One changed path, relative to the repository root."""

    path: str
    #: file | executable | deleted | opaque (a directory that hides the base's) | symlink | other | too_big
    kind: str
    data: bytes = b""


@dataclass
class _Walk:
    entries: list[Entry] = field(default_factory=list)
    num_bytes: int = 0
    truncated: bool = False


def collect_changes(upper_fd: int) -> tuple[list[Entry], bool]:
    """Entries of an overlay's upper directory, sorted, and whether limits cut the walk short.

    Follows no links. Top-level `.git` is left out: the agent's own repository is never looked at.
    """
    walk = _Walk()
    _descend(upper_fd, "", walk)
    return sorted(walk.entries, key=lambda e: e.path), walk.truncated


def _descend(fd: int, prefix: str, walk: _Walk) -> None:
    for name in os.listdir(fd):
        if not prefix and name == ".git":
            continue
        if len(walk.entries) >= MAX_ENTRIES:
            walk.truncated = True
            return
        path, info = prefix + name, os.lstat(name, dir_fd=fd)
        if stat.S_ISDIR(info.st_mode):
            child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                if _is_opaque(child):
                    walk.entries.append(Entry(path, "opaque"))
                _descend(child, path + "/", walk)
            finally:
                os.close(child)
        elif stat.S_ISREG(info.st_mode):
            walk.entries.append(_regular(fd, name, path, info, walk))
        elif stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            walk.entries.append(Entry(path, "deleted"))
        else:
            walk.entries.append(Entry(path, "symlink" if stat.S_ISLNK(info.st_mode) else "other"))


def _regular(fd: int, name: str, path: str, info: os.stat_result, walk: _Walk) -> Entry:
    if info.st_size > MAX_FILE_BYTES:
        return Entry(path, "too_big")
    if walk.num_bytes + info.st_size > MAX_TOTAL_BYTES:
        walk.truncated = True
        return Entry(path, "too_big")
    walk.num_bytes += info.st_size
    kind = "executable" if info.st_mode & stat.S_IXUSR else "file"
    return Entry(path, kind, read_file(fd, name, MAX_FILE_BYTES))


def read_file(dir_fd: int, name: str, limit: int, tail: bool = False) -> bytes:
    """At most `limit` bytes of a regular file in a directory; empty when there is none. Follows no link."""
    try:
        if not stat.S_ISREG(os.lstat(name, dir_fd=dir_fd).st_mode):
            return b""
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=dir_fd)
    except OSError:
        return b""
    with os.fdopen(fd, "rb") as file:
        if tail:
            file.seek(max(0, os.fstat(fd).st_size - limit))
        return file.read(limit)


def _is_opaque(fd: int) -> bool:
    try:
        names = os.listxattr(fd)
    except OSError:
        return False
    return any(name in names for name in _OPAQUE)
