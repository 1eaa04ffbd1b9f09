"""Faust on the system's broker, for low-rate, idempotent, at-least-once services (progress, health).

Not for anything that counts: Faust's exactly-once was measured to lose and double records after a kill. What is set
here so that Faust fits the rest: committed records only, every topic named explicitly, no web server, no topic of its
own for leader election, data under `data.dir`, and our codec with dead letters in front of the agents.

    app = make_faust_app(settings, "progress")
    reader = EventReader(settings, "progress", wanted=frozenset({"RunStarted"}))

    @app.agent(event_topic(app, settings, "runs", "steps"))
    async def watch(stream):
        async for event in reader.events(stream):
            ...

    serve_faust_app(app, stop)
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import structlog
import uvloop

from infra.kafka import EventWriter, bootstrap_servers, check_cluster, make_codec, topic_name
from infra.paths import data_dir
from infra.settings import Settings
from schemas.base import Event
from schemas.codec import CodecError, UnknownSchemaError
from schemas.topics import CATALOGUE, MAX_MESSAGE_BYTES
from streams.runtime.kafka_log import read_writer_schemas
from streams.runtime.metrics import LoopMetrics
from streams.runtime.step import PoisonError, Record, make_dead_letter

if TYPE_CHECKING:
    import faust

log = structlog.get_logger()


class FaustSetupError(ValueError):
    """A setting that Faust's transport cannot follow: names the key and the remedy."""


def make_faust_app(settings: Settings, name: str, instance: int = 0, **conf: Any) -> faust.App:
    """A Faust app on the configured cluster; `conf` overrides Faust's own settings.

    Raises KafkaUnavailableError when the cluster does not answer, FaustSetupError when `kafka.client` holds a security
    setting that aiokafka has no counterpart for.
    """
    from streams.runtime.faust_transport import CommittedApp

    check_cluster(settings)
    datadir = data_dir(settings) / "faust" / f"{name}-{instance}"
    (datadir / "v1" / "tables").mkdir(parents=True, exist_ok=True)  # Faust makes no parents
    return CommittedApp(
        topic_name(settings, name),
        broker=[f"aiokafka://{server}" for server in bootstrap_servers(settings).split(",")],
        **security(settings.kafka.client),
        **{
            # A failing agent stops the service instead of being restarted after the event it failed on.
            "agent_supervisor": "mode.supervisors:CrashingSupervisor",
            "stream_ack_exceptions": False,
            "autodiscover": False,
            "broker_client_id": f"{name}-{instance}",
            "broker_commit_interval": 1.0,
            "broker_session_timeout": 10.0,
            "broker_request_timeout": 30.0,
            "broker_heartbeat_interval": 2.0,
            "consumer_auto_offset_reset": "earliest",
            "consumer_max_fetch_size": MAX_MESSAGE_BYTES,
            "datadir": datadir,
            "key_serializer": "raw",
            "value_serializer": "raw",
            "processing_guarantee": "at_least_once",
            "store": "memory://",
            "topic_disable_leader": True,
            "topic_partitions": settings.kafka.partitions,
            "topic_replication_factor": settings.kafka.replication,
            "web_enabled": False,
            "worker_redirect_stdouts": False,
            **conf,
        },
    )


def event_topic(app: faust.App, settings: Settings, *names: str) -> Any:
    """A channel over catalogue topics, raw bytes: decode with `EventReader`. KeyError names an unknown topic."""
    known = {topic.name for topic in CATALOGUE}
    for name in names:
        if name not in known:
            raise KeyError(f"topic {name!r} is not in the catalogue; known: {', '.join(sorted(known))}")
    return app.topic(
        *(topic_name(settings, name) for name in names),
        key_type=bytes,
        value_type=bytes,
        key_serializer="raw",
        value_serializer="raw",
        allow_empty=True,
    )


