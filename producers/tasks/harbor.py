"""Harbor task directories, read and written.

Layout of a task (Harbor's, schema 1.4):

    task.toml               schema_version, [task] name, [metadata], [verifier], [agent], [environment]
    instruction.md          what the agent is told, verbatim
    environment/Dockerfile  for container sandboxes; `environment/repo/` is the repository the agent works in
    tests/                  hidden tests, and test.sh which leaves the reward in /logs/verifier/reward.txt
    solution/               gold.patch and solve.sh

`[metadata]` carries what Harbor leaves free: `task_set`, and test ids in `fail_to_pass` and `pass_to_pass`. A
test id is a pytest node id relative to the repository root once `tests/` has been laid over `<repo>/tests/`,
e.g. `tests/test_ops.py::test_above_cup`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = "1.4"
#: Versions whose layout this module reads.
READABLE_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
DEFAULT_TIMEOUT_SEC = 600.0
#: Directories and files that running code leaves behind; no part of a task.
_IGNORED_PARTS = frozenset({"__pycache__", ".pytest_cache"})
_TASK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
#: Metadata keys that have fields of their own.
_TYPED_METADATA = ("task_set", "fail_to_pass", "pass_to_pass")


class TaskError(ValueError):
    """A task cannot be used. The message names the file, the field and the remedy."""

    def __init__(self, path: Path, what: str, remedy: str) -> None:
        super().__init__(f"{path}: {what}; {remedy}")


@dataclass(frozen=True)
class Task:
    """A task as its directory describes it. `task_id` is the directory's name."""

    task_id: str
    path: Path
    task_set: str
    instruction: str
    #: SHA-256 over the directory's files, hex (see `compute_digest`).
    digest: str
    #: Root file system of its sandbox: `host`, or an image reference.
    image: str = "host"
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    verifier_timeout_sec: float = DEFAULT_TIMEOUT_SEC
    agent_timeout_sec: float = DEFAULT_TIMEOUT_SEC
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def repo_dir(self) -> Path:
        """The repository the agent works in; may be absent for tasks that live in an image."""
        return self.path / "environment" / "repo"

    @property
    def tests_dir(self) -> Path:
        """Hidden tests: they enter only the grading sandbox."""
        return self.path / "tests"

    @property
    def gold_patch(self) -> Path:
        """The reference solution as a patch against the repository root (`patch -p1`); may be absent."""
        return self.path / "solution" / "gold.patch"


def task_files(path: Path) -> list[Path]:
    """The files that make up a task, ordered by their path relative to the task directory."""
    files = (p for p in path.rglob("*") if p.is_symlink() or p.is_file())
    kept = (p for p in files if _IGNORED_PARTS.isdisjoint(p.relative_to(path).parts))
    return sorted(kept, key=lambda p: p.relative_to(path).as_posix())


def compute_digest(path: Path) -> str:
    """SHA-256, hex, over (relative path, content) of every file; times, owners and location do not enter."""
    sha = hashlib.sha256()
    for file in task_files(path):
        content = b"\0link" + str(file.readlink()).encode() if file.is_symlink() else file.read_bytes()
        name = file.relative_to(path).as_posix().encode()
        sha.update(len(name).to_bytes(8, "little") + name + len(content).to_bytes(8, "little") + content)
    return sha.hexdigest()


def load_task(path: str | Path) -> Task:
    """Read and validate a task directory. Raises TaskError."""
    root = Path(path)
    config = _read_config(root)
    instruction = _read_instruction(root)
    _check_tests(root)
    metadata = _section(root, config, "metadata")
    environment = _section(root, config, "environment")
    fail_to_pass = _string_list(root, metadata, "fail_to_pass")
    pass_to_pass = _string_list(root, metadata, "pass_to_pass")
    _check_test_ids(root, fail_to_pass, pass_to_pass)
    return Task(
        task_id=_task_id(root),
        path=root,
        task_set=_string(root, metadata, "metadata", "task_set", "train"),
        instruction=instruction,
        digest=compute_digest(root),
        image=_string(root, environment, "environment", "docker_image", "host") or "host",
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        verifier_timeout_sec=_seconds(root, _section(root, config, "verifier"), "verifier"),
        agent_timeout_sec=_seconds(root, _section(root, config, "agent"), "agent"),
        metadata={k: _as_text(v) for k, v in metadata.items() if k not in _TYPED_METADATA},
    )


