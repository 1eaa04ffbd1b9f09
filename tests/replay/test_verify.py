"""`replay verify` on a real log: the live loops wrote it, and it is derived again with no difference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.kafka import EventWriter, read_events
from infra.settings import Settings
from schemas.events import GroupReady, TrajectoryAdmitted
from schemas.ids import EventId
from streams.replay.service import ReplayError, load_stages, verify
from streams.runtime.loop import TransactionalLoop
from tests.integration.test_runtime import Running, wait_for
from tests.replay.recorded import SETTINGS, make_sources
from tests.unit.stages import builders as b

NUM_GROUPS = 4


def record_run(settings: Settings) -> None:
    """Source events of a run on the log, and what the live loops make of them."""
    settings = replace(settings, schedule=SETTINGS.schedule)
    writer = EventWriter(settings)
    for event in make_sources(NUM_GROUPS, settings):
        writer.write(event)
    writer.flush()
    loops = [Running(TransactionalLoop(stage, settings)) for stage in load_stages(settings)]
    wait_for(lambda: len(list(read_events(settings, "groups", types=(GroupReady,)))) == NUM_GROUPS, "all groups")
    for loop in loops:
        loop.stop.set()
    for loop in loops:
        assert loop.wait_end() is None


def test_verify_a_recorded_run(kafka_settings: Settings) -> None:
    record_run(kafka_settings)
    # Verified with another run file than the run had: its own recorded rules count.
    other = replace(kafka_settings, schedule=replace(kafka_settings.schedule, min_admitted=100))
    report = verify(other, b.RUN)
    assert report.differences == []
    assert report.num_violations == 0
    assert report.num_compared == {"trajectories": 4 * NUM_GROUPS, "groups": NUM_GROUPS}
    assert report.num_compared_by_type == {
        "TrajectoryAssembled": 2 * NUM_GROUPS,
        "TrajectoryAdmitted": 2 * NUM_GROUPS,
        "GroupReady": NUM_GROUPS,
    }
    assert len(report.checks) == 5

    # A log that was tampered with: one verdict more, and one group once more.
    writer = EventWriter(kafka_settings)
    verdict = next(iter(read_events(kafka_settings, "trajectories", types=(TrajectoryAdmitted,))))
    assert isinstance(verdict, TrajectoryAdmitted)
    writer.write(replace(verdict, event_id=EventId("forged"), reward=1.0))
    writer.write(next(iter(read_events(kafka_settings, "groups", types=(GroupReady,)))))
    writer.flush()
    report = verify(kafka_settings, b.RUN)
    assert sorted((d.topic, d.kind) for d in report.differences) == [("groups", "repeated"), ("trajectories", "extra")]
    assert {v.detail for row in report.checks for v in row.violations} == {"2 ends"}


def test_unknown_run_is_named(kafka_settings: Settings) -> None:
    with pytest.raises(ReplayError, match="run-9"):
        verify(kafka_settings, "run-9")
