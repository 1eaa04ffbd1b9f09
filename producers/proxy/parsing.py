"""Sampled text to content and tool calls: the Hermes form, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Incremental: text is released as soon as it cannot be the beginning of a call; a call is held until its region closes.
A region that is no call is passed on as the text the model wrote, tags included, and marks the reply as failed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete tool call. `arguments` is JSON text of an object."""

    name: str
    arguments: str


@dataclass
class ParsedReply:
    """The whole reply: its text, its calls, and what became of the calls (none | ok | failed)."""

    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)
    outcome: str = "none"


def parse_call(region: str) -> ParsedCall | None:
    """The call inside a region, or None when it is malformed."""
    try:
        data = json.loads(region)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    name, arguments = data.get("name"), data.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))


def _held_suffix(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)


class HermesParser:
    """Feed decoded text; get what can be released: strings of content, and calls."""

    def __init__(self) -> None:
        self._buffer = ""
        self._inside = False
        #: White space that is content only when more content follows (it separates calls from text).
        self._blank = ""
        self.reply = ParsedReply()

    def feed(self, text: str) -> list[str | ParsedCall]:
        """Take newly sampled text."""
        self._buffer += text
        out: list[str | ParsedCall] = []
        while True:
            if not self._inside:
                at = self._buffer.find(OPEN)
                if at < 0:
                    keep = _held_suffix(self._buffer, OPEN)
                    free, self._buffer = (
                        self._buffer[: len(self._buffer) - keep],
                        self._buffer[len(self._buffer) - keep :],
                    )
                    self._release(free, out)
                    return out
                self._release(self._buffer[:at], out)
                self._buffer = self._buffer[at + len(OPEN) :]
                self._inside = True
            at = self._buffer.find(CLOSE)
            if at < 0:
                return out
            region, self._buffer = self._buffer[:at], self._buffer[at + len(CLOSE) :]
            self._inside = False
            self._close(region, out)

    def finish(self) -> list[str | ParsedCall]:
        """The reply ended: an open region, and anything held, is text."""
        out: list[str | ParsedCall] = []
        if self._inside:
            self.reply.outcome = "failed"
            self._release(OPEN + self._buffer, out)
        else:
            self._release(self._buffer, out)
        self._buffer, self._inside = "", False
        if self._blank and not self.reply.calls:
            self._emit(self._blank, out)
        self._blank = ""
        return out

    def _close(self, region: str, out: list[str | ParsedCall]) -> None:
        call = parse_call(region)
        if call is None:
            self.reply.outcome = "failed"
            self._release(OPEN + region + CLOSE, out)
            return
        self._blank = ""
        self.reply.calls.append(call)
        if self.reply.outcome == "none":
            self.reply.outcome = "ok"
        out.append(call)

    def _release(self, text: str, out: list[str | ParsedCall]) -> None:
        body = (self._blank + text).rstrip()
        self._blank = (self._blank + text)[len(body) :]
        if body:
            self._emit(body, out)

    def _emit(self, text: str, out: list[str | ParsedCall]) -> None:
        self.reply.content += text
        out.append(text)


class PlainParser(HermesParser):
    """For requests without tools: everything is text."""

    def feed(self, text: str) -> list[str | ParsedCall]:
        """Release at once."""
        out: list[str | ParsedCall] = []
        if text:
            self._emit(text, out)
        return out


def parse_reply(text: str, *, tools: bool) -> ParsedReply:
    """Parse a finished reply."""
    parser = HermesParser() if tools else PlainParser()
    parser.feed(text)
    parser.finish()
    return parser.reply


def joined_text(events: Sequence[str | ParsedCall]) -> str:
    """The content among released events."""
    return "".join(e for e in events if isinstance(e, str))