class EventReader:
    """Decodes a Faust stream into events, as `streams.runtime.step.step` does for the transactional loop."""

    def __init__(self, settings: Settings, service: str, wanted: frozenset[str], instance: int = 0) -> None:
        self._settings, self._service, self._wanted = settings, service, wanted
        self._names = {topic_name(settings, topic.name): topic.name for topic in CATALOGUE}
        self._codec = make_codec(settings)
        self._writer = EventWriter(settings)
        self._metrics = LoopMetrics(service, instance)
        self._learn()

    def _learn(self) -> None:
        for schema in read_writer_schemas(self._settings):
            try:
                self._codec.add_schema(schema)
            except CodecError as exc:  # an event type of a newer version
                log.debug("schema_not_known_here", detail=str(exc))

    async def events(self, stream: Any) -> AsyncIterator[Event]:
        """The wanted events. What cannot be decoded is in `dead-letters` before its offset is committed.

        Raises UnknownSchemaError for a wanted event in a schema that nobody published.
        """
        async for message in stream.events():
            record = self._record(message.message)
            self._metrics.count_in(record.topic, 1)
            event = await self._decode(record)
            if event is not None:
                yield event

    def _record(self, message: Any) -> Record:
        headers = message.headers.items() if isinstance(message.headers, Mapping) else message.headers or ()
        return Record(
            self._names[message.topic],
            message.partition,
            message.offset,
            message.key,
            message.value,
            tuple((str(name), value or b"") for name, value in headers),
            int(message.timestamp * 1000) if message.timestamp else 0,
        )

    async def _decode(self, record: Record) -> Event | None:
        kind = record.event_type
        if record.value is None or (kind is not None and kind not in self._wanted):
            return None
        try:
            return self._wanted_only(self._codec.decode(record.value))
        except UnknownSchemaError as exc:
            await asyncio.to_thread(self._learn)
            try:
                return self._wanted_only(self._codec.decode(record.value))
            except UnknownSchemaError:
                if kind is not None:
                    raise
                await self.write_dead_letter(record, exc)
        except CodecError as exc:
            await self.write_dead_letter(record, exc)
        return None

    def _wanted_only(self, event: Event) -> Event | None:
        return event if type(event).__name__ in self._wanted else None

    async def write_dead_letter(self, record: Record, error: CodecError | PoisonError) -> None:
        """Write and wait until it is acknowledged. Raises DeliveryError otherwise: then the service must stop."""
        self._metrics.dead_letters.inc()
        log.warning("dead_letter", topic=record.topic, offset=record.offset, detail=str(error))
        await self.write(make_dead_letter(self._service, record, error))

    async def write(self, event: Event) -> None:
        """Write an event and wait until it is acknowledged."""
        self._writer.write(event)
        await asyncio.to_thread(self._writer.flush)
        self._metrics.count_out(event.TOPIC)


def serve_faust_app(app: faust.App, stop: threading.Event) -> None:
    """Run the app in this thread until `stop` is set; then it commits and closes. Raises what made it crash."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_faust_app(app, stop))


async def run_faust_app(app: faust.App, stop: threading.Event) -> None:
    """The same within a running event loop."""
    app.loop = asyncio.get_running_loop()
    app.finalize()
    try:
        await app.start()
        while not stop.is_set() and not app.crashed:
            await asyncio.to_thread(stop.wait, 0.25)
    finally:
        try:
            await app.stop()
        except BaseException as exc:  # a crashed app cancels its own tasks while it stops; what crashed it comes first
            if app.crash_reason is None:
                raise
            log.debug("faust_stop", detail=repr(exc))
        if app.crash_reason is not None:
            raise app.crash_reason


def security(client: Mapping[str, str]) -> dict[str, Any]:
    """Faust's `broker_credentials` from librdkafka properties.

    Understands security.protocol, sasl.mechanism(s), sasl.username, sasl.password, ssl.ca.location,
    ssl.certificate.location, ssl.key.location, ssl.key.password and ssl.endpoint.identification.algorithm; properties
    that are not about security do not concern Faust. Raises FaustSetupError for any other of sasl.* and ssl.*.
    """
    from faust.auth import SASLCredentials, SSLCredentials

    known = {
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
        "ssl.ca.location",
        "ssl.certificate.location",
        "ssl.key.location",
        "ssl.key.password",
        "ssl.endpoint.identification.algorithm",
    }
    for key in client:
        if key.startswith(("sasl.", "ssl.")) and key not in known:
            raise FaustSetupError(
                f"kafka.client {key!r} has no counterpart in Faust's transport; use one of {', '.join(sorted(known))}"
            )
    protocol = client.get("security.protocol", "plaintext").upper()
    if protocol == "PLAINTEXT":
        return {}
    context = _ssl_context(client) if protocol.endswith("SSL") else None
    if protocol == "SSL":
        return {"broker_credentials": SSLCredentials(context)}
    if protocol not in ("SASL_PLAINTEXT", "SASL_SSL"):
        raise FaustSetupError(f"kafka.client security.protocol: {protocol!r} is none of PLAINTEXT, SSL, SASL_*")
    mechanism = client.get("sasl.mechanism") or client.get("sasl.mechanisms") or "PLAIN"
    if mechanism not in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        raise FaustSetupError(
            f"kafka.client sasl.mechanism: {mechanism!r} cannot be used with Faust; use PLAIN or SCRAM-SHA-256/512"
        )
    credentials = SASLCredentials(
        mechanism=mechanism,
        username=client.get("sasl.username"),
        password=client.get("sasl.password"),
        ssl_context=context,
    )
    return {"broker_credentials": credentials}


def _ssl_context(client: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=client.get("ssl.ca.location"))
    if client.get("ssl.endpoint.identification.algorithm", "https") == "none":
        context.check_hostname = False
    if certificate := client.get("ssl.certificate.location"):
        context.load_cert_chain(certificate, client.get("ssl.key.location"), client.get("ssl.key.password"))
    return context
