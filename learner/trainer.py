"""One training step: complete groups in, updated policy and its figures out. No Kafka, no files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from infra.settings import ScheduleSection, TrainSection
from learner.backends.base import Backend
from learner.consumption import ReadyGroup
from learner.core.advantages import compute_advantages
from learner.core.fidelity import RoutingAgreement, TokenComparison, summarize_fidelity
from learner.core.loss import Denominators, LossConfig, LossInputs, LossOutput, compute_loss
from learner.core.packing import MicroBatch, pack_micro_batches
from learner.core.schedule import compute_learning_rate
from learner.core.segments import RowOptions, SegmentRow, make_rows
from schemas.events.training import FidelitySummary, LossTerms


@dataclass(frozen=True)
class StepFigures:
    """What a step did; the fields are those of StepCompleted."""

    num_informative_groups: int
    num_trajectories: int
    num_tokens: int
    num_stale_tokens: int
    num_unreported_tokens: int
    reward_mean: float
    learning_rate: float
    grad_norm: float
    loss: LossTerms
    fidelity: tuple[FidelitySummary, ...]
    forward_backward_sec: float
    optimizer_sec: float


@dataclass(frozen=True)
class _Sequence:
    """One admitted trial."""

    advantage: float
    informative: bool
    rows: list[SegmentRow]

    @property
    def num_tokens(self) -> int:
        return sum(int(r.train_T.sum()) for r in self.rows)


@dataclass
class _Sums:
    """Figures of the micro-batches so far."""

    tokens: list[TokenComparison] = field(default_factory=list)
    agreements: list[RoutingAgreement] = field(default_factory=list)
    outputs: list[LossOutput] = field(default_factory=list)


def make_loss_config(train: TrainSection) -> LossConfig:
    """The objective's settings. Raises LossConfigError naming the key."""
    return LossConfig(
        algorithm=train.algorithm,
        clip_low=train.clip_low,
        clip_high=train.clip_high,
        kl_coef=train.kl_coef,
        entropy_coef=train.entropy_coef,
        importance_correction=train.importance_correction,
    )


def _make_sequences(groups: Sequence[ReadyGroup], options: RowOptions) -> list[_Sequence]:
    sequences: list[_Sequence] = []
    for group in groups:
        rewards = [t.reward for t in group.trials]
        informative = len(set(rewards)) > 1
        for trial, advantage in zip(group.trials, compute_advantages(rewards).tolist(), strict=True):
            rows = make_rows(trial.trajectory, len(sequences), trial.routing, options)
            sequences.append(_Sequence(advantage, informative, rows))
    return sequences


