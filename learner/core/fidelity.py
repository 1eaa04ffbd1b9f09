"""How well the rollout's log-probabilities agree with the training pass, per policy version.

Two independent checks: the log-probs themselves (Pearson, |dlogp|, k3, effective sample size), and, under routing
replay, whether the replayed experts are those the model would choose itself. Only the second tells a right replay
from a misaligned one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.core.loss import compute_k3
from schemas.events.training import FidelitySummary

#: Upper edges of the histogram's bins of |dlogp|; a last bin takes everything at or above 1.
HISTOGRAM_EDGES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)

#: `version` of the summary over all versions together.
ALL_VERSIONS = -1


@dataclass(frozen=True)
class TokenComparison:
    """Trained tokens of one micro-batch, on the CPU: [N] each."""

    train_logp_N: Tensor
    rollout_logp_N: Tensor
    version_N: Tensor


@dataclass(frozen=True)
class RoutingAgreement:
    """Token rows of one micro-batch whose experts matter to the loss, flat: [R] each.

    overlap_R: share of the replayed experts that are among the model's own choice, mean over layers (0 where not
    replayed); top1_R: share of layers whose first expert is the model's own first; replayed_R: routing was recorded;
    version_R: version that sampled the token, -1 for prompt tokens.
    """

    overlap_R: Tensor
    top1_R: Tensor
    replayed_R: Tensor
    version_R: Tensor


def compute_pearson(x_N: Tensor, y_N: Tensor) -> float | None:
    """Pearson correlation in float64; null with fewer than two tokens or without variation."""
    if len(x_N) < 2:
        return None
    x, y = x_N.double() - x_N.double().mean(), y_N.double() - y_N.double().mean()
    scale = x.square().sum().sqrt() * y.square().sum().sqrt()
    return float((x * y).sum() / scale) if float(scale) > 0 else None


def compute_ess(log_weight_N: Tensor) -> float:
    """Effective sample size (sum w)^2 / (n sum w^2) of weights exp(log_weight): 1 when all are equal, 0 without."""
    if not len(log_weight_N):
        return 0.0
    weight = torch.exp(log_weight_N.double() - log_weight_N.double().max())  # the share does not depend on the scale
    return float(weight.sum().square() / (len(weight) * weight.square().sum()))


def compute_histogram(abs_dlogp_N: Tensor) -> tuple[int, ...]:
    """Counts of |dlogp| by decade: < 1e-7, < 1e-6, ..., < 1, >= 1."""
    bins = torch.bucketize(abs_dlogp_N.double(), torch.tensor(HISTOGRAM_EDGES, dtype=torch.float64), right=True)
    return tuple(torch.bincount(bins, minlength=len(HISTOGRAM_EDGES) + 1).tolist())


def _summary(version: int, tokens: TokenComparison, routing: RoutingAgreement | None) -> FidelitySummary:
    diff = tokens.train_logp_N.double() - tokens.rollout_logp_N.double()
    num = len(diff)
    overlap = top1 = coverage = None
    if routing is not None and len(routing.replayed_R):
        coverage = float(routing.replayed_R.double().mean())
        if bool(routing.replayed_R.any()):
            overlap = float(routing.overlap_R[routing.replayed_R].double().mean())
            top1 = float(routing.top1_R[routing.replayed_R].double().mean())
    return FidelitySummary(
        version=version,
        num_tokens=num,
        pearson=compute_pearson(tokens.train_logp_N, tokens.rollout_logp_N),
        mean_abs_dlogp=float(diff.abs().mean()) if num else 0.0,
        max_abs_dlogp=float(diff.abs().max()) if num else 0.0,
        k3_kl=float(compute_k3(tokens.rollout_logp_N.double(), tokens.train_logp_N.double()).mean()) if num else 0.0,
        ess=compute_ess(diff),
        histogram=compute_histogram(diff.abs()),
        replay_overlap=overlap,
        replay_top1_agreement=top1,
        replay_coverage=coverage,
    )


def summarize_fidelity(
    tokens: Sequence[TokenComparison], routing: Sequence[RoutingAgreement]
) -> tuple[FidelitySummary, ...]:
    """All versions together (version -1) first, then each version that sampled a compared token, oldest first.

    The routing figures of -1 cover every row (prompt tokens too), those of a version the tokens it sampled.
    Without replay `routing` is empty and its figures are null.
    """
    every = TokenComparison(
        *(
            torch.cat([getattr(t, name) for t in tokens]) if tokens else torch.zeros(0)
            for name in ("train_logp_N", "rollout_logp_N", "version_N")
        )
    )
    rows = (
        RoutingAgreement(
            *(
                torch.cat([getattr(r, name) for r in routing])
                for name in ("overlap_R", "top1_R", "replayed_R", "version_R")
            )
        )
        if routing
        else None
    )
    out = [_summary(ALL_VERSIONS, every, rows)]
    for version in sorted(set(every.version_N.tolist())):
        pick = every.version_N == version
        part = TokenComparison(every.train_logp_N[pick], every.rollout_logp_N[pick], every.version_N[pick])
        part_rows = None
        if rows is not None:
            keep = rows.version_R == version
            part_rows = RoutingAgreement(
                rows.overlap_R[keep], rows.top1_R[keep], rows.replayed_R[keep], rows.version_R[keep]
            )
        out.append(_summary(version, part, part_rows))
    return tuple(out)
