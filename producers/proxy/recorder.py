"""Writes the proxy's events and tells the event loop when Kafka has them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import structlog

from infra.kafka import DeliveryError, EventWriter, make_producer
from infra.settings import Settings
from schemas.base import Event

log = structlog.get_logger()

#: The poller wakes up this often when nothing happens, seconds.
_POLL_SEC = 0.2


class NotRecordedError(RuntimeError):
    """Kafka did not acknowledge the events of a call in time: nothing may be told to the caller as done."""


class Recorder:
    """One producer, polled by a thread of its own, so that an acknowledgement reaches its waiter at once."""

    def __init__(self, settings: Settings, ack_timeout_sec: float) -> None:
        self._timeout_sec = ack_timeout_sec
        overrides: dict[str, Any] = {"linger.ms": 1, "message.timeout.ms": max(1000, int(ack_timeout_sec * 1000))}
        producer = make_producer(settings, **overrides)
        self._writer = EventWriter(settings, producer=producer)
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="kafka-acks", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._stopping.is_set():
            self._writer.poll(_POLL_SEC)

    def write(self, events: Sequence[Event], traceparent: str | None = None) -> asyncio.Future[None]:
        """Queue events in order; the future ends when all are acknowledged, or with NotRecordedError."""
        done: asyncio.Future[None] = self._loop.create_future()
        left = len(events)
        if not left:
            done.set_result(None)
            return done

        def settle(error: Exception | None) -> None:
            nonlocal left
            left -= 1
            if done.done():
                return
            if error is not None:
                done.set_exception(NotRecordedError(f"Kafka did not take the call's record: {error}"))
            elif left == 0:
                done.set_result(None)

        def on_ack(error: Exception | None) -> None:
            try:
                self._loop.call_soon_threadsafe(settle, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                log.warning("acknowledgement after shutdown", error=str(error) if error else None)

        try:
            for event in events:
                self._writer.write(event, traceparent=traceparent, on_ack=on_ack)
        except DeliveryError as exc:
            if not done.done():
                done.set_exception(NotRecordedError(str(exc)))
        # Waiters may have given up; their failure was logged where it happened.
        done.add_done_callback(lambda f: f.cancelled() or f.exception())
        return done

    async def wait(self, done: asyncio.Future[None]) -> None:
        """Wait for acknowledgements. Raises NotRecordedError when they fail or take too long."""
        try:
            await asyncio.wait_for(asyncio.shield(done), self._timeout_sec + 5.0)
        except TimeoutError as exc:
            raise NotRecordedError(f"Kafka did not acknowledge the call within {self._timeout_sec:.0f} s") from exc

    async def close(self) -> None:
        """Flush and stop the thread. Raises DeliveryError when events are left."""
        try:
            await asyncio.to_thread(self._writer.flush, self._timeout_sec)
        finally:
            self._stopping.set()
            await asyncio.to_thread(self._thread.join, 2.0)
            del self._writer  # the client's threads and connections end with its last reference
