"""Run as a script, `suite_runner.py repos.json report.json`: many repositories' tests in one pytest session.

Each repository is importable only while its own test modules are imported, and what they imported is
forgotten before the next one: repositories may have modules of the same name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class SuiteRecorder:
    """A pytest plugin that isolates the repositories' imports and records each test's outcome."""

    def __init__(self, root: Path, repos: list[str]) -> None:
        self._root = root
        self.results: dict[str, dict[str, bool]] = {repo: {} for repo in repos}

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        """Put the repository on the path while its test module is imported."""
        repo = self._repo_of(collector.path) if isinstance(collector, pytest.Module) else None
        if repo is None:
            return (yield)
        known = set(sys.modules)
        sys.path.append(repo)  # last: a repository cannot hide pytest or the standard library
        try:
            return (yield)
        finally:
            sys.path.remove(repo)
            for name in set(sys.modules) - known:
                file = getattr(sys.modules[name], "__file__", None)
                if file and file.startswith(repo + "/"):
                    del sys.modules[name]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test passed when its setup, call and teardown passed."""
        path, _, name = report.nodeid.partition("::")
        file = self._root / path
        repo = self._repo_of(file)
        if repo is None:
            return
        test_id = f"{file.relative_to(repo).as_posix()}::{name}"
        passed = self.results[repo].get(test_id, True)
        self.results[repo][test_id] = passed and report.outcome == "passed"

    def _repo_of(self, path: Path) -> str | None:
        return next((str(p) for p in path.parents if str(p) in self.results), None)


def main(job: str, report: str) -> int:
    """Run the tests of the repositories listed in `job`; write a list of {node id: passed} to `report`."""
    repos = [str(Path(r).resolve()) for r in json.loads(Path(job).read_text())]
    # Node ids, and the names test modules are imported by, are relative to this.
    root = Path(os.path.commonpath(repos)) if len(repos) > 1 else Path(repos[0]).parent
    recorder: Any = SuiteRecorder(root, repos)
    options = [
        "-c",
        "/dev/null",
        f"--rootdir={root}",
        f"--confcutdir={root}",
        "--noconftest",
        "-q",
        "--tb=no",
        "--no-header",
        "--no-summary",
    ]
    options += ["--import-mode=importlib", "--assert=plain", "-p", "no:cacheprovider"]
    options += ["--continue-on-collection-errors"]
    code = pytest.main([*options, *(f"{r}/tests" for r in repos)], plugins=[recorder])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        return int(code)
    Path(report).write_text(json.dumps([recorder.results[r] for r in repos]))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
