"""Assembly, case by case."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from infra.settings import Settings, TrainSection
from schemas.base import Event
from schemas.events import TrajectoryAssembled
from schemas.ids import make_call_id
from schemas.packing import unpack_ints
from streams.assembly.core import AssemblyStage
from tests.unit.stages.builders import TRIAL, call, failed_call, opened, trial_finished


def assemble(*events: Event, settings: Settings | None = None) -> list[TrajectoryAssembled]:
    stage = AssemblyStage(settings or Settings())
    state, outputs = stage.initial(), []
    for event in events:
        state, out = stage.apply(state, event)
        outputs += out
    assert all(isinstance(e, TrajectoryAssembled) for e in outputs)
    return outputs  # type: ignore[return-value]


def test_a_finished_trial_is_assembled_once_its_calls_are_there_in_any_order() -> None:
    end, first, second = trial_finished(2), call(0, [1], [10]), call(1, [5], [11], parent=0, shared=2)
    orders = [assemble(opened(), *order) for order in itertools.permutations([end, first, second])]
    ((done,), *others) = orders
    assert all(other == [done] for other in others)
    assert [list(unpack_ints(s.ids)) for s in done.segments] == [[1, 10, 5, 11]]
    assert (done.num_calls, done.num_sampled_tokens, done.min_version, done.max_version) == (2, 2, 0, 0)
    assert (done.trial_finished_event_id, done.reward_event_id) == (end.event_id, "grade-1")
    assert done.occurred_at == 2100, "the newest of its sources"
    assert done.producer == "assembly"


def test_nothing_is_assembled_while_a_call_is_missing() -> None:
    assert assemble(opened(), trial_finished(3), call(0, [1], [10]), failed_call(2)) == []


def test_repeats_and_late_calls_change_nothing() -> None:
    events = [opened(), call(0, [1], [10]), trial_finished(1)]
    (done,) = assemble(*events, *events, call(1, [1], [12]), trial_finished(1))
    assert done.num_sampled_tokens == 1


def test_calls_of_other_attempts_do_not_count_wherever_they_lie() -> None:
    lost = [opened(attempt=1), call(0, [1], [99], attempt=1), call(1, [1], [98], attempt=1)]
    won = [opened(attempt=2), call(0, [1], [10], attempt=2)]
    end = trial_finished(1, attempt=2, num_attempts=2)
    (early,) = assemble(*lost, *won, end)
    (late,) = assemble(*won, end, *lost)
    assert early == late
    assert (early.attempt, early.num_sampled_tokens, early.excluded) == (2, 1, ())
    assert [c.call_id for c in early.segments[0].calls] == [make_call_id(TRIAL, 2, 0)]


def test_a_trial_whose_number_of_calls_is_unknown_has_no_segments() -> None:
    end = trial_finished(None, termination_reason="sandbox_lost", attempt_event_id=None, reward_event_id=None)
    (before,) = assemble(opened(), call(0, [1], [10]), end)
    (after,) = assemble(end, opened(), call(0, [1], [10]))
    assert before == after
    assert (before.segments, before.excluded, before.num_calls, before.min_version) == ((), (), 0, None)
    assert before.termination_reason == "sandbox_lost"


def test_a_trial_without_calls_is_assembled_at_its_end() -> None:
    (done,) = assemble(trial_finished(0, termination_reason="env_setup_failed"))
    assert (done.num_calls, done.segments) == (0, ())


def test_calls_that_do_not_fit_end_the_trial_capture_broken_and_say_which() -> None:
    bad = replace(call(1, [5], [11], parent=0, shared=2), prompt_len=9)
    (done,) = assemble(opened(), call(0, [1], [10]), bad, failed_call(2), trial_finished(3))
    assert done.termination_reason == "capture_broken"
    assert bad.call_id in done.detail
    assert [(x.call_id, x.reason) for x in done.excluded] == [
        (make_call_id(TRIAL, 1, 0), "capture_broken"),
        (bad.call_id, "capture_broken"),
    ]
    assert (done.segments, done.num_sampled_tokens, done.num_calls) == ((), 0, 3)


@pytest.mark.parametrize(("kinds", "num_tokens"), [(("main",), 1), (("main", "title"), 3), ((), 0)])
def test_which_conversations_are_trained_is_configured(kinds: tuple[str, ...], num_tokens: int) -> None:
    title = call(0, [7], [14, 15], conversation_id="title")
    (done,) = assemble(
        *(opened(), opened("title", "title"), title, call(1, [1], [10]), trial_finished(2)),
        settings=Settings(train=TrainSection(conversations=kinds)),
    )
    assert done.num_sampled_tokens == num_tokens
    assert num_tokens + sum(x.num_sampled_tokens for x in done.excluded) == 3


def test_the_id_follows_from_the_sources() -> None:
    end, done = trial_finished(1), call(0, [1], [10])
    (one,), (two,) = assemble(opened(), end, done), assemble(opened(), end, replace(done, event_id="other"))
    assert one.event_id != two.event_id