class Trainer:
    """Applies steps to a backend, one optimizer update each."""

    def __init__(self, backend: Backend, train: TrainSection, schedule: ScheduleSection) -> None:
        self._backend, self._train, self._schedule = backend, train, schedule
        self._config = make_loss_config(train)
        self._entropy = train.entropy_coef != 0.0

    def train_step(self, groups: Sequence[ReadyGroup], step: int, version: int) -> StepFigures:
        """One update of policy `version` with these groups.

        Groups without reward variation are skipped unless KL or entropy gives them a gradient. When nothing at all has
        one, the weights stay as they are and the fidelity figures come from a forward pass over one micro-batch.
        """
        began = time.monotonic()
        options = RowOptions(
            shape=self._backend.shape,
            oldest_version=version - self._schedule.max_staleness,
            replay=self._train.routing_replay,
            replay_shift_tokens=self._train.replay_shift_tokens,
        )
        sequences = _make_sequences(groups, options)
        regularised = self._train.kl_coef > 0 or self._entropy
        in_loss = [s for s in sequences if s.num_tokens and (s.informative or regularised)]
        informative = [s for s in in_loss if s.informative]
        denominators = Denominators(
            num_informative_sequences=len(informative),
            num_informative_tokens=sum(s.num_tokens for s in informative),
            num_sequences=len(in_loss),
        )
        sums = _Sums()
        self._backend.zero_grad()
        for batch in self._pack(in_loss):
            output = self._forward(batch, sequences, denominators, sums, grad=True)
            output.loss.backward()  # type: ignore[no-untyped-call]
        if not in_loss:
            for batch in self._pack([s for s in sequences if s.num_tokens]):
                self._forward(batch, sequences, denominators, sums, grad=False)
                break
        forwarded = time.monotonic()
        learning_rate = compute_learning_rate(
            step,
            self._schedule.num_steps,
            peak=self._train.lr,
            end_share=self._train.lr_end,
            warmup_steps=self._train.warmup_steps,
        )
        grad_norm = self._backend.apply_gradients(learning_rate) if in_loss else 0.0
        rewards = [t.reward for g in groups for t in g.trials]
        return StepFigures(
            num_informative_groups=sum(len({t.reward for t in g.trials}) > 1 for g in groups),
            num_trajectories=len(in_loss),
            num_tokens=sum(s.num_tokens for s in in_loss),
            num_stale_tokens=sum(r.num_stale for s in sequences for r in s.rows),
            num_unreported_tokens=sum(r.num_unreported for s in sequences for r in s.rows),
            reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            loss=_loss_terms(sums.outputs, [s.advantage for s in in_loss], bool(in_loss)),
            fidelity=summarize_fidelity(sums.tokens, sums.agreements),
            forward_backward_sec=forwarded - began,
            optimizer_sec=time.monotonic() - forwarded,
        )

    def _pack(self, sequences: Iterable[_Sequence]) -> Iterable[MicroBatch]:
        return pack_micro_batches([r for s in sequences for r in s.rows], self._train.micro_batch_tokens)

    def _forward(
        self, batch: MicroBatch, sequences: Sequence[_Sequence], denominators: Denominators, sums: _Sums, *, grad: bool
    ) -> LossOutput:
        """Forward one micro-batch and add its figures to `sums`."""
        out = self._backend.compute_logprobs(batch, grad=grad, entropy=self._entropy)
        device = out.train_logp_N.device
        rollout_N = batch.rollout_BT[batch.train_BT]
        mine = [sequences[i] for i in batch.sequences]
        reference_N = None
        if grad and self._train.kl_coef > 0:
            reference_N = self._backend.compute_reference_logprobs(batch)
        inputs = LossInputs(
            train_logp_N=out.train_logp_N,
            rollout_logp_N=rollout_N.to(device),
            sequence_N=batch.sequence_N.to(device),
            advantage_S=torch.tensor([s.advantage for s in mine], device=device),
            # Without gradient the ratio of sequences that have no variation is still worth reporting.
            informative_S=torch.tensor([s.informative or not grad for s in mine], device=device),
            reference_logp_N=reference_N,
            entropy_N=out.entropy_N,
        )
        output = compute_loss(inputs, denominators, self._config)
        sums.outputs.append(output)
        sums.tokens.append(
            TokenComparison(out.train_logp_N.detach().float().cpu(), rollout_N, batch.version_BT[batch.train_BT])
        )
        if out.agreement is not None:
            sums.agreements.append(out.agreement)
        return output


def _loss_terms(outputs: Sequence[LossOutput], advantages: Sequence[float], trained: bool) -> LossTerms:
    num_ratios = sum(o.num_ratios for o in outputs)
    entropies = [o.entropy for o in outputs if o.entropy is not None]
    mean = sum(advantages) / len(advantages) if advantages else 0.0
    spread = sum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1) if len(advantages) > 1 else 0.0
    return LossTerms(
        loss=sum(float(o.loss.detach()) for o in outputs) if trained else 0.0,
        policy_loss=sum(o.policy_loss for o in outputs) if trained else 0.0,
        kl_loss=sum(o.kl_loss for o in outputs),
        entropy=sum(entropies) if entropies and trained else None,
        ratio_mean=sum(o.ratio_sum for o in outputs) / num_ratios if num_ratios else 1.0,
        clip_fraction=sum(o.num_clipped for o in outputs) / num_ratios if num_ratios else 0.0,
        advantage_mean=mean,
        advantage_std=spread**0.5,
    )
