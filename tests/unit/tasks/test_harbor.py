"""Task directories: round trip, digest, and what a broken one is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from producers.tasks.harbor import Task, TaskError, compute_digest, load_task, load_tasks, write_task
from producers.tasks.index import load_indexed_tasks, read_index, write_index

INSTRUCTION = 'FAILED test_ops.py::test_a\n$ cat -n ops.py\n     1\tx = "é\\"'


def make_task(path: Path, task_set: str = "train") -> Task:
    return write_task(
        path,
        task_set=task_set,
        instruction=INSTRUCTION,
        repo={"ops.py": "x = 1\n", "pkg/__init__.py": ""},
        tests={"test_ops.py": "def test_a():\n    pass\n"},
        fail_to_pass=["tests/test_ops.py::test_a"],
        pass_to_pass=['tests/test_ops.py::test_b["x"]'],
        solution={"gold.patch": "--- a/ops.py\n"},
        metadata={"verb": "above", "odd key": 'quote " backslash \\ tab \t é'},
        agent_timeout_sec=12.5,
    )


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path / "task-1")


def test_what_is_written_is_read_back(task: Task) -> None:
    assert load_task(task.path) == task
    assert task.instruction == INSTRUCTION
    assert task.metadata == {"verb": "above", "odd key": 'quote " backslash \\ tab \t é'}
    assert (task.task_id, task.image, task.agent_timeout_sec) == ("task-1", "host", 12.5)
    assert task.pass_to_pass == ('tests/test_ops.py::test_b["x"]',)
    assert (task.repo_dir / "ops.py").read_text() == "x = 1\n"
    assert (task.tests_dir / "test.sh").stat().st_mode & 0o111


def test_digest_depends_on_names_and_contents_alone(task: Task, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "task-1"
    shutil.copytree(task.path, copy)
    (copy / "tests" / "__pycache__").mkdir()
    (copy / "tests" / "__pycache__" / "test_ops.pyc").write_bytes(b"left by a run")
    assert compute_digest(copy) == task.digest
    (copy / "environment/repo/ops.py").write_text("x = 2\n")
    changed = compute_digest(copy)
    assert changed != task.digest
    (copy / "environment/repo/ops.py").rename(copy / "environment/repo/ops2.py")
    assert compute_digest(copy) not in (changed, task.digest)


def test_digest_keeps_name_and_content_apart(tmp_path: Path) -> None:
    for name, files in {"one": {"ab": "c"}, "two": {"a": "bc"}}.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    assert compute_digest(tmp_path / "one") != compute_digest(tmp_path / "two")


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda p: (p / "task.toml").unlink(), ["task.toml", "file not found"]),
        (lambda p: (p / "task.toml").write_text("a = [\n"), ["task.toml", "not valid TOML", "correct the syntax"]),
        (lambda p: (p / "instruction.md").unlink(), ["instruction.md", "file not found"]),
        (lambda p: (p / "instruction.md").write_text(" \n"), ["instruction.md", "is empty"]),
        (lambda p: (p / "instruction.md").write_bytes(b"\xff"), ["instruction.md", "UTF-8"]),
        (lambda p: shutil.rmtree(p / "tests"), ["tests", "no tests", "add tests/test.sh"]),
        (lambda p: (p / "tests/test.sh").unlink(), ["test.sh", "file not found"]),
        (lambda p: (p / "tests/test_ops.py").unlink(), ["task.toml", "fail_to_pass", "tests/test_ops.py::test_a"]),
        (lambda p: edit(p, "timeout_sec = 12.5", "timeout_sec = -1"), ["[agent] timeout_sec is -1", "above 0"]),
        (lambda p: edit(p, 'schema_version = "1.4"', 'schema_version = "9"'), ["schema_version is '9'", "1.4"]),
        (lambda p: edit(p, '["tests/test_ops.py::test_a"]', '"test_a"'), ["fail_to_pass is 'test_a'", "list"]),
        (lambda p: edit(p, '"train"', "3"), ["[metadata] task_set is 3", "string"]),
        (lambda p: edit(p, 'test_b[\\"x\\"]', "test_a"), ["is in fail_to_pass and in pass_to_pass"]),
    ],
)
def test_a_broken_task_names_file_field_and_remedy(task: Task, break_it, words: list[str]) -> None:
    break_it(task.path)
    with pytest.raises(TaskError) as error:
        load_task(task.path)
    for word in [str(task.path), *words]:
        assert word in str(error.value)


def edit(path: Path, old: str, new: str) -> None:
    text = (path / "task.toml").read_text()
    assert old in text
    (path / "task.toml").write_text(text.replace(old, new))


def test_a_directory_of_tasks_is_read_in_order(tmp_path: Path) -> None:
    for name in ("b", "c", "a"):
        make_task(tmp_path / "pool" / name)
    assert [t.task_id for t in load_tasks(tmp_path / "pool")] == ["a", "b", "c"]
    assert [t.task_id for t in load_tasks(tmp_path / "pool" / "b")] == ["b"]


@pytest.mark.parametrize("source", ["missing", "empty", "missing.parquet", "text.parquet"])
def test_a_source_without_tasks_is_an_error_that_names_it(tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(TaskError, match=source):
        load_tasks(tmp_path / source)


def test_a_directory_name_that_is_no_task_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="is no task id"):
        make_task(tmp_path / "with space")


def test_index_rows_are_the_tasks(tmp_path: Path) -> None:
    tasks = [make_task(tmp_path / "pool" / name, task_set=name) for name in ("b", "a")]
    assert write_index(tmp_path / "index.parquet", tasks) == 2
    assert read_index(tmp_path / "index.parquet") == [tasks[1], tasks[0]]
    assert load_tasks(tmp_path / "index.parquet") == [tasks[1], tasks[0]]


def test_index_and_tasks_move_together(tmp_path: Path) -> None:
    write_index(tmp_path / "old" / "index.parquet", [make_task(tmp_path / "old" / "pool" / "a")])
    (tmp_path / "old").rename(tmp_path / "new")
    assert [t.path for t in load_indexed_tasks(tmp_path / "new" / "index.parquet")] == [tmp_path / "new" / "pool" / "a"]


def test_a_task_changed_behind_its_index_is_an_error(tmp_path: Path) -> None:
    task = make_task(tmp_path / "pool" / "a")
    write_index(tmp_path / "index.parquet", [task])
    (task.tests_dir / "test_ops.py").write_text("def test_a():\n    assert True\n")
    with pytest.raises(TaskError, match="write the index again"):
        load_tasks(tmp_path / "index.parquet")


def test_an_index_names_each_task_once(tmp_path: Path) -> None:
    task = make_task(tmp_path / "pool" / "a")
    write_index(tmp_path / "index.parquet", [task, task])
    with pytest.raises(TaskError, match="'a' appears twice"):
        load_tasks(tmp_path / "index.parquet")
