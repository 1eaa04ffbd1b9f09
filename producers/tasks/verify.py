"""Which tests of a task fail before the gold patch and pass after it: found by running them.

Many small repositories are run by a few pytest processes, each of which imports pytest once: one process per
repository would take 300 ms each, this takes a few. The repositories must be trusted, they share the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

#: Repositories run by one process: bounds what a hanging test can hold up.
CHUNK = 250
TIMEOUT_SEC = 300.0


class VerifyError(RuntimeError):
    """Tests could not be run, or do not tell the broken repository from the fixed one."""


@dataclass(frozen=True)
class TestLists:
    """Node ids relative to the repository root, in the order of the file."""

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    #: Fail after the gold patch: no use for grading.
    failing: tuple[str, ...]

    __test__ = False  # not a test class


def run_suites(repos: Sequence[Path], *, num_processes: int = 2) -> list[dict[str, bool]]:
    """Run every repository's tests/ and return, per repository, node id -> passed. Raises VerifyError."""
    chunks = [repos[i : i + CHUNK] for i in range(0, len(repos), CHUNK)]
    with ThreadPoolExecutor(max(1, num_processes)) as pool:
        return [result for chunk in pool.map(_run_chunk, chunks) for result in chunk]


def _run_chunk(repos: Sequence[Path]) -> list[dict[str, bool]]:
    with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
        job, report = Path(scratch) / "repos.json", Path(scratch) / "report.json"
        job.write_text(json.dumps([str(r) for r in repos]))
        runner = Path(__file__).with_name("suite_runner.py")
        # -I: neither the caller's directory nor its environment decides what the repositories import.
        command = [sys.executable, "-I", "-B", str(runner), str(job), str(report)]
        try:
            done = subprocess.run(
                command,
                cwd=scratch,
                env={"PATH": os.defpath, "HOME": scratch},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SEC,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise VerifyError(
                f"the tests of {repos[0]} and {len(repos) - 1} more ran for over {TIMEOUT_SEC:.0f} s; "
                "look for an endless loop in a test or its fix"
            ) from None
        if done.returncode or not report.exists():
            raise VerifyError(f"the tests of {repos[0]} could not be run:\n{done.stdout}{done.stderr}")
        results: list[dict[str, bool]] = json.loads(report.read_text())
        return results


@dataclass(frozen=True)
class Candidate:
    """A repository with hidden tests and a fix, not yet a task. `repo` and `tests`: relative path -> content."""

    repo: Mapping[str, str]
    tests: Mapping[str, str]
    #: Unified diff with a/ and b/ prefixes.
    gold_patch: str


def find_test_lists(candidates: Sequence[Candidate], *, num_processes: int = 2) -> list[TestLists]:
    """Run each candidate's tests before and after its gold patch. Raises VerifyError."""
    with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
        repos: list[Path] = []
        for i, candidate in enumerate(candidates):
            files = {**candidate.repo, **{f"tests/{name}": text for name, text in candidate.tests.items()}}
            for state in ("before", "after"):
                repo = Path(scratch) / f"{i:05d}-{state}"
                for name, text in files.items():
                    (repo / name).parent.mkdir(parents=True, exist_ok=True)
                    (repo / name).write_bytes(text.encode())
                repos.append(repo)
            apply_patch(repos[-1], candidate.gold_patch)
        results = run_suites(repos, num_processes=num_processes)
    return [compare_runs(b, a) for b, a in zip(results[::2], results[1::2], strict=True)]


def compare_runs(before: dict[str, bool], after: dict[str, bool]) -> TestLists:
    """Sort the tests that ran after the fix; one that did not even run before it counts as failing then."""
    return TestLists(
        fail_to_pass=tuple(t for t, ok in after.items() if ok and not before.get(t, False)),
        pass_to_pass=tuple(t for t, ok in after.items() if ok and before.get(t, False)),
        failing=tuple(t for t, ok in after.items() if not ok),
    )


def apply_patch(directory: Path, patch: str) -> None:
    """Apply a unified diff (a/ b/ prefixes) in a directory. Raises VerifyError."""
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        cwd=directory,
        # Not the repository that the scratch directory may lie in.
        env={"PATH": os.environ.get("PATH", os.defpath), "GIT_CEILING_DIRECTORIES": str(directory.parent)},
        input=patch,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise VerifyError(f"a gold patch does not apply: {done.stderr.strip()}; make it against the root:\n{patch}")
