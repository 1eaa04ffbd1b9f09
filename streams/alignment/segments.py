"""Recorded calls of one attempt -> token segments that can be trained. Pure; tokens are compared, never made.

A segment is one sequence of tokens that the engine really had as its context, so a position in a segment is also the
position in the context of each of its calls. A call continues a segment when its context begins with exactly the
segment's tokens; anything else starts a new segment, whose context is there with mask 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from schemas.events import CallSlice, ExcludedCall, ModelCallCompleted, ModelCallFailed, Segment, VersionSpan
from schemas.ids import CallId, ConversationId
from schemas.packing import PackingError, pack_bits, unpack_bits, unpack_floats, unpack_ints

Call = ModelCallCompleted | ModelCallFailed


class AlignmentError(ValueError):
    """Recorded calls do not fit together: names the call and what does not fit."""


@dataclass(frozen=True)
class Alignment:
    """What becomes of the calls of one attempt."""

    segments: tuple[Segment, ...]
    excluded: tuple[ExcludedCall, ...]
    #: Tokens with mask 1, and the oldest and newest policy version among them.
    num_sampled_tokens: int
    min_version: int | None
    max_version: int | None


@dataclass
class _Read:
    """One completed call, unpacked."""

    call: ModelCallCompleted
    context: array[int]
    sampled: array[int]
    logprobs: array[float]
    valid: list[bool]

    @property
    def tokens(self) -> array[int]:
        return self.context + self.sampled


@dataclass
class _Building:
    """A segment that may still grow."""

    conversation_id: ConversationId
    ids: array[int] = field(default_factory=lambda: array("i"))
    mask: bytearray = field(default_factory=bytearray)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    valid: list[bool] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    calls: list[CallSlice] = field(default_factory=list)

    def append(self, read: _Read) -> None:
        """Append the call's new prompt tokens (mask 0) and its sampled tokens (mask 1)."""
        start, prompt = len(self.ids), read.context[len(self.ids) :]
        self.ids.extend(prompt)
        self.mask.extend(bytes(len(prompt)))
        self.logprobs.extend([0.0] * len(prompt))
        self.valid.extend([False] * len(prompt))
        at = len(self.ids)
        self.ids.extend(read.sampled)
        self.mask.extend(b"\x01" * len(read.sampled))
        self.logprobs.extend(read.logprobs)
        self.valid.extend(read.valid)
        for span in read.call.version_spans:
            if span.start < span.end:
                self.spans.append(VersionSpan(version=span.version, start=at + span.start, end=at + span.end))
        self.calls.append(
            CallSlice(call_id=read.call.call_id, prompt_start=start, sampled_start=at, sampled_end=len(self.ids))
        )

    def finish(self) -> Segment:
        return Segment(
            conversation_id=self.conversation_id,
            ids=self.ids.tobytes(),
            mask=bytes(self.mask),
            logprobs=self.logprobs.tobytes(),
            logprob_valid=pack_bits(self.valid),
            version_spans=tuple(self.spans),
            calls=tuple(self.calls),
        )


def align_calls(
    calls: Sequence[Call], kinds: Mapping[ConversationId, str], trained_kinds: Collection[str]
) -> Alignment:
    """Align the calls of one attempt, which are all there and in order of call index.

    `kinds` maps a conversation to its kind; a conversation that is not in it is "unknown". Raises AlignmentError.
    """
    completed = [c for c in calls if isinstance(c, ModelCallCompleted)]
    orphans = find_orphaned_retries(completed)
    excluded: list[ExcludedCall] = []
    segments: list[_Building] = []
    #: Call -> the segment that a continuation of the call may extend.
    ends: dict[CallId, _Building] = {}
    reader = _Reader(completed)
    for call in calls:
        read = reader.read(call) if isinstance(call, ModelCallCompleted) else None
        reason = _exclusion(call, orphans, kinds, trained_kinds)
        num_sampled = len(call.sampled_ids or b"") // 4
        if reason is not None or read is None or num_sampled == 0:
            if num_sampled:
                excluded.append(
                    ExcludedCall(call_id=call.call_id, reason=reason or "failed", num_sampled_tokens=num_sampled)
                )
            if read is not None and read.call.parent_call_id in ends:
                ends[call.call_id] = ends[read.call.parent_call_id]  # its tokens may be context of what follows
            continue
        parent = read.call.parent_call_id
        segment = ends.get(parent) if parent is not None else None
        if segment is None or segment.conversation_id != call.conversation_id or not _extends(read, segment):
            segment = _Building(read.call.conversation_id)
            segments.append(segment)
        segment.append(read)
        ends[call.call_id] = segment
    return _finish(segments, excluded)


