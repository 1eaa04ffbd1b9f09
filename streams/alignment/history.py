"""Which recorded conversation does a resent message list continue?

Harnesses resend the whole history with every request, and change it on the way: contents flip between null, "" and
lists of text parts, defaults appear in tool arguments, reasoning is dropped. Messages are therefore compared by an
identity that ignores what harnesses are known to change, never as bytes and never by encoding assistant text again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]

#: Keys of a message that never decide identity: hints for caches, and fields that only some harnesses send back.
_IGNORED = frozenset(
    {"cache_control", "reasoning", "reasoning_content", "thinking_blocks", "provider_specific_fields", "refusal"}
    | {"annotations", "audio", "function_call", "images"}
)


def _plain_content(content: Any) -> Any:
    """null = "" = absent; a list of text parts = the string of their texts; cache hints are dropped."""
    if content is None:
        return ""
    if isinstance(content, list):
        if all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            return "".join(str(part.get("text") or "") for part in content)
        return [
            {k: v for k, v in part.items() if k != "cache_control"} if isinstance(part, Mapping) else part
            for part in content
        ]
    return content


def _parsed(arguments: Any) -> Any:
    """Tool arguments as the JSON they are; text that is no JSON stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _tool_calls(message: Message) -> list[Message]:
    calls = message.get("tool_calls")
    return [c for c in calls if isinstance(c, Mapping)] if isinstance(calls, list) else []


def _assistant_identity(message: Message) -> Any:
    """An assistant turn with tool calls is its call ids (names and arguments may be edited); else its text."""
    calls = _tool_calls(message)
    ids = [call.get("id") for call in calls]
    if calls and all(isinstance(i, str) and i for i in ids):
        return ["assistant", "ids", ids]
    plain = [
        [(call.get("function") or {}).get("name"), _parsed((call.get("function") or {}).get("arguments"))]
        for call in calls
    ]
    return ["assistant", "text", _plain_content(message.get("content")), plain]


def message_identity(message: Message) -> str:
    """What makes two messages the same turn, as canonical JSON.

    >>> message_identity({"role": "user", "content": None}) == message_identity({"role": "user", "content": []})
    True
    """
    role = str(message.get("role", ""))
    if role == "assistant":
        identity = _assistant_identity(message)
    else:
        rest = {
            k: v
            for k, v in message.items()
            if k not in _IGNORED and k not in ("role", "content") and v is not None and v != []
        }
        identity = [role, _plain_content(message.get("content")), rest]
    return json.dumps(identity, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _digest(identity: str) -> bytes:
    return hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True)
class KnownConversation:
    """A point that a request can continue: one completed call's messages and then its reply.

    `key` is the caller's name for it (a call id). `digests` are made from `messages` unless given.
    """

    key: str
    messages: Sequence[Message]
    digests: tuple[bytes, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not self.digests:
            object.__setattr__(self, "digests", message_digests(self.messages))


def message_digests(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """The identity digest of each message."""
    return tuple(_digest(message_identity(m)) for m in messages)


@dataclass(frozen=True)
class Match:
    """The answer: continue `key` after its `num_matched` messages, or (key None) start a new segment.

    `reason` is one of: continued; first_request (nothing recorded yet); retry (the same list was answered before,
    without an earlier point to continue); history_truncated (a recorded list goes on where this one ends);
    history_changed (lists agree up to message `diverged_at` and differ there).
    """

    key: str | None
    num_matched: int
    reason: str
    diverged_at: int = 0

    @property
    def continues(self) -> bool:
        """True when the request continues recorded tokens."""
        return self.key is not None


def match_history(known: Sequence[KnownConversation], messages: Sequence[Message]) -> Match:
    """Decide what `messages` continues: the longest recorded list (request and reply) that is a proper prefix of it.

    Of equally long ones the one whose last turn is resent literally wins, then the newest. `known` is in order of
    recording. A new message must follow the matched ones: a request that ends with a recorded reply is no new turn.
    """
    incoming = message_digests(messages)
    best: KnownConversation | None = None
    best_rank = (0, False)
    common, truncated, repeated = 0, False, False
    for candidate in known:
        digests = candidate.digests
        shared = _num_shared(digests, incoming)
        common = max(common, shared)
        if 0 < shared == len(digests) < len(incoming):
            rank = (shared, candidate.messages[-1] == messages[shared - 1])
            if rank >= best_rank:
                best, best_rank = candidate, rank
        elif shared == len(incoming):
            truncated = True
            repeated = repeated or len(digests) == len(incoming) + 1
    if best is not None:
        return Match(best.key, len(best.digests), "continued", len(best.digests))
    if not known:
        return Match(None, 0, "first_request")
    reason = "retry" if repeated else "history_truncated" if truncated else "history_changed"
    return Match(None, 0, reason, common)


def _num_shared(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    num = min(len(a), len(b))
    return next((i for i in range(num) if a[i] != b[i]), num)
