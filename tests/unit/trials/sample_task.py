"""A small task in Harbor's layout for tests of the trial path."""

from __future__ import annotations

from pathlib import Path

from producers.tasks.harbor import Task, write_task
from schemas.events import TrialOffered
from schemas.ids import GroupId, RunId, TaskId, TrialId, make_event_id, now_ms

OPS = "def double(x):\n    return 2 * x\n\n\ndef above(x, limit):\n    return x - limit\n"
HIDDEN = (
    "from ops import above, double\n\n\ndef test_above():\n    assert above(3, 2) is True\n\n\n"
    "def test_double():\n    assert double(2) == 4\n"
)
VISIBLE = "def test_nothing():\n    assert True\n"
INSTRUCTION = "FAILED test_ops.py::test_above\n$ cat -n ops.py\n     1\tdef double(x):\n"
FIX = "sed -i 's/x - limit/x > limit/' ops.py"


def make_task(directory: Path, name: str = "task-1") -> Task:
    """One bug in ops.py; tests/test_ops.py is hidden and shadows a visible file of that name."""
    return write_task(
        directory / name,
        task_set="train",
        instruction=INSTRUCTION,
        repo={"ops.py": OPS, "tests/test_ops.py": VISIBLE, "data/one.txt": "1\n", "data/deep/two.txt": "2\n"},
        tests={"test_ops.py": HIDDEN},
        fail_to_pass=["tests/test_ops.py::test_above"],
        pass_to_pass=["tests/test_ops.py::test_double"],
    )


def make_offer(task: Task, index: int = 0, *, run_id: str = "run-t", attempt: int = 1) -> TrialOffered:
    """An offer of trial `index` of a group on `task`."""
    now = now_ms()
    return TrialOffered(
        event_id=make_event_id(now),
        run_id=RunId(run_id),
        occurred_at=now,
        producer="scheduler",
        trial_id=TrialId(f"{run_id}.t00001.000.{index:02d}"),
        group_id=GroupId(f"{run_id}.t00001.000"),
        task_id=TaskId(task.task_id),
        task_path=str(task.path),
        task_digest=task.digest,
        purpose="train",
        attempt=attempt,
        policy_version=0,
        harness="mini-swe-agent",
        seed=index,
        temperature=1.0,
        max_turns=3,
    )
