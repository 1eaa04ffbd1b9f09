"""How far each service is behind the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from infra.kafka import ClientError, KafkaUnavailableError, end_offsets, group_lag
from infra.settings import Settings
from schemas.topics import CATALOGUE, SCHEMAS_TOPIC

#: Asking costs the broker a few dozen small requests: a live table asks this seldom.
REFRESH_SEC = 10.0

#: Consumer group of a service -> the topics it reads. The learner's lag is what no step has trained yet.
GROUP_INPUTS: Mapping[str, tuple[str, ...]] = {
    "scheduler": ("runs", "tasks", "policy-versions", "offers", "trial-stages", "groups", "steps"),
    "assembly": ("model-calls", "trial-stages"),
    "admission": ("trajectories", "rewards"),
    "grouping": ("offers", "trajectories"),
    "learner": ("groups", "trajectories", "routing"),
    "sink": tuple(t.name for t in CATALOGUE if t.name != SCHEMAS_TOPIC),
}


def fetch_lag(settings: Settings) -> dict[str, int]:
    """Service -> records between its committed offsets and the end of its topics. Raises KafkaUnavailableError."""
    try:
        ends = end_offsets(settings, GROUP_INPUTS["sink"])
        return {
            group: group_lag(settings, group, {part: end for part, end in ends.items() if part[0] in topics})
            for group, topics in GROUP_INPUTS.items()
        }
    except (ClientError, KeyError) as exc:  # KeyError: a topic that is not there
        raise KafkaUnavailableError(f"no consumer lag: {exc}; is Kafka up (`rollstream up`)?") from exc


def describe_lag(lag: Mapping[str, int] | None) -> str:
    """One line: records behind, by service; empty when it is not known."""
    return ", ".join(f"{name} {num:,}" for name, num in lag.items()) if lag else ""


class LagWatch:
    """The newest known lag, asked for in the background so that no screen waits for it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lag: dict[str, int] | None = None
        self._thread: threading.Thread | None = None
        self._next = 0.0

    def latest(self) -> dict[str, int] | None:
        """What is known now; None when nothing is, or when Kafka does not answer. Does not wait."""
        now = time.monotonic()
        if now >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._next = now + REFRESH_SEC
            self._thread = threading.Thread(target=self._ask, name="lag", daemon=True)
            self._thread.start()
        return self._lag

    def _ask(self) -> None:
        try:
            self._lag = fetch_lag(self._settings)
        except KafkaUnavailableError:
            self._lag = None
