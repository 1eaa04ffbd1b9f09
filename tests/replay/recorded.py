"""A small run's source events, as its services would have recorded them."""

from __future__ import annotations

from collections.abc import Sequence

from infra.config import settings_json
from infra.settings import ScheduleSection, Settings
from schemas.base import Event
from schemas.codec import Codec
from schemas.events import RunFinished
from schemas.ids import EventId, GroupId, TrialId
from streams.replay.service import load_stages
from streams.runtime.memory import MemoryLog
from tests.laws import run_to_end
from tests.unit.stages import builders as b

SETTINGS = Settings(schedule=ScheduleSection(group_size=2, groups_per_step=2))
CODEC = Codec()


def make_trial(group_id: str, index: int, reward: float) -> list[Event]:
    """One trial of two calls, of which a first attempt was lost after one call."""
    trial_id = TrialId(f"{group_id}.{index:02d}")
    grade = EventId(f"grade-{trial_id}")
    of_trial = {"trial_id": trial_id, "group_id": GroupId(group_id)}
    lost = b.call(0, [1, 2, 3], [9, 9], trial_id=trial_id, attempt=1, conversation_id="lost")
    return [
        b.trial_offered(trial_id),
        b.trial_offered(trial_id, attempt=2),
        b.opened(trial_id=trial_id, attempt=2),
        lost,
        b.call(0, [1, 2, 3], [4, 5], trial_id=trial_id, attempt=2),
        b.call(1, [6], [7], parent=0, shared=5, trial_id=trial_id, attempt=2),
        b.graded(reward, event_id=grade, trial_id=trial_id, attempt=2),
        b.trial_finished(2, **of_trial, attempt=2, num_attempts=2, reward_event_id=grade),
    ]


def make_sources(num_groups: int = 3, settings: Settings = SETTINGS, outcome: str = "completed") -> list[Event]:
    """Every source event of a run of `num_groups` groups of two; the first two were trained, one per step."""
    groups = [f"{b.RUN}.t00000.{n:03d}" for n in range(num_groups)]
    events: list[Event] = [b.run_started({"train": 1}, config_json=settings_json(settings))]
    for group_id in groups:
        events.append(b.group_offered(group_id, 2))
        for index in range(2):
            events += make_trial(group_id, index, reward=float(index))
    for step, group_id in enumerate(groups[:2]):
        events.append(b.step_completed(step, group_ids=(GroupId(group_id),)))
    finished = b.base(9000) | {"outcome": outcome}
    events.append(RunFinished(**finished))
    return events


def run_stages(sources: Sequence[Event], settings: Settings = SETTINGS) -> MemoryLog:
    """A log with the sources and what the live stages made of them."""
    memory = MemoryLog(2)
    for event in sources:
        memory.write(event, CODEC)
    for stage in load_stages(settings):
        run_to_end(stage, memory)
    return memory


def all_events(memory: MemoryLog) -> list[Event]:
    """Every event on the log."""
    return [
        CODEC.decode(record.value or b"")
        for topic in memory.num_partitions
        if topic != "schemas"
        for record in memory.read(topic)
    ]
