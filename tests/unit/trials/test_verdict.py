"""From a signed report to a verdict, and the reuse of verdicts."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from producers.trials.verifier import report_plugin
from producers.trials.verifier.grader import Grade, judge, read_report
from producers.trials.verifier.grades import GradeCache
from schemas.ids import EventId
from tests.unit.trials.sample_task import make_task

KEY = bytes(32)
F2P, P2P = "tests/test_ops.py::test_above", "tests/test_ops.py::test_double"


def report(*records: dict[str, Any]) -> bytes:
    r, w = os.pipe()
    emit = report_plugin.make_emitter(w, KEY)
    for record in records:
        emit(record)
    os.close(w)
    with os.fdopen(r, "rb") as file:
        return file.read()


def phases(test_id: str, call: str = "passed", **extra: Any) -> list[dict[str, Any]]:
    outcomes = {"setup": "passed", "call": call, "teardown": "passed"}
    return [
        {"event": "test", "id": test_id, "when": w, "outcome": o, "xfail": False, "sec": 0.1} | extra
        for w, o in outcomes.items()
    ]


END = {"event": "end", "exit": 0}


def test_a_report_reads_back() -> None:
    records, problem = read_report(report({"event": "ready"}, END), KEY)
    assert [r["event"] for r in records] == ["ready", "end"] and problem == ""


@pytest.mark.parametrize("forgery", ["append", "drop", "repeat", "edit", "key"])
def test_a_forged_report_is_seen(forgery: str) -> None:
    lines = report({"event": "ready"}, *phases(F2P), END).splitlines(keepends=True)
    if forgery == "append":
        lines.insert(1, b'{"event": "test"}\t' + b"0" * 64 + b"\n")
    elif forgery == "drop":
        del lines[2]
    elif forgery == "repeat":
        lines.insert(2, lines[2])
    elif forgery == "edit":
        lines[2] = lines[2].replace(b"passed", b"failed")
    records, problem = read_report(b"".join(lines), b"\1" * 32 if forgery == "key" else KEY)
    assert "not signed" in problem and len(records) < 5


def test_verdicts(tmp_path: Path) -> None:
    task = make_task(tmp_path)

    def outcome(*records: dict[str, Any], problem: str = "") -> tuple[float, list[str]]:
        reward, tests, _ = judge(task, records, problem)
        assert [t.test_id for t in tests] == [F2P, P2P]
        return reward, [t.outcome for t in tests]

    good = [*phases(F2P), *phases(P2P)]
    assert outcome(*good, END) == (1.0, ["passed", "passed"])
    assert outcome(*good) == (0.0, ["missing", "missing"]), "the process died before the end"
    assert outcome(*good, END, problem="forged") == (0.0, ["missing", "missing"])
    assert outcome(*phases(F2P), END) == (0.0, ["passed", "missing"])
    assert outcome(*phases(F2P, "failed"), *phases(P2P), END) == (0.0, ["failed", "passed"])
    assert outcome(*phases(F2P, "skipped"), *phases(P2P), END) == (0.0, ["skipped", "passed"])
    assert outcome(*phases(F2P, xfail=True), *phases(P2P), END)[0] == 0.0
    assert outcome(*phases(F2P), *phases(F2P), *phases(P2P), END)[0] == 0.0, "a test that ran twice"
    assert outcome(phases(F2P, "failed")[0] | {"outcome": "failed"}, *phases(P2P), END)[1][0] == "error"


def test_an_equal_grade_is_made_once() -> None:
    cache, made, gate = GradeCache(), [], threading.Event()

    def grade() -> Grade:
        made.append(1)
        gate.wait(10)
        return Grade(1.0, ())

    results: list[EventId | None] = []
    key = ("task", "diff", "grader")
    threads = [
        threading.Thread(target=lambda i=i: results.append(cache.grade_once(key, EventId(f"e{i}"), grade)[1]))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(10)
    assert len(made) == 1 and results.count(None) == 1
    assert len({r for r in results if r}) == 1


def test_a_failed_grade_is_not_remembered_and_old_ones_are_forgotten() -> None:
    cache = GradeCache(capacity=1)

    def fail() -> Grade:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cache.grade_once(("a", "", ""), EventId("1"), fail)
    assert cache.grade_once(("a", "", ""), EventId("2"), lambda: Grade(0.0, ()))[1] is None
    cache.grade_once(("b", "", ""), EventId("3"), lambda: Grade(0.0, ()))
    assert cache.get(("a", "", "")) is None and cache.get(("b", "", "")) is not None
