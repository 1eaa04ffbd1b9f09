"""`rollstream replay verify`: read a run's topics, derive again, compare, check the laws."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from infra.kafka import end_offsets, make_codec, read_topic
from infra.settings import Settings
from schemas.base import Event
from schemas.codec import Codec, CodecError
from schemas.events import RunStarted
from schemas.topics import CATALOGUE
from streams.replay.checks import CHECKED_TYPES, CheckRow, run_checks
from streams.replay.core import Difference, compare_topic, derive_topics, select_run
from streams.runtime.kafka_log import read_writer_schemas, to_record
from streams.runtime.step import Record, Stage

#: The stages whose topics are derived from recorded facts alone, in data-flow order. Named by strings: stages do not
#: import each other, and neither does this.
DERIVED_STAGES = (
    "streams.assembly.core:AssemblyStage",
    "streams.admission.core:AdmissionStage",
    "streams.grouping.core:GroupingStage",
)

#: Events that those stages write, by topic.
DERIVED_TYPES = {
    "trajectories": frozenset({"TrajectoryAssembled", "TrajectoryAdmitted", "TrajectoryRejected"}),
    "groups": frozenset({"GroupReady", "GroupDropped"}),
}

#: Sections of the run file that the derivation depends on; they are taken from the run itself.
RULE_SECTIONS = ("admission", "schedule", "train")


class ReplayError(RuntimeError):
    """The run cannot be replayed: says what is missing and what to do."""


@dataclass
class VerifyReport:
    """What became of a run's derivation."""

    run_id: str
    #: Derived topic -> events compared.
    num_compared: dict[str, int] = field(default_factory=dict)
    #: The same by event type.
    num_compared_by_type: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    checks: list[CheckRow] = field(default_factory=list)

    @property
    def num_violations(self) -> int:
        """Things that break a law of the run."""
        return sum(len(row.violations) for row in self.checks)


def verify(settings: Settings, run_id: str) -> VerifyReport:
    """Derive the run's trajectories, verdicts and groups again from its source topics and compare byte for byte.

    The rules (admission table, group sizes, trained conversations) are the recorded ones of the run, not the current
    run file's. Raises ReplayError when the log does not hold the run, KafkaUnavailableError when there is no log.
    """
    codec = make_codec(settings)
    learn_schemas(settings, codec)
    stages = load_stages(run_settings(settings, codec, run_id))
    wanted = frozenset().union(*(stage.wanted for stage in stages)) | CHECKED_TYPES
    wanted |= frozenset().union(*DERIVED_TYPES.values())
    recorded = read_run(settings, codec, run_id, wanted)
    sources = {
        topic: [record for record in records if record.event_type not in DERIVED_TYPES.get(topic, ())]
        for topic, records in recorded.items()
    }
    partitions = Counter(topic for topic, _ in end_offsets(settings, tuple(recorded)))
    derived = derive_topics(stages, sources, codec, partitions)
    report = VerifyReport(run_id)
    by_type: Counter[str] = Counter()
    for topic, types in DERIVED_TYPES.items():
        in_log = [record for record in recorded[topic] if record.event_type in types]
        comparison = compare_topic(in_log, derived.get(topic, []), codec)
        report.num_compared[topic] = comparison.num_compared.total()
        by_type.update(comparison.num_compared)
        report.differences += comparison.differences
    report.num_compared_by_type = dict(by_type)
    report.checks = run_checks(decode_all(recorded, codec))
    return report


def learn_schemas(settings: Settings, codec: Codec) -> None:
    """Every writer schema of the log, so that events of older and newer versions can be read."""
    for schema in read_writer_schemas(settings):
        try:
            codec.add_schema(schema)
        except CodecError:
            continue  # an event type this version does not know; it is skipped by its header


def load_stages(settings: Settings) -> list[Stage[Any]]:
    """The deriving stages."""
    stages = []
    for entry in DERIVED_STAGES:
        module, _, name = entry.partition(":")
        stages.append(getattr(importlib.import_module(module), name)(settings))
    return stages


def run_settings(settings: Settings, codec: Codec, run_id: str) -> Settings:
    """The settings with the rules that the run recorded when it was last started."""
    started: RunStarted | None = None
    for message in read_topic(settings, "runs"):
        record = to_record(message, "runs")
        if record.event_type == "RunStarted" and record.value is not None:
            event = codec.decode(record.value)
            if isinstance(event, RunStarted) and event.run_id == run_id:
                started = event
    if started is None:
        raise ReplayError(f"no run {run_id!r} in the log; `rollstream tail runs` shows the runs it holds")
    return apply_recorded_rules(settings, json.loads(started.config_json))


def apply_recorded_rules(settings: Settings, config: dict[str, dict[str, Any]]) -> Settings:
    """`settings` with the rule sections of a recorded configuration. Keys this version does not know are ignored."""
    sections = {}
    for name in RULE_SECTIONS:
        current = getattr(settings, name)
        known = {entry.name for entry in dataclasses.fields(current)}
        values = {
            key: tuple(value) if isinstance(getattr(current, key), tuple) else value
            for key, value in config.get(name, {}).items()
            if key in known
        }
        sections[name] = dataclasses.replace(current, **values)
    return dataclasses.replace(settings, **sections)


def read_run(settings: Settings, codec: Codec, run_id: str, types: frozenset[str]) -> dict[str, list[Record]]:
    """Topic -> committed records of the run that hold these event types."""
    found: dict[str, list[Record]] = {}
    for topic in CATALOGUE:
        if types.intersection(topic.events):
            records = (to_record(message, topic.name) for message in read_topic(settings, topic.name))
            found[topic.name] = list(select_run(records, types, codec, run_id))
    return found


def decode_all(recorded: dict[str, list[Record]], codec: Codec) -> list[Event]:
    """The events the checks look at."""
    return [
        codec.decode(record.value or b"")
        for records in recorded.values()
        for record in records
        if record.event_type in CHECKED_TYPES
    ]
