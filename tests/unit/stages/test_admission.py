"""The admission table and the wait for the grade."""

from __future__ import annotations

import pytest

from infra.settings import AdmissionSection, Settings
from schemas.base import Event
from schemas.events import TrajectoryAdmitted, TrajectoryRejected
from streams.admission.core import AdmissionStage
from streams.admission.table import TABLES, make_table
from streams.runtime.step import PoisonError
from streams.scheduling.termination import TERMINATION_REASONS
from tests.unit.stages.builders import graded, trajectory


def admit(*events: Event, **overrides: str) -> list[Event]:
    stage = AdmissionStage(Settings(admission=AdmissionSection(overrides=overrides)))
    state, outputs = stage.initial(), []
    for event in events:
        state, out = stage.apply(state, event)
        outputs += out
    return outputs


RULES = [
    ("agent_completed", "keep"),
    ("max_turns_reached", "keep"),
    ("overlong", "keep"),
    ("agent_crashed", "keep"),
    ("parser_failed", "zero_reward"),
    ("agent_timeout", "mask"),
    ("verifier_timeout", "mask"),
    ("env_setup_failed", "mask"),
    ("sandbox_lost", "mask"),
    ("inference_failed", "mask"),
    ("no_tokens", "mask"),
    ("capture_broken", "mask"),
]


@pytest.mark.parametrize(("reason", "rule"), RULES)
def test_table_v1(reason: str, rule: str) -> None:
    done = trajectory(reason)
    (verdict,) = admit(graded(1.0), done)
    assert verdict.trajectory_event_id == done.event_id  # type: ignore[attr-defined]
    assert verdict.occurred_at == 2200
    if rule == "mask":
        assert isinstance(verdict, TrajectoryRejected)
        assert (verdict.rule, verdict.termination_reason) == ("mask", reason)
    else:
        assert isinstance(verdict, TrajectoryAdmitted)
        assert (verdict.rule, verdict.termination_reason) == (rule, reason)
        assert (verdict.reward, verdict.reward_event_id) == ((1.0, "grade-1") if rule == "keep" else (0.0, None))
        assert (verdict.table_version, verdict.min_version, verdict.max_version) == ("v1", 0, 1)


def test_the_table_has_a_rule_for_every_reason() -> None:
    assert {reason for reason, _ in RULES} == set(TERMINATION_REASONS)
    assert all(set(table) == set(TERMINATION_REASONS) for table in TABLES.values())


def test_a_verdict_waits_for_the_grade_that_the_trial_names() -> None:
    done = trajectory()
    assert admit(done, graded(event_id="grade-of-another-attempt")) == []
    (late,), (early,) = admit(done, graded(0.0, at=2500)), admit(graded(0.0, at=2500), done)
    assert late == early
    assert isinstance(late, TrajectoryAdmitted)
    assert (late.reward, late.occurred_at) == (0.0, 2500)


def test_a_later_grade_of_a_decided_trial_changes_nothing() -> None:
    assert len(admit(graded(1.0), trajectory(), graded(0.0, event_id="regrade"), trajectory())) == 1


def test_keep_without_a_grade_is_not_admitted() -> None:
    (verdict,) = admit(trajectory(reward_event_id=None))
    assert isinstance(verdict, TrajectoryRejected)
    assert verdict.rule == "no_grade"


def test_a_rejected_or_zeroed_trial_waits_for_no_grade() -> None:
    assert len(admit(trajectory("agent_timeout"))) == len(admit(trajectory("parser_failed"))) == 1


def test_overrides() -> None:
    (verdict,) = admit(trajectory("agent_timeout"), agent_timeout="zero_reward", overlong="keep")
    assert isinstance(verdict, TrajectoryAdmitted)
    assert (verdict.reward, verdict.table_version) == (0.0, "v1+agent_timeout=zero_reward")


@pytest.mark.parametrize(
    ("version", "overrides", "message"),
    [
        ("v9", {}, r"admission\.table: no table 'v9'; known: v1"),
        ("v1", {"timeout": "mask"}, r"admission\.overrides\.timeout: no such termination reason; known: agent_comp"),
        ("v1", {"overlong": "drop"}, r"admission\.overrides\.overlong: no rule 'drop'; use one of keep, mask"),
    ],
)
def test_a_wrong_configuration_is_named(version: str, overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_table(version, overrides)


def test_an_unknown_reason_is_poison_and_leaves_the_state_alone() -> None:
    stage = AdmissionStage(Settings())
    state = stage.initial()
    with pytest.raises(PoisonError, match="reason 'new_reason'"):
        stage.apply(state, trajectory("new_reason"))
    assert state == stage.initial()
