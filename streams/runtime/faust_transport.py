"""Faust's aiokafka transport, reading committed records only.

Faust reads uncommitted records unless it runs its own (unsafe) exactly-once. Our topics are written in transactions,
and an aborted step or trajectory must never be seen.
"""

from __future__ import annotations

from typing import Any

import faust
import faust.serializers.codecs  # registers "raw" before any topic is declared
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Transport


class CommittedThread(AIOKafkaConsumerThread):  # type: ignore[misc]
    """The thread that owns the aiokafka consumer."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = "read_committed"  # read by aiokafka when the consumer starts
        return consumer


class CommittedConsumer(Consumer):  # type: ignore[misc]
    """Faust's consumer with the thread above."""

    def _new_consumer_thread(self) -> CommittedThread:
        return CommittedThread(self, loop=self.loop, beacon=self.beacon)


class CommittedTransport(Transport):  # type: ignore[misc]
    """Faust's transport with the consumer above."""

    Consumer = CommittedConsumer


class CommittedApp(faust.App):  # type: ignore[misc]
    """Faust's app with the transport above."""

    def _new_transport(self) -> CommittedTransport:
        return CommittedTransport(self.conf.broker_consumer, self)
