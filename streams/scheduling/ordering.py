"""Which task comes when, and with which seed: functions of the run's seed, on hashes, never on random state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from schemas.ids import GroupId, TaskId

#: Group index of a slot's first replacement is its slot + this, of the second twice this, and so on.
REPLACEMENT_STRIDE = 10_000


def hash_int(*parts: object, bits: int = 63) -> int:
    """A non-negative integer of `bits` bits that depends on the parts alone."""
    payload = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "big") >> (64 - bits)


@lru_cache(maxsize=8)
def shuffle_epoch(seed: int, epoch: int, tasks: tuple[TaskId, ...]) -> tuple[TaskId, ...]:
    """The tasks in the order of this epoch, whatever the order they came in."""
    return tuple(sorted(tasks, key=lambda task: (hash_int(seed, "epoch", epoch, task), task)))


def task_at(seed: int, position: int, tasks: tuple[TaskId, ...]) -> tuple[TaskId, int]:
    """Task and epoch of the group number `position` (from 0) of the endless stream of shuffled epochs."""
    epoch, place = divmod(position, len(tasks))
    return shuffle_epoch(seed, epoch, tasks)[place], epoch


def replacement_task(seed: int, step: int, index: int, tasks: Sequence[TaskId], avoid: TaskId) -> TaskId:
    """The task of a replacement group: another than the dropped group's, where there is one."""
    others = sorted(t for t in tasks if t != avoid) or sorted(tasks)
    return others[hash_int(seed, "replacement", step, index) % len(others)]


def trial_seed(seed: int, purpose: str, step: int, index: int, trial: int) -> int:
    """Sampling seed of one trial, 31 bits."""
    return hash_int(seed, "trial", purpose, step, index, trial, bits=31)


def group_index(group_id: GroupId) -> int:
    """The index that `schemas.ids.make_group_id` put into a group id."""
    return int(group_id.rpartition(".")[2])
