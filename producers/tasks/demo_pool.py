"""The demo's task pool on disk: train and held-out sets as Harbor tasks with indexes, and the demonstrations.

<pool>/train/<task id>/...     <pool>/train.parquet
<pool>/held_out/<task id>/...  <pool>/held_out.parquet
<pool>/sft.jsonl               {"instruction": ..., "command": ...} per line
<pool>/pool.json               what it was made from, for reuse
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from producers.tasks.demo_tasks import README, DemoTask, make_demo_tasks, make_demonstration
from producers.tasks.harbor import Task, load_tasks, write_task
from producers.tasks.index import read_index, write_index
from producers.tasks.verify import Candidate, TestLists, VerifyError, find_test_lists

log = structlog.get_logger()

MANIFEST = "pool.json"
DEMONSTRATIONS = "sft.jsonl"
#: Wall limits written into the tasks: a test run takes 30 ms, a trial well under a second.
AGENT_TIMEOUT_SEC, VERIFIER_TIMEOUT_SEC = 60.0, 30.0


@dataclass(frozen=True)
class PoolInfo:
    """A pool on disk. The paths are what [tasks] of the run file names."""

    path: Path
    train: Path
    held_out: Path
    num_train: int
    num_held_out: int
    num_sft: int
    #: False: an equal pool was there already.
    made: bool
    wall_sec: float


def make_demo_pool(
    directory: str | Path, seed: int = 0, num_train: int = 1024, num_held_out: int = 256, num_sft: int = 4096
) -> PoolInfo:
    """Make the pool, or reuse the one in `directory` when it was made from the same arguments and generator.

    The same arguments give byte-equal files. Raises VerifyError when a task's tests do not tell bug from fix.
    """
    started = time.monotonic()
    root = Path(directory)
    arguments = {"seed": seed, "num_train": num_train, "num_held_out": num_held_out, "num_sft": num_sft}
    wanted = {**arguments, "generator_sha256": _generator_digest()}
    made = not _is_current(root, wanted)
    if made:
        (root / MANIFEST).unlink(missing_ok=True)
        digests = {
            name: _write_set(root, name, make_demo_tasks(seed, name, count))
            for name, count in (("train", num_train), ("held_out", num_held_out))
        }
        _write_demonstrations(root / DEMONSTRATIONS, seed, num_sft)
        # Last: a pool whose making was interrupted has no manifest and is made again.
        (root / MANIFEST).write_text(json.dumps(wanted | {"tasks_sha256": digests}, indent=1) + "\n")
    wall_sec = time.monotonic() - started
    log.info("demo pool ready", path=str(root), made=made, wall_sec=round(wall_sec, 1), **arguments)
    return PoolInfo(
        path=root,
        train=root / "train.parquet",
        held_out=root / "held_out.parquet",
        num_train=num_train,
        num_held_out=num_held_out,
        num_sft=num_sft,
        made=made,
        wall_sec=wall_sec,
    )


def _write_set(root: Path, name: str, demo_tasks: Sequence[DemoTask]) -> str:
    shutil.rmtree(root / name, ignore_errors=True)
    ids = [f"demo-{name.replace('_', '-')}-{i:04d}" for i in range(len(demo_tasks))]
    lists = find_test_lists([_candidate(t) for t in demo_tasks])
    tasks: list[Task] = []
    for task_id, demo, found in zip(ids, demo_tasks, lists, strict=True):
        if not found.fail_to_pass or not found.pass_to_pass or found.failing:
            raise VerifyError(f"{task_id} ({demo.function}): its tests do not tell the bug from the fix: {found}")
        tasks.append(_write_demo_task(root / name / task_id, demo, found))
    write_index(root / f"{name}.parquet", tasks)
    return _combine_digests(tasks)


def _candidate(demo: DemoTask) -> Candidate:
    return Candidate(
        repo={demo.file: demo.source(demo.wrong), "README.md": README},
        tests={f"test_{demo.file}": demo.test_source},
        gold_patch=demo.gold_patch,
    )


def _write_demo_task(path: Path, demo: DemoTask, lists: TestLists) -> Task:
    candidate = _candidate(demo)
    return write_task(
        path,
        task_set=demo.split,
        instruction=demo.instruction,
        repo=candidate.repo,
        tests=candidate.tests,
        fail_to_pass=lists.fail_to_pass,
        pass_to_pass=lists.pass_to_pass,
        solution={"gold.patch": candidate.gold_patch, "solve.sh": f"#!/bin/sh\n{demo.command(demo.right)}\n"},
        agent_timeout_sec=AGENT_TIMEOUT_SEC,
        verifier_timeout_sec=VERIFIER_TIMEOUT_SEC,
        metadata={
            "function": demo.function,
            "verb": demo.verb,
            "noun": demo.noun,
            "constant": "" if demo.constant is None else str(demo.constant),
            "wrong": demo.wrong,
            "right": demo.right,
        },
        org="rollstream-demo",
    )


def _write_demonstrations(file: Path, seed: int, count: int) -> None:
    rng = random.Random(f"demo:{seed}:teacher")
    with open(file, "w", encoding="utf-8") as out:
        for task in make_demo_tasks(seed, "sft", count):
            row = {"instruction": task.instruction, "command": make_demonstration(rng, task)}
            out.write(json.dumps(row) + "\n")


def _is_current(root: Path, wanted: dict[str, object]) -> bool:
    try:
        manifest = json.loads((root / MANIFEST).read_text())
        if {k: v for k, v in manifest.items() if k != "tasks_sha256"} != wanted:
            return False
        # The indexes are compared here; loading the tasks for a run compares each directory with its index.
        return (
            all(
                _combine_digests(read_index(root / f"{name}.parquet")) == digest and (root / name).is_dir()
                for name, digest in manifest["tasks_sha256"].items()
            )
            and (root / DEMONSTRATIONS).is_file()
        )
    except (OSError, ValueError, KeyError):
        return False


def _combine_digests(tasks: Sequence[Task]) -> str:
    rows = sorted((t.task_id, t.digest) for t in tasks)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _generator_digest() -> str:
    files = ("demo_tasks.py", "demo_pool.py", "harbor.py")
    content = [Path(__file__).with_name(name).read_bytes() for name in files]
    return hashlib.sha256(b"\0".join(content)).hexdigest()


def check_pool(info: PoolInfo) -> dict[str, int]:
    """Read every task of the pool back and compare it with its index; returns counts. Raises TaskError."""
    return {name: len(load_tasks(source)) for name, source in (("train", info.train), ("held_out", info.held_out))}


def describe_pool(info: PoolInfo) -> dict[str, object]:
    """The pool as plain values, for logs and summaries."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(info).items()}
