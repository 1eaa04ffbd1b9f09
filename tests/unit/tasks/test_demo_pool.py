"""The demo's pool: disjoint splits, the same files for the same seed, test lists that are true, fixes that fix."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from producers.tasks.demo_pool import PoolInfo, check_pool, make_demo_pool
from producers.tasks.demo_tasks import (
    KNOWN_VERBS,
    OPERATORS,
    SPLITS,
    DemoTask,
    make_demo_task,
    make_demo_tasks,
    make_demonstration,
)
from producers.tasks.harbor import Task, load_tasks
from producers.tasks.verify import Candidate, VerifyError, find_test_lists, run_suites


@pytest.fixture(scope="module")
def splits() -> dict[str, list[DemoTask]]:
    return {split: make_demo_tasks(0, split, 1500) for split in SPLITS}


def test_names_and_constants_of_the_splits_are_disjoint(splits: dict[str, list[DemoTask]]) -> None:
    for what in ("function", "noun", "constant"):
        found = {s: {getattr(t, what) for t in tasks} - {None} for s, tasks in splits.items()}
        assert all(found.values())
        assert not found["train"] & found["held_out"], what
        assert not found["sft"] & (found["train"] | found["held_out"]), what


def test_held_out_mutations_are_never_trained(splits: dict[str, list[DemoTask]]) -> None:
    pairs = {s: {(t.verb, t.wrong) for t in tasks} for s, tasks in splits.items()}
    assert not pairs["held_out"] & (pairs["train"] | pairs["sft"])
    # ... while every verb occurs in each split, so that the held-out set is about the same concepts
    assert {v for v, _ in pairs["held_out"]} == {v for v, _ in pairs["train"]}


def test_tasks_of_a_set_differ_and_follow_from_the_seed(splits: dict[str, list[DemoTask]]) -> None:
    train = splits["train"]
    assert len({t.instruction for t in train}) == len(train)
    assert make_demo_tasks(0, "train", 50) == train[:50]
    assert make_demo_tasks(1, "train", 50) != train[:50]


def test_the_test_passes_with_the_right_operator_alone(splits: dict[str, list[DemoTask]]) -> None:
    for task in splits["held_out"]:
        expected = task.evaluate(task.right)
        assert task.wrong != task.right
        assert [op for op in OPERATORS if task.evaluate(op) == expected] == [task.right]


def test_more_tasks_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="1000000 tasks of split 'train'"):
        make_demo_tasks(0, "train", 10**6)


def test_instruction_is_what_cat_prints(tmp_path: Path) -> None:
    task = make_demo_task(random.Random(5), "train")
    (tmp_path / task.file).write_text(task.source(task.wrong))
    shown = subprocess.run(["cat", "-n", task.file], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    head = f"FAILED test_{task.file}::test_{task.function}\n$ cat -n {task.file}\n"
    assert task.instruction + "\n" == head + shown


def test_the_teacher_is_as_good_as_it_says(splits: dict[str, list[DemoTask]]) -> None:
    rng = random.Random(0)
    right: dict[bool, list[bool]] = {True: [], False: []}
    for task in splits["sft"]:
        command = make_demonstration(rng, task, skill=0.4)
        assert command in {task.command(op) for op in OPERATORS if op != task.wrong}
        right[task.verb in KNOWN_VERBS].append(command == task.command(task.right))
    assert all(right[True])
    assert 0.35 < sum(right[False]) / len(right[False]) < 0.45


def test_same_arguments_give_the_same_files(pool: PoolInfo, tmp_path: Path) -> None:
    again = make_demo_pool(tmp_path / "again", seed=3, num_train=14, num_held_out=6, num_sft=40)
    assert again.made
    files = {p.relative_to(pool.path): p.read_bytes() for p in pool.path.rglob("*") if p.is_file()}
    assert files == {p.relative_to(again.path): p.read_bytes() for p in again.path.rglob("*") if p.is_file()}


def test_an_equal_pool_is_reused_and_another_made_anew(pool: PoolInfo, tmp_path: Path) -> None:
    arguments = {"num_train": 2, "num_held_out": 1, "num_sft": 3}
    assert make_demo_pool(tmp_path, seed=0, **arguments).made
    assert not make_demo_pool(tmp_path, seed=0, **arguments).made
    assert make_demo_pool(tmp_path, seed=1, **arguments).made
    shutil.rmtree(tmp_path / "held_out")
    assert make_demo_pool(tmp_path, seed=1, **arguments).made
    assert check_pool(pool) == {"train": 14, "held_out": 6}


def test_demonstrations_are_lines_of_instruction_and_command(pool: PoolInfo) -> None:
    rows = [json.loads(line) for line in (pool.path / "sft.jsonl").read_text().splitlines()]
    assert len(rows) == 40
    assert all(r["instruction"].startswith("FAILED ") and r["command"].startswith("sed -i ") for r in rows)


def pytest_outcomes(repo: Path) -> dict[str, bool]:
    """The listed outcomes of `python -m pytest -rA` in a repository, as a user would run it."""
    done = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-c", os.devnull, "tests"],
        cwd=repo,
        env={**os.environ, "PYTHONPATH": str(repo)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.split(" - ")[0].split() for line in done.stdout.splitlines()]
    return {w[1]: w[0] == "PASSED" for w in lines if len(w) == 2 and w[0] in ("PASSED", "FAILED")}


def lay_out(task: Task, repo: Path) -> Path:
    shutil.copytree(task.repo_dir, repo)
    shutil.copytree(task.tests_dir, repo / "tests")
    return repo


@pytest.mark.parametrize(("set_name", "at"), [("train", 0), ("train", 7), ("held_out", 1)])
def test_lists_are_true_and_the_gold_action_solves(pool: PoolInfo, tmp_path: Path, set_name: str, at: int) -> None:
    task = load_tasks(getattr(pool, set_name))[at]
    repo = lay_out(task, tmp_path / "repo")
    every = set(task.fail_to_pass) | set(task.pass_to_pass)
    before = pytest_outcomes(repo)
    assert set(before) == every
    assert {t for t, ok in before.items() if not ok} == set(task.fail_to_pass)
    assert (
        f"tests/test_{task.instruction.split('test_')[1].split('.')[0]}.py::test_{task.metadata['function']}" in before
    )
    action = (task.path / "solution/solve.sh").read_text().splitlines()[1]
    done = subprocess.run(["bash", "-c", action], cwd=repo, capture_output=True, text=True, check=True)
    assert done.stdout == "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"
    assert pytest_outcomes(repo) == dict.fromkeys(before, True)
    # the gold patch makes the same repository
    patched = lay_out(task, tmp_path / "patched")
    subprocess.run(["patch", "-p1", "-i", str(task.gold_patch.resolve())], cwd=patched, capture_output=True, check=True)
    name = next(p.name for p in repo.glob("*.py"))
    assert (patched / name).read_bytes() == (repo / name).read_bytes()


def test_harbors_test_script_writes_the_reward(pool: PoolInfo, tmp_path: Path) -> None:
    task = load_tasks(pool.train)[2]
    for state, reward in (("broken", "0"), ("fixed", "1")):
        root = tmp_path / state
        shutil.copytree(task.path, root)
        repo, logs = root / "environment/repo", tmp_path / f"logs-{state}"
        if state == "fixed":
            subprocess.run(["sh", str(root / "solution/solve.sh")], cwd=repo, capture_output=True, check=True)
        script = (
            (root / "tests/test.sh").read_text().replace("/logs/verifier", str(logs)).replace("python3", sys.executable)
        )
        subprocess.run(["sh", "-c", script, str(root / "tests/test.sh")], cwd=repo, capture_output=True, check=False)
        assert (logs / "reward.txt").read_text() == f"{reward}\n"


def test_suites_of_equal_module_names_do_not_meet(tmp_path: Path) -> None:
    for name, value in (("one", 1), ("two", 2)):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "ops.py").write_text(
            f"import helper\nVALUE = helper.VALUE\nif VALUE != {value}: raise SystemError\n"
        )
        (tmp_path / name / "helper.py").write_text(f"VALUE = {value}\n")
        (tmp_path / name / "tests/test_ops.py").write_text(
            "import ops\ndef test_one():\n    assert ops.VALUE == 1\n"
            "class TestTwo:\n    def test_two(self):\n        assert ops.VALUE == 2\n"
        )
    (tmp_path / "broken" / "tests").mkdir(parents=True)
    (tmp_path / "broken/tests/test_x.py").write_text("import does_not_exist\ndef test_x(): pass\n")
    one, two, broken = run_suites([tmp_path / n for n in ("one", "two", "broken")])
    assert one == {"tests/test_ops.py::test_one": True, "tests/test_ops.py::TestTwo::test_two": False}
    assert two == {"tests/test_ops.py::test_one": False, "tests/test_ops.py::TestTwo::test_two": True}
    assert broken == {}


def test_a_patch_that_does_not_apply_is_an_error() -> None:
    patch = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"
    with pytest.raises(VerifyError, match="does not apply"):
        find_test_lists([Candidate(repo={"x.py": "c\n"}, tests={}, gold_patch=patch)])
