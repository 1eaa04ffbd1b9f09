"""Task trees: what the agent sees of a task, made once per task digest and mounted read-only under every trial.

A tree is the task's `environment/repo` with a fresh one-commit history. The original `.git` is not copied: moving it
aside would leave its objects readable, and a reset would leave the fix in dangling commits and the reflog.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

from producers.tasks.harbor import Task
from producers.trials.sandboxes.layout import sandbox_gid, sandbox_uid

_GIT_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "task",
    "GIT_AUTHOR_EMAIL": "task@example.invalid",
    "GIT_COMMITTER_NAME": "task",
    "GIT_COMMITTER_EMAIL": "task@example.invalid",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}
_GIT_COMMANDS = (
    ("init", "-q", "-b", "main", "--template="),
    # A commit may start a detached gc, which would rewrite the shared tree.
    ("config", "gc.auto", "0"),
    # Overlay and user mapping change stat data; without these the first `git status` hashes every file again.
    ("config", "core.checkStat", "minimal"),
    ("config", "core.trustctime", "false"),
    ("add", "-A", "-f"),
    ("commit", "-q", "--allow-empty", "--no-gpg-sign", "-m", "base"),
    ("repack", "-adq"),
    ("reflog", "expire", "--expire=now", "--all"),
)


class WorktreeError(RuntimeError):
    """A task's tree could not be made."""


class BaseTree:
    """A made tree, as the diff needs it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = frozenset(
            p.relative_to(path).as_posix()
            for p in path.rglob("*")
            if ".git" not in p.relative_to(path).parts[:1] and p.is_file() and not p.is_symlink()
        )
        self._content: dict[str, bytes] = {}
        #: Names at the repository's root.
        self.top_level = frozenset(p.name for p in path.iterdir())

    def read(self, path: str) -> bytes | None:
        """Content of a regular file; None when the tree has none of that name."""
        if path not in self._files:
            return None
        if path not in self._content:
            self._content[path] = (self.path / path).read_bytes()
        return self._content[path]

    def list_below(self, directory: str) -> list[str]:
        """Files below a directory."""
        prefix = directory + "/"
        return [f for f in self._files if f.startswith(prefix)]


class Worktrees:
    """The trees under one directory, by task digest. Safe to use from many threads and processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._known: dict[str, BaseTree] = {}

    def path(self, digest: str) -> Path:
        """Where the tree of a task digest lies."""
        return self.root / digest[:40]

    def ensure(self, task: Task) -> BaseTree:
        """The tree of `task`, made unless it is there. Raises WorktreeError."""
        target = self.path(task.digest)
        with self._lock:
            tree = self._known.get(task.digest)
            if tree is None:
                if not target.is_dir():
                    self._make(task, target)
                tree = self._known[task.digest] = BaseTree(target)
            return tree

    def _make(self, task: Task, target: Path) -> None:
        if not task.repo_dir.is_dir():
            raise WorktreeError(f"{task.repo_dir}: not found; a task run with image `host` brings environment/repo")
        self.root.mkdir(parents=True, exist_ok=True)
        draft = self.root / f".{target.name}.{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            shutil.copytree(task.repo_dir, draft, symlinks=True, ignore=shutil.ignore_patterns(".git"))
            for command in _GIT_COMMANDS:
                subprocess.run(
                    ["git", "-c", "core.fsync=none", "-C", str(draft), *command],
                    env=_GIT_ENV,
                    check=True,
                    capture_output=True,
                    text=True,
                )
            _hand_over(draft)
            draft.rename(target)
        except subprocess.CalledProcessError as exc:
            raise WorktreeError(f"{task.path}: git failed while its tree was made: {exc.stderr.strip()}") from exc
        except OSError as exc:
            if not target.is_dir():  # else another worker was first
                raise WorktreeError(f"{task.path}: its tree could not be made: {exc}") from exc
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _hand_over(tree: Path) -> None:
    """Give the tree to the sandbox's user: an overlay copies owners up and fails on one that is not mapped."""
    uid, gid = sandbox_uid(), sandbox_gid()
    os.chown(tree, uid, gid)
    for parent, directories, files in os.walk(tree):
        for name in (*directories, *files):
            os.chown(Path(parent, name), uid, gid, follow_symlinks=False)
