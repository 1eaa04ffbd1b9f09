"""Sampled ids to the assistant message that a harness gets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from producers.proxy.engines.base import EngineError
from producers.proxy.parsing import HermesParser, ParsedCall, PlainParser
from producers.proxy.rendering import Renderer


@dataclass(frozen=True, slots=True)
class Released:
    """A complete tool call with its place in the reply and its id."""

    index: int
    id: str
    call: ParsedCall

    def as_openai(self) -> dict[str, Any]:
        """The entry of `tool_calls`."""
        function = {"name": self.call.name, "arguments": self.call.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ReplyBuilder:
    """Sampled ids to the assistant message, at once or as they come; both ways give the same message."""

    def __init__(self, renderer: Renderer, call_id: str, *, parse_tools: bool) -> None:
        self._renderer = renderer
        self._call_id = call_id
        self._parser = HermesParser() if parse_tools else PlainParser()
        self._stream: DecodeStream | None = None
        self._text = ""
        self._num_calls = 0
        self._calls: list[Released] = []

    def feed(self, ids: Sequence[int]) -> list[str | Released]:
        """Newly sampled ids; stop tokens are no text."""
        if self._stream is None:
            self._stream = DecodeStream(skip_special_tokens=False)
        out: list[str | Released] = []
        for token in ids:
            if token in self._renderer.stop_token_ids:
                continue
            piece = self._stream.step(self._renderer.tokenizer, token)
            if piece:
                self._text += piece
                out += self._number(self._parser.feed(piece))
        return out

    def finish(self, ids: Sequence[int]) -> list[str | Released]:
        """All ids of the reply; returns what was not released before."""
        body = ids[:-1] if ids and ids[-1] in self._renderer.stop_token_ids else ids
        whole = self._renderer.decode(body)
        if not whole.startswith(self._text):
            raise EngineError("decoding token by token and at once disagree; the reply cannot be streamed")
        rest = self._parser.feed(whole[len(self._text) :])
        self._text = whole
        return self._number([*rest, *self._parser.finish()])

    def _number(self, parsed: Sequence[str | ParsedCall]) -> list[str | Released]:
        out: list[str | Released] = []
        for item in parsed:
            if isinstance(item, ParsedCall):
                digest = hashlib.sha256(f"{self._call_id}/{self._num_calls}".encode()).hexdigest()
                item_out = Released(self._num_calls, f"call_{digest[:24]}", item)
                self._num_calls += 1
                self._calls.append(item_out)
                out.append(item_out)
            else:
                out.append(item)
        return out

    @property
    def outcome(self) -> str:
        """none | ok | failed."""
        return self._parser.reply.outcome

    def message(self) -> dict[str, Any]:
        """The assistant message."""
        message: dict[str, Any] = {"role": "assistant", "content": self._parser.reply.content}
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [c.as_openai() for c in self._calls]
        return message

    def finish_reason(self, engine_reason: str | None) -> str:
        """tool_calls when the reply ended by itself and made calls."""
        return "tool_calls" if self._calls and engine_reason == "stop" else str(engine_reason)
