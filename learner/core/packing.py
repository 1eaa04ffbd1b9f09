"""Rows to padded micro-batches. A trial's segments stay together: the sequence ratio needs all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.core.segments import NO_VERSION, SegmentRow


@dataclass(frozen=True)
class Replay:
    """Recorded experts of a micro-batch, an argument of its forward pass.

    expert_ids: one int64 tensor [B, T, K] per MoE layer, in model order; recorded_BT: bool, False where the token
    routes freely (padding too).
    """

    expert_ids: tuple[Tensor, ...]
    recorded_BT: Tensor

    def to(self, device: torch.device) -> Replay:
        """The same on `device`."""
        return Replay(tuple(ids.to(device) for ids in self.expert_ids), self.recorded_BT.to(device))


@dataclass(frozen=True)
class MicroBatch:
    """Padded on the right: under causal attention nothing real ever looks at padding, so there is no attention mask.

    ids_BT int64; real_BT bool: not padding; train_BT bool: position t is trained (predicted from t - 1), never at
    t = 0; rollout_BT float32; version_BT int64 (-1 where not sampled); sequence_B int64: which of the S trials of
    this micro-batch a row belongs to; sequences: their numbers in the step.
    """

    ids_BT: Tensor
    real_BT: Tensor
    train_BT: Tensor
    rollout_BT: Tensor
    version_BT: Tensor
    sequence_B: Tensor
    sequences: tuple[int, ...]
    replay: Replay | None

    @property
    def sequence_N(self) -> Tensor:
        """Trial of every trained token, row-major: int64 [N]."""
        return self.sequence_B[:, None].expand_as(self.train_BT)[self.train_BT]

    @property
    def num_padded_tokens(self) -> int:
        """B x T."""
        return self.ids_BT.numel()


def plan_micro_batches(lengths: Sequence[Sequence[int]], max_padded_tokens: int) -> list[list[int]]:
    """Which sequences go together: indices into `lengths` (the row lengths of each sequence).

    Longest first, so that rows of like length share a batch; a new batch begins when rows x longest row would exceed
    the bound. A sequence longer than the bound gets a batch of its own. Deterministic.
    """
    order = sorted((i for i, rows in enumerate(lengths) if rows), key=lambda i: (-max(lengths[i]), i))
    plan: list[list[int]] = []
    num_rows = width = 0
    for i in order:
        if not plan or (num_rows + len(lengths[i])) * width > max_padded_tokens:
            plan.append([])
            num_rows, width = 0, max(lengths[i])
        plan[-1].append(i)
        num_rows += len(lengths[i])
    return plan


def pack_rows(rows: Sequence[SegmentRow]) -> MicroBatch:
    """One micro-batch of the given rows (at least one; all with routing, or none)."""
    sequences = tuple(dict.fromkeys(r.sequence for r in rows))
    place = {s: i for i, s in enumerate(sequences)}
    num_B, num_T = len(rows), max(r.length for r in rows)
    ids = np.zeros((num_B, num_T), dtype=np.int64)
    real, train = np.zeros((num_B, num_T), dtype=np.bool_), np.zeros((num_B, num_T), dtype=np.bool_)
    rollout = np.zeros((num_B, num_T), dtype=np.float32)
    version = np.full((num_B, num_T), NO_VERSION, dtype=np.int64)
    for b, row in enumerate(rows):
        end = row.length
        ids[b, :end], real[b, :end], train[b, :end] = row.ids_T, True, row.train_T
        rollout[b, :end], version[b, :end] = row.rollout_T, row.version_T
    return MicroBatch(
        ids_BT=torch.from_numpy(ids),
        real_BT=torch.from_numpy(real),
        train_BT=torch.from_numpy(train),
        rollout_BT=torch.from_numpy(rollout),
        version_BT=torch.from_numpy(version),
        sequence_B=torch.tensor([place[r.sequence] for r in rows]),
        sequences=sequences,
        replay=_pack_replay(rows, num_T),
    )


def _pack_replay(rows: Sequence[SegmentRow], num_T: int) -> Replay | None:
    routing = [r.routing for r in rows if r.routing is not None]
    if not routing:
        return None
    _, num_L, num_K = routing[0].expert_ids_TLK.shape
    ids_BTLK = np.broadcast_to(np.arange(num_K, dtype=np.int16), (len(rows), num_T, num_L, num_K)).copy()
    recorded_BT = np.zeros((len(rows), num_T), dtype=np.bool_)
    for b, part in enumerate(routing):
        ids_BTLK[b, : len(part.recorded_T)] = part.expert_ids_TLK
        recorded_BT[b, : len(part.recorded_T)] = part.recorded_T
    layers = tuple(torch.from_numpy(ids_BTLK[:, :, layer].astype(np.int64)) for layer in range(num_L))
    return Replay(layers, torch.from_numpy(recorded_BT))


def pack_micro_batches(rows: Sequence[SegmentRow], max_padded_tokens: int) -> Iterator[MicroBatch]:
    """Rows of any number of trials to micro-batches of at most `max_padded_tokens` (but for single long trials).

    Rows of length 0 (everything left out) are dropped. Padded one at a time, when it is asked for.
    """
    by_sequence: dict[int, list[SegmentRow]] = {}
    for row in rows:
        if row.length:
            by_sequence.setdefault(row.sequence, []).append(row)
    groups = list(by_sequence.values())
    for batch in plan_micro_batches([[r.length for r in g] for g in groups], max_padded_tokens):
        yield pack_rows([row for i in batch for row in groups[i]])
