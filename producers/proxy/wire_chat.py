"""The OpenAI chat completions format: requests in, replies and stream chunks out.

Field names and shapes: OpenAI API reference, "Chat completions" and "Streaming". Harnesses' own additions to messages
are kept as they came.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

from producers.proxy.calls import CallRequest, Reply
from producers.proxy.errors import CallError, bad_request
from producers.proxy.replies import Released

WIRE_FORMAT = "chat"

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

#: Features that change what is sampled and are not offered: refused unless they are at their neutral value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop": (None, []),
    "n": (None, 1),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "functions": (None, []),
    "audio": (None,),
    "response_format": (None, {"type": "text"}),
}


def parse_request(body: bytes) -> CallRequest:
    """Validate a request body. Raises CallError (400) that names the field."""
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise bad_request(f"the body is not JSON: {exc}") from exc
    if not isinstance(raw, dict):
        raise bad_request("the body must be a JSON object")
    if b"\\ud" in body.lower():  # escaped surrogates: a lone one is no text and cannot be recorded
        try:
            json.dumps(raw, ensure_ascii=False).encode()
        except UnicodeEncodeError as exc:
            raise bad_request("the body has an unpaired surrogate escape (\\ud800 to \\udfff)") from exc
    messages = raw.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("`messages` must be a non-empty list", "messages")
    _check_messages(messages)
    for name, allowed in _NEUTRAL.items():
        if raw.get(name) not in allowed:
            raise bad_request(f"`{name}` is not supported with this value; leave it out", name)
    tools = _check_tools(raw)
    choice = raw.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise bad_request('`tool_choice` can be "auto" or "none"; forced calls are not supported', "tool_choice")
    top_k = _integer(raw, "top_k", -1, 1_000_000)
    max_tokens = _integer(raw, "max_completion_tokens", 1, 2**31 - 1)
    return CallRequest(
        raw=raw,
        messages=messages,
        tools=() if choice == "none" else tools,
        stream=_flag(raw, "stream"),
        temperature=_number(raw, "temperature", 0.0, 2.0),
        top_p=_top_p(raw),
        top_k=max(0, top_k or 0),
        max_tokens=max_tokens if max_tokens is not None else _integer(raw, "max_tokens", 1, 2**31 - 1),
        seed=_integer(raw, "seed", -(2**63), 2**63 - 1),
        parse_tools=bool(tools) and choice != "none",
    )


def wants_usage(raw: dict[str, Any]) -> bool:
    """Whether a stream must end with a usage chunk."""
    options = raw.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _check_messages(messages: Sequence[Any]) -> None:
    known_calls: set[str] = set()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise bad_request(f"`{where}` must be an object", where)
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise bad_request(
                f"`{where}.role` must be one of {', '.join(sorted(_ROLES))}, not {role!r}", f"{where}.role"
            )
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise bad_request(f"`{where}.content` must be a string, a list of parts or null", f"{where}.content")
        if role == "assistant":
            known_calls |= _check_calls(message.get("tool_calls"), where)
            if content is None and not message.get("tool_calls"):
                message["content"] = ""
        elif role == "tool":
            call_id = message.get("tool_call_id")
            if not isinstance(call_id, str):
                raise bad_request(f"`{where}.tool_call_id` must be a string", f"{where}.tool_call_id")
            if call_id not in known_calls:
                raise bad_request(
                    f"`{where}` answers tool call {call_id!r}, which no preceding assistant message made", where
                )
        elif content is None:
            raise bad_request(f"`{where}.content` is missing", f"{where}.content")


def _check_calls(calls: Any, where: str) -> set[str]:
    if calls is None:
        return set()
    if not isinstance(calls, list):
        raise bad_request(f"`{where}.tool_calls` must be a list", f"{where}.tool_calls")
    ids = set()
    for j, call in enumerate(calls):
        at = f"{where}.tool_calls[{j}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"`{at}` must be a function call with a name", at)
        if not isinstance(call.get("id"), str):
            raise bad_request(f"`{at}.id` must be a string", f"{at}.id")
        ids.add(call["id"])
    return ids


def _check_tools(raw: dict[str, Any]) -> Sequence[dict[str, Any]]:
    tools = raw.get("tools")
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise bad_request("`tools` must be a list", "tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"`tools[{i}]` must be of type function and have a name", f"tools[{i}]")
    return tools


def _number(raw: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high:
        raise bad_request(f"`{name}` must be a number from {low:g} to {high:g}, not {value!r}", name)
    return float(value)


def _top_p(raw: dict[str, Any]) -> float:
    value = _number(raw, "top_p", 0.0, 1.0)
    if value == 0.0:
        raise bad_request("`top_p` must be above 0; use `temperature` 0 for greedy sampling", "top_p")
    return 1.0 if value is None else value


def _integer(raw: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise bad_request(f"`{name}` must be an integer of at least {low}, not {value!r}", name)
    return value


def _flag(raw: dict[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad_request(f"`{name}` must be true or false, not {value!r}", name)
    return bool(value)


def usage_of(reply: Reply) -> dict[str, Any]:
    """Token counts."""
    sampled = len(reply.sampled.ids)
    return {
        "prompt_tokens": reply.prompt_len,
        "completion_tokens": sampled,
        "total_tokens": reply.prompt_len + sampled,
        "prompt_tokens_details": {"cached_tokens": reply.sampled.cached_prompt_tokens or 0},
    }


class ChatResponse:
    """Builds the bodies of one reply."""

    def __init__(self, call_id: str, request: CallRequest) -> None:
        model = request.raw.get("model")
        self._id = f"chatcmpl-{call_id}"
        self._model = model if isinstance(model, str) else "policy"
        self._created = int(time.time())
        self._usage = wants_usage(request.raw)

    def whole(self, reply: Reply) -> dict[str, Any]:
        """A chat.completion object."""
        choice = {"index": 0, "message": reply.message, "finish_reason": reply.finish_reason, "logprobs": None}
        return self._envelope("chat.completion") | {"choices": [choice], "usage": usage_of(reply)}

    def first(self) -> bytes:
        """The chunk that opens a stream."""
        return self._chunk({"role": "assistant", "content": ""})

    def parts(self, released: Sequence[str | Released]) -> bytes:
        """Chunks for newly released text and calls."""
        out = b""
        for item in released:
            if isinstance(item, Released):
                out += self._chunk({"tool_calls": [{"index": item.index, **item.as_openai()}]})
            else:
                out += self._chunk({"content": item})
        return out

    def last(self, reply: Reply) -> bytes:
        """The end of a stream."""
        out = self._chunk({}, reply.finish_reason)
        if self._usage:
            out += sse(self._envelope("chat.completion.chunk") | {"choices": [], "usage": usage_of(reply)})
        return out + b"data: [DONE]\n\n"

    def error(self, error: CallError) -> bytes:
        """An error in the middle of a stream: an event with the error object, and no [DONE]."""
        return sse(error.body())

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return sse(self._envelope("chat.completion.chunk") | {"choices": [choice]})


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
