"""Calls as events: spans, routing rows and chunks; scripts of the scripted engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from producers.proxy.calls import call_seed
from producers.proxy.capture import CallIdentity, Sampled, routing_events
from producers.proxy.engines.base import RoutingRows, RoutingShape, TokenChunk
from producers.proxy.engines.scripted import ScriptEntry, parse_script, scripted_experts
from producers.proxy.rendering import Renderer
from producers.proxy.replies import ReplyBuilder
from producers.proxy.wire_chat import ChatResponse
from schemas.codec import Codec
from schemas.events import VersionSpan
from schemas.ids import CallId, RunId, TrialId
from schemas.packing import unpack_bits
from tests.unit.proxy import tiny

SHAPE = RoutingShape(num_layers=2, top_k=2, num_experts=8, dtype="uint8")
WHO = CallIdentity(RunId("r"), "proxy/0", TrialId("t"), 1, CallId("t/a1/c0000"), 0, "chat")


def rows(start: int, num: int, version: int, fill: int, valid: tuple[bool, ...] | None = None) -> RoutingRows:
    return RoutingRows(start, num, bytes([fill]) * (4 * num), version, valid)


def test_chunks_add_up_to_spans():
    sampled = Sampled()
    sampled.add(TokenChunk([1, 2], [-1.0, None], 3, queue_ms=1.0, prefill_ms=2.0))
    sampled.add(TokenChunk([3], [-1.0], 3))
    sampled.add(TokenChunk([4], [-1.0], 4, finish_reason="stop", decode_ms=9.0))
    assert sampled.spans == [VersionSpan(version=3, start=0, end=3), VersionSpan(version=4, start=3, end=4)]
    assert (sampled.ids, sampled.finish_reason, sampled.queue_ms, sampled.decode_ms) == ([1, 2, 3, 4], "stop", 1.0, 9.0)
    with pytest.raises(ValueError, match="1 tokens with 2 log-probs"):
        sampled.add(TokenChunk([5], [-1.0, -2.0], 4))


def test_routing_starts_where_the_parents_rows_end():
    events, end = routing_events(WHO, SHAPE, [rows(0, 10, 1, 7)], first=6)
    assert end == 10 and len(events) == 1
    assert (events[0].token_start, events[0].num_tokens, len(events[0].expert_ids)) == (6, 4, 16)
    assert routing_events(WHO, SHAPE, [rows(0, 6, 1, 7)], first=6) == ([], 6)


def test_missing_rows_are_invalid_and_forwarded_twice_means_the_first():
    parts = [rows(0, 3, 1, 1), rows(4, 2, 1, 2, (True, False)), rows(2, 4, 2, 3)]
    (event,), end = routing_events(WHO, SHAPE, parts, first=0)
    fills = [event.expert_ids[4 * i] for i in range(end)]
    assert fills == [1, 1, 1, 3, 2, 3] and all(unpack_bits(event.valid, 6))
    spans = [(s.version, s.start, s.end) for s in event.version_spans]
    assert spans == [(1, 0, 3), (2, 3, 4), (1, 4, 5), (2, 5, 6)]
    (event,), end = routing_events(WHO, SHAPE, [rows(0, 2, 1, 1), rows(4, 1, 1, 1)], first=0)
    assert unpack_bits(event.valid, end) == [True, True, False, False, True]
    with pytest.raises(ValueError, match="routing bytes"):
        routing_events(WHO, SHAPE, [RoutingRows(0, 2, b"123", 1)], first=0)


def test_long_calls_are_chunked_below_the_message_limit():
    wide = RoutingShape(num_layers=48, top_k=8, num_experts=128, dtype="uint8")
    data = bytes(i % 128 for i in range(wide.row_bytes)) * 5000
    events, end = routing_events(WHO, wide, [RoutingRows(0, 5000, data, 1)], first=0)
    assert end == 5000 and len(events) == 3 and [e.chunk_index for e in events] == [0, 1, 2]
    assert b"".join(e.expert_ids for e in events) == data
    assert [e.token_start for e in events] == [0, events[0].num_tokens, events[0].num_tokens + events[1].num_tokens]
    assert all(len(Codec().encode(e)) < 900_000 for e in events)


def test_seeds_differ_by_call_and_repeat():
    assert call_seed(7, 0) == call_seed(7, 0) != call_seed(7, 1) != call_seed(8, 1)
    assert 0 <= call_seed(7, 0) < 2**63


def test_scripted_experts_are_distinct_per_layer():
    for token in range(50):
        row = scripted_experts(token, 3)
        assert row[0] != row[1] and row[2] != row[3] and max(row) < 8
    assert len({scripted_experts(5, p) for p in range(50)}) > 10


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "2: not JSON"),
        ('{"txt": "a"}', "2: expected an object with keys among"),
        ('{"text": "a", "ids": [1]}', "2: give exactly one of"),
    ],
)
def test_bad_scripts_are_named(tmp_path: Path, line: str, words: str):
    path = tmp_path / "s.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=words):
        parse_script(path)
    path.write_text('{"match": "a.c", "ids": [1, 2], "finish_reason": "length"}\n\n')
    assert parse_script(path) == (ScriptEntry(match="a.c", ids=(1, 2), finish_reason="length"),)
    path.write_text("\n")
    with pytest.raises(ValueError, match="empty"):
        parse_script(path)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.from_policy(tiny.write_tokenizer(tmp_path_factory.mktemp("policy")))


@pytest.mark.parametrize("text", ["emoji \U0001f600 and \u6f22\u5b57", "caf\u00e9 \u2603", "tail \U0001f600"])
def test_streaming_decodes_what_decoding_at_once_decodes(renderer: Renderer, text: str):
    ids = [*renderer.encode(text), tiny.IM_END]
    streamed = ReplyBuilder(renderer, "c", parse_tools=True)
    pieces = [r for i in ids for r in streamed.feed([i])] + streamed.finish(ids)
    whole = ReplyBuilder(renderer, "c", parse_tools=True)
    whole.finish(ids)
    assert "".join(map(str, pieces)) == text == streamed.message()["content"] == whole.message()["content"]


def test_a_reply_cut_inside_a_character_streams_like_it_decodes(renderer: Renderer):
    ids = renderer.encode("ab \U0001f600")[:-1]  # length stop in the middle of the emoji's bytes
    streamed = ReplyBuilder(renderer, "c", parse_tools=False)
    pieces = [str(r) for i in ids for r in streamed.feed([i])]
    pieces += map(str, streamed.finish(ids))
    assert "".join(pieces) == renderer.decode(ids) and pieces[-1].endswith("\ufffd")


def test_ids_of_tool_calls_follow_from_the_call(renderer: Renderer):
    ids = renderer.encode('<tool_call>{"name": "f"}</tool_call>' * 2)

    def made(call_id: str) -> list[str]:
        builder = ReplyBuilder(renderer, call_id, parse_tools=True)
        builder.finish(ids)
        assert builder.finish_reason("stop") == "tool_calls" and builder.finish_reason("length") == "length"
        assert builder.message()["content"] is None
        return [c["id"] for c in builder.message()["tool_calls"]]

    assert made("c1") == made("c1") != made("c2") and len(set(made("c1"))) == 2


def test_response_ids_name_the_call():
    from producers.proxy.wire_chat import parse_request

    request = parse_request(b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": true}')
    chunk = ChatResponse("t/a1/c0000", request).first()
    assert chunk.startswith(b'data: {"id":"chatcmpl-t/a1/c0000","object":"chat.completion.chunk"') and chunk.endswith(
        b"\n\n"
    )
