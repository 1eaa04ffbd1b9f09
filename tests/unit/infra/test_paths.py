"""The layout of the data directory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from infra import paths
from infra.settings import DataSection, RunSection, Settings


def settings_at(directory: Path, run_id: str = "r1") -> Settings:
    return replace(Settings(), data=DataSection(dir=str(directory)), run=RunSection(id=run_id))


def test_layout(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    assert paths.policy_dir(settings, 3) == tmp_path / "policies" / "r1" / "v3"
    assert paths.checkpoint_dir(settings, 7) == tmp_path / "checkpoints" / "r1" / "step00007"
    assert paths.service_log(settings, "proxy", 1) == tmp_path / "logs" / "proxy-1.log"
    assert paths.service_file(settings, "proxy", 1) == tmp_path / "run" / "services" / "proxy-1.json"


def test_a_relative_directory_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths.kafka_dir(Settings()) == tmp_path / ".rollstream" / "kafka"


def test_directories_of_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.id is empty"):
        paths.policies_dir(settings_at(tmp_path, ""))


def test_the_socket_lies_in_the_data_directory_where_it_fits() -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        assert paths.proxy_socket_path(settings_at(Path(short)), 0) == Path(short) / "run" / "proxy-0.sock"


def test_a_long_directory_gets_a_short_private_socket_path(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    first, again, other = (paths.proxy_socket_path(settings_at(deep), n) for n in (0, 0, 1))
    assert first == again != other
    assert len(os.fsencode(first)) < paths.MAX_SOCKET_PATH_BYTES
    assert first.parent.stat().st_mode & 0o777 == 0o700
