"""The Confluent framing against a real Schema Registry, read back by clients that are not ours."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from infra.kafka import EventWriter, make_codec, make_consumer, topic_name
from infra.local.artifacts import cache_dir, fetch_artifacts, read_lock
from infra.local.java import find_java
from infra.local.ports import LOOPBACK, free_port
from infra.local.process import OwnedDirectoryLock, log_tail, spawn, stop_process
from infra.schema_registry import SchemaRegistry, SchemaRegistryError
from infra.settings import SchemaRegistrySection, Settings
from schemas.avro_types import load_schema
from schemas.base import EVENTS, Event
from schemas.codec import Codec, UnknownSchemaError
from schemas.events import RewardGraded
from schemas.examples_gen import example_event

LOCK = Path(__file__).parent / "apicurio.lock"
START_TIMEOUT_SEC = 90.0
MIN_JAVA = 21


def unpacked_registry() -> Path:
    """Apicurio's directory, fetched and unpacked once per user."""
    (archive,) = fetch_artifacts(read_lock(LOCK), "Apicurio Registry")
    home = cache_dir() / "apicurio" / archive.name.removesuffix(".tar.gz")
    if not home.exists():
        part = home.with_name(home.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        with tarfile.open(archive) as tar:
            tar.extractall(part, filter="data")
        part.rename(home)
    return home


@pytest.fixture(scope="module")
def registry_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a running registry's Confluent-compatible interface."""
    port, work = free_port(), tmp_path_factory.mktemp("registry")
    quarkus = {"host": LOOPBACK, "port": port, "management.host": LOOPBACK, "management.port": free_port()}
    options = [
        f"-Dquarkus.{name if name.startswith('management') else 'http.' + name}={value}"
        for name, value in quarkus.items()
    ]
    java = find_java(MIN_JAVA)
    flags = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    command = [java.executable, *flags, *options, "-jar", unpacked_registry() / "quarkus-run.jar"]
    with OwnedDirectoryLock(work, "registry") as lock:
        record, process = spawn(command, lock, log_path=work / "registry.log", port=port)
    url = f"http://{LOOPBACK}:{port}/apis/ccompat/v7"
    try:
        deadline = time.monotonic() + START_TIMEOUT_SEC
        while True:
            try:
                with urllib.request.urlopen(f"{url}/subjects", timeout=5):
                    break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log_tail(record.log)
                time.sleep(0.05)
        yield url
    finally:
        stop_process(record)


@pytest.fixture
def registry_settings(kafka_settings: Settings, registry_url: str) -> Settings:
    return replace(kafka_settings, schema_registry=SchemaRegistrySection(url=registry_url))


def read_values(settings: Settings, topic: str, num: int) -> list[bytes]:
    consumer = make_consumer(settings, group="registry-test")
    consumer.subscribe([topic_name(settings, topic)])
    values: list[bytes] = []
    deadline = time.monotonic() + 30
    try:
        while len(values) < num:
            assert time.monotonic() < deadline, f"{len(values)} of {num} records arrived"
            message = consumer.poll(0.2)
            if message is not None:
                assert message.error() is None
                values.append(message.value())
    finally:
        consumer.close()
    return values


def as_read_by_others(event: Event) -> dict[str, object]:
    """The event as another Avro reader shows it: lists, dicts, logical types as datetimes."""

    def convert(value: object) -> object:
        if isinstance(value, tuple):
            return [convert(item) for item in value]
        if hasattr(value, "__dataclass_fields__"):
            return {k: convert(v) for k, v in value.__dict__.items()}
        return value

    record = {name: convert(value) for name, value in event.__dict__.items()}
    for field in load_schema(type(event).__name__, type(event).VERSION)["fields"]:
        if isinstance(field["type"], dict) and field["type"].get("logicalType") == "timestamp-millis":
            record[field["name"]] = datetime.fromtimestamp(record[field["name"]] / 1000, tz=UTC)
    return record


def test_every_event_is_read_by_confluents_own_deserializer(registry_settings: Settings, registry_url: str) -> None:
    codec = make_codec(registry_settings)
    deserialize = AvroDeserializer(SchemaRegistryClient({"url": registry_url}))
    for cls in EVENTS.values():
        event = example_event(cls)
        data = codec.encode(event)
        assert data[0] == 0
        context = SerializationContext(topic_name(registry_settings, cls.TOPIC), MessageField.VALUE)
        assert deserialize(data, context) == as_read_by_others(event), cls.__name__
        assert make_codec(registry_settings).decode(data) == event


def test_events_on_a_topic_are_read_by_others(registry_settings: Settings, registry_url: str) -> None:
    """Several event types on one topic, by Confluent's deserializer and by ourselves."""
    writer = EventWriter(registry_settings)
    events = [example_event(cls) for cls in EVENTS.values() if cls.TOPIC == "trial-stages"]
    assert len({type(event) for event in events}) > 3
    for event in events:
        writer.write(event)
    writer.flush()
    values = read_values(registry_settings, "trial-stages", len(events))
    deserialize = AvroDeserializer(SchemaRegistryClient({"url": registry_url}))
    read = [deserialize(value, SerializationContext("any", MessageField.VALUE)) for value in values]
    expected = [as_read_by_others(event) for event in events]
    assert sorted(read, key=str) == sorted(expected, key=str)
    codec = make_codec(registry_settings)
    assert {codec.decode(value) for value in values} == set(events)


def test_kcat_reads_it(registry_settings: Settings, registry_url: str) -> None:
    kcat = shutil.which("kcat")
    if kcat is None:
        pytest.skip("kcat is not installed")
    if "Avro" not in subprocess.run([kcat, "-V"], capture_output=True, text=True, timeout=10, check=True).stdout:
        pytest.skip("this kcat is built without Avro support, as Debian's is; its own bootstrap.sh builds one with it")
    event = example_event(RewardGraded)
    assert isinstance(event, RewardGraded)
    writer = EventWriter(registry_settings)
    writer.write(event)
    writer.flush()
    topic = topic_name(registry_settings, "rewards")
    brokers = registry_settings.kafka.bootstrap
    options = ["-b", brokers, "-t", topic, "-C", "-e", "-q", "-o", "beginning", "-s", "value=avro", "-r", registry_url]
    done = subprocess.run([kcat, *options], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["trial_id"] == event.trial_id
    assert record["reward"] == event.reward


def test_a_registry_log_and_a_plain_log_read_alike(registry_settings: Settings) -> None:
    event = example_event(RewardGraded)
    both = make_codec(registry_settings)
    assert both.decode(Codec().encode(event)) == both.decode(both.encode(event)) == event


def test_subjects_name_topic_and_record(registry_settings: Settings, registry_url: str) -> None:
    make_codec(registry_settings).encode(example_event(RewardGraded))
    subject = f"{registry_settings.kafka.topic_prefix}rewards-rollstream.RewardGraded"
    assert subject in SchemaRegistryClient({"url": registry_url}).get_subjects()


def test_an_id_the_registry_does_not_know(registry_settings: Settings) -> None:
    data = b"\x00" + (987_654).to_bytes(4, "big") + b"\x00"
    with pytest.raises(UnknownSchemaError, match=r"schemas/ids/987654.*another registry"):
        make_codec(registry_settings).decode(data)


def test_an_incompatible_subject_is_refused_with_the_remedy(registry_url: str, registry_settings: Settings) -> None:
    registry = SchemaRegistry(registry_url)
    topic = registry_settings.kafka.topic_prefix + "clash"
    one = {"type": "record", "name": "Thing", "namespace": "x", "fields": [{"name": "a", "type": "string"}]}
    two = {"type": "record", "name": "Thing", "namespace": "x", "fields": [{"name": "a", "type": "long"}]}
    registry.id_of(topic, one)
    request = urllib.request.Request(
        f"{registry_url}/config/{registry.subject(topic, one)}",
        json.dumps({"compatibility": "BACKWARD"}).encode(),
        {"Content-Type": "application/json"},
        method="PUT",
    )
    with urllib.request.urlopen(request, timeout=10):
        pass
    with pytest.raises(SchemaRegistryError, match=r"HTTP 409.*kafka\.topic_prefix"):
        registry.id_of(topic, two)


def test_no_registry_there() -> None:
    with pytest.raises(SchemaRegistryError, match=r"no Schema Registry at .*refused.*unset schema_registry\.url"):
        SchemaRegistry(f"http://{LOOPBACK}:{free_port()}").schema_of(1)


def test_a_url_that_is_none() -> None:
    with pytest.raises(SchemaRegistryError, match=r"schema_registry\.url 'localhost:8081' is no http"):
        SchemaRegistry("localhost:8081")


class _SomethingElse(BaseHTTPRequestHandler):
    """A web server that is no registry; records the Authorization header."""

    seen: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers["Authorization"])
        found = self.path.startswith("/page")
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def other_server() -> Iterator[int]:
    server = HTTPServer((LOOPBACK, 0), _SomethingElse)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_another_web_server_is_no_registry(other_server: int) -> None:
    """Neither is taken for "the record is bad": that would send good records to the dead letters."""
    with pytest.raises(SchemaRegistryError, match=r"not a Schema Registry's.*ccompat"):
        SchemaRegistry(f"http://{LOOPBACK}:{other_server}/page").schema_of(1)
    with pytest.raises(SchemaRegistryError, match=r"HTTP 404.*check the path"):
        SchemaRegistry(f"http://{LOOPBACK}:{other_server}/elsewhere").schema_of(1)


def test_credentials_in_the_url_become_a_header(other_server: int) -> None:
    with pytest.raises(SchemaRegistryError) as caught:
        SchemaRegistry(f"http://user:p%40ss@{LOOPBACK}:{other_server}/").schema_of(1)
    assert _SomethingElse.seen[-1] == "Basic dXNlcjpwQHNz"
    assert "p%40ss" not in str(caught.value)
