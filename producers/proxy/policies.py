"""Follows the policy-versions topic and keeps the engine on the run's newest policy."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable

import structlog

from infra.kafka import header_type, make_codec, make_consumer, topic_name
from infra.settings import Settings
from schemas.events import PolicyPublished

log = structlog.get_logger()

_TOPIC = "policy-versions"
_POLL_SEC = 0.2


class PolicyFollower:
    """Reads the topic from its beginning in a thread; calls `on_policy` in the event loop, newest publication only.

    While one publication is being loaded later ones are collapsed: only the newest is loaded next.
    """

    def __init__(self, settings: Settings, on_policy: Callable[[PolicyPublished], Awaitable[None]]) -> None:
        self._settings = settings
        self._on_policy = on_policy
        self._loop = asyncio.get_running_loop()
        self._newest: PolicyPublished | None = None
        self._changed = asyncio.Event()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="policy-versions", daemon=True)

    async def run(self) -> None:
        """Follow until cancelled. Raises what the reading thread or `on_policy` raised."""
        self._thread.start()
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._failure is not None:
                    raise self._failure
                if self._newest is not None:
                    await self._on_policy(self._newest)
        finally:
            self._stopping.set()

    def _read(self) -> None:
        # A group of its own, never committed: every proxy reads the whole topic.
        consumer = make_consumer(self._settings, group=f"proxy-policies-{uuid.uuid4().hex[:12]}")
        codec = make_codec(self._settings)
        pending: PolicyPublished | None = None
        try:
            consumer.subscribe([topic_name(self._settings, _TOPIC)])
            while not self._stopping.is_set():
                # Hand over only at the end of what is there: an old version is not worth loading.
                message = consumer.poll(_POLL_SEC if pending is None else 0.02)
                if message is None:
                    if pending is not None:
                        self._hand_over(pending)
                        pending = None
                    continue
                if message.error():
                    log.warning("policy-versions cannot be read", error=message.error().str())
                    continue
                if header_type(message.headers()) not in (None, "PolicyPublished"):
                    continue
                event = codec.decode(message.value())
                if isinstance(event, PolicyPublished) and event.run_id == self._settings.run.id:
                    pending = event
        except Exception as exc:
            self._post(exc)
        finally:
            consumer.close()

    def _hand_over(self, policy: PolicyPublished) -> None:
        def take() -> None:
            self._newest = policy
            self._changed.set()

        self._call(take)

    def _post(self, failure: BaseException) -> None:
        def take() -> None:
            self._failure = failure
            self._changed.set()

        self._call(take)

    def _call(self, action: Callable[[], None]) -> None:
        if not self._stopping.is_set() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)
