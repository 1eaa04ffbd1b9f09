"""Git patches, made from an overlay's changes and applied again, without git and without the agent's `.git`.

The format is what `git apply` reads (git-diff(1), "Generating patch text"): text files, three lines of context, no
renames. The same change always gives the same bytes. Pure: no I/O but through `read_base`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

CONTEXT = 3
#: Beyond this many line pairs a file's middle is replaced whole instead of being compared line by line.
_MAX_COMPARED_PAIRS = 4_000_000
_NO_NEWLINE = b"\\ No newline at end of file\n"
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_HEADER = re.compile(rb"(?m)^diff --git ")


class PatchError(ValueError):
    """A patch that does not fit, or is none."""


@dataclass(frozen=True)
class FileChange:
    """One file before and after; None: it does not exist. `executable` matters for new files only."""

    path: str
    before: bytes | None
    after: bytes | None
    executable: bool = False


def is_text(data: bytes | None) -> bool:
    """As git sees it: no NUL byte."""
    return data is None or b"\0" not in data


def make_patch(changes: Iterable[FileChange]) -> bytes:
    """The patch of text changes, in path order. Unchanged files leave no trace."""
    ordered = sorted(changes, key=lambda c: c.path)
    return b"".join(_file_patch(c) for c in ordered if c.before != c.after)


def _file_patch(change: FileChange) -> bytes:
    path = change.path.encode()
    mode = b"100755" if change.executable else b"100644"
    out = [b"diff --git a/%s b/%s\n" % (path, path)]
    if change.before is None:
        out.append(b"new file mode %s\n" % mode)
    elif change.after is None:
        out.append(b"deleted file mode 100644\n")
    hunks = _hunks(_lines(change.before or b""), _lines(change.after or b""))
    if hunks:
        tab = b"\t" if b" " in path else b""  # where a name with spaces ends
        out.append(b"--- /dev/null\n" if change.before is None else b"--- a/%s%s\n" % (path, tab))
        out.append(b"+++ /dev/null\n" if change.after is None else b"+++ b/%s%s\n" % (path, tab))
    return b"".join(out + hunks)


def _lines(data: bytes) -> list[bytes]:
    """Lines with their ends; only a line feed ends one."""
    lines = data.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def _hunks(before: list[bytes], after: list[bytes]) -> list[bytes]:
    out = []
    for group in _grouped(_opcodes(before, after)):
        (_, a0, _, b0, _), (_, _, a1, _, b1) = group[0], group[-1]
        out.append(b"@@ -%s +%s @@\n" % (_range(a0, a1), _range(b0, b1)))
        for tag, i0, i1, j0, j1 in group:
            if tag == "equal":
                out += [_line(b" ", line) for line in before[i0:i1]]
            else:
                out += [_line(b"-", line) for line in before[i0:i1]]
                out += [_line(b"+", line) for line in after[j0:j1]]
    return out


def _range(start: int, stop: int) -> bytes:
    length = stop - start
    if length == 1:
        return b"%d" % (start + 1)
    return b"%d,%d" % (start + 1 if length else start, length)


def _line(sign: bytes, line: bytes) -> bytes:
    return sign + line if line.endswith(b"\n") else sign + line + b"\n" + _NO_NEWLINE


Opcode = tuple[str, int, int, int, int]


def _opcodes(before: list[bytes], after: list[bytes]) -> list[Opcode]:
    """Edit operations: the common head and tail are cut off first, so that the rest is small."""
    shortest = min(len(before), len(after))
    head = 0
    while head < shortest and before[head] == after[head]:
        head += 1
    tail = 0
    while tail < shortest - head and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    a, b = before[head : len(before) - tail], after[head : len(after) - tail]
    out: list[Opcode] = [("equal", 0, head, 0, head)] if head else []
    if len(a) * len(b) > _MAX_COMPARED_PAIRS:
        middle: list[Opcode] = [("replace", 0, len(a), 0, len(b))]
    else:
        middle = list(difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes())
    out += [(tag, i0 + head, i1 + head, j0 + head, j1 + head) for tag, i0, i1, j0, j1 in middle]
    if tail:
        out.append(("equal", len(before) - tail, len(before), len(after) - tail, len(after)))
    return out


def _grouped(opcodes: list[Opcode]) -> list[list[Opcode]]:
    """Hunks: changes with up to CONTEXT lines around them; longer stretches without change separate them."""
    groups: list[list[Opcode]] = []
    current: list[Opcode] = []
    last = len(opcodes) - 1
    for index, (tag, i0, i1, j0, j1) in enumerate(opcodes):
        if tag != "equal":
            current.append((tag, i0, i1, j0, j1))
            continue
        if index == 0:
            cut = max(0, i1 - i0 - CONTEXT)
            current.append((tag, i0 + cut, i1, j0 + cut, j1))
        elif index == last:
            keep = min(i1 - i0, CONTEXT)
            current.append((tag, i0, i0 + keep, j0, j0 + keep))
        elif i1 - i0 > 2 * CONTEXT:
            current.append((tag, i0, i0 + CONTEXT, j0, j0 + CONTEXT))
            groups.append(current)
            current = [(tag, i1 - CONTEXT, i1, j1 - CONTEXT, j1)]
        else:
            current.append((tag, i0, i1, j0, j1))
    if any(op[0] != "equal" for op in current):
        groups.append(current)
    return groups


def apply_patch(patch: bytes, read_base: Callable[[str], bytes | None]) -> dict[str, tuple[bytes | None, bool]]:
    """Path -> (new content or None, executable) of every file a patch of `make_patch` touches.

    Strict: every context line must be where the patch says. Raises PatchError.
    """
    out: dict[str, tuple[bytes | None, bool]] = {}
    for section in _sections(patch):
        path, content, executable = _apply_file(section, read_base)
        out[path] = (content, executable)
    return out


def _sections(patch: bytes) -> list[bytes]:
    # A context, removed or added line begins with its sign, so no content line matches the header.
    starts = [m.start() for m in _HEADER.finditer(patch)]
    if patch.strip() and (not starts or patch[: starts[0]].strip()):
        raise PatchError("the patch does not begin with 'diff --git'")
    return [patch[a:b] for a, b in zip(starts, [*starts[1:], len(patch)], strict=False)]


def _apply_file(section: bytes, read_base: Callable[[str], bytes | None]) -> tuple[str, bytes | None, bool]:
    lines = _lines(section)
    names = lines[0].removeprefix(b"diff --git a/").rstrip(b"\n")
    half = (len(names) - 3) // 2
    raw = names[:half]
    if names != raw + b" b/" + raw:
        raise PatchError(f"renames and quoted names are not understood: {names!r}")
    path = raw.decode()
    new = any(x.startswith(b"new file mode ") for x in lines[1:3])
    deleted = any(x.startswith(b"deleted file mode ") for x in lines[1:3])
    base = read_base(path)
    if new == (base is not None):
        raise PatchError(f"{path}: {'exists already' if new else 'does not exist in the base tree'}")
    hunk_start = next((i for i, x in enumerate(lines) if x.startswith(b"@@ ")), len(lines))
    content = _apply_hunks(path, _lines(base or b""), lines[hunk_start:])
    if deleted:
        if content:
            raise PatchError(f"{path}: is deleted but content is left")
        return path, None, False
    return path, content, new and lines[1].startswith(b"new file mode 100755")


def _apply_hunks(path: str, base: list[bytes], lines: list[bytes]) -> bytes:
    out: list[bytes] = []
    position = index = 0
    while index < len(lines):
        match = _HUNK.match(lines[index])
        if match is None:
            raise PatchError(f"{path}: expected a hunk, found {lines[index][:60]!r}")
        start, length = int(match[1]), int(match[2] or 1)
        begin = start - 1 if length else start
        if begin < position or begin > len(base):
            raise PatchError(f"{path}: hunks are out of order or past the end")
        out += base[position:begin]
        position, index = begin, index + 1
        while index < len(lines) and not lines[index].startswith(b"@@ "):
            sign, line = lines[index][:1], lines[index][1:]
            if index + 1 < len(lines) and lines[index + 1] == _NO_NEWLINE:
                line, index = line[:-1], index + 1
            if sign in b" -":
                if position >= len(base) or base[position] != line:
                    raise PatchError(f"{path}: line {position + 1} is not what the patch expects")
                position += 1
            if sign in b" +":
                out.append(line)
            index += 1
    return b"".join(out + base[position:])
