"""Laws over whole histories: order, repeats, crashes and restarts change nothing; nothing vanishes."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache

import pytest

from schemas.base import Event
from schemas.events import (
    GroupDropped,
    GroupOffered,
    GroupReady,
    ModelCallCompleted,
    ModelCallFailed,
    TrajectoryAssembled,
    TrialFinished,
    TrialOffered,
)
from streams.scheduling.core import SchedulingStage
from tests.unit.stages.checks import OUTPUTS, check_accounts, check_rederivation, of_type, reread
from tests.unit.stages.history import World, world_settings
from tests.unit.stages.history import make_history as play

SEEDS = range(5)
make_history = lru_cache(maxsize=None)(play)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("crash_share", [0.0, 0.3])
def test_nothing_vanishes_and_nothing_happens_twice(seed: int, crash_share: float) -> None:
    history = make_history(seed, crash_share=crash_share)
    check_accounts(history)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_step_gets_its_groups_and_every_pass_its_tasks(seed: int) -> None:
    history = make_history(seed, crash_share=0.2)
    ready = Counter((e.purpose, e.step) for e in of_type(history, GroupReady))
    assert {step: num for (purpose, step), num in ready.items() if purpose == "train"} == dict.fromkeys(range(4), 2)
    passes = Counter(e.step for e in of_type(history, GroupOffered) if e.purpose == "validation")
    assert passes == {0: 3, 2: 3, 4: 3}


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_of_a_validation_pass_come_from_its_version_alone(seed: int) -> None:
    history = make_history(seed, crash_share=0.2)
    passes = [t for t in of_type(history, TrajectoryAssembled) if t.purpose == "validation" and t.num_sampled_tokens]
    assert passes
    assert all(t.min_version == t.max_version == t.policy_version for t in passes)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_no_sampled_token_is_older_than_the_bound(seed: int, max_staleness: int) -> None:
    settings = world_settings(max_staleness=max_staleness, validate_every=0)
    history = play(seed, settings, loss_share=0.0)
    steps = {e.group_id: e.step for e in of_type(history, GroupOffered)}
    lags = [steps[t.group_id] - t.min_version for t in of_type(history, TrajectoryAssembled) if t.segments]
    assert max(lags) <= max_staleness
    spans = [s for t in of_type(history, TrajectoryAssembled) for g in t.segments for s in g.version_spans]
    assert len({s.version for s in spans}) > 1


@pytest.mark.parametrize("stage_type", list(OUTPUTS))
@pytest.mark.parametrize("seed", SEEDS)
def test_order_across_partitions_and_repeats_do_not_matter(stage_type: type, seed: int) -> None:
    history = make_history(seed, crash_share=0.2)
    for repeats in (0.0, 0.5):
        check_rederivation(history, stage_type, seed * 10 + 1, repeats)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scheduler_that_reads_its_own_outputs_emits_nothing_that_differs_from_them(seed: int) -> None:
    history = make_history(seed)
    recorded = {e.event_id: e for e in of_type(history, Event)}
    outputs = reread(history, SchedulingStage(history.settings), None, random.Random(seed), 0.5)
    assert len({e.event_id for e in outputs}) == len(outputs)
    assert all(recorded[e.event_id] == e for e in outputs)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sampled_token_is_trained_once_or_excluded(seed: int) -> None:
    history = make_history(seed)
    winners = {t.trial_id: t for t in of_type(history, TrajectoryAssembled)}
    fates: dict[str, list[str]] = defaultdict(list)
    for t in winners.values():
        for segment in t.segments:
            assert sum(segment.mask) == sum(c.sampled_end - c.sampled_start for c in segment.calls)
            for part in segment.calls:
                fates[part.call_id].append("trained")
        for excluded in t.excluded:
            fates[excluded.call_id].append(excluded.reason)
    reasons = set()
    for call in of_type(history, ModelCallCompleted, ModelCallFailed):
        t = winners[call.trial_id]
        by_rule = call.attempt != t.attempt or t.num_calls == 0
        num_sampled = len(call.sampled_ids or b"") // 4
        assert len(fates[call.call_id]) == (0 if by_rule or not num_sampled else 1), call.call_id
        reasons.update(fates[call.call_id])
    assert {"trained", "failed"} <= reasons


def test_the_histories_hold_the_hard_cases() -> None:
    histories = [make_history(seed) for seed in SEEDS]
    excluded = {x.reason for h in histories for t in of_type(h, TrajectoryAssembled) for x in t.excluded}
    assert {"orphaned_retry", "failed", "conversation_not_trained"} <= excluded
    ends = [e for h in histories for e in of_type(h, TrialFinished)]
    assert any(e.num_attempts > e.attempt for e in ends), "a late survivor won over its successor"
    assert any(e.attempt > 1 for e in ends)
    assert any(len(t.segments) > 1 for h in histories for t in of_type(h, TrajectoryAssembled))
    assert any(isinstance(e, GroupDropped) for h in histories for e in h.events("groups"))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scheduler_that_restarts_after_a_task_changed_repeats_no_offer_and_changes_none(seed: int) -> None:
    world = World(seed, world_settings(), crash_share=0.3)
    write = world.write
    changed = []

    def write_and_change(event: Event) -> None:
        write(event)
        if isinstance(event, GroupReady) and not changed:  # in mid-run every task gets another digest
            changed.append(event)
            for task in list(world.log["tasks", 0]):
                write(replace(task, event_id=task.event_id + "-again", digest="other"))  # type: ignore[call-arg]

    world.write = write_and_change  # type: ignore[method-assign]
    world.run()
    offers = [e for e in world.events("offers") if isinstance(e, GroupOffered | TrialOffered)]
    assert set(Counter(e.event_id for e in offers).values()) == {1}
    digests = {e.group_id: e.task_digest for e in offers if isinstance(e, GroupOffered)}
    assert {e.task_digest == digests[e.group_id] for e in offers if isinstance(e, TrialOffered)} == {True}
    assert len(set(digests.values())) > 2
