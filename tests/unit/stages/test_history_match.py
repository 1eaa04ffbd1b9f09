"""Message-level alignment: what real harnesses do to a resent history, and what it must lead to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.alignment import KnownConversation, match_history


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool_turn(call_id: str, command: str, content: str | None = None) -> dict[str, Any]:
    arguments = json.dumps({"command": command})
    call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


FIRST = [user("fix it"), tool_turn("c1", "ls")]
SECOND = [*FIRST, result("c1", "ops.py"), tool_turn("c2", "cat ops.py")]
KNOWN = [KnownConversation("call-0", FIRST), KnownConversation("call-1", SECOND)]


def test_the_first_request_starts_a_segment() -> None:
    match = match_history([], [user("fix it")])
    assert (match.key, match.num_matched, match.reason) == (None, 0, "first_request")


def test_a_continuation_matches_the_whole_history() -> None:
    match = match_history(KNOWN, [*SECOND, result("c2", "return x")])
    assert (match.key, match.num_matched, match.reason) == ("call-1", 4, "continued")


def test_the_longest_prefix_wins_whatever_the_order() -> None:
    messages = [*SECOND, result("c2", "return x")]
    assert match_history(KNOWN[::-1], messages).key == "call-1"


def test_a_rollback_continues_the_earlier_call() -> None:
    match = match_history(KNOWN, [*FIRST, result("c1", "ops.py"), user("think again")])
    assert (match.key, match.num_matched) == ("call-0", 2)


def test_a_retry_of_a_later_turn_continues_the_same_point_as_the_first_try() -> None:
    assert match_history(KNOWN, SECOND[:3]).key == "call-0"


def test_a_retry_of_the_first_request_starts_a_segment_and_says_so() -> None:
    match = match_history(KNOWN, [user("fix it")])
    assert (match.key, match.reason) == (None, "retry")


def test_a_changed_message_starts_a_segment_and_names_where() -> None:
    match = match_history(KNOWN, [user("something else"), *SECOND[1:], result("c2", "x")])
    assert (match.key, match.reason, match.diverged_at) == (None, "history_changed", 0)


def test_a_request_that_ends_with_a_recorded_reply_is_no_continuation() -> None:
    match = match_history(KNOWN[:1], FIRST)
    assert (match.key, match.reason) == (None, "history_truncated")


@pytest.mark.parametrize(
    ("sent", "resent"),
    [
        (user(None), user("")),
        (user(""), {"role": "user"}),
        (user("t"), user([{"type": "text", "text": "t"}])),
        (user("t"), user([{"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}}])),
        (reply("done"), reply("done") | {"reasoning_content": "because"}),
        (tool_turn("c1", "ls"), tool_turn("c1", "ls -la")),
        (tool_turn("c1", "ls"), tool_turn("c1", "ls", content="")),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"b":2,"a":1}'}}]},
        ),
        (user("t"), {"content": "t", "role": "user", "name": None}),
    ],
)
def test_what_harnesses_change_is_not_a_difference(sent: dict[str, Any], resent: dict[str, Any]) -> None:
    known = [KnownConversation("k", [user("go"), sent])]
    assert match_history(known, [user("go"), resent, user("next")]).key == "k"


@pytest.mark.parametrize(
    ("sent", "resent"),
    [
        (user("t"), user("u")),
        (user("t"), {"role": "system", "content": "t"}),
        (tool_turn("c1", "ls"), tool_turn("c2", "ls")),
        (tool_turn("c1", "ls", "x"), reply("x")),
        (result("c1", "a"), result("c1", "b")),
        (result("c1", "a"), result("c2", "a")),
        (user([{"type": "image_url", "url": "a"}]), user([{"type": "image_url", "url": "b"}])),
    ],
)
def test_real_differences_are_seen(sent: dict[str, Any], resent: dict[str, Any]) -> None:
    known = [KnownConversation("k", [user("go"), sent])]
    match = match_history(known, [user("go"), resent, user("next")])
    assert (match.key, match.diverged_at) == (None, 1)


def test_of_equal_retries_the_literally_echoed_one_is_continued() -> None:
    known = [
        KnownConversation("first", [user("go"), {**reply("same"), "reasoning_content": "one"}]),
        KnownConversation("second", [user("go"), {**reply("same"), "reasoning_content": "two"}]),
    ]
    echoed = {**reply("same"), "reasoning_content": "one"}
    assert match_history(known, [user("go"), echoed, user("next")]).key == "first"
    assert match_history(known, [user("go"), reply("same"), user("next")]).key == "second"


@given(st.lists(st.text(max_size=3), min_size=2, max_size=8), st.data())
def test_any_prefix_of_a_chain_of_turns_is_found(texts: list[str], data: st.DataObject) -> None:
    turns: list[dict[str, Any]] = []
    known = []
    for i, text in enumerate(texts):
        turns += [user(text), reply(f"r{i}")]
        known.append(KnownConversation(str(i), list(turns)))
    cut = data.draw(st.integers(0, len(texts) - 1))
    match = match_history(known, [*turns[: 2 * cut + 2], user("\x00new")])
    assert (match.key, match.num_matched) == (str(cut), 2 * cut + 2)
