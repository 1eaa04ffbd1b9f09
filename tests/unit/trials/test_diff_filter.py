"""Which changes reach the grader."""

from __future__ import annotations

import pytest

from producers.trials.sandboxes.collect import Entry
from producers.trials.verifier.diff_filter import MAX_PATCH_BYTES, FilteredPatch, filter_changes

BASE = {
    "ops.py": b"x\n",
    "data/one.txt": b"1\n",
    "data/deep/two.txt": b"2\n",
    "tests/test_ops.py": b"t\n",
    "token.py": b"k\n",
}


def run(*entries: Entry) -> FilteredPatch:
    return filter_changes(
        entries, BASE.get, lambda d: [p for p in BASE if p.startswith(d + "/")], {p.split("/")[0] for p in BASE}
    )


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("tests/test_ops.py", "test"),
        ("pkg/test_new.py", "test"),
        ("pkg/x_test.py", "test"),
        (".github/workflows/ci.yml", "test"),
        ("conftest.py", "configuration"),
        ("pkg/conftest.py", "configuration"),
        ("pyproject.toml", "configuration"),
        ("sitecustomize.py", "configuration"),
        ("x.pth", "configuration"),
        ("pkg/mod.so", "configuration"),
        ("pytest.py", "shadows a module"),
        ("_pytest/__init__.py", "shadows a module"),
        ("json.py", "shadows a module"),
        ("hmac/__init__.py", "shadows a module"),
        ('we"ird.py', "strange name"),
        ("line\nbreak.py", "strange name"),
    ],
)
def test_dropped_paths(path: str, reason: str) -> None:
    result = run(Entry(path, "file", b"evil\n"), Entry("ops.py", "file", b"y\n"))
    assert result.dropped == (f"{path!r}: {reason}",)
    assert result.patch.startswith(b"diff --git a/ops.py b/ops.py\n") and result.patch.count(b"diff --git") == 1


@pytest.mark.parametrize("kind", ["symlink", "other", "too_big"])
def test_dropped_kinds(kind: str) -> None:
    result = run(Entry("ops.py", kind))
    assert result.patch == b"" and len(result.dropped) == 1


def test_binaries_are_dropped_and_a_repository_may_own_a_stdlib_name() -> None:
    result = run(Entry("ops.py", "file", b"\0"), Entry("token.py", "file", b"new\n"))
    assert result.dropped == ("'ops.py': binary",)
    assert b"a/token.py" in result.patch


def test_untouched_copies_leave_no_trace() -> None:
    assert run(Entry("ops.py", "file", b"x\n"), Entry("ops.py~", "deleted")) == FilteredPatch(b"")


def test_a_removed_directory_is_its_files() -> None:
    result = run(Entry("data", "deleted"))
    assert result.patch.count(b"deleted file mode") == 2
    assert b"a/data/deep/two.txt" in result.patch and b"a/data/one.txt" in result.patch


def test_a_replaced_directory_hides_what_was_below_it() -> None:
    result = run(Entry("data", "opaque"), Entry("data/one.txt", "file", b"1\n"), Entry("data/new.txt", "file", b"n\n"))
    assert result.patch.count(b"deleted file mode") == 1 and b"+++ b/data/new.txt" in result.patch
    assert b"data/one.txt" not in result.patch


def test_an_oversized_patch_is_refused_whole() -> None:
    result = run(Entry("ops.py", "file", b"line\n" * (MAX_PATCH_BYTES // 5)))
    assert result.patch == b"" and "more than" in result.dropped[0]
