"""From recorded events to arrays: a Segment's bytes and its calls' routing become one row to train on.

Lengths are checked everywhere; a mismatch names the call. Routing is keyed by (call, token): a segment is
append-only, so the position of a token in a call's full context is its position in the segment, and every position
takes the routing of the *first* call that recorded it. That call forwarded the token for the first time; a later
call that had to prefill the same prefix again (an evicted cache) may have routed it differently, and its routes do
not belong to the log-probs of the earlier tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from schemas.events.calls import RoutingRecorded
from schemas.events.trajectories import CallSlice, Segment, TrajectoryAssembled
from schemas.ids import CallId

#: Version of a token that no policy sampled.
NO_VERSION = -1


class SegmentError(ValueError):
    """Recorded arrays that do not fit together: names the trial and the call, and what was expected."""


@dataclass(frozen=True)
class ModelShape:
    """What routing must fit: MoE layers, experts per token, experts per layer, vocabulary size."""

    num_layers: int
    top_k: int
    num_experts: int
    vocab_size: int


@dataclass(frozen=True)
class RoutingRows:
    """Recorded experts of one segment. expert_ids_TLK: int16 [T, L, K]; recorded_T: bool [T]."""

    expert_ids_TLK: npt.NDArray[np.int16]
    recorded_T: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SegmentRow:
    """One segment, ready to be padded into a batch.

    ids_T int64; train_T bool: sampled, with a reported log-prob and not stale; rollout_T float32 (0 where not
    trained); version_T int32 (-1 where not sampled); num_stale and num_unreported: sampled tokens left out, by reason.
    """

    sequence: int
    ids_T: npt.NDArray[np.int64]
    train_T: npt.NDArray[np.bool_]
    rollout_T: npt.NDArray[np.float32]
    version_T: npt.NDArray[np.int32]
    routing: RoutingRows | None
    num_stale: int
    num_unreported: int

    @property
    def length(self) -> int:
        """Tokens of the segment."""
        return len(self.ids_T)


def _array(data: bytes, dtype: str, num: int, what: str) -> npt.NDArray[np.generic]:
    size = np.dtype(dtype).itemsize
    if len(data) != num * size:
        raise SegmentError(f"{what}: {len(data)} bytes, expected {num} x {size}")
    return np.frombuffer(data, dtype=dtype)


def _bits(data: bytes, num: int, what: str) -> npt.NDArray[np.bool_]:
    if len(data) != (num + 7) // 8:
        raise SegmentError(f"{what}: a bitmap of {num} bits has {(num + 7) // 8} bytes, not {len(data)}")
    return np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little", count=num).astype(np.bool_)


def _check_calls(calls: Sequence[CallSlice], num_tokens: int, mask_T: npt.NDArray[np.bool_], where: str) -> None:
    """Slices are in order, inside the segment, and hold every token of mask 1."""
    covered_T = np.zeros(num_tokens, dtype=np.bool_)
    previous_end = 0
    for call in calls:
        if not previous_end <= call.prompt_start <= call.sampled_start <= call.sampled_end <= num_tokens:
            raise SegmentError(
                f"{where}, call {call.call_id}: slice prompt {call.prompt_start}, sampled [{call.sampled_start}, "
                f"{call.sampled_end}) does not follow position {previous_end} within {num_tokens} tokens"
            )
        covered_T[call.sampled_start : call.sampled_end] = True
        previous_end = call.sampled_end
    stray = np.flatnonzero(mask_T & ~covered_T)
    if len(stray):
        raise SegmentError(f"{where}: token {int(stray[0])} has mask 1 and lies in no call's sampled slice")


def _check_chunk(chunk: RoutingRecorded, shape: ModelShape, limit: int) -> npt.NDArray[np.int16]:
    """The chunk's expert ids [n, L, K], checked against the model. Raises SegmentError naming the call."""
    where = f"routing of call {chunk.call_id}, chunk {chunk.chunk_index}"
    got = (chunk.num_layers, chunk.top_k, chunk.num_experts)
    want = (shape.num_layers, shape.top_k, shape.num_experts)
    if got != want:
        raise SegmentError(f"{where}: (layers, top-k, experts) {got}, the model has {want}")
    if chunk.dtype not in ("uint8", "uint16"):
        raise SegmentError(f"{where}: dtype {chunk.dtype!r}, expected uint8 or uint16")
    if chunk.token_start < 0 or chunk.token_start + chunk.num_tokens > limit:
        raise SegmentError(
            f"{where}: rows [{chunk.token_start}, {chunk.token_start + chunk.num_tokens}) exceed the call's "
            f"{limit} context tokens"
        )
    dtype = "u1" if chunk.dtype == "uint8" else "<u2"
    flat = _array(chunk.expert_ids, dtype, chunk.num_tokens * chunk.num_layers * chunk.top_k, where)
    return flat.reshape(chunk.num_tokens, chunk.num_layers, chunk.top_k).astype(np.int16)


