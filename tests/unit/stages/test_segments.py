"""Segments from calls: hand-computed cases, and what must hold for any conversation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.events import ModelCallCompleted, ModelCallFailed, Segment, VersionSpan
from schemas.ids import ConversationId, make_call_id
from schemas.packing import pack_bits, pack_floats, pack_ints, unpack_bits, unpack_floats, unpack_ints
from streams.alignment.segments import Alignment, AlignmentError, align_calls
from tests.unit.stages.builders import TRIAL, call, failed_call

MAIN = {ConversationId("main"): "main"}


def align(*calls: ModelCallCompleted | ModelCallFailed, **kinds: str) -> Alignment:
    return align_calls(calls, MAIN | {ConversationId(k): v for k, v in kinds.items()}, {"main"})


def tokens(segment: Segment) -> list[int]:
    return list(unpack_ints(segment.ids))


def trained(segment: Segment) -> list[int]:
    return [t for t, m in zip(tokens(segment), segment.mask, strict=True) if m]


def names(*indexes: int) -> list[str]:
    return [make_call_id(TRIAL, 1, i) for i in indexes]


def test_two_turns_are_one_segment() -> None:
    (segment,) = align(call(0, [1, 2, 3], [10, 11]), call(1, [4], [12], parent=0, shared=5, version=1)).segments
    assert tokens(segment) == [1, 2, 3, 10, 11, 4, 12]
    assert list(segment.mask) == [0, 0, 0, 1, 1, 0, 1]
    assert unpack_floats(segment.logprobs).tolist() == pytest.approx([0, 0, 0, -1.0, -1.1, 0, -1.2])
    assert unpack_bits(segment.logprob_valid, 7) == [False] * 3 + [True] * 2 + [False, True]
    assert segment.version_spans == (
        VersionSpan(version=0, start=3, end=5),
        VersionSpan(version=1, start=6, end=7),
    )
    assert [(c.call_id, c.prompt_start, c.sampled_start, c.sampled_end) for c in segment.calls] == [
        (names(0)[0], 0, 3, 5),
        (names(1)[0], 5, 6, 7),
    ]


def test_versions_and_counts() -> None:
    alignment = align(call(0, [1], [10, 11], version=3), call(1, [4], [12], parent=0, shared=3, version=5))
    assert (alignment.num_sampled_tokens, alignment.min_version, alignment.max_version) == (3, 3, 5)
    assert align() == Alignment((), (), 0, None, None)


def test_a_log_prob_that_was_not_reported_stays_invalid() -> None:
    partly = replace(call(0, [1], [10, 11]), logprob_valid=pack_bits([False, True]))
    (segment,) = align(partly).segments
    assert unpack_bits(segment.logprob_valid, 3) == [False, False, True]
    assert list(segment.mask) == [0, 1, 1]


def test_a_prefix_cut_inside_the_reply_starts_a_new_segment_with_mask_0() -> None:
    first, second = align(call(0, [1, 2], [10, 11]), call(1, [4], [12], parent=0, shared=3)).segments
    assert (tokens(first), list(first.mask)) == ([1, 2, 10, 11], [0, 0, 1, 1])
    assert (tokens(second), list(second.mask)) == ([1, 2, 10, 4, 12], [0, 0, 0, 0, 1])
    assert second.calls[0].prompt_start == 0


def test_a_cut_that_the_delta_undoes_is_a_continuation() -> None:
    (segment,) = align(call(0, [1, 2], [10, 11]), call(1, [11, 4], [12], parent=0, shared=3)).segments
    assert (tokens(segment), list(segment.mask)) == ([1, 2, 10, 11, 4, 12], [0, 0, 1, 1, 0, 1])


def test_a_call_without_parent_starts_a_new_segment() -> None:
    first, second = align(call(0, [1], [10]), call(1, [1, 10, 5], [12])).segments
    assert (tokens(first), tokens(second)) == ([1, 10], [1, 10, 5, 12])
    assert list(second.mask) == [0, 0, 0, 1]


def test_a_retry_that_is_echoed_is_real_and_the_other_an_orphan() -> None:
    first, second = call(0, [1], [10]), call(1, [1], [11])
    then_second = align(first, second, call(2, [5], [12], parent=1, shared=2))
    assert [tokens(s) for s in then_second.segments] == [[1, 11, 5, 12]]
    assert [(x.call_id, x.reason, x.num_sampled_tokens) for x in then_second.excluded] == [
        (names(0)[0], "orphaned_retry", 1)
    ]
    then_first = align(first, second, call(2, [5], [12], parent=0, shared=2))
    assert [tokens(s) for s in then_first.segments] == [[1, 10, 5, 12]]
    assert [x.call_id for x in then_first.excluded] == names(1)


def test_of_retries_that_are_not_echoed_the_last_is_kept() -> None:
    alignment = align(call(0, [1], [9]), *(call(i, [5], [10 + i], parent=0, shared=2) for i in (1, 2, 3)))
    assert [tokens(s) for s in alignment.segments] == [[1, 9, 5, 13]]
    assert [x.call_id for x in alignment.excluded] == names(1, 2)


def test_a_child_that_shares_only_the_prompt_does_not_echo() -> None:
    alignment = align(call(0, [1], [10]), call(1, [1], [11]), call(2, [5], [12], parent=0, shared=1))
    assert [x.call_id for x in alignment.excluded] == names(0)
    assert [tokens(s) for s in alignment.segments] == [[1, 11], [1, 5, 12]]


def test_a_rollback_trains_both_branches_and_no_token_twice() -> None:
    alignment = align(
        call(0, [1], [10]), call(1, [5], [11], parent=0, shared=2), call(2, [6], [12], parent=0, shared=2)
    )
    assert [tokens(s) for s in alignment.segments] == [[1, 10, 5, 11], [1, 10, 6, 12]]
    assert [trained(s) for s in alignment.segments] == [[10, 11], [12]]


def test_failed_aborted_and_foreign_calls_are_excluded_with_their_reason() -> None:
    title = call(2, [7], [14, 15], conversation_id=ConversationId("title"))
    unknown = call(3, [7], [16], conversation_id=ConversationId("new"))
    alignment = align(
        failed_call(0, [20]), failed_call(1), title, unknown, call(4, [1], [10], finish_reason="aborted"), title="title"
    )
    assert [(x.call_id, x.reason, x.num_sampled_tokens) for x in alignment.excluded] == [
        (names(0)[0], "failed", 1),
        (names(2)[0], "conversation_not_trained", 2),
        (names(3)[0], "conversation_not_trained", 1),
        (names(4)[0], "aborted", 1),
    ]
    assert alignment.segments == ()


def test_an_excluded_reply_may_be_context_of_a_continuation() -> None:
    cut_off = call(1, [5], [11], parent=0, shared=2, finish_reason="aborted")
    (segment,) = align(call(0, [1], [10]), cut_off, call(2, [6], [12], parent=1, shared=4)).segments
    assert (tokens(segment), list(segment.mask)) == ([1, 10, 5, 11, 6, 12], [0, 1, 0, 0, 0, 1])


def test_an_empty_reply_neither_trains_nor_breaks_the_segment() -> None:
    alignment = align(call(0, [1], [10]), call(1, [5], [], parent=0, shared=2), call(2, [6], [12], parent=1, shared=3))
    assert [tokens(s) for s in alignment.segments] == [[1, 10, 5, 6, 12]]
    assert alignment.excluded == ()


def test_another_conversation_does_not_continue_a_segment() -> None:
    sub = ConversationId("sub")
    alignment = align(call(0, [1], [10]), call(1, [5], [11], parent=0, shared=2, conversation_id=sub), sub="main")
    assert [(s.conversation_id, trained(s)) for s in alignment.segments] == [("main", [10]), ("sub", [11])]


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("log-probs", {"logprobs": pack_floats([0.0])}, "2 sampled tokens, 1 log-probs"),
    ("bitmap", {"logprob_valid": b""}, "bitmap"),
    ("ragged ids", {"sampled_ids": b"abc"}, "no int32 array"),
    ("prompt length", {"prompt_len": 7}, "prompt_len is 7"),
    ("missing parent", {"parent_call_id": "gone"}, "its parent gone"),
    ("prefix without parent", {"parent_call_id": None}, "no parent"),
    ("prefix too long", {"shared_prefix_len": 9}, "which has 3"),
    ("span gap", {"version_spans": (VersionSpan(version=0, start=1, end=2),)}, "begin at 0"),
    ("span too short", {"version_spans": (VersionSpan(version=0, start=0, end=1),)}, "cover 1 of 2"),
]


@pytest.mark.parametrize(("changes", "message"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_what_does_not_fit_is_an_error_that_names_the_call(changes: dict[str, Any], message: str) -> None:
    bad = replace(call(1, [4], [12, 13], parent=0, shared=3), **changes)
    with pytest.raises(AlignmentError, match=message) as info:
        align(call(0, [1, 2], [10]), bad)
    assert bad.call_id in str(info.value)


@st.composite
def conversations(draw: st.DrawFn) -> list[ModelCallCompleted | ModelCallFailed]:
    """Calls that continue, retry, roll back, cut prefixes and fail, in any mixture. Every sampled token is unique."""
    calls: list[ModelCallCompleted | ModelCallFailed] = []
    lengths: dict[int, int] = {}
    fresh = iter(range(1000, 10_000))
    for index in range(draw(st.integers(1, 9))):
        sampled = [next(fresh) for _ in range(draw(st.integers(0, 3)))]
        kind = draw(st.sampled_from(["continue", "continue", "retry", "cut", "root", "failed"]))
        completed = [c for c in calls if isinstance(c, ModelCallCompleted)]
        if kind == "failed":
            calls.append(failed_call(index, sampled))
            continue
        if kind == "retry" and completed:
            old = draw(st.sampled_from(completed))
            new = call(index, [], sampled)
            calls.append(
                replace(
                    new,
                    parent_call_id=old.parent_call_id,
                    shared_prefix_len=old.shared_prefix_len,
                    prompt_delta_ids=old.prompt_delta_ids,
                    prompt_len=old.prompt_len,
                )
            )
        else:
            delta = draw(st.lists(st.integers(0, 3), max_size=3))
            parent = draw(st.sampled_from(completed)).call_index if completed and kind != "root" else None
            full = lengths[parent] if parent is not None else 0
            shared = draw(st.integers(0, full)) if kind == "cut" else full
            calls.append(call(index, delta, sampled, parent=parent, shared=shared))
        last = calls[-1]
        assert isinstance(last, ModelCallCompleted)
        lengths[index] = last.prompt_len + len(sampled)
    return calls


def context_of(call: ModelCallCompleted, by_id: dict[str, ModelCallCompleted]) -> list[int]:
    """The definition, written out plainly."""
    prefix: list[int] = []
    if call.parent_call_id is not None:
        parent = by_id[call.parent_call_id]
        prefix = (context_of(parent, by_id) + list(unpack_ints(parent.sampled_ids)))[: call.shared_prefix_len]
    return prefix + list(unpack_ints(call.prompt_delta_ids))


@settings(deadline=None, max_examples=150)
@given(conversations())
def test_any_conversation(calls: list[ModelCallCompleted | ModelCallFailed]) -> None:
    alignment = align(*calls)
    by_id = {c.call_id: c for c in calls if isinstance(c, ModelCallCompleted)}
    placed = [part for segment in alignment.segments for part in segment.calls]
    fates = [p.call_id for p in placed] + [x.call_id for x in alignment.excluded]
    with_tokens = [c.call_id for c in calls if c.sampled_ids]
    assert sorted(fates) == sorted(with_tokens), "each call with tokens has exactly one fate"
    for segment in alignment.segments:
        ids = tokens(segment)
        assert len(ids) == len(segment.mask) == len(segment.logprobs) // 4
        for part in segment.calls:  # what the engine had as context is exactly what lies before the sampled tokens
            done = by_id[part.call_id]
            assert ids[: part.sampled_start] == context_of(done, by_id)
            assert ids[part.sampled_start : part.sampled_end] == list(unpack_ints(done.sampled_ids))
            assert all(segment.mask[part.sampled_start : part.sampled_end])
        assert sum(segment.mask) == sum(p.sampled_end - p.sampled_start for p in segment.calls)
        assert segment.mask[-1] == 1, "a segment ends with a sampled token"
    once = [t for segment in alignment.segments for t in trained(segment)]
    assert len(once) == len(set(once)) == alignment.num_sampled_tokens


def test_the_work_is_proportional_to_the_tokens() -> None:
    """A long conversation is one segment and holds every token once."""
    calls = [call(0, [1] * 10, [2] * 10)]
    for i in range(1, 200):
        calls.append(call(i, [3] * 5, [4] * 5, parent=i - 1, shared=20 + 10 * (i - 1)))
    (segment,) = align(*calls).segments
    assert len(segment.mask) == 20 + 10 * 199
    assert pack_ints(tokens(segment)) == segment.ids
