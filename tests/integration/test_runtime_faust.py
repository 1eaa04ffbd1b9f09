"""The Faust wrapper on a real broker: committed records only, dead letters, restart without loss."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infra.kafka import make_producer, topic_name
from infra.settings import Settings
from schemas.codec import HEADER_TYPE, UnknownSchemaError
from schemas.events import DeadLettered, RewardGraded
from streams.runtime.faust_app import (
    EventReader,
    FaustSetupError,
    event_topic,
    make_faust_app,
    security,
    serve_faust_app,
)
from tests.integration.test_runtime import CODEC, KafkaWorld, encode_newer, wait_for, write
from tests.unit.runtime.stages import make_grade, make_renewal

WANTED = frozenset({"RewardGraded"})


class Watcher:
    """A Faust service that counts grades, in a thread."""

    def __init__(self, settings: Settings, instance: int = 0) -> None:
        self.seen: Counter[str] = Counter()
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._settings, self._instance = settings, instance
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        app = make_faust_app(self._settings, "watcher", self._instance)
        reader = EventReader(self._settings, "watcher", WANTED)

        async def watch(stream: Any) -> None:
            async for event in reader.events(stream):
                assert isinstance(event, RewardGraded)
                self.seen[event.trial_id] += 1

        app.agent(event_topic(app, self._settings, "rewards", "trial-stages"), name="watch")(watch)
        try:
            serve_faust_app(app, self.stop)
        except BaseException as exc:
            self.error = exc

    def close(self) -> None:
        self.stop.set()
        self.thread.join(30)
        assert not self.thread.is_alive()


def write_aborted(settings: Settings) -> None:
    """A grade in a transaction that is aborted."""
    producer = make_producer(settings, transactional_id="aborter")
    producer.init_transactions(10)
    producer.begin_transaction()
    event = make_grade(99)
    headers: list[tuple[str, bytes]] = [(HEADER_TYPE, b"RewardGraded")]
    producer.produce(topic_name(settings, event.TOPIC), event.key, CODEC.encode(event), headers=headers)
    producer.flush(10)
    producer.abort_transaction(10)


def test_reads_committed_events_and_resumes(kafka_settings: Settings) -> None:
    world = KafkaWorld(kafka_settings)
    write(world, *(make_grade(n) for n in range(10)), make_renewal(0))
    write_aborted(kafka_settings)
    world.produce("rewards", b"trial-0", b"garbage", ((HEADER_TYPE, b"RewardGraded"),))
    first = Watcher(kafka_settings)
    wait_for(lambda: len(first.seen) == 10 or first.error is not None, "ten grades")
    wait_for(lambda: len(world.read("dead-letters")) == 1, "a dead letter")
    first.close()
    assert first.error is None
    assert "trial-99" not in first.seen
    letter = CODEC.decode(world.read("dead-letters")[0].value or b"")
    assert isinstance(letter, DeadLettered)
    assert (letter.original_value, letter.service) == (b"garbage", "watcher")

    write(world, *(make_grade(n) for n in range(10, 15)))
    second = Watcher(kafka_settings)
    wait_for(lambda: {f"trial-{n}" for n in range(10, 15)} <= set(second.seen), "what was written in between")
    second.close()
    assert second.error is None
    assert not set(second.seen) & {f"trial-{n}" for n in range(10)}, "committed offsets were kept"
    assert (Path(kafka_settings.data.dir) / "faust" / "watcher-0").is_dir()


def test_unknown_schema_crashes_the_service(kafka_settings: Settings) -> None:
    world = KafkaWorld(kafka_settings)
    watcher = Watcher(kafka_settings)
    world.produce("rewards", b"trial-1", encode_newer(1), ((HEADER_TYPE, b"RewardGraded"),))
    watcher.thread.join(40)
    assert isinstance(watcher.error, UnknownSchemaError)


def test_security_settings_are_translated() -> None:
    from faust.auth import SASLCredentials

    assert security({"socket.keepalive.enable": "true"}) == {}
    found = security(
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": "u",
            "sasl.password": "p",
        }
    )["broker_credentials"]
    assert isinstance(found, SASLCredentials)
    assert (found.username, found.password, found.mechanism.value, found.ssl_context) == (
        "u",
        "p",
        "SCRAM-SHA-512",
        None,
    )
    with_tls = security({"security.protocol": "sasl_ssl", "sasl.username": "u", "sasl.password": "p"})[
        "broker_credentials"
    ]
    assert with_tls.protocol.value == "SASL_SSL" and with_tls.ssl_context is not None
    with pytest.raises(FaustSetupError, match=r"sasl\.kerberos\.service\.name"):
        security({"sasl.kerberos.service.name": "kafka"})
    with pytest.raises(FaustSetupError, match="GSSAPI"):
        security({"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "GSSAPI"})