def collect_routing(
    calls: Sequence[CallSlice],
    chunks: Mapping[CallId, Sequence[RoutingRecorded]],
    num_tokens: int,
    shape: ModelShape,
) -> RoutingRows:
    """The experts of every segment position, each from the first call that recorded it.

    `chunks` may lack a call (nothing was recorded: its tokens route freely); a call with some chunks missing is an
    error. Invalid rows hold arange(K), a legal choice that is never used.
    """
    ids_TLK = np.broadcast_to(
        np.arange(shape.top_k, dtype=np.int16), (num_tokens, shape.num_layers, shape.top_k)
    ).copy()
    recorded_T = np.zeros(num_tokens, dtype=np.bool_)
    for call in calls:
        parts = sorted(chunks.get(call.call_id, ()), key=lambda c: c.chunk_index)
        if parts and [p.chunk_index for p in parts] != list(range(parts[0].num_chunks)):
            raise SegmentError(
                f"routing of call {call.call_id}: chunks {[p.chunk_index for p in parts]} of {parts[0].num_chunks}"
            )
        for part in parts:
            rows_nLK = _check_chunk(part, shape, call.sampled_end)
            where = f"routing of call {call.call_id}, chunk {part.chunk_index}"
            valid_n = _bits(part.valid, part.num_tokens, where)
            _check_expert_ids(rows_nLK[valid_n], shape, where)
            span = slice(part.token_start, part.token_start + part.num_tokens)
            take_n = valid_n & ~recorded_T[span]
            ids_TLK[span][take_n] = rows_nLK[take_n]
            recorded_T[span] |= valid_n
    return RoutingRows(ids_TLK, recorded_T)


def _check_expert_ids(rows_nLK: npt.NDArray[np.int16], shape: ModelShape, where: str) -> None:
    if not rows_nLK.size:
        return
    if int(rows_nLK.max()) >= shape.num_experts or int(rows_nLK.min()) < 0:  # negative: beyond int16
        raise SegmentError(f"{where}: expert id {int(rows_nLK.max())}, the model has {shape.num_experts} experts")
    ordered = np.sort(rows_nLK, axis=-1)
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise SegmentError(f"{where}: an expert appears twice in one row; the row was not captured, clear its validity")


def shift_routing(rows: RoutingRows, shift: int) -> RoutingRows:
    """Fault injection: the routing of token t is given to token t + shift (cyclic within the segment)."""
    if not shift:
        return rows
    return RoutingRows(np.roll(rows.expert_ids_TLK, shift, axis=0), np.roll(rows.recorded_T, shift))


def _versions(segment: Segment, mask_T: npt.NDArray[np.bool_], where: str) -> npt.NDArray[np.int32]:
    num = len(mask_T)
    version_T = np.full(num, NO_VERSION, dtype=np.int32)
    for span in segment.version_spans:
        if not 0 <= span.start <= span.end <= num:
            raise SegmentError(f"{where}: version span [{span.start}, {span.end}) exceeds {num} tokens")
        version_T[span.start : span.end] = span.version
    missing = np.flatnonzero(mask_T & (version_T == NO_VERSION))
    if len(missing):
        raise SegmentError(f"{where}: sampled token {int(missing[0])} has no policy version")
    version_T[~mask_T] = NO_VERSION
    return version_T


@dataclass(frozen=True)
class RowOptions:
    """How rows are made. `oldest_version`: tokens sampled by an older policy are stale, masked and counted."""

    shape: ModelShape
    oldest_version: int
    replay: bool = True
    replay_shift_tokens: int = 0


