"""The objective (paper, Eq. 1): clipped surrogate with a selectable importance ratio, k3 KL and entropy.

All tensors are flat over the trained tokens of one micro-batch (suffix N); `sequence_N` says which trial a token
belongs to. All segments of a trial must be in the same micro-batch, because GSPO's ratio is a mean over all of them.

Aggregation is seq-mean-token-mean: a mean over a sequence's trained tokens, then a mean over sequences; the
denominators are those of the whole step, so that the losses of its micro-batches add up to the step's loss. The
surrogate is averaged over the sequences of groups with reward variation (the others have advantage 0 and would only
scale the gradient down), KL and entropy over every sequence that was forwarded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALGORITHMS = ("gspo", "grpo", "ppo")
IMPORTANCE_CORRECTIONS = ("off", "token")

#: Upper bound of a token's truncated importance weight (truncated importance sampling).
CORRECTION_CAP = 2.0


class LossConfigError(ValueError):
    """A [train] setting that the loss does not know: names the key and the values it may have."""


@dataclass(frozen=True)
class LossConfig:
    """The [train] settings that the objective depends on.

    algorithm: `gspo` (sequence ratio: exp of the mean token log-ratio), `grpo` (token ratio, seq-mean-token-mean) or
    `ppo` (token ratio, mean over all trained tokens of the step, so that long answers weigh more).
    """

    algorithm: str = "gspo"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance_correction: str = "off"

    def __post_init__(self) -> None:
        """Raises LossConfigError on unknown names and on bounds that make no sense."""
        if self.algorithm not in ALGORITHMS:
            raise LossConfigError(f"train.algorithm {self.algorithm!r}: one of {', '.join(ALGORITHMS)}")
        if self.importance_correction not in IMPORTANCE_CORRECTIONS:
            known = ", ".join(IMPORTANCE_CORRECTIONS)
            raise LossConfigError(f"train.importance_correction {self.importance_correction!r}: one of {known}")
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            raise LossConfigError(
                f"train.clip_low {self.clip_low} must be in [0, 1) and train.clip_high {self.clip_high} >= 0"
            )


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole step that micro-batch sums are divided by."""

    #: Sequences with trained tokens whose group has reward variation.
    num_informative_sequences: int
    #: Their trained tokens (denominator of `ppo`).
    num_informative_tokens: int
    #: All sequences that are forwarded.
    num_sequences: int


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. `reference_N` is given with KL, `entropy_N` with an entropy bonus."""

    train_logp_N: Tensor
    rollout_logp_N: Tensor
    sequence_N: Tensor
    advantage_S: Tensor
    informative_S: Tensor
    reference_logp_N: Tensor | None = None
    entropy_N: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """`loss` carries the gradient; the rest are detached sums of this micro-batch, already divided as documented."""

    loss: Tensor
    policy_loss: float
    kl_loss: float
    entropy: float | None
    #: Sums over informative sequences (gspo) or tokens (grpo, ppo), and how many there were.
    ratio_sum: float
    num_clipped: int
    num_ratios: int


def sum_by_sequence(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Sum of a sequence's token values: [S]."""
    return values_N.new_zeros(num_sequences).index_add(0, sequence_N, values_N)


