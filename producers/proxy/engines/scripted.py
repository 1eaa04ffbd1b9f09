"""An engine that emits given replies through the same path as a real one: for tests and for measuring the proxy.

A script is one JSON object per line:

    {"match": "regular expression searched in the prompt's text", "text": "..."}    every matching call
    {"ids": [5, 6, 7]}                                                              the next call that matches nothing
    {"text": "...", "finish_reason": "length", "delay_ms": 20, "error": "..."}

Entries with `match` are tried first, in order. The others answer calls in order of arrival, the last one for ever.
A reply without `finish_reason` is closed by the stop token. Log-probs and experts are a hash of (token, position)
resp. (token, position, layer), so that whoever reads the log can check that none was moved.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from producers.proxy.engines.base import (
    ContextLengthError,
    EngineError,
    EngineUnavailableError,
    GenerateRequest,
    LoadResult,
    RoutingRows,
    RoutingShape,
    TokenChunk,
)
from schemas.events import PolicyPublished
from schemas.packing import unpack_floats

#: Layout of the invented routing rows.
SCRIPTED_ROUTING = RoutingShape(num_layers=2, top_k=2, num_experts=8, dtype="uint8")

#: Context length when [engine] gives none.
SCRIPTED_MAX_MODEL_LEN = 131_072

_MASK = 2**32 - 1


def _mix(*values: int) -> int:
    """A 32-bit hash of small integers (FNV-1a over words)."""
    acc = 0x811C9DC5
    for value in values:
        acc = ((acc ^ (value & _MASK)) * 0x01000193) & _MASK
        acc ^= acc >> 15
    return acc


_NUM_ROWS = 4096
_LOGPROBS = [-(1 + _mix(index) % 4096) / 1024.0 for index in range(_NUM_ROWS)]


def scripted_logprob(token_id: int, position: int) -> float:
    """The log-prob the engine reports for `token_id` at context position `position`; exact in float32."""
    return _LOGPROBS[(token_id * 131 + position * 17) % _NUM_ROWS]


def _make_rows() -> list[bytes]:
    """A table of routing rows: distinct experts per layer."""
    shape, rows = SCRIPTED_ROUTING, []
    for index in range(_NUM_ROWS):
        row = bytearray()
        for layer in range(shape.num_layers):
            first = _mix(index, layer) % shape.num_experts
            row += bytes((first + i) % shape.num_experts for i in range(shape.top_k))
        rows.append(bytes(row))
    return rows


_ROWS = _make_rows()


def scripted_experts(token_id: int, position: int) -> bytes:
    """The routing row it reports for a context token."""
    return _ROWS[(token_id * 31 + position * 7) % _NUM_ROWS]


@dataclass(frozen=True)
class ScriptEntry:
    """One scripted reply: either `ids` or `text`, or an `error`."""

    match: str | None = None
    text: str | None = None
    ids: tuple[int, ...] | None = None
    finish_reason: str = "stop"
    delay_ms: float = 0.0
    error: str | None = None


def parse_script(path: Path) -> tuple[ScriptEntry, ...]:
    """Read a script file. Raises ValueError naming the line and the field."""
    entries = []
    known = set(ScriptEntry.__dataclass_fields__)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except ValueError as exc:
            raise ValueError(f"{path}:{number}: not JSON ({exc}); write one JSON object per line") from exc
        if not isinstance(raw, dict) or set(raw) - known:
            raise ValueError(f"{path}:{number}: expected an object with keys among {', '.join(sorted(known))}")
        if sum(k in raw for k in ("text", "ids", "error")) != 1:
            raise ValueError(f"{path}:{number}: give exactly one of `text`, `ids` and `error`")
        if "ids" in raw:
            raw["ids"] = tuple(raw["ids"])
        entries.append(ScriptEntry(**raw))
    if not entries:
        raise ValueError(f"{path}: the script is empty")
    return tuple(entries)


class ScriptedEngine:
    """See the module's text. `calls` keeps every request and reply: the engine's own, independent record."""

    def __init__(
        self,
        entries: Sequence[ScriptEntry],
        *,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
        stop_token_id: int,
        replica: str = "engine/0",
        max_model_len: int = SCRIPTED_MAX_MODEL_LEN,
        routing_shape: RoutingShape | None = SCRIPTED_ROUTING,
        keep_calls: int = 10_000,
    ) -> None:
        self.replica = replica
        self.calls: list[dict[str, Any]] = []
        self._keep = keep_calls
        self._matched = [(re.compile(e.match, re.S), e) for e in entries if e.match is not None]
        self._ordered = [e for e in entries if e.match is None]
        self._next = 0
        self._encode, self._decode, self._stop = encode, decode, stop_token_id
        self._max_model_len = max_model_len
        self._shape = routing_shape
        self._version: int | None = None
        self._running = asyncio.Event()
        self._running.set()

    @property
    def version(self) -> int | None:
        """The version it pretends to serve."""
        return self._version

    @property
    def max_model_len(self) -> int:
        """Longest context, tokens."""
        return self._max_model_len

    @property
    def routing_shape(self) -> RoutingShape | None:
        """Layout of its routing rows."""
        return self._shape

    def _choose(self, prompt: Sequence[int]) -> ScriptEntry:
        if self._matched:
            text = self._decode(prompt)
            for pattern, entry in self._matched:
                if pattern.search(text):
                    return entry
        if not self._ordered:
            raise EngineError("the script has no entry for this prompt; add one without `match`")
        entry = self._ordered[min(self._next, len(self._ordered) - 1)]
        self._next += 1
        return entry

    def _reply_ids(self, entry: ScriptEntry, request: GenerateRequest) -> tuple[list[int], str]:
        ids = list(entry.ids) if entry.ids is not None else self._encode(entry.text or "")
        reason = entry.finish_reason
        if reason == "stop" and (not ids or ids[-1] not in request.stop_token_ids):
            ids.append(self._stop)
        if len(ids) > request.max_tokens:
            ids, reason = ids[: request.max_tokens], "length"
        return ids, reason

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Emit the scripted reply; one chunk per token when streaming."""
        prompt_len = len(request.prompt_ids)
        if prompt_len >= self._max_model_len:
            raise ContextLengthError(prompt_len, self._max_model_len)
        if self._version is None:
            raise EngineUnavailableError(f"{self.replica}: no policy is loaded")
        entry = self._choose(request.prompt_ids)
        if entry.error is not None:
            raise EngineError(entry.error)
        ids, reason = self._reply_ids(entry, request)
        if len(self.calls) < self._keep:
            record = {"request_id": request.request_id, "prompt": list(request.prompt_ids), "sampled": ids}
            self.calls.append(record)
        logprobs: list[float | None] = [scripted_logprob(t, prompt_len + i) for i, t in enumerate(ids)]
        step = 1 if request.stream or entry.delay_ms else max(1, len(ids))
        for at in range(0, len(ids), step):
            if entry.delay_ms:
                await asyncio.sleep(entry.delay_ms / 1000)
            await self._running.wait()
            end = at + step
            yield TokenChunk(
                ids[at:end],
                logprobs[at:end],
                self._version,
                self._rows(request, ids, at, end),
                reason if end >= len(ids) else None,
                queue_ms=0.0 if at == 0 else None,
                prefill_ms=0.0 if at == 0 else None,
            )

    def _rows(self, request: GenerateRequest, ids: Sequence[int], at: int, end: int) -> list[RoutingRows]:
        """Rows of the tokens forwarded to sample ids[at:end]: all but the newest token of the context."""
        if self._shape is None or self._version is None:
            return []
        prompt = request.prompt_ids
        start = request.first_row if at == 0 else len(prompt) + at - 1
        stop = len(prompt) + min(end, len(ids)) - 1
        tail = [*prompt[start:], *ids[max(0, start - len(prompt)) :]]
        data = b"".join(scripted_experts(t, p) for p, t in zip(range(start, stop), tail, strict=False))
        return [RoutingRows(start, max(0, stop - start), data, self._version)]

    async def load(self, policy: PolicyPublished) -> LoadResult:
        """Pretend: the canary is the published one."""
        started = time.perf_counter()
        self._version = policy.version
        canary = tuple(unpack_floats(policy.canary_logprobs))
        return LoadResult(policy.version, True, canary, 0.0, time.perf_counter() - started)

    def set_version(self, version: int) -> None:
        """Serve as `version` without a publication (the engine has no weights)."""
        self._version = version

    async def pause(self) -> None:
        """Hold every generation before its next chunk."""
        self._running.clear()

    async def resume(self) -> None:
        """Go on."""
        self._running.set()

    async def close(self) -> None:
        """Fail what comes next."""
        self._version = None
        self._running.set()
