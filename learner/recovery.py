"""Where a run stands: what its log says was committed, and the state on disk that goes with it."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from infra.kafka import read_events
from infra.paths import checkpoint_dir, checkpoints_dir, policies_dir, policy_dir
from infra.settings import Settings
from learner.backends import Backend, make_backend
from learner.checkpoint import CheckpointError, Progress, discard_uncommitted, load_checkpoint
from learner.durable import DigestError, verify_files
from learner.publish import PolicyError, discard_unpublished
from schemas.events import PolicyPublished, StepCompleted
from schemas.ids import GroupId

log = structlog.get_logger()


@dataclass(frozen=True)
class History:
    """The committed steps of a run. `start`: version 0, None for a new run; `last`: its newest step."""

    num_steps: int
    start: PolicyPublished | None
    last: StepCompleted | None
    trained_groups: tuple[GroupId, ...]


def read_history(settings: Settings) -> History:
    """Read `steps` and `policy-versions`. Raises CheckpointError when they contradict each other."""
    run_id = settings.run.id
    versions: dict[int, PolicyPublished] = {}
    steps: dict[int, StepCompleted] = {}
    repeated: list[str] = []
    for event in read_events(settings, "policy-versions", types=(PolicyPublished,)):
        if isinstance(event, PolicyPublished) and event.run_id == run_id:
            repeated += [f"version {event.version}"] if event.version in versions else []
            versions.setdefault(event.version, event)
    for event in read_events(settings, "steps", types=(StepCompleted,)):
        if isinstance(event, StepCompleted) and event.run_id == run_id:
            repeated += [f"step {event.step}"] if event.step in steps else []
            steps.setdefault(event.step, event)
    num_steps = len(steps)
    expected = set(range(num_steps + 1)) if versions else set()
    if repeated or set(steps) != set(range(num_steps)) or set(versions) != expected:
        raise CheckpointError(
            f"run {run_id}: the log holds steps {sorted(steps)} and policy versions {sorted(versions)}, repeated: "
            f"{', '.join(repeated) or 'none'}; they must be contiguous, with one version more than steps. The topics "
            "were altered: restore them, or start a new run"
        )
    trained = tuple(g for step in sorted(steps) for g in steps[step].group_ids)
    return History(num_steps, versions.get(0), steps.get(num_steps - 1), trained)


def discard_leftovers(settings: Settings, history: History) -> list[Path]:
    """Remove what a crashed step wrote and never committed. Returns the checkpoints that went."""
    discard_unpublished(policies_dir(settings), history.num_steps if history.start else -1)
    return discard_uncommitted(checkpoints_dir(settings), history.num_steps)


def load_run(settings: Settings, start: PolicyPublished, last: StepCompleted | None) -> tuple[Backend, Progress]:
    """The backend and the progress of the last committed step; torch's generator is set too.

    Raises PolicyError or CheckpointError when a file is missing or altered.
    """
    directory = policy_dir(settings, 0)
    try:
        verify_files(directory, start.files, "restore the run's published starting policy")
    except DigestError as exc:
        raise PolicyError(str(exc)) from exc
    train = settings.train
    backend = make_backend(train, directory, directory if train.kl_coef > 0 else None)
    if last is None:
        torch.manual_seed(settings.run.seed)
        return backend, Progress(run_id=settings.run.id, num_steps=0, version=0)
    path = checkpoint_dir(settings, last.step + 1)
    checkpoint = load_checkpoint(path, last.checkpoint_sha256)
    found = checkpoint.progress
    if (found.run_id, found.num_steps, found.version) != (settings.run.id, last.step + 1, last.version_after):
        raise CheckpointError(
            f"{path}: holds run {found.run_id}, {found.num_steps} steps, version {found.version}; the log names "
            f"{settings.run.id}, {last.step + 1}, {last.version_after}"
        )
    backend.restore(checkpoint.weights, checkpoint.optimizer_state)
    torch.set_rng_state(checkpoint.rng_state)
    return backend, found


@contextmanager
def only_writer(parent: Path, stop: threading.Event) -> Iterator[None]:
    """Hold the run's directories: a learner that was fenced may go on writing until it notices.

    Waits until the other one is gone; gives up, without the lock, when `stop` is set.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / ".lock").open("w") as handle:
        waited = False
        while not stop.is_set():
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waited:
                    log.warning("learner_waits", detail=f"another learner of this run still holds {parent}")
                waited = True
                stop.wait(0.1)
        yield
