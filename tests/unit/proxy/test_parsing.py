"""Tool calls out of sampled text."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from producers.proxy.parsing import HermesParser, ParsedCall, parse_reply

GOOD = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
LS = ParsedCall("bash", '{"command": "ls"}')


def outcome(text: str, tools: bool = True):
    reply = parse_reply(text, tools=tools)
    return reply.content, reply.calls, reply.outcome


def test_calls_and_text():
    assert outcome(GOOD) == ("", [LS], "ok")
    assert outcome("I look.\n" + GOOD + "\n" + GOOD + "\n") == ("I look.", [LS, LS], "ok")
    assert outcome("plain text \n") == ("plain text \n", [], "none")
    assert outcome("") == ("", [], "none")
    assert outcome('<tool_call>\n{"name": "f"}\n</tool_call>') == ("", [ParsedCall("f", "{}")], "ok")
    unknown = '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>'
    assert outcome(unknown)[2] == "ok"  # for the harness to answer


def test_what_is_no_call_stays_the_text_that_was_written():
    for bad in (
        "<tool_call>{oops}</tool_call>",
        '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}',
        '<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>["bash"]</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "<tool_call></tool_call>",
    ):
        assert outcome("a " + bad + " b") == ("a " + bad + " b", [], "failed")
    assert outcome("x <tool_call>{}</tool_call> " + GOOD) == ("x <tool_call>{}</tool_call>", [LS], "failed")


def test_without_tools_everything_is_text():
    assert outcome(GOOD, tools=False) == (GOOD, [], "none")


_PIECES = st.lists(
    st.sampled_from(
        [GOOD, "<tool_call>", "</tool_call>", "<tool", "{}", " \n", "text", "<", "\u2603", '{"name": "f"}']
    ),
    max_size=8,
)


@given(_PIECES, st.lists(st.integers(1, 12), min_size=1, max_size=40))
def test_any_way_of_cutting_the_text_gives_the_same_reply(pieces, cuts):
    text = "".join(pieces)
    parser, released, at, turn = HermesParser(), [], 0, 0
    while at < len(text):
        size = cuts[turn % len(cuts)]
        released += parser.feed(text[at : at + size])
        at, turn = at + size, turn + 1
    released += parser.finish()
    whole = parse_reply(text, tools=True)
    assert (parser.reply.content, parser.reply.calls, parser.reply.outcome) == (
        whole.content,
        whole.calls,
        whole.outcome,
    )
    assert "".join(r for r in released if isinstance(r, str)) == whole.content
    assert [r for r in released if isinstance(r, ParsedCall)] == whole.calls
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)


def test_text_is_released_before_the_reply_ends():
    parser = HermesParser()
    assert parser.feed("hello <tool") == ["hello"]
    assert parser.feed("box> and") == [" <toolbox> and"]
    assert parser.feed('<tool_call>{"name": "f"') == []
    assert parser.feed("}</tool_call>") == [ParsedCall("f", "{}")]
