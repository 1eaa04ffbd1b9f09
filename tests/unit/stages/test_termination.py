"""The termination table, row by row."""

from __future__ import annotations

from typing import Any

import pytest

from streams.scheduling.termination import TERMINATION_REASONS, decide_termination
from tests.unit.stages.builders import attempt_finished

CRASHED = {"agent_exit_code": 1, "agent_exit_status": "RuntimeError"}
NO_GRADE = {"verifier_ok": False, "reward_event_id": None}

TABLE: list[tuple[str, dict[str, Any], str]] = [
    ("completed", {}, "agent_completed"),
    ("exit code 0, no word for it", {"agent_exit_status": None}, "agent_completed"),
    ("completed after a failed call was retried", {"num_calls": 2, "num_failed_calls": 1}, "agent_completed"),
    ("completed after an unparsed call", {"num_calls": 2, "num_parser_failures": 1}, "agent_completed"),
    ("completed though the last reply was cut", {"length_stop": True}, "agent_completed"),
    ("sandbox not built", {"setup_ok": False, **CRASHED, **NO_GRADE}, "env_setup_failed"),
    ("not built beats lost", {"setup_ok": False, "sandbox_lost": True}, "env_setup_failed"),
    ("sandbox lost", {"sandbox_lost": True, "agent_exit_code": None, **NO_GRADE}, "sandbox_lost"),
    ("lost beats capture", {"sandbox_lost": True, "capture_ok": False, "num_calls": None}, "sandbox_lost"),
    ("calls not acknowledged", {"capture_ok": False}, "capture_broken"),
    ("number of calls unknown", {"num_calls": None}, "capture_broken"),
    ("agent timeout", {"agent_timed_out": True, "agent_exit_code": None, "agent_exit_status": None}, "agent_timeout"),
    ("agent timeout before its first token", {"agent_timed_out": True, "num_sampled_tokens": 0}, "agent_timeout"),
    ("no call", {"num_calls": 0, "num_sampled_tokens": 0, **CRASHED}, "no_tokens"),
    ("no token, yet exit 0", {"num_calls": 0, "num_sampled_tokens": 0}, "no_tokens"),
    ("only failed calls", {"num_sampled_tokens": 0, "num_failed_calls": 1, **CRASHED}, "inference_failed"),
    ("gave up on failing calls", {"num_calls": 3, "num_failed_calls": 1, **CRASHED}, "inference_failed"),
    ("length stop", {"length_stop": True, **CRASHED}, "overlong"),
    ("context overflow", {"context_overflow": True, **CRASHED}, "overlong"),
    ("cut in a tool call", {"length_stop": True, "num_parser_failures": 1, **CRASHED}, "overlong"),
    ("turn limit", {"max_turns_hit": True, "agent_exit_status": "LimitsExceeded"}, "max_turns_reached"),
    ("turn limit, some parsed", {"max_turns_hit": True, "num_calls": 3, "num_parser_failures": 2}, "max_turns_reached"),
    ("turn limit, all unparsed", {"max_turns_hit": True, "num_calls": 2, "num_parser_failures": 2}, "parser_failed"),
    ("turn limit beats its own exit word", {"max_turns_hit": True}, "max_turns_reached"),
    ("unparsed and stopped", {"num_parser_failures": 1, **CRASHED}, "parser_failed"),
    ("unparsed needs no grade", {"num_parser_failures": 1, **CRASHED, **NO_GRADE}, "parser_failed"),
    ("crashed", CRASHED, "agent_crashed"),
    ("killed", {"agent_exit_code": None, "agent_exit_status": None}, "agent_crashed"),
    ("exit code 0, but says it failed", {"agent_exit_status": "Cancelled"}, "agent_crashed"),
    ("verifier timeout", {"verifier_timed_out": True, **NO_GRADE}, "verifier_timeout"),
    ("verifier timeout after a crash", {"verifier_timed_out": True, **NO_GRADE, **CRASHED}, "verifier_timeout"),
    ("no grader", NO_GRADE, "env_setup_failed"),
    ("no grader at the turn limit", {"max_turns_hit": True, **NO_GRADE}, "env_setup_failed"),
]


@pytest.mark.parametrize(("facts", "reason"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_reason_of(facts: dict[str, Any], reason: str) -> None:
    assert decide_termination(attempt_finished(**facts)) == reason


def test_the_table_reaches_every_reason() -> None:
    assert {reason for _, _, reason in TABLE} == set(TERMINATION_REASONS)