def load_tasks(source: str | Path) -> list[Task]:
    """The tasks of a directory (one task, or one per subdirectory) or of an index (.parquet), by task id.

    Raises TaskError when there is none, when one is invalid, when two have one id, and when a task of an
    index is no longer what the index says.
    """
    root = Path(source)
    if root.suffix == ".parquet":
        from producers.tasks.index import load_indexed_tasks

        tasks = load_indexed_tasks(root)
    elif not root.is_dir():
        raise TaskError(root, "no such task directory or index", "give a directory of Harbor tasks or a .parquet index")
    elif (root / "task.toml").exists():
        tasks = [load_task(root)]
    else:
        tasks = [load_task(p) for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")]
    if not tasks:
        raise TaskError(root, "holds no task", "a task is a subdirectory with task.toml, instruction.md and tests/")
    return sorted(tasks, key=lambda t: t.task_id)


def write_task(
    path: str | Path,
    *,
    task_set: str,
    instruction: str,
    repo: Mapping[str, str],
    tests: Mapping[str, str],
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    solution: Mapping[str, str] | None = None,
    dockerfile: str = "",
    image: str = "",
    verifier_timeout_sec: float = DEFAULT_TIMEOUT_SEC,
    agent_timeout_sec: float = DEFAULT_TIMEOUT_SEC,
    metadata: Mapping[str, str] | None = None,
    org: str = "rollstream",
) -> Task:
    """Write a task directory and read it back. `repo`, `tests`, `solution`: relative path -> content.

    An existing directory is replaced. Where `tests` has no test.sh, one is written that runs the listed ids.
    Raises TaskError when the result is no valid task.
    """
    root = Path(path)
    ids = [*fail_to_pass, *pass_to_pass]
    files: dict[str, str] = {
        "task.toml": _render_toml(
            f"{org}/{_task_id(root)}",
            {"task_set": task_set, "fail_to_pass": list(fail_to_pass), "pass_to_pass": list(pass_to_pass)}
            | dict(metadata or {}),
            {"verifier": verifier_timeout_sec, "agent": agent_timeout_sec},
            image,
        ),
        "instruction.md": instruction,
        "environment/Dockerfile": dockerfile or DOCKERFILE,
        "tests/test.sh": render_test_script(ids),
    }
    for folder, content in (("environment/repo", repo), ("tests", tests), ("solution", solution or {})):
        files |= {f"{folder}/{name}": text for name, text in content.items()}
    if root.exists():
        shutil.rmtree(root)
    for parent in {(root / name).parent for name in files}:
        parent.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name).write_bytes(text.encode())
        if name.endswith(".sh"):
            (root / name).chmod(0o755)
    return load_task(root)


#: Container image of a plain Python repository.
DOCKERFILE = """FROM python:3.12-slim
RUN pip install --no-cache-dir pytest
COPY repo /repo
WORKDIR /repo
"""


def render_test_script(test_ids: Sequence[str]) -> str:
    """tests/test.sh: lay the hidden tests over the repository, run the listed ones, write the reward."""
    chosen = " ".join(f"'{i}'" for i in test_ids)
    return (
        "#!/bin/sh\n"
        "mkdir -p /logs/verifier tests\n"
        'cp -r "$(dirname "$0")"/. tests/\n'
        f"if python3 -m pytest -q -p no:cacheprovider {chosen}; then reward=1; else reward=0; fi\n"
        "echo $reward > /logs/verifier/reward.txt\n"
    )


