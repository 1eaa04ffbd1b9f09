"""The laws of the runtime (replay equals live, order and repeats, crashes commit nothing) over every stage."""

from __future__ import annotations

import pytest

from schemas.base import Event
from schemas.events import GroupOffered, TrialFinished
from streams.admission.core import AdmissionStage
from streams.assembly.core import AssemblyStage
from streams.grouping.core import GroupingStage
from streams.progress.core import ProgressStage
from streams.scheduling.core import SchedulingStage
from tests.laws import check_laws, check_order_and_repeats, check_replay_equals_live
from tests.unit.stages.history import make_history, world_settings

HISTORY = make_history(2, world_settings(num_steps=2))


def recorded(stage_type: type, *own: type) -> list[Event]:
    """The events the stage applies, less its own outputs."""
    stage = stage_type(HISTORY.settings)
    events = HISTORY.events(*stage.inputs)
    return [e for e in events if type(e).__name__ in stage.wanted and not isinstance(e, own)]


@pytest.mark.parametrize("stage_type", [AssemblyStage, AdmissionStage, GroupingStage, ProgressStage])
def test_laws(stage_type: type) -> None:
    check_laws(lambda: stage_type(HISTORY.settings), recorded(stage_type))


def test_laws_of_the_scheduler() -> None:
    """It reads its own offers back, so they are part of its input here; test_world crashes it in a closed loop."""
    events = recorded(SchedulingStage, GroupOffered, TrialFinished)
    check_replay_equals_live(lambda: SchedulingStage(HISTORY.settings), events)
    check_order_and_repeats(lambda: SchedulingStage(HISTORY.settings), events)
