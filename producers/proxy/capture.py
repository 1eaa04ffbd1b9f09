"""A model call as the events that record it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from producers.proxy.conversations import Prompt, canonical_json
from producers.proxy.engines.base import RoutingRows, RoutingShape, TokenChunk
from schemas.base import Event
from schemas.events import ConversationOpened, ModelCallCompleted, ModelCallFailed, RoutingRecorded, VersionSpan
from schemas.ids import CallId, RunId, TrialId, make_event_id, now_ms
from schemas.packing import all_bits, pack_bits, pack_floats, pack_ints

#: A routing event's arrays stay below this many bytes: brokers' default message limit is 1 MiB.
MAX_CHUNK_BYTES = 890_000


#: Requests of failed calls are kept up to this size: the failure must fit into a record whatever was sent.
MAX_FAILED_REQUEST_CHARS = 1_000_000

#: Requests that are answered may bring this much that is new: a record holds it once as text and once as tokens.
MAX_NEW_REQUEST_CHARS = 3_000_000


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """Whose call it is."""

    run_id: RunId
    producer: str
    trial_id: TrialId
    attempt: int
    call_id: CallId
    call_index: int
    wire_format: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a call."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int | None


@dataclass
class Sampled:
    """What an engine has sampled for a call so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    routing: list[RoutingRows] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs_mode: str = "processed"
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    cached_prompt_tokens: int | None = None

    def add(self, chunk: TokenChunk) -> None:
        """Append a chunk. Raises ValueError when ids and log-probs differ in number."""
        if len(chunk.ids) != len(chunk.logprobs):
            raise ValueError(f"engine sent {len(chunk.ids)} tokens with {len(chunk.logprobs)} log-probs")
        if not self.ids:
            self.queue_ms, self.prefill_ms = chunk.queue_ms, chunk.prefill_ms
            self.cached_prompt_tokens = chunk.cached_prompt_tokens
        start, end = len(self.ids), len(self.ids) + len(chunk.ids)
        if self.spans and self.spans[-1].version == chunk.version:
            start = self.spans.pop().start
        if end > start:
            self.spans.append(VersionSpan(version=chunk.version, start=start, end=end))
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        self.routing += chunk.routing
        self.logprobs_mode = chunk.logprobs_mode
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.decode_ms = chunk.decode_ms if chunk.decode_ms is not None else self.decode_ms


def opened_event(who: CallIdentity, prompt: Prompt) -> list[Event]:
    """ConversationOpened, when the call opened one."""
    if prompt.opened is None:
        return []
    now = now_ms()
    return [
        ConversationOpened(
            event_id=make_event_id(now),
            run_id=who.run_id,
            occurred_at=now,
            producer=who.producer,
            trial_id=who.trial_id,
            attempt=who.attempt,
            conversation_id=prompt.conversation_id,
            kind=prompt.opened.kind,
            reason=prompt.opened.reason,
            parent_conversation_id=prompt.opened.parent_conversation_id,
        )
    ]


def completed_event(
    who: CallIdentity,
    prompt: Prompt,
    sampling: Sampling,
    sampled: Sampled,
    *,
    request: dict[str, Any],
    reply: dict[str, Any],
    finish_reason: str,
    parser_outcome: str,
    streamed: bool,
    replica: str,
) -> ModelCallCompleted:
    """ModelCallCompleted. `request` is the whole request; of its messages only the new ones are kept."""
    now = now_ms()
    valid = [p is not None for p in sampled.logprobs]
    stored = {k: v for k, v in request.items() if k != "messages"} | {"messages": list(prompt.new_messages)}
    return ModelCallCompleted(
        event_id=make_event_id(now),
        run_id=who.run_id,
        occurred_at=now,
        producer=who.producer,
        trial_id=who.trial_id,
        attempt=who.attempt,
        conversation_id=prompt.conversation_id,
        call_id=who.call_id,
        call_index=who.call_index,
        parent_call_id=prompt.parent.call_id if prompt.parent is not None else None,
        shared_prefix_len=prompt.shared_prefix_len,
        prompt_delta_ids=pack_ints(prompt.delta_ids),
        prompt_len=len(prompt.ids),
        sampled_ids=pack_ints(sampled.ids),
        logprobs=pack_floats(0.0 if p is None else p for p in sampled.logprobs),
        logprob_valid=all_bits(len(valid)) if all(valid) else pack_bits(valid),
        logprobs_mode=sampled.logprobs_mode,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        version_spans=tuple(sampled.spans),
        finish_reason=finish_reason,
        request_json=canonical_json(stored),
        num_messages=len(request["messages"]),
        response_json=canonical_json(reply),
        parser_outcome=parser_outcome,
        wire_format=who.wire_format,
        streamed=streamed,
        num_retries=0,
        engine_replica=replica,
        queue_ms=sampled.queue_ms,
        prefill_ms=sampled.prefill_ms,
        decode_ms=sampled.decode_ms,
        cached_prompt_tokens=sampled.cached_prompt_tokens,
    )


