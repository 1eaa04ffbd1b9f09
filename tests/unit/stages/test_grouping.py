"""Groups, with numbers computed by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from infra.settings import ScheduleSection, Settings
from schemas.base import Event
from schemas.events import GroupDropped, GroupReady, TrajectoryAdmitted, TrajectoryRejected
from streams.grouping.core import GroupingStage, compute_mean_std
from tests.unit.stages.builders import GROUP, base, group_offered


def verdict(index: int, reward: float | None, at: int = 3000, max_version: int | None = 0) -> Event:
    """Admitted with a reward, or (None) rejected."""
    common: dict[str, Any] = {
        "trial_id": f"{GROUP}.{index:02d}",
        "group_id": GROUP,
        "trajectory_event_id": f"t{index}",
        "table_version": "v1",
        "min_version": 0,
        "max_version": max_version,
        "num_sampled_tokens": 5,
    }
    if reward is None:
        return TrajectoryRejected(**base(at), **common, termination_reason="agent_timeout", rule="mask")
    fields = {"reward_event_id": "g", "reward": reward, "termination_reason": "agent_completed", "rule": "keep"}
    return TrajectoryAdmitted(**base(at), **common, **fields)


def group(*events: Event, **schedule: Any) -> list[Event]:
    stage = GroupingStage(Settings(schedule=ScheduleSection(**schedule)))
    state, outputs = stage.initial(), []
    for event in events:
        state, out = stage.apply(state, event)
        outputs += out
    return outputs


def test_mean_and_std_over_the_admitted_members() -> None:
    """Rewards 1, 0, 0 (one more masked): mean 1/3, variance ((2/3)^2 + 2 (1/3)^2) / 2 = 1/3."""
    (done,) = group(group_offered(num_trials=4), *(verdict(i, r) for i, r in enumerate([1.0, None, 0.0, 0.0])))
    assert isinstance(done, GroupReady)
    assert done.reward_mean == pytest.approx(1 / 3)
    assert done.reward_std == pytest.approx(math.sqrt(1 / 3))
    assert (done.num_admitted, done.zero_variation) == (3, False)
    assert [m.reward for m in done.members] == [1.0, None, 0.0, 0.0]
    assert [m.admitted for m in done.members] == [True, False, True, True]
    assert [m.trial_id for m in done.members] == [f"{GROUP}.{i:02d}" for i in range(4)]


def test_mean_and_std_of_few() -> None:
    assert compute_mean_std([1.0]) == (1.0, 0.0)
    assert compute_mean_std([1.0, 0.0]) == (0.5, pytest.approx(math.sqrt(0.5)))
    assert compute_mean_std([1.0, 1.0]) == (1.0, 0.0)


def test_order_does_not_matter_and_repeats_do_not_count() -> None:
    events = [group_offered(), verdict(0, 1.0, at=3100), verdict(1, 0.0)]
    outcomes = [group(*order, *order) for order in itertools.permutations(events)]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert [e.occurred_at for e in outcomes[0]] == [3100]


def test_a_group_waits_for_all_its_trials() -> None:
    assert group(group_offered(num_trials=3), verdict(0, 1.0), verdict(2, 1.0)) == []


def test_equal_rewards_are_marked() -> None:
    (done,) = group(group_offered(num_trials=3), verdict(0, 1.0), verdict(1, 1.0), verdict(2, None))
    assert isinstance(done, GroupReady)
    assert (done.zero_variation, done.reward_std) == (True, 0.0)


def test_too_few_admitted() -> None:
    (done,) = group(group_offered(num_trials=3), verdict(0, 1.0), verdict(1, None), verdict(2, None), min_admitted=2)
    assert isinstance(done, GroupDropped)
    assert (done.reason, done.num_admitted, len(done.members)) == ("too_few_admitted", 1, 3)


def test_a_group_of_one_needs_one() -> None:
    (done,) = group(group_offered(num_trials=1), verdict(0, 1.0), min_admitted=2)
    assert isinstance(done, GroupReady)
    (lost,) = group(group_offered(num_trials=1, purpose="validation"), verdict(0, None), min_admitted=0)
    assert isinstance(lost, GroupDropped)


@pytest.mark.parametrize(
    ("versions", "purpose", "reason"),
    [
        ((2, 2), "train", "too_stale"),
        ((2, 4), "train", None),
        ((None, None), "train", None),
        ((2, 2), "validation", None),
    ],
)
def test_a_group_without_a_fresh_token_is_too_stale(
    versions: tuple[int | None, int | None], purpose: str, reason: str | None
) -> None:
    """Step 4, staleness 1: tokens of versions before 3 cannot be trained."""
    verdicts = [verdict(i, float(i), max_version=v) for i, v in enumerate(versions)]
    (done,) = group(group_offered(step=4, purpose=purpose), *verdicts, max_staleness=1)
    assert getattr(done, "reason", None) == reason