def mean_by_sequence(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Mean of a sequence's token values: [S]; 0 for a sequence without tokens."""
    count_S = sum_by_sequence(torch.ones_like(values_N), sequence_N, num_sequences)
    return sum_by_sequence(values_N, sequence_N, num_sequences) / count_S.clamp(min=1)


def compute_sequence_ratio(train_logp_N: Tensor, old_logp_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """sigma_i = exp(mean over the trial's trained tokens, all segments, of logp_train - logp_old): [S] (GSPO)."""
    return torch.exp(mean_by_sequence(train_logp_N - old_logp_N, sequence_N, num_sequences))


def compute_k3(logp: Tensor, other_logp: Tensor) -> Tensor:
    """Per-token k3 estimate of KL(p || q), p having sampled the tokens: exp(q - p) - (q - p) - 1 >= 0.

    Source: J. Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    diff = other_logp - logp
    return torch.exp(diff) - diff - 1


def compute_correction_weights(train_logp_N: Tensor, rollout_logp_N: Tensor) -> Tensor:
    """Truncated token-level importance weights min(exp(train - rollout), cap), without gradient: [N]."""
    return torch.exp(train_logp_N.detach() - rollout_logp_N).clamp(max=CORRECTION_CAP)


def _surrogate(ratio: Tensor, advantage: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """(-min(r A, clip(r) A), whether the clipped branch was taken)."""
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    plain_gain, clipped_gain = ratio * advantage, clipped * advantage
    return -torch.minimum(plain_gain, clipped_gain), (clipped_gain < plain_gain).detach()


def compute_loss(inputs: LossInputs, denominators: Denominators, config: LossConfig) -> LossOutput:
    """The micro-batch's part of the step's loss.

    With importance_correction = "token" the ratio is taken to the policy at the start of the step (with one update
    per step that is the current policy, so the ratio is 1 and the clip inert) and every token's term is weighted by
    min(exp(logp_train - logp_rollout), 2): the mismatch is corrected per token instead of clipped per ratio.
    """
    x = inputs
    num_S = len(x.advantage_S)
    corrected = config.importance_correction == "token"
    old_N = x.train_logp_N.detach() if corrected else x.rollout_logp_N
    advantage_N, informative_N = x.advantage_S[x.sequence_N], x.informative_S[x.sequence_N]

    if config.algorithm == "gspo":
        ratio_S = compute_sequence_ratio(x.train_logp_N, old_N, x.sequence_N, num_S)
        if corrected:
            # GSPO-token form: the same value and gradient as the sequence ratio, but one term per token to weigh.
            step_N = torch.exp(x.train_logp_N - x.train_logp_N.detach())
            term_N, _ = _surrogate(ratio_S.detach()[x.sequence_N] * step_N, advantage_N, config)
            term_N = term_N * compute_correction_weights(x.train_logp_N, x.rollout_logp_N)
            per_sequence_S = mean_by_sequence(term_N, x.sequence_N, num_S)
            _, clipped = _surrogate(ratio_S.detach(), x.advantage_S, config)
        else:
            per_sequence_S, clipped = _surrogate(ratio_S, x.advantage_S, config)
        has_tokens_S = sum_by_sequence(torch.ones_like(x.train_logp_N), x.sequence_N, num_S) > 0
        counted, ratio = x.informative_S & has_tokens_S, ratio_S.detach()
        policy = torch.where(counted, per_sequence_S, 0.0).sum() / max(1, denominators.num_informative_sequences)
    else:
        ratio_N = torch.exp(x.train_logp_N - old_N)
        term_N, clipped = _surrogate(ratio_N, advantage_N, config)
        if corrected:
            term_N = term_N * compute_correction_weights(x.train_logp_N, x.rollout_logp_N)
        term_N = torch.where(informative_N, term_N, 0.0)
        if config.algorithm == "grpo":
            policy = mean_by_sequence(term_N, x.sequence_N, num_S).sum()
            policy = policy / max(1, denominators.num_informative_sequences)
        else:
            policy = term_N.sum() / max(1, denominators.num_informative_tokens)
        counted, ratio = informative_N, ratio_N.detach()

    loss, kl, entropy = policy, 0.0, None
    if x.reference_logp_N is not None:
        k3_N = compute_k3(x.train_logp_N, x.reference_logp_N)
        kl_term = mean_by_sequence(k3_N, x.sequence_N, num_S).sum() / max(1, denominators.num_sequences)
        loss, kl = loss + config.kl_coef * kl_term, float(kl_term.detach())
    if x.entropy_N is not None:
        bonus = mean_by_sequence(x.entropy_N, x.sequence_N, num_S).sum() / max(1, denominators.num_sequences)
        loss, entropy = loss - config.entropy_coef * bonus, float(bonus.detach())
    return LossOutput(
        loss=loss,
        policy_loss=float(policy.detach()),
        kl_loss=kl,
        entropy=entropy,
        ratio_sum=float(ratio[counted].sum()),
        num_clipped=int((clipped & counted).sum()),
        num_ratios=int(counted.sum()),
    )