def _render_toml(name: str, metadata: Mapping[str, Any], timeouts: Mapping[str, float], image: str) -> str:
    # A JSON string or list of strings is a TOML one as well, as long as characters stay unescaped.
    def value(item: Any) -> str:
        return json.dumps(item, ensure_ascii=False).replace("\x7f", "\\u007f")

    lines = [
        f"schema_version = {value(SCHEMA_VERSION)}",
        "",
        "[task]",
        f"name = {value(name)}",
        "",
        "[metadata]",
    ]
    lines += [f"{value(key)} = {value(item)}" for key, item in metadata.items()]
    for section, seconds in timeouts.items():
        lines += ["", f"[{section}]", f"timeout_sec = {float(seconds)}"]
    lines += ["", "[environment]", "allow_internet = false"]
    if image:
        lines.append(f"docker_image = {value(image)}")
    return "\n".join(lines) + "\n"


def _read_config(root: Path) -> dict[str, Any]:
    file = root / "task.toml"
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise TaskError(file, "file not found", "a Harbor task directory has a task.toml at its root") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise TaskError(file, f"not valid TOML: {exc}", "correct the syntax at that place") from None
    version = config.get("schema_version", config.get("version", SCHEMA_VERSION))
    if version not in READABLE_VERSIONS:
        raise TaskError(file, f"schema_version is {version!r}", f"readable are {', '.join(READABLE_VERSIONS)}")
    return config


def _read_instruction(root: Path) -> str:
    file = root / "instruction.md"
    try:
        text = file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise TaskError(file, "file not found", "write what the agent is told into instruction.md") from None
    except UnicodeDecodeError as exc:
        raise TaskError(file, f"not valid UTF-8: {exc}", "save it as UTF-8") from None
    if not text.strip():
        raise TaskError(file, "is empty", "write what the agent is told into instruction.md")
    return text


def _check_tests(root: Path) -> None:
    tests = root / "tests"
    if not tests.is_dir():
        raise TaskError(tests, "the task has no tests", "add tests/test.sh and the hidden tests it runs")
    if not (tests / "test.sh").is_file():
        raise TaskError(tests / "test.sh", "file not found", "add the script that grades the task")


def _check_test_ids(root: Path, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]) -> None:
    both = sorted(set(fail_to_pass) & set(pass_to_pass))
    if both:
        remedy = "a test fails before the fix or passes before it: keep it in one list"
        raise TaskError(root / "task.toml", f"[metadata] {both[0]!r} is in fail_to_pass and in pass_to_pass", remedy)
    for name, ids in (("fail_to_pass", fail_to_pass), ("pass_to_pass", pass_to_pass)):
        for test_id in ids:
            file = test_id.split("::")[0]
            hidden = root / file  # ids begin with tests/, the folder they are laid over
            if not hidden.is_file() and not (root / "environment" / "repo" / file).is_file():
                remedy = "name a test in the task's tests/ (as tests/...) or in the repository"
                raise TaskError(root / "task.toml", f"[metadata] {name}: no file for {test_id!r}", remedy)


def _task_id(root: Path) -> str:
    name = root.resolve().name
    if not _TASK_ID.fullmatch(name):
        raise TaskError(root, f"{name!r} is no task id", "use at most 200 letters, digits, '.', '_', '-'")
    return name


def _section(root: Path, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, dict):
        raise TaskError(root / "task.toml", f"{name} is {section!r}", f"make it a table: [{name}]")
    return section


def _string(root: Path, section: Mapping[str, Any], where: str, name: str, default: str) -> str:
    value = section.get(name, default)
    if not isinstance(value, str):
        raise TaskError(root / "task.toml", f"[{where}] {name} is {value!r}", "make it a string")
    return value


def _string_list(root: Path, metadata: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = metadata.get(name, [])
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise TaskError(root / "task.toml", f"[metadata] {name} is {value!r}", "make it a list of pytest node ids")
    return tuple(value)


def _seconds(root: Path, section: Mapping[str, Any], where: str) -> float:
    value = section.get("timeout_sec", DEFAULT_TIMEOUT_SEC)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise TaskError(
            root / "task.toml", f"[{where}] timeout_sec is {value!r}", "make it a number of seconds above 0"
        )
    return float(value)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
