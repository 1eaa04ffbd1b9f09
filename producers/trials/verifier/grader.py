"""The worker's side of grading: build the request, run it in a clean sandbox, read the verdict off its report."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from producers.tasks.harbor import Task
from producers.trials.sandboxes.bubblewrap import Container
from schemas.events import TestResult

GRADER_ID = "pytest"
PROGRAM = "producers.trials.verifier.pytest_warm"
_NOT_LAID_OVER = frozenset({"test.sh"})
_CODE = ("patch.py", "pytest_warm.py", "report_plugin.py", "diff_filter.py", "grader.py")


class GraderError(RuntimeError):
    """Grading itself failed: no verdict about the diff."""


class GradeTimeoutError(GraderError):
    """The tests did not end in time."""


@dataclass(frozen=True)
class Grade:
    """A verdict. `detail` says in a line what a person would ask first."""

    reward: float
    tests: tuple[TestResult, ...]
    detail: str = ""
    peak_memory_bytes: int | None = None
    duration_sec: float = 0.0
    cpu_sec: float = 0.0


@dataclass(frozen=True)
class _Payload:
    hidden: list[list[Any]]
    blob: bytes
    digest: str
    no_conftest: bool


def code_digest() -> str:
    """Digest of everything on our side that can change a verdict, hex."""
    sha = hashlib.sha256(f"{sys.version_info[:3]} pytest {version('pytest')}".encode())
    for name in _CODE:
        sha.update(Path(__file__).with_name(name).read_bytes())
    return sha.hexdigest()


class Grader:
    """Grades diffs in forks of a warm pytest. Safe to use from many threads."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._code_digest = code_digest()
        self._payloads: dict[str, _Payload] = {}

    def digest(self, task: Task) -> str:
        """Digest of the grader's code and of the task's tests, hex."""
        return self._payload(task).digest

    def grade(self, task: Task, tree_name: str, patch: bytes, timeout_sec: float) -> Grade:
        """Grade `patch` on the task's clean tree. Raises GraderError, SandboxLostError, SandboxSetupError."""
        started = time.perf_counter()
        payload, key = self._payload(task), os.urandom(32)
        required = [*task.fail_to_pass, *task.pass_to_pass]
        if not required:
            raise GraderError(f"{task.path}/task.toml: no test decides this task; list them in fail_to_pass")
        request = {
            "tree": f"trees/{tree_name}",
            "listen": False,
            "key": key.hex(),
            "patch_size": len(patch),
            "hidden": payload.hidden,
            "required": required,
            "no_conftest": payload.no_conftest,
        }
        read_fd, write_fd = os.pipe()
        try:
            trial = self._container.start_trial(request, patch + payload.blob, [write_fd])
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        with os.fdopen(read_fd, "rb") as report, ThreadPoolExecutor(1) as reader:
            raw = reader.submit(report.read, 64 << 20)
            try:
                trial.wait_started(min(30.0, timeout_sec))
                result, timed_out = trial.wait_result(timeout_sec)
            finally:
                trial.abandon()  # ends what is left, and with it the report
            text = raw.result()
        if timed_out:
            raise GradeTimeoutError(f"the tests did not end within {timeout_sec:g} s")
        records, problem = read_report(text, key)
        if not records:
            last = result.log_tail.strip().splitlines()[-1:]
            raise GraderError(f"the diff and the hidden tests could not be laid out: {''.join(last)}")
        reward, tests, detail = judge(task, records, problem)
        elapsed = time.perf_counter() - started
        return Grade(reward, tests, detail, result.peak_memory_bytes, elapsed, result.cpu_sec)

    def _payload(self, task: Task) -> _Payload:
        found = self._payloads.get(task.digest)
        if found is None:
            found = self._payloads[task.digest] = _make_payload(task, self._code_digest)
        return found


def _make_payload(task: Task, code: str) -> _Payload:
    hidden: list[list[Any]] = []
    blobs: list[bytes] = []
    sha = hashlib.sha256(code.encode())
    for path in sorted(task.tests_dir.rglob("*")):
        name = path.relative_to(task.tests_dir).as_posix()
        if not path.is_file() or name in _NOT_LAID_OVER or "__pycache__" in path.parts:
            continue
        data = path.read_bytes()
        hidden.append([f"tests/{name}", len(data)])
        blobs.append(data)
        sha.update(f"{name}\0{len(data)}\0".encode() + data)
    sha.update(json.dumps([task.fail_to_pass, task.pass_to_pass]).encode())
    # The base's conftest is kept where a repository has one: its tests may need it, and a diff cannot touch it.
    conftest = any(task.repo_dir.rglob("conftest.py")) or any(task.tests_dir.rglob("conftest.py"))
    return _Payload(hidden, b"".join(blobs), sha.hexdigest(), not conftest)


def read_report(raw: bytes, key: bytes) -> tuple[list[dict[str, Any]], str]:
    """The records of a test report (`report_plugin`) up to the first that breaks the chain, and what broke it."""
    chain, out = b"", list[dict[str, Any]]()
    for number, line in enumerate(raw.splitlines(), 1):
        body, _, mac = line.rpartition(b"\t")
        chain = hmac.new(key, chain + body, hashlib.sha256).digest()
        if not hmac.compare_digest(chain.hex().encode(), mac):
            return out, f"record {number} of the test report is not signed as it must be"
        out.append(json.loads(body))
    return out, ""


def judge(
    task: Task, records: Iterable[dict[str, Any]], problem: str = ""
) -> tuple[float, tuple[TestResult, ...], str]:
    """(reward, per-test results, detail) from a report. Pure.

    A test passed when its set-up, call and tear-down did, once each, and it was not expected to fail. Without an end
    record (the process died), or when the report was tampered with (`problem`), nothing passed.
    """
    phases: dict[str, list[dict[str, Any]]] = {}
    ended, detail = False, ""
    for record in records:
        if record["event"] == "test":
            phases.setdefault(record["id"], []).append(record)
        elif record["event"] == "collect_error" and not detail:
            detail = f"{record['id']}: {record['detail'].strip().splitlines()[-1] if record['detail'].strip() else ''}"
        ended = ended or record["event"] == "end"
    ended = ended and not problem
    tests = []
    for expected, ids in (("fail_to_pass", task.fail_to_pass), ("pass_to_pass", task.pass_to_pass)):
        for test_id in ids:
            seen = phases.get(test_id, [])
            outcome = _outcome(seen) if ended else "missing"
            tests.append(
                TestResult(
                    test_id=test_id,
                    outcome=outcome,
                    expected=expected,
                    duration_sec=sum(float(r["sec"]) for r in seen) if seen else None,
                )
            )
    if not ended:
        detail = problem or "the test process ended without a report"
    passed = all(t.outcome == "passed" for t in tests)
    return (1.0 if passed else 0.0), tuple(tests), detail


def _outcome(seen: list[dict[str, Any]]) -> str:
    if not seen:
        return "missing"
    by_phase = {r["when"]: r for r in seen}
    if len(by_phase) == len(seen) == 3 and all(r["outcome"] == "passed" and not r["xfail"] for r in seen):
        return "passed"
    call = by_phase.get("call")
    if call is not None and call["outcome"] == "failed":
        return "failed"
    if any(r["outcome"] == "failed" for r in seen):
        return "error"
    return "skipped" if any(r["outcome"] == "skipped" for r in seen) else "failed"
