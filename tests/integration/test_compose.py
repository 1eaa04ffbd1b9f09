"""`infra/compose.yaml` on a real Docker engine: Kafka comes up healthy from a locally built image and passes our tests.

Run by `make test-compose`; needs root unless a Docker engine already runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.kafka import EventWriter, end_offsets, ensure_topics, warm_up
from infra.local import kafka_image
from infra.local.ports import free_port, listener_of
from infra.local.stack import stack_status
from infra.settings import ClickHouseSection, KafkaSection, SchemaRegistrySection, Settings
from schemas.events import TaskRegistered
from schemas.examples_gen import example_event
from tests.integration.compose.engine import DockerMissingError, base_rootfs, call, docker_engine

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "infra" / "compose.yaml"


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a working Docker engine with compose v2."""
    try:
        with docker_engine(tmp_path_factory.mktemp("docker")) as env:
            yield env
    except DockerMissingError as exc:
        pytest.skip(str(exc))


@pytest.fixture(scope="module")
def kafka_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def project(docker: dict[str, str], kafka_port: int) -> dict[str, str]:
    """The environment of one compose project of the test's own, with the locally built image."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in docker.items():
            patch.setenv(name, value)
        image = kafka_image.build_image(kafka_image.import_base(base_rootfs()))
    return {
        **docker,
        "COMPOSE_PROJECT_NAME": f"rollstream-test-{uuid.uuid4().hex[:8]}",
        "COMPOSE_FILE": str(COMPOSE_FILE),
        "KAFKA_IMAGE": image,
        "KAFKA_PORT": str(kafka_port),
    }


@pytest.fixture(scope="module")
def compose_kafka(project: dict[str, str], kafka_port: int) -> Iterator[Settings]:
    """Settings with the broker of a compose project, which is up and healthy."""
    try:
        call(["docker", "compose", "up", "--wait", "--wait-timeout", "120", "kafka"], env=project)
        yield Settings(kafka=KafkaSection(bootstrap=f"127.0.0.1:{kafka_port}", partitions=2))
    finally:
        call(["docker", "compose", "down", "--volumes", "--timeout", "20"], env=project)


def full_config(env: dict[str, str]) -> dict[str, Any]:
    arguments = ["--profile", "*", "config", "--format", "json"]
    loaded: dict[str, Any] = json.loads(call(["docker", "compose", "-f", COMPOSE_FILE, *arguments], env=env))
    return loaded


def test_compose_accepts_the_full_file(docker: dict[str, str]) -> None:
    services = full_config(docker)["services"]
    assert set(services) == {"kafka", "clickhouse", "schema-registry", "grafana", "kafka-ui"}
    for name, service in services.items():
        assert "healthcheck" in service, name
        assert all(port["host_ip"] == "127.0.0.1" for port in service["ports"]), f"{name} is not on loopback only"


def test_ports_are_those_of_the_local_stack(docker: dict[str, str]) -> None:
    services = full_config(docker)["services"]
    published = {name: int(service["ports"][0]["published"]) for name, service in services.items()}
    assert published["kafka"] == KafkaSection().port
    assert published["clickhouse"] == ClickHouseSection().port
    assert len(set(published.values())) == len(published)
    assert SchemaRegistrySection().url == ""


def test_the_broker_is_healthy_and_takes_events(compose_kafka: Settings) -> None:
    created = ensure_topics(compose_kafka)
    assert "model-calls" in created
    warm_up(compose_kafka)
    writer = EventWriter(compose_kafka)
    for _ in range(100):
        writer.write(example_event(TaskRegistered))
    writer.flush()
    assert end_offsets(compose_kafka, ("tasks",))["tasks", 0] == 100
    kafka, _ = stack_status(compose_kafka)
    assert kafka.ready and not kafka.managed and kafka.process is None


def test_data_outlives_the_container(compose_kafka: Settings, project: dict[str, str]) -> None:
    before = end_offsets(compose_kafka, ("schemas",))["schemas", 0]
    assert before > 0
    call(["docker", "compose", "rm", "--stop", "--force", "kafka"], env=project)
    call(["docker", "compose", "up", "--wait", "--wait-timeout", "120", "kafka"], env=project)
    warm_up(compose_kafka)
    assert end_offsets(compose_kafka, ("schemas",))["schemas", 0] == before


def test_nothing_listens_beyond_loopback(compose_kafka: Settings, kafka_port: int) -> None:
    assert listener_of(kafka_port) is not None
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    addresses = {line.split()[1].split(":")[0] for line in lines if line.split()[1].endswith(f":{kafka_port:04X}")}
    assert "00000000" not in addresses


SHORT_RUN = "tests/integration/test_loop.py::test_a_short_run_ends_and_the_log_proves_it"


@pytest.mark.parametrize("suite", ["tests/integration/test_runtime.py", SHORT_RUN])
def test_the_kafka_tests_and_a_short_run_pass_against_it(compose_kafka: Settings, suite: str) -> None:
    """With `kafka.bootstrap` set to the broker in the container."""
    env = {**os.environ, "ROLLSTREAM_TEST_BOOTSTRAP": compose_kafka.kafka.bootstrap}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        suite,
    ]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def test_an_external_kafka_is_not_started_or_stopped(compose_kafka: Settings, tmp_path: Path) -> None:
    from infra.local.stack import down

    settings = replace(compose_kafka, data=replace(compose_kafka.data, dir=str(tmp_path)))
    assert down(settings) == ()
    assert stack_status(settings)[0].ready
