"""The grader's program: pytest, imported once and forked per grade. Runs inside a sandbox without any network."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from typing import Any

from producers.trials.verifier import patch as patches
from producers.trials.verifier import report_plugin

REPO = "/repo"
_INI = "[pytest]\n"
_PRIME = """import pytest

@pytest.mark.parametrize("x", [1])
def test_ok(x):
    assert x == 1

def test_bad():
    with pytest.raises(ValueError):
        int("x")
    assert [1] == [2]
"""


def warm(options: dict[str, Any]) -> dict[str, Any]:
    """Import pytest and run one small suite, so that what it imports late is there."""
    os.environ.update(options["env"] | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    import pytest

    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        with open("test_prime.py", "w") as file:
            file.write(_PRIME)
        ini = os.path.join(directory, "prime.ini")  # noqa: PTH118
        with open(ini, "w") as file:
            file.write(_INI)
        records: list[dict[str, Any]] = []
        plugin = report_plugin.make_plugin(records.append, {"test_prime.py::test_ok[1]", "test_prime.py::test_bad"})
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main(_arguments(ini, directory, True, ["test_prime.py"]), plugins=[plugin])
        outcomes = [r["outcome"] for r in records if r["event"] == "test" and r["when"] == "call"]
        if outcomes != ["passed", "failed"]:
            raise RuntimeError(f"the priming run of pytest went wrong: {records}")
        os.chdir("/")
    sys.modules.pop("test_prime", None)
    return {"pytest": pytest.__version__}


def _arguments(ini: str, root: str, no_conftest: bool, files: list[str]) -> list[str]:
    arguments = ["-c", ini, f"--rootdir={root}", "--import-mode=importlib", "-q", "--tb=line", "-p", "no:cacheprovider"]
    return [*arguments, *(["--noconftest"] if no_conftest else []), *files]


def run(request: dict[str, Any], blob: bytes, fds: list[int]) -> int:
    """Apply the patch, lay the hidden tests over the repository, run the required tests.

    `request`: key (hex), patch_size, hidden ([path, size] ...), required (node ids), no_conftest. `blob`: the patch,
    then the hidden files. `fds`: the report.
    """
    patch, position = blob[: request["patch_size"]], request["patch_size"]
    for path, (content, executable) in patches.apply_patch(patch, _read).items():
        _write(path, content, executable)
    for path, size in request["hidden"]:
        _write(path, blob[position : position + size], False)
        position += size
    ini = os.path.join(os.environ["TMPDIR"], "grader.ini")  # noqa: PTH118
    with open(ini, "w") as file:
        file.write(_INI)
    required = frozenset(request["required"])
    files = list(dict.fromkeys(i.split("::", 1)[0] for i in request["required"]))
    emit = report_plugin.make_emitter(fds[0], bytes.fromhex(request["key"]))
    emit({"event": "ready"})  # what goes wrong until here is ours; from here on it is the diff's
    plugin = report_plugin.make_plugin(emit, required)
    os.set_inheritable(fds[0], False)
    _forget_ourselves()
    import pytest

    # The standard library first, the repository next, installed packages last; pytest itself is loaded already.
    first = next((i for i, p in enumerate(sys.path) if p.endswith("site-packages")), len(sys.path))
    sys.path.insert(first, REPO)
    sys.dont_write_bytecode = True
    return int(pytest.main(_arguments(ini, REPO, request["no_conftest"], files), plugins=[plugin]))


def _forget_ourselves() -> None:
    """Leave no module of ours for the code under test to import by name."""
    for name in [n for n in sys.modules if n == "producers" or n.startswith("producers.")]:
        del sys.modules[name]
    sys.path[:] = [p for p in sys.path if not p.startswith("/host")]


def _read(path: str) -> bytes | None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _write(path: str, content: bytes | None, executable: bool) -> None:
    if path.startswith("/") or ".." in path.split("/"):
        raise patches.PatchError(f"{path}: leads out of the repository")
    if content is None:
        os.unlink(path)  # noqa: PTH108
        return
    directory = os.path.dirname(path)  # noqa: PTH120
    if directory:
        os.makedirs(directory, exist_ok=True)  # noqa: PTH103
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 (never write through a link)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755 if executable else 0o644), "wb") as file:
        file.write(content)
