"""Containers shared by the sandbox tests: starting one is the expensive part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from producers.trials.sandboxes.bubblewrap import Container
from producers.trials.sandboxes.inside import Limits
from producers.trials.sandboxes.layout import Layout, make_layout
from producers.trials.worktree import Worktrees

COMMAND = "producers.trials.sandboxes.exec_command"


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sandbox-state")


@pytest.fixture(scope="session")
def worktrees(state_dir: Path) -> Worktrees:
    trees = Worktrees(state_dir / "trees")
    trees.root.mkdir()
    return trees


@pytest.fixture(scope="session")
def layout(state_dir: Path, worktrees: Worktrees) -> Layout:
    return make_layout(state_dir, worktrees.root)


@pytest.fixture(scope="session")
def command_box(layout: Layout, state_dir: Path) -> Iterator[Container]:
    """A container whose program runs command lines."""
    container = Container(layout, COMMAND, Limits(disk_mb=64, memory_mb=512, max_processes=48), state_dir / "box.log")
    container.launch()
    container.wait_ready(60)
    yield container
    container.close()
