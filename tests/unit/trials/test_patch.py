"""Our patches are git's: applied by `git apply` and by our own reader they give the same tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from producers.trials.verifier.patch import FileChange, PatchError, apply_patch, make_patch

_LINES = st.lists(
    st.sampled_from(["a", "b", "  c", "", "-x", "+y", "@@ -1 +1 @@", "diff --git a/f b/f", "\r", "é"]), max_size=30
)
_TEXT = st.builds(
    lambda lines, end: ("\n".join(lines) + ("\n" if end and lines else "")).encode(), _LINES, st.booleans()
)


def _git_apply(directory: Path, files: dict[str, bytes], patch: bytes) -> dict[str, bytes]:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    subprocess.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        cwd=directory,
        input=patch,
        check=True,
        env={"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(directory.parent), "HOME": str(directory)},
    )
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=_TEXT, after=_TEXT)
def test_a_change_survives_git_and_our_reader(
    before: bytes, after: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    patch = make_patch([FileChange("f.txt", before, after)])
    assert (patch == b"") == (before == after)
    if patch:
        directory = tmp_path_factory.mktemp("apply")
        assert _git_apply(directory, {"f.txt": before}, patch) == {"f.txt": after}
        assert apply_patch(patch, {"f.txt": before}.get) == {"f.txt": (after, False)}


def test_new_deleted_and_spaced_files(tmp_path: Path) -> None:
    base = {"old.py": b"x\n", "with space.py": b"1\n2\n3\n", "empty_gone.py": b""}
    patch = make_patch(
        [
            FileChange("old.py", b"x\n", None),
            FileChange("with space.py", base["with space.py"], b"1\n3\n"),
            FileChange("pkg/new.py", None, b"n", executable=True),
            FileChange("pkg/empty.py", None, b""),
            FileChange("empty_gone.py", b"", None),
        ]
    )
    expected = {"with space.py": b"1\n3\n", "pkg/new.py": b"n", "pkg/empty.py": b""}
    assert _git_apply(tmp_path, base, patch) == expected
    assert (tmp_path / "pkg/new.py").stat().st_mode & 0o100
    applied = apply_patch(patch, base.get)
    assert {k: v for k, (v, _) in applied.items() if v is not None} == expected
    assert applied["pkg/new.py"][1] and applied["old.py"][0] is None


def test_a_large_rewrite_is_one_hunk_and_applies() -> None:
    before = b"".join(b"%d\n" % i for i in range(3000))
    after = b"".join(b"%d\n" % (i * 7 % 3001) for i in range(3000))
    patch = make_patch([FileChange("big.txt", before, after)])
    assert apply_patch(patch, {"big.txt": before}.get)["big.txt"][0] == after


def test_a_patch_that_does_not_fit_is_refused() -> None:
    patch = make_patch([FileChange("f", b"a\nb\n", b"a\nc\n")])
    with pytest.raises(PatchError, match="line 2 is not what"):
        apply_patch(patch, {"f": b"a\nB\n"}.get)
    with pytest.raises(PatchError, match="does not exist"):
        apply_patch(patch, {}.get)
    with pytest.raises(PatchError, match="does not begin"):
        apply_patch(b"--- a/f\n+++ b/f\n", {}.get)
    assert apply_patch(b"", {}.get) == {}
