"""From recorded bytes to rows and micro-batches: exact positions, and errors that name the call."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner.core.packing import pack_micro_batches, pack_rows, plan_micro_batches
from learner.core.segments import ModelShape, RowOptions, SegmentError, collect_routing, make_rows, shift_routing
from schemas.events.calls import RoutingRecorded, VersionSpan
from schemas.events.trajectories import Segment, TrajectoryAssembled
from schemas.ids import CallId
from schemas.packing import pack_bits, unpack_floats
from tests.unit.learner.factory import VOCAB, Sampler, make_policy, record_trial

SHAPE = ModelShape(num_layers=2, top_k=2, num_experts=8, vocab_size=VOCAB)
OPTIONS = RowOptions(shape=SHAPE, oldest_version=0)
TURNS = ((12, 6), (4, 5), (3, 4))

Chunks = dict[CallId, list[RoutingRecorded]]


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    return Sampler(make_policy(tmp_path_factory.mktemp("policy") / "p"), version=3)


@pytest.fixture(scope="module")
def recorded(sampler: Sampler) -> tuple[TrajectoryAssembled, list[RoutingRecorded]]:
    return record_trial(sampler, "g.00", "g", turns=TURNS, chunk_rows=4)


def by_call(routing: list[RoutingRecorded]) -> Chunks:
    out: Chunks = {}
    for chunk in routing:
        out.setdefault(chunk.call_id, []).append(chunk)
    return out


def with_segment(trajectory: TrajectoryAssembled, **changes: object) -> TrajectoryAssembled:
    return replace(trajectory, segments=(replace(trajectory.segments[0], **changes),))


def test_row_holds_exactly_what_was_recorded(
    sampler: Sampler, recorded: tuple[TrajectoryAssembled, list[RoutingRecorded]]
) -> None:
    trajectory, routing = recorded
    (row,) = make_rows(trajectory, 0, by_call(routing[::-1]), OPTIONS)  # chunks in any order
    segment = trajectory.segments[0]
    assert row.train_T.tolist() == [bool(m) for m in segment.mask]
    assert row.rollout_T[row.train_T].tolist() == [
        v for v, m in zip(unpack_floats(segment.logprobs), segment.mask, strict=True) if m
    ]
    assert set(row.version_T[row.train_T].tolist()) == {3} and set(row.version_T[~row.train_T].tolist()) == {-1}
    _, experts = sampler.forward(row.ids_T.tolist())
    assert row.routing is not None
    assert row.routing.recorded_T.tolist() == [True] * (row.length - 1) + [False]  # the last token was never forwarded
    assert (row.routing.expert_ids_TLK[:-1] == experts[:-1]).all()


def test_the_first_call_that_recorded_a_token_wins(
    recorded: tuple[TrajectoryAssembled, list[RoutingRecorded]],
) -> None:
    trajectory, routing = recorded
    calls, chunks = trajectory.segments[0].calls, by_call(routing)
    before = collect_routing(calls, chunks, 34, SHAPE)
    # The last call lost its cache and prefilled the whole prefix again, with other routes.
    last = chunks[calls[2].call_id]
    rows = np.tile(np.array([6, 7], dtype=np.uint8), (33, 2, 1))
    own = before.expert_ids_TLK[22:33].astype(np.uint8)
    rows[22:] = own
    again = replace(
        last[0],
        chunk_index=0,
        num_chunks=1,
        token_start=0,
        num_tokens=33,
        expert_ids=rows.tobytes(),
        valid=b"\xff" * 4 + b"\x01",
    )
    after = collect_routing(calls, {**chunks, calls[2].call_id: [again]}, 34, SHAPE)
    assert (after.expert_ids_TLK == before.expert_ids_TLK).all()
    assert after.recorded_T.tolist() == before.recorded_T.tolist()


def test_rows_not_captured_route_freely(recorded: tuple[TrajectoryAssembled, list[RoutingRecorded]]) -> None:
    trajectory, routing = recorded
    first = routing[0]
    holed = replace(
        first, valid=pack_bits([1, 0, 1, 1]), expert_ids=b"\xff" * len(first.expert_ids[:4]) + first.expert_ids[4:]
    )
    with pytest.raises(SegmentError, match="expert id 255"):  # row 0 claims to be valid
        collect_routing(trajectory.segments[0].calls, by_call([holed, *routing[1:]]), 34, SHAPE)
    holed = replace(holed, valid=pack_bits([0, 0, 1, 1]))
    rows = collect_routing(trajectory.segments[0].calls, by_call([holed, *routing[1:]]), 34, SHAPE)
    assert rows.recorded_T.tolist() == [False, False] + [True] * 31 + [False]
    assert rows.expert_ids_TLK[0].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, r"routing of call g\.00/a1/c0000, chunk 0: .*the model has"),
        ({"token_start": 16}, r"c0000, chunk 0: rows \[16, 20\) exceed the call's 18 context tokens"),
        ({"num_tokens": 3}, r"c0000, chunk 0: 16 bytes, expected 12"),
        ({"valid": b"\x0f\x00"}, r"c0000, chunk 0: a bitmap of 4 bits has 1 bytes, not 2"),
        ({"dtype": "uint32"}, r"c0000, chunk 0: dtype 'uint32'"),
        ({"num_chunks": 9}, r"routing of call g\.00/a1/c0000: chunks .* of 9"),
        ({"expert_ids": bytes(16)}, r"c0000, chunk 0: an expert appears twice"),
    ],
)
def test_routing_that_does_not_fit_names_the_call(
    recorded: tuple[TrajectoryAssembled, list[RoutingRecorded]], changes: dict[str, object], message: str
) -> None:
    trajectory, routing = recorded
    broken = [replace(routing[0], **changes), *routing[1:]]  # type: ignore[arg-type]
    with pytest.raises(SegmentError, match=message):
        make_rows(trajectory, 0, by_call(broken), OPTIONS)


def test_segments_that_do_not_fit_name_their_calls(
    recorded: tuple[TrajectoryAssembled, list[RoutingRecorded]],
) -> None:
    trajectory, routing = recorded
    segment, chunks = trajectory.segments[0], by_call(routing)

    def error(**changes: object) -> str:
        with pytest.raises(SegmentError) as caught:
            make_rows(with_segment(trajectory, **changes), 0, chunks, OPTIONS)
        return str(caught.value)

    assert "g.00/a1/c0000" in error(logprobs=segment.logprobs[:-4]) and "logprobs" in error(logprobs=b"")
    assert "mask" in error(mask=segment.mask[:-1])
    calls = segment.calls
    overlapping = (calls[0], replace(calls[1], prompt_start=10), calls[2])
    assert "call g.00/a1/c0001: slice prompt 10" in error(calls=overlapping)
    assert "lies in no call's sampled slice" in error(calls=calls[:2])
    assert "has no policy version" in error(version_spans=segment.version_spans[:1])
    assert "outside the vocabulary" in error(ids=b"\xff\x00\x00\x00" + segment.ids[4:])
    assert "first token has mask 1" in error(mask=b"\x01" + segment.mask[1:])


def test_stale_and_unreported_tokens_are_left_out_and_counted(
    recorded: tuple[TrajectoryAssembled, list[RoutingRecorded]],
) -> None:
    trajectory, routing = recorded
    calls = trajectory.segments[0].calls
    spans = tuple(
        VersionSpan(version=v, start=c.sampled_start, end=c.sampled_end) for v, c in zip((1, 2, 3), calls, strict=True)
    )
    mixed = with_segment(trajectory, version_spans=spans)
    (row,) = make_rows(mixed, 0, by_call(routing), replace(OPTIONS, oldest_version=2))
    assert (row.num_stale, int(row.train_T.sum())) == (6, 9)
    flags = list(trajectory.segments[0].mask)
    flags[calls[0].sampled_start] = 0
    (row,) = make_rows(with_segment(trajectory, logprob_valid=pack_bits(flags)), 0, by_call(routing), OPTIONS)
    assert (row.num_unreported, int(row.train_T.sum())) == (1, 14)
    (row,) = make_rows(trajectory, 0, by_call(routing), replace(OPTIONS, oldest_version=4))
    assert (row.length, row.num_stale) == (0, 15)
    assert list(pack_micro_batches([row], 100)) == []


def test_shift_moves_routing_by_whole_tokens(recorded: tuple[TrajectoryAssembled, list[RoutingRecorded]]) -> None:
    trajectory, routing = recorded
    rows = collect_routing(trajectory.segments[0].calls, by_call(routing), 34, SHAPE)
    moved = shift_routing(rows, 1)
    assert (moved.expert_ids_TLK[1:] == rows.expert_ids_TLK[:-1]).all()
    assert moved.recorded_T.tolist() == [False] + [True] * 33
    assert shift_routing(rows, 0) is rows


def test_plan_respects_the_bound_and_keeps_every_sequence_whole() -> None:
    lengths = [[10], [30, 5], [29], [10], [], [100], [9]]
    plan = plan_micro_batches(lengths, 64)
    assert sorted(i for b in plan for i in b) == [0, 1, 2, 3, 5, 6]
    assert plan[0] == [5]  # longer than the bound: alone
    for batch in plan[1:]:
        rows = [n for i in batch for n in lengths[i]]
        assert len(rows) * max(rows) <= 64
    assert plan == plan_micro_batches(lengths, 64)


def test_padding_is_neither_real_nor_trained(sampler: Sampler) -> None:
    rows = []
    for i, turns in enumerate((((12, 6),), ((4, 3), (2, 2)))):
        trajectory, routing = record_trial(sampler, f"g.{i:02d}", "g", turns=turns, seed=i)
        rows += make_rows(trajectory, i, by_call(routing), OPTIONS)
    batch = pack_rows(rows)
    assert batch.ids_BT.shape == (2, 18) and batch.real_BT.sum(1).tolist() == [18, 11]
    assert batch.train_BT.sum(1).tolist() == [6, 5] and not bool((batch.train_BT & ~batch.real_BT).any())
    assert batch.sequence_N.tolist() == [0] * 6 + [1] * 5
    assert batch.replay is not None and not bool((batch.replay.recorded_BT & ~batch.real_BT).any())


def test_segments_without_sampled_tokens_make_no_row(
    recorded: tuple[TrajectoryAssembled, list[RoutingRecorded]],
) -> None:
    trajectory, _ = recorded
    segment: Segment = trajectory.segments[0]
    assert make_rows(with_segment(trajectory, mask=bytes(len(segment.mask))), 0, {}, OPTIONS) == []


def test_a_forked_branch_takes_the_routing_of_the_prefix_it_found_in_the_cache(sampler: Sampler) -> None:
    trajectory, routing = record_trial(sampler, "g.05", "g", turns=((12, 6), (4, 5)))
    segment, chunks = trajectory.segments[0], by_call(routing)
    first, second = segment.calls
    # The second call as a segment of its own: its prompt is everything before its sampled tokens, and its routing
    # begins where the first call's ended.
    mask = bytes(second.sampled_start) + bytes(segment.mask[second.sampled_start :])
    branch = replace(segment, mask=mask, calls=(replace(second, prompt_start=0),))
    end = first.sampled_end
    trunk = replace(
        segment,
        ids=segment.ids[: 4 * end],
        mask=segment.mask[:end],
        logprobs=segment.logprobs[: 4 * end],
        logprob_valid=pack_bits(list(segment.mask[:end])),
        version_spans=segment.version_spans[:1],
        calls=(first,),
    )
    whole = make_rows(trajectory, 0, chunks, OPTIONS)[0].routing
    forked = make_rows(replace(trajectory, segments=(trunk, branch)), 0, chunks, OPTIONS)[1].routing
    alone = make_rows(replace(trajectory, segments=(branch,)), 0, chunks, OPTIONS)[0].routing
    assert whole is not None and forked is not None and alone is not None
    assert (forked.expert_ids_TLK == whole.expert_ids_TLK).all()
    assert forked.recorded_T.tolist() == whole.recorded_T.tolist()
    assert alone.recorded_T.tolist() == [False] * 17 + [True] * 9 + [False]
