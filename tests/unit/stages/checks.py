"""Laws that every recorded history must obey, in memory and on Kafka."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from schemas.base import Event
from schemas.events import (
    GroupDropped,
    GroupOffered,
    GroupReady,
    RunFinished,
    TrajectoryAdmitted,
    TrajectoryAssembled,
    TrajectoryRejected,
    TrialFinished,
    TrialOffered,
)
from streams.admission.core import AdmissionStage
from streams.assembly.core import AssemblyStage
from streams.grouping.core import GroupingStage
from streams.scheduling.core import SchedulingStage
from tests.unit.stages.history import NUM_PARTITIONS, History

OUTPUTS: dict[type, set[str]] = {
    SchedulingStage: {"GroupOffered", "TrialOffered", "TrialFinished", "RunFinished"},
    AssemblyStage: {"TrajectoryAssembled"},
    AdmissionStage: {"TrajectoryAdmitted", "TrajectoryRejected"},
    GroupingStage: {"GroupReady", "GroupDropped"},
}


def of_type(history: History, *types: type) -> list[Any]:
    return [e for events in history.log.values() for e in events if isinstance(e, types)]


def reread(
    history: History, stage: Any, partition: int | None, rng: random.Random, repeats: float, skip: tuple[type, ...] = ()
) -> list[Event]:
    """Apply a stage's whole input again: partitions interleaved at random, events repeated at random."""
    numbers = range(NUM_PARTITIONS) if partition is None else [partition]
    parts = [list(history.log.get((t, n), [])) for t in stage.inputs for n in numbers]
    state, outputs = stage.initial(), []
    seen: list[Event] = []
    while parts := [p for p in parts if p]:
        event = rng.choice(parts).pop(0)
        seen.append(event)
        again = [rng.choice(seen)] if rng.random() < repeats else []
        for item in [event, *again]:
            if type(item).__name__ in stage.wanted and not isinstance(item, skip):
                state, out = stage.apply(state, item)
                outputs += out
    return outputs


def check_rederivation(history: History, stage_type: type, seed: int, repeats: float) -> None:
    """Re-reading a stage's inputs, in another order and with repeats, makes exactly the events that are recorded."""
    stage = stage_type(history.settings)
    recorded = [e for e in of_type(history, Event) if type(e).__name__ in OUTPUTS[stage_type]]
    own = (GroupOffered, TrialFinished) if stage_type is SchedulingStage else ()  # it does not repeat what it reads
    partitions = [None] if stage.scope == "single" else list(range(NUM_PARTITIONS))
    rng = random.Random(seed)
    outputs = [e for p in partitions for e in reread(history, stage, p, rng, repeats, own)]
    assert sorted(outputs, key=lambda e: e.event_id) == sorted(recorded, key=lambda e: e.event_id)


def check_accounts(history: History) -> None:
    """Every offer ends once, in every stage; no attempt is offered twice; the run ends once."""
    offered = {e.trial_id for e in of_type(history, TrialOffered)}
    in_groups = [t for e in of_type(history, GroupOffered) for t in e.trial_ids]
    assert Counter(in_groups) == Counter(offered)
    for types in [(TrialFinished,), (TrajectoryAssembled,), (TrajectoryAdmitted, TrajectoryRejected)]:
        assert Counter(e.trial_id for e in of_type(history, *types)) == Counter(offered), types
    groups = Counter(e.group_id for e in of_type(history, GroupReady, GroupDropped))
    assert groups == Counter(e.group_id for e in of_type(history, GroupOffered))
    attempts = Counter((e.trial_id, e.attempt) for e in of_type(history, TrialOffered))
    assert set(attempts.values()) == {1}
    assert [e.outcome for e in of_type(history, RunFinished)] == ["completed"]
