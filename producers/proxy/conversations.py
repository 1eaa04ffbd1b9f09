"""The recorded calls of one trial attempt, and what a new request continues."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from producers.proxy.rendering import Renderer
from producers.proxy.template_check import TemplateReport
from schemas.ids import CallId, ConversationId
from streams.alignment import KnownConversation, match_history, message_digests

log = structlog.get_logger()

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A completed call: the messages it answered, its reply, and the exact tokens of both."""

    call_id: CallId
    conversation_id: ConversationId
    known: KnownConversation
    reply: Message
    #: Full context and the sampled tokens.
    ids: array[int]
    ended_with_stop: bool
    #: Context positions [0, routed) have their routing recorded by this call or by the calls it continues.
    routed: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens a request is answered from, and how they relate to what is recorded."""

    ids: array[int]
    parent: RecordedCall | None
    shared_prefix_len: int
    #: Messages of the request that the parent does not hold.
    new_messages: Sequence[Message]
    conversation_id: ConversationId
    #: Set when the request opened a conversation or a segment.
    opened: OpenedConversation | None

    @property
    def delta_ids(self) -> array[int]:
        """Tokens behind the shared prefix."""
        return self.ids[self.shared_prefix_len :]


@dataclass(frozen=True, slots=True)
class OpenedConversation:
    """Facts of ConversationOpened."""

    kind: str
    reason: str
    parent_conversation_id: ConversationId | None


class Conversations:
    """All conversations of one attempt. Not thread-safe."""

    def __init__(self, prefix: str, renderer: Renderer, template: TemplateReport) -> None:
        self._prefix = prefix
        self._renderer = renderer
        self._template = template
        self._calls: dict[str, RecordedCall] = {}
        self._known: list[KnownConversation] = []
        self._num_opened = 0
        self._main_head: bytes | None = None
        self._main: ConversationId | None = None
        #: Digest of a whole message list -> conversation that a root request with it opened.
        self._roots: dict[bytes, ConversationId] = {}

    def make_prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Prompt:
        """Decide what the request continues and build its tokens. Raises RenderError."""
        match = match_history(self._known, messages)
        reason = match.reason
        if match.key is not None:
            parent = self._calls[match.key]
            continued = self._continue(parent, messages[match.num_matched :], tools)
            if continued is not None:
                return continued
            reason = "template_context_dependent"
        return self._open(messages, tools, reason)

    def _continue(self, parent: RecordedCall, new: Sequence[Message], tools: Sequence[Any] | None) -> Prompt | None:
        if not self._template.allows_delta(new):
            return None
        rendered = self._renderer.render_delta(parent.reply, new, tools)
        if rendered is None:
            return None
        closing, delta = rendered
        ids = array("i", parent.ids)
        if not parent.ended_with_stop:
            ids.extend(closing)
        ids.extend(delta)
        return Prompt(ids, parent, len(parent.ids), new, parent.conversation_id, None)

    def _open(self, messages: Sequence[Message], tools: Sequence[Any] | None, reason: str) -> Prompt:
        ids = array("i", self._renderer.render_prompt(messages, tools))
        digests = message_digests(messages)
        whole = b"".join(digests)
        if whole in self._roots:  # the same request again: another attempt at the same point, not a new segment
            return Prompt(ids, None, 0, messages, self._roots[whole], None)
        head = b"".join(digests[: _head_length(messages)])
        kind = "main" if self._main_head in (None, head) else "unknown"
        parent = self._main if kind == "main" else None
        conversation_id = ConversationId(f"{self._prefix}/k{self._num_opened:02d}")
        self._num_opened += 1
        self._roots[whole] = conversation_id
        if self._main_head is None:
            self._main_head, self._main = head, conversation_id
        return Prompt(ids, None, 0, messages, conversation_id, OpenedConversation(kind, reason, parent))

    def record(
        self, prompt: Prompt, call: CallId, reply: Message, sampled: Sequence[int], *, stopped: bool, routed: int
    ) -> None:
        """Remember a completed call, so that a later request can continue it."""
        ids = array("i", prompt.ids)
        ids.extend(sampled)
        before = prompt.parent.known.digests if prompt.parent is not None else ()
        digests = (*before, *message_digests([*prompt.new_messages, reply]))
        # Only the last message is compared literally; the digests stand for all of them.
        known = KnownConversation(call, [reply], digests)
        self._calls[call] = RecordedCall(call, prompt.conversation_id, known, reply, ids, stopped, routed)
        self._known.append(known)


def _head_length(messages: Sequence[Message]) -> int:
    """Messages up to and with the first user turn: what tells conversations of one harness apart."""
    return next((i + 1 for i, m in enumerate(messages) if m.get("role") == "user"), len(messages))


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; non-ASCII text stays readable."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
