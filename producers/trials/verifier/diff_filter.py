"""Which of an agent's changes reach the grader. Pure.

Dropped: tests and test configuration, what Python or pytest load by themselves, compiled files, links and special
files, binaries, and new modules that would shadow the standard library or the test runner. Measured against 19
tampering diffs this alone stops six of ten that a clean sandbox lets pass; the honest fix always passes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from producers.trials.sandboxes.collect import Entry
from producers.trials.verifier.patch import FileChange, is_text, make_patch

MAX_PATCH_BYTES = 900_000

_LOADED_BY_NAME = re.compile(
    r"(^|/)(conftest\.py|pytest\.ini|\.?pytest\.toml|tox\.ini|setup\.cfg|setup\.py|pyproject\.toml|noxfile\.py"
    r"|sitecustomize\.py|usercustomize\.py|Makefile|\.coveragerc|[^/]*\.(pth|so|pyc|pyd|egg-link))$"
)
_TEST_PATH = re.compile(
    r"(^|/)(tests?|testing|__pycache__|\.pytest_cache|\.git[^/]*|[^/]*\.(egg-info|dist-info))(/|$)"
    r"|(^|/)test_[^/]*\.py$|_test\.py$"
)
_STRANGE_NAME = re.compile(r'[\x00-\x1f"\\\x7f]')
_RUNNER_MODULES = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "py", "packaging", "attr", "pygments"})


@dataclass(frozen=True)
class FilteredPatch:
    """The patch that is graded, and what was left out: `path: reason`."""

    patch: bytes
    dropped: tuple[str, ...] = ()


def filter_changes(
    entries: Iterable[Entry],
    read_base: Callable[[str], bytes | None],
    list_base: Callable[[str], Collection[str]],
    base_top_level: Collection[str],
    truncated: bool = False,
) -> FilteredPatch:
    """Turn what an overlay collected into a patch.

    `read_base(path)`: content of a regular base file or None; `list_base(directory)`: base files below it;
    `base_top_level`: names at the base's root.
    """
    changes: dict[str, FileChange] = {}
    dropped = ["(more): too many changes"] if truncated else []
    for entry in _expand(entries, list_base):
        reason = _reason(entry, base_top_level)
        before = read_base(entry.path)
        if entry.kind == "deleted":
            if before is None:
                continue  # a whiteout of a directory or link was expanded, or there is nothing to delete
            change = FileChange(entry.path, before, None)
        else:
            change = FileChange(entry.path, before, entry.data, entry.kind == "executable")
        if not reason and not (is_text(before) and is_text(change.after)):
            reason = "binary"
        if reason:
            dropped.append(f"{entry.path!r}: {reason}")
        else:
            changes[entry.path] = change
    patch = make_patch(changes.values())
    if len(patch) > MAX_PATCH_BYTES:
        return FilteredPatch(b"", (f"(all): the patch has {len(patch)} bytes, more than {MAX_PATCH_BYTES}",))
    return FilteredPatch(patch, tuple(dropped))


def _expand(entries: Iterable[Entry], list_base: Callable[[str], Collection[str]]) -> list[Entry]:
    """Directories that were deleted or replaced become the base files that are gone with them."""
    listed = list(entries)
    present = {e.path for e in listed if e.kind != "opaque"}
    out = [e for e in listed if e.kind != "opaque"]
    for entry in listed:
        # A file in a directory's place hides what was below it as well.
        for path in list_base(entry.path):
            if path not in present:
                present.add(path)
                out.append(Entry(path, "deleted"))
    return sorted(out, key=lambda e: e.path)


def _reason(entry: Entry, base_top_level: Collection[str]) -> str:
    path = entry.path
    if entry.kind not in ("file", "executable", "deleted"):
        return entry.kind.replace("_", " ")
    if _STRANGE_NAME.search(path) or not path.isprintable():
        return "strange name"
    if _LOADED_BY_NAME.search(path):
        return "configuration"
    if _TEST_PATH.search(path):
        return "test"
    top = path.split("/", 1)[0].removesuffix(".py")
    known = {name.removesuffix(".py") for name in base_top_level}
    if top in _RUNNER_MODULES or (top in sys.stdlib_module_names and top not in known):
        return "shadows a module"
    return ""
