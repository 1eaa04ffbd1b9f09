"""Sampling of one token per sequence, and the log-prob of what was sampled.

Shape letters: B sequences, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

_DRAWS = 32


@dataclass
class Sampler:
    """A sequence's sampling parameters and its own random numbers: the same whatever else is in the batch."""

    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    _generator: torch.Generator = field(init=False)
    _draws: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._generator = torch.Generator()
        seed = int.from_bytes(os.urandom(8), "little") >> 1 if self.seed is None else self.seed
        self._generator.manual_seed(seed % 2**63)

    @property
    def logprobs_mode(self) -> str:
        """Greedy sampling has no distribution of its own: the model's is reported."""
        return "processed" if self.temperature > 0 else "raw"

    def draw(self) -> float:
        """The next number of [0, 1)."""
        if not self._draws:
            self._draws = torch.rand(_DRAWS, generator=self._generator, dtype=torch.float64).tolist()[::-1]
        return self._draws.pop()


def _truncate(row_V: torch.Tensor, top_k: int, top_p: float) -> None:
    """Set logits outside top-k, then outside the nucleus, to -inf, in place. The likeliest token always stays."""
    if 0 < top_k < row_V.shape[0]:
        row_V[row_V < row_V.topk(top_k).values[-1]] = -torch.inf
    if top_p < 1:
        sorted_V, order_V = row_V.sort(descending=True)
        probs_V = sorted_V.softmax(-1)
        row_V[order_V[probs_V.cumsum(-1) - probs_V >= top_p]] = -torch.inf


def sample(logits_BV: torch.Tensor, samplers: Sequence[Sampler]) -> tuple[list[int], list[float]]:
    """Sampled ids, and their log-probs in the distribution after temperature and truncation."""
    scale = torch.tensor([s.temperature if s.temperature > 0 else 1.0 for s in samplers])
    scaled_BV = logits_BV.float() / scale[:, None]
    for row, sampler in enumerate(samplers):
        if sampler.temperature > 0 and (sampler.top_p < 1 or sampler.top_k > 0):
            _truncate(scaled_BV[row], sampler.top_k, sampler.top_p)
    logp_BV = scaled_BV.log_softmax(-1)
    # The inverse of the cumulative distribution: in float64, so that no rounding reaches the choice.
    cumulative_BV = logp_BV.double().exp().cumsum(-1)
    draws_B = torch.tensor([s.draw() if s.temperature > 0 else 0.0 for s in samplers], dtype=torch.float64)
    targets_B1 = (draws_B * cumulative_BV[:, -1])[:, None]
    chosen_B = torch.searchsorted(cumulative_BV, targets_B1, right=True)[:, 0].clamp(max=logp_BV.shape[1] - 1)
    greedy_B = torch.tensor([s.temperature <= 0 for s in samplers])
    if bool(greedy_B.any()):
        chosen_B = torch.where(greedy_B, logp_BV.argmax(-1), chosen_B)
    return chosen_B.tolist(), logp_BV.gather(1, chosen_B[:, None])[:, 0].tolist()
