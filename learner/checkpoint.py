"""Checkpoints: weights, optimizer, RNG *and* the offsets to read from, as one directory that is whole or absent.

    step<NNNNN>/            after NNNNN steps
      weights.safetensors   float32, the backend's own names
      optimizer.safetensors the backend's optimizer state
      rng.safetensors       torch's generator state
      progress.json         run, steps, version, next offsets, what was consumed already above those offsets
      manifest.json         sha256 and size of each of the above

A checkpoint counts only once the transaction with its StepCompleted is committed; that event holds the manifest's
digest. A newer directory is left over from a crash and is thrown away.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from learner.durable import TEMPORARY_PREFIX, DigestError, digest_files, remove_directory, verify_files, write_directory
from schemas.events.training import FileDigest

WEIGHTS, OPTIMIZER, RNG = "weights.safetensors", "optimizer.safetensors", "rng.safetensors"
PROGRESS, MANIFEST = "progress.json", "manifest.json"

_NAME = re.compile(r"step(\d{5,})")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used: names the directory or file and the remedy."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands after `num_steps` steps.

    next_offsets: (topic, partition, offset): every record that an untrained group needs lies at or above them.
    closed_groups, closed_trials: consumed, dropped or not for training, though records of them may lie above.
    """

    run_id: str
    num_steps: int
    version: int
    next_offsets: tuple[tuple[str, int, int], ...] = ()
    closed_groups: tuple[str, ...] = ()
    closed_trials: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory. Tensors are on the CPU after loading."""

    progress: Progress
    weights: Mapping[str, Tensor]
    optimizer_state: Mapping[str, Tensor]
    rng_state: Tensor = field(default_factory=torch.get_rng_state)


def write_checkpoint(directory: Path, checkpoint: Checkpoint) -> str:
    """Write a checkpoint durably; returns the manifest's SHA-256."""
    digest = ""

    def fill(temporary: Path) -> None:
        nonlocal digest
        save_file({n: t.contiguous() for n, t in checkpoint.weights.items()}, temporary / WEIGHTS)
        save_file({n: t.contiguous() for n, t in checkpoint.optimizer_state.items()}, temporary / OPTIMIZER)
        save_file({"torch": checkpoint.rng_state}, temporary / RNG)
        (temporary / PROGRESS).write_text(json.dumps(asdict(checkpoint.progress), indent=1) + "\n")
        manifest = json.dumps([asdict(f) for f in digest_files(temporary)], indent=1) + "\n"
        (temporary / MANIFEST).write_text(manifest)
        digest = hashlib.sha256(manifest.encode()).hexdigest()

    write_directory(directory, fill)
    return digest


def _progress(directory: Path) -> Progress:
    data: dict[str, Any] = json.loads((directory / PROGRESS).read_text())
    return Progress(
        run_id=data["run_id"],
        num_steps=data["num_steps"],
        version=data["version"],
        next_offsets=tuple((t, p, o) for t, p, o in data["next_offsets"]),
        closed_groups=tuple(data["closed_groups"]),
        closed_trials=tuple(data["closed_trials"]),
    )


def load_checkpoint(directory: Path, manifest_sha256: str) -> Checkpoint:
    """The checkpoint whose manifest has this digest. Raises CheckpointError when anything is missing or altered."""
    remedy = "restore the directory from a backup; the run cannot go on from the log alone"
    try:
        manifest = (directory / MANIFEST).read_bytes()
    except OSError as exc:
        raise CheckpointError(f"{directory / MANIFEST}: {exc.strerror}; {remedy}") from exc
    got = hashlib.sha256(manifest).hexdigest()
    if got != manifest_sha256:
        raise CheckpointError(
            f"{directory / MANIFEST}: sha256 {got[:12]}, but StepCompleted names {manifest_sha256[:12]}; {remedy}"
        )
    try:
        verify_files(directory, [FileDigest(**entry) for entry in json.loads(manifest)], remedy)
    except DigestError as exc:
        raise CheckpointError(str(exc)) from exc
    return Checkpoint(
        progress=_progress(directory),
        weights=load_file(directory / WEIGHTS),
        optimizer_state=load_file(directory / OPTIMIZER),
        rng_state=load_file(directory / RNG)["torch"],
    )


def list_checkpoints(parent: Path) -> dict[int, Path]:
    """Steps completed -> directory, of everything written whole below `parent`."""
    if not parent.is_dir():
        return {}
    found = ((_NAME.fullmatch(p.name), p) for p in parent.iterdir() if p.is_dir())
    return {int(match.group(1)): path for match, path in sorted(found, key=lambda f: f[1].name) if match}


def discard_uncommitted(parent: Path, committed_steps: int) -> list[Path]:
    """Remove checkpoints newer than the committed one, and what a crash left half written. Returns what went."""
    gone = [path for steps, path in list_checkpoints(parent).items() if steps > committed_steps]
    gone += sorted(parent.glob(f"{TEMPORARY_PREFIX}*"))
    for path in gone:
        remove_directory(path)
    return gone


def prune_checkpoints(parent: Path, committed_steps: int, keep: int) -> list[Path]:
    """Keep the newest `keep` committed checkpoints (0: all); the newest committed one always stays."""
    if keep <= 0:
        return []
    committed = [s for s in list_checkpoints(parent) if s <= committed_steps]
    old = sorted(s for s in committed if s != committed_steps)
    old = old[: max(0, len(old) - (keep - 1))]
    paths = [list_checkpoints(parent)[s] for s in old]
    for path in paths:
        remove_directory(path)
    return paths