def make_segment_row(
    segment: Segment,
    sequence: int,
    chunks: Mapping[CallId, Sequence[RoutingRecorded]],
    options: RowOptions,
    trial_id: str,
) -> SegmentRow:
    """One row of a batch. Raises SegmentError when any length, position or id does not fit."""
    where = f"trial {trial_id}, conversation {segment.conversation_id}"
    if segment.calls:
        where += f" (calls {segment.calls[0].call_id} to {segment.calls[-1].call_id})"
    num = len(segment.ids) // 4
    ids_T = _array(segment.ids, "<i4", num, f"{where}: ids").astype(np.int64)
    mask_T = _array(segment.mask, "u1", num, f"{where}: mask").astype(np.bool_)
    logp_T = _array(segment.logprobs, "<f4", num, f"{where}: logprobs").astype(np.float32)
    valid_T = _bits(segment.logprob_valid, num, f"{where}: logprob_valid")
    if num and (int(ids_T.min()) < 0 or int(ids_T.max()) >= options.shape.vocab_size):
        raise SegmentError(f"{where}: a token id lies outside the vocabulary of {options.shape.vocab_size}")
    if num and mask_T[0]:
        raise SegmentError(f"{where}: its first token has mask 1, but nothing precedes it that could predict it")
    _check_calls(segment.calls, num, mask_T, where)
    version_T = _versions(segment, mask_T, where)
    fresh_T = version_T >= options.oldest_version
    reported_T = valid_T & np.isfinite(logp_T)
    train_T = mask_T & fresh_T & reported_T
    routing = None
    if options.replay:
        routing = collect_routing(segment.calls, chunks, num, options.shape)
    return SegmentRow(
        sequence=sequence,
        ids_T=ids_T,
        train_T=train_T,
        rollout_T=np.where(train_T, logp_T, np.float32(0)),
        version_T=version_T,
        routing=routing,
        num_stale=int((mask_T & ~fresh_T).sum()),
        num_unreported=int((mask_T & fresh_T & ~reported_T).sum()),
    )


def make_rows(
    trajectory: TrajectoryAssembled,
    sequence: int,
    chunks: Mapping[CallId, Sequence[RoutingRecorded]],
    options: RowOptions,
) -> list[SegmentRow]:
    """The rows of one trial: its segments with at least one sampled token, cut after the last trained token.

    What follows the last trained token cannot change anything that is trained. A segment whose sampled tokens were
    all left out keeps no row's cost: it is returned with length 0, for its counts.
    """
    rows: list[SegmentRow] = []
    for segment in trajectory.segments:
        if 1 not in segment.mask:
            continue
        row = make_segment_row(segment, sequence, chunks, options, trajectory.trial_id)
        rows.append(_share_routing(row, rows))
    shift = options.replay_shift_tokens
    if shift:
        rows = [replace(r, routing=r.routing and shift_routing(r.routing, shift)) for r in rows]
    return [_trim(row) for row in rows]


def _share_routing(row: SegmentRow, earlier: Sequence[SegmentRow]) -> SegmentRow:
    """Take routing that is missing at the start of a segment from earlier segments with the same tokens there.

    Where a harness forks a conversation, the second branch is a segment of its own, but its calls found the common
    prefix in the engine's cache: its routing is recorded with the call of the first branch that forwarded it.
    """
    routing = row.routing
    for other in earlier:
        if routing is None or other.routing is None or bool(routing.recorded_T.all()):
            break
        num = min(row.length, other.length)
        differ = np.flatnonzero(row.ids_T[:num] != other.ids_T[:num])
        num = int(differ[0]) if len(differ) else num
        take = np.flatnonzero(other.routing.recorded_T[:num] & ~routing.recorded_T[:num])
        if not len(take):
            continue
        ids_TLK, recorded_T = routing.expert_ids_TLK.copy(), routing.recorded_T.copy()
        ids_TLK[take], recorded_T[take] = other.routing.expert_ids_TLK[take], True
        routing = RoutingRows(ids_TLK, recorded_T)
    return replace(row, routing=routing)


def _trim(row: SegmentRow) -> SegmentRow:
    trained = np.flatnonzero(row.train_T)
    end = int(trained[-1]) + 1 if len(trained) else 0
    if end == row.length:
        return row
    routing = row.routing and RoutingRows(row.routing.expert_ids_TLK[:end], row.routing.recorded_T[:end])
    return replace(
        row,
        ids_T=row.ids_T[:end],
        train_T=row.train_T[:end],
        rollout_T=row.rollout_T[:end],
        version_T=row.version_T[:end],
        routing=routing,
    )