def _finish(segments: Sequence[_Building], excluded: Sequence[ExcludedCall]) -> Alignment:
    versions = [span.version for segment in segments for span in segment.spans]
    return Alignment(
        segments=tuple(segment.finish() for segment in segments),
        excluded=tuple(excluded),
        num_sampled_tokens=sum(sum(segment.mask) for segment in segments),
        min_version=min(versions, default=None),
        max_version=max(versions, default=None),
    )


def _extends(read: _Read, segment: _Building) -> bool:
    return read.context[: len(segment.ids)].tobytes() == segment.ids.tobytes()


def _exclusion(
    call: Call, orphans: Collection[CallId], kinds: Mapping[ConversationId, str], trained_kinds: Collection[str]
) -> str | None:
    if isinstance(call, ModelCallFailed):
        return "failed"
    if kinds.get(call.conversation_id, "unknown") not in trained_kinds:
        return "conversation_not_trained"
    if call.call_id in orphans:
        return "orphaned_retry"
    return "aborted" if call.finish_reason == "aborted" else None


def find_orphaned_retries(calls: Sequence[ModelCallCompleted]) -> set[CallId]:
    """Calls whose prompt was answered again and whose own reply did not go on.

    Retries have the same parent and the same prompt. Those whose reply a later call continues are real; if none is
    continued, the last one is.
    """
    by_id = {call.call_id: call for call in calls}
    continued: set[CallId] = set()
    tries: dict[tuple[CallId | None, int, bytes], list[ModelCallCompleted]] = {}
    for call in calls:
        parent = by_id.get(call.parent_call_id) if call.parent_call_id is not None else None
        if parent is not None and call.shared_prefix_len > parent.prompt_len:
            continued.add(parent.call_id)
        tries.setdefault((call.parent_call_id, call.shared_prefix_len, call.prompt_delta_ids), []).append(call)
    orphans: set[CallId] = set()
    for group in tries.values():
        real = {c.call_id for c in group if c.call_id in continued} or {group[-1].call_id}
        orphans.update(c.call_id for c in group if c.call_id not in real)
    return orphans


class _Reader:
    """Unpacks calls in order and rebuilds their contexts; keeps a context only while a later call needs it."""

    def __init__(self, calls: Sequence[ModelCallCompleted]) -> None:
        self._uses: dict[CallId, int] = {}
        for call in calls:
            if call.parent_call_id is not None:
                self._uses[call.parent_call_id] = self._uses.get(call.parent_call_id, 0) + 1
        self._tokens: dict[CallId, array[int]] = {}

    def read(self, call: ModelCallCompleted) -> _Read:
        """Raises AlignmentError, naming the call, when lengths or references do not fit."""
        try:
            sampled, logprobs = unpack_ints(call.sampled_ids), unpack_floats(call.logprobs)
            valid = unpack_bits(call.logprob_valid, len(sampled))
            delta = unpack_ints(call.prompt_delta_ids)
        except PackingError as exc:
            raise AlignmentError(f"call {call.call_id}: {exc}") from exc
        if len(logprobs) != len(sampled):
            raise AlignmentError(f"call {call.call_id}: {len(sampled)} sampled tokens, {len(logprobs)} log-probs")
        _check_spans(call, len(sampled))
        context = self._prefix(call) + delta
        if len(context) != call.prompt_len:
            raise AlignmentError(
                f"call {call.call_id}: prompt_len is {call.prompt_len}, but prefix {call.shared_prefix_len} and delta "
                f"{len(delta)} make {len(context)} tokens"
            )
        read = _Read(call, context, sampled, logprobs, valid)
        if call.call_id in self._uses:
            self._tokens[call.call_id] = read.tokens
        return read

    def _prefix(self, call: ModelCallCompleted) -> array[int]:
        parent_id, length = call.parent_call_id, call.shared_prefix_len
        if parent_id is None:
            if length:
                raise AlignmentError(f"call {call.call_id}: shares a prefix of {length} tokens with no parent")
            return array("i")
        parent = self._tokens.get(parent_id)
        if parent is None:
            raise AlignmentError(f"call {call.call_id}: its parent {parent_id} is not among the earlier calls")
        if not 0 <= length <= len(parent):
            raise AlignmentError(
                f"call {call.call_id}: shares {length} tokens with parent {parent_id}, which has {len(parent)}"
            )
        self._uses[parent_id] -= 1
        prefix = parent[:length]
        if self._uses[parent_id] == 0:
            del self._tokens[parent_id]
        return prefix


def _check_spans(call: ModelCallCompleted, num_sampled: int) -> None:
    position = 0
    for span in call.version_spans:
        if span.start != position or span.end < span.start:
            raise AlignmentError(
                f"call {call.call_id}: version span [{span.start}, {span.end}) does not begin at {position}"
            )
        position = span.end
    if position != num_sampled:
        raise AlignmentError(f"call {call.call_id}: version spans cover {position} of {num_sampled} sampled tokens")
