"""The topic catalogue: names, partitions, retention and which events each holds."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.events import EVENTS

#: Topic of the writer schemas: key = 8-byte Avro fingerprint as hex, value = the schema as JSON.
SCHEMAS_TOPIC = "schemas"

#: One MiB under the broker's default `message.max.bytes` is too tight for long trials.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Topic:
    """One topic of the catalogue."""

    name: str
    doc: str
    #: False: the topic has one partition; True: as many as `kafka.partitions`, all keyed alike and so co-partitioned.
    keyed_by_trial: bool = False
    compacted: bool = False

    def partitions(self, configured: int) -> int:
        """Partitions to create."""
        return configured if self.keyed_by_trial else 1

    def config(self) -> dict[str, str]:
        """Topic configuration: kept forever; the archive is what trims a log."""
        policy = "compact" if self.compacted else "delete"
        return {
            "cleanup.policy": policy,
            "retention.ms": "-1",
            "retention.bytes": "-1",
            "max.message.bytes": str(MAX_MESSAGE_BYTES),
        }

    @property
    def events(self) -> tuple[str, ...]:
        """Names of the events written to it."""
        return tuple(name for name, cls in EVENTS.items() if self.name == cls.TOPIC)


CATALOGUE: tuple[Topic, ...] = (
    Topic("runs", "runs begin and end"),
    Topic("tasks", "tasks that can be offered", compacted=True),
    Topic("offers", "groups and trials to run: a work queue", keyed_by_trial=True),
    Topic("trial-stages", "leases, stages and ends of trials", keyed_by_trial=True),
    Topic("model-calls", "every model call: tokens in, tokens out", keyed_by_trial=True),
    Topic("routing", "experts chosen per token and layer", keyed_by_trial=True),
    Topic("rewards", "grades", keyed_by_trial=True),
    Topic("policy-versions", "weights published and loaded"),
    Topic("trajectories", "assembled, admitted and rejected trajectories", keyed_by_trial=True),
    Topic("groups", "groups ready for the learner, or dropped"),
    Topic("steps", "learner steps"),
    Topic("alerts", "run health"),
    Topic("dead-letters", "records that could not be read"),
    Topic(SCHEMAS_TOPIC, "writer schemas by fingerprint", compacted=True),
)

BY_NAME: dict[str, Topic] = {t.name: t for t in CATALOGUE}