def failed_event(
    who: CallIdentity,
    *,
    status: int,
    error_class: str,
    detail: str,
    request: dict[str, Any] | None,
    prompt: Prompt | None,
    sampled: Sampled | None,
) -> ModelCallFailed:
    """ModelCallFailed, with what had been sampled."""
    now = now_ms()
    stored = dict(request) if request is not None else None
    if stored is not None and prompt is not None:
        stored["messages"] = list(prompt.new_messages)
    return ModelCallFailed(
        event_id=make_event_id(now),
        run_id=who.run_id,
        occurred_at=now,
        producer=who.producer,
        trial_id=who.trial_id,
        attempt=who.attempt,
        conversation_id=prompt.conversation_id if prompt is not None else None,
        call_id=who.call_id,
        call_index=who.call_index,
        http_status=status,
        error_class=error_class,
        detail=detail,
        request_json=_bounded_json(stored),
        sampled_ids=pack_ints(sampled.ids) if sampled is not None and sampled.ids else None,
        wire_format=who.wire_format,
    )


def _bounded_json(request: dict[str, Any] | None) -> str:
    """The request of a failed call; empty when there is none, or when it is larger than a record may be."""
    text = canonical_json(request) if request is not None else ""
    return text if len(text) <= MAX_FAILED_REQUEST_CHARS else ""


def routing_events(
    who: CallIdentity, shape: RoutingShape, rows: Sequence[RoutingRows], first: int, max_bytes: int = MAX_CHUNK_BYTES
) -> tuple[list[RoutingRecorded], int]:
    """The routing rows from context position `first` on, in chunks; and one past the last recorded position.

    A position that was forwarded twice (after new weights were loaded) keeps its first row: the one that the tokens
    sampled at the time were made with. Positions that no row covers are in the arrays with a cleared validity bit.
    """
    end = max((r.start + r.num_tokens for r in rows), default=first)
    if end <= first:
        return [], first
    data = bytearray((end - first) * shape.row_bytes)
    valid = bytearray(end - first)
    versions = array("q", [-1]) * (end - first)
    for row in rows:  # in order of forwarding: the first one wins
        _place(row, shape.row_bytes, first, data, valid, versions)
    per_chunk = max(1, max_bytes * 8 // (shape.row_bytes * 8 + 1))  # a row and its validity bit
    starts = range(0, end - first, per_chunk)
    events = []
    now = now_ms()
    for index, at in enumerate(starts):
        stop = min(at + per_chunk, end - first)
        flags = valid[at:stop]
        events.append(
            RoutingRecorded(
                event_id=make_event_id(now),
                run_id=who.run_id,
                occurred_at=now,
                producer=who.producer,
                trial_id=who.trial_id,
                attempt=who.attempt,
                call_id=who.call_id,
                chunk_index=index,
                num_chunks=len(starts),
                token_start=first + at,
                num_tokens=stop - at,
                num_layers=shape.num_layers,
                top_k=shape.top_k,
                num_experts=shape.num_experts,
                dtype=shape.dtype,
                expert_ids=bytes(data[at * shape.row_bytes : stop * shape.row_bytes]),
                valid=all_bits(len(flags)) if all(flags) else pack_bits(flags),
                version_spans=tuple(_version_spans(versions[at:stop])),
            )
        )
    return events, end


def _place(
    row: RoutingRows, row_bytes: int, first: int, data: bytearray, valid: bytearray, versions: array[int]
) -> None:
    """Copy the rows that fill still empty positions."""
    if len(row.expert_ids) != row.num_tokens * row_bytes:
        raise ValueError(f"engine sent {len(row.expert_ids)} routing bytes for {row.num_tokens} rows of {row_bytes}")
    lo, hi = max(row.start, first), row.start + row.num_tokens
    if lo >= hi:
        return
    if row.valid is None and not any(valid[lo - first : hi - first]):
        source = row.expert_ids[(lo - row.start) * row_bytes :]
        data[(lo - first) * row_bytes : (hi - first) * row_bytes] = source
        valid[lo - first : hi - first] = b"\x01" * (hi - lo)
        versions[lo - first : hi - first] = array("q", [row.version]) * (hi - lo)
        return
    for position in range(lo, hi):
        at, source_at = position - first, position - row.start
        if valid[at] or not (row.valid is None or row.valid[source_at]):
            continue
        data[at * row_bytes : (at + 1) * row_bytes] = row.expert_ids[
            source_at * row_bytes : (source_at + 1) * row_bytes
        ]
        valid[at], versions[at] = 1, row.version


def _version_spans(versions: array[int]) -> Iterator[VersionSpan]:
    """Runs of equal versions; rows that were not captured (-1) belong to none."""
    if len(versions) > 1 and versions.count(versions[0]) == len(versions):
        if versions[0] >= 0:
            yield VersionSpan(version=versions[0], start=0, end=len(versions))
        return
    start = 0
    for at in range(1, len(versions) + 1):
        if at == len(versions) or versions[at] != versions[start]:
            if versions[start] >= 0:
                yield VersionSpan(version=versions[start], start=start, end=at)
            start = at
