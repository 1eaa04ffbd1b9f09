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
    logits_BV = _processed(logits_BV.float(), samplers)
    logp_BV = logits_BV.log_softmax(-1)
    # The inverse of the cumulative distribution: in float64, so that no rounding reaches the choice.
    cumulative_BV = torch.softmax(logits_BV, -1, dtype=torch.float64).cumsum(-1)
    draws_B1 = torch.tensor([[s.draw() if s.temperature > 0 else 0.0] for s in samplers], dtype=torch.float64)
    chosen_B1 = torch.searchsorted(cumulative_BV, draws_B1.mul_(cumulative_BV[:, -1:]), right=True)
    chosen_B1.clamp_(max=logits_BV.shape[1] - 1)
    if any(s.temperature <= 0 for s in samplers):
        greedy_B1 = torch.tensor([[s.temperature <= 0] for s in samplers])
        chosen_B1 = torch.where(greedy_B1, logp_BV.argmax(-1, keepdim=True), chosen_B1)
    return chosen_B1.flatten().tolist(), logp_BV.gather(1, chosen_B1).flatten().tolist()


def _processed(logits_BV: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """Logits after temperature and truncation; the same tensor where there is neither."""
    truncated = [s.temperature > 0 and (s.top_p < 1 or s.top_k > 0) for s in samplers]
    scales = [s.temperature if s.temperature > 0 else 1.0 for s in samplers]
    if not any(truncated) and all(scale == 1 for scale in scales):
        return logits_BV
    scaled_BV = logits_BV / torch.tensor(scales)[:, None]
    for row, sampler in enumerate(samplers):
        if truncated[row]:
            _truncate(scaled_BV[row], sampler.top_k, sampler.top_p)
    return scaled_BV
