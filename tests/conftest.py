"""Fixtures shared by every test: a real Kafka broker, settings with topics of their own, a data directory.

The broker is started once per session on a free port; ROLLSTREAM_TEST_BOOTSTRAP=host:port uses a running one instead.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.kafka import drop_topics, ensure_topics, warm_up
from infra.local.kafka import start_kafka, stop_kafka
from infra.local.ports import free_port
from infra.settings import DataSection, KafkaSection, Settings

BOOTSTRAP_VARIABLE = "ROLLSTREAM_TEST_BOOTSTRAP"
NUM_PARTITIONS = 2


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a Kafka broker."""
    if running := os.environ.get(BOOTSTRAP_VARIABLE):
        yield running
        return
    settings = Settings(
        data=DataSection(dir=str(tmp_path_factory.mktemp("broker"))), kafka=KafkaSection(port=free_port())
    )
    record = start_kafka(settings)
    try:
        warm_up(settings)
        yield f"127.0.0.1:{record.port}"
    finally:
        stop_kafka(settings, record)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """An empty data directory."""
    path = tmp_path / "data"
    path.mkdir()
    return path


@pytest.fixture
def kafka_settings(broker: str, data_dir: Path) -> Iterator[Settings]:
    """Settings with the broker, a topic prefix and a data directory of the test's own; the topics exist."""
    settings = replace(
        Settings(),
        data=DataSection(dir=str(data_dir)),
        kafka=KafkaSection(bootstrap=broker, topic_prefix=f"t{uuid.uuid4().hex[:10]}-", partitions=NUM_PARTITIONS),
    )
    ensure_topics(settings)
    yield settings
    drop_topics(settings)
