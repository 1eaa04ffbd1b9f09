"""The thin index: one parquet row per task, to list, filter and ship a set without its files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from producers.tasks.harbor import Task, TaskError, load_task

SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),
        ("task_set", pa.string()),
        # relative to the index file's directory, so that index and tasks move together
        ("path", pa.string()),
        ("digest", pa.string()),
        ("instruction", pa.string()),
        ("image", pa.string()),
        ("fail_to_pass", pa.list_(pa.string())),
        ("pass_to_pass", pa.list_(pa.string())),
        ("verifier_timeout_sec", pa.float64()),
        ("agent_timeout_sec", pa.float64()),
        ("metadata", pa.map_(pa.string(), pa.string())),
    ]
)


def write_index(file: str | Path, tasks: Iterable[Task]) -> int:
    """Write the index of `tasks`, ordered by task id; returns the number of rows."""
    target = Path(file)
    base = target.resolve().parent
    rows = [
        {
            "task_id": t.task_id,
            "task_set": t.task_set,
            "path": os.path.relpath(t.path.resolve(), base),
            "digest": t.digest,
            "instruction": t.instruction,
            "image": t.image,
            "fail_to_pass": list(t.fail_to_pass),
            "pass_to_pass": list(t.pass_to_pass),
            "verifier_timeout_sec": t.verifier_timeout_sec,
            "agent_timeout_sec": t.agent_timeout_sec,
            "metadata": sorted(t.metadata.items()),
        }
        for t in sorted(tasks, key=lambda t: t.task_id)
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and moved: a reader sees the old index or the new one.
    part = target.with_name(target.name + ".part")
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), part, compression="zstd")
    part.replace(target)
    return len(rows)


def read_index(file: str | Path) -> list[Task]:
    """The tasks as the index describes them; their directories are not opened. Raises TaskError."""
    source = Path(file)
    try:
        table = pq.read_table(source)
    except FileNotFoundError:
        raise TaskError(source, "no such index", "write one with `write_index`, or name the task directory") from None
    except pa.ArrowException as exc:
        raise TaskError(source, f"not a readable parquet file: {exc}", "write the index again") from None
    missing = [name for name in SCHEMA.names if name not in table.column_names]
    if missing:
        raise TaskError(
            source, f"column {missing[0]!r} is missing", f"an index has the columns {', '.join(SCHEMA.names)}"
        )
    base = source.resolve().parent
    return [
        Task(
            task_id=row["task_id"],
            path=Path(os.path.normpath(base / row["path"])),
            task_set=row["task_set"],
            instruction=row["instruction"],
            digest=row["digest"],
            image=row["image"],
            fail_to_pass=tuple(row["fail_to_pass"]),
            pass_to_pass=tuple(row["pass_to_pass"]),
            verifier_timeout_sec=row["verifier_timeout_sec"],
            agent_timeout_sec=row["agent_timeout_sec"],
            metadata=dict(row["metadata"]),
        )
        for row in table.select(SCHEMA.names).to_pylist()
    ]


def load_indexed_tasks(file: str | Path) -> list[Task]:
    """The index's tasks, read from their directories. Raises TaskError when one is not as indexed."""
    tasks = []
    seen: set[str] = set()
    for row in read_index(file):
        if row.task_id in seen:
            raise TaskError(Path(file), f"task id {row.task_id!r} appears twice", "give each task an id of its own")
        seen.add(row.task_id)
        if not row.path.is_dir():
            what = f"task {row.task_id!r}: its directory {row.path} is gone"
            raise TaskError(Path(file), what, "put it back (paths are relative to the index), or write the index again")
        task = load_task(row.path)
        if task.digest != row.digest:
            remedy = "write the index again if the change is meant"
            raise TaskError(row.path, f"its digest {task.digest[:12]} is not the index's {row.digest[:12]}", remedy)
        tasks.append(task)
    return tasks
