"""Group-relative advantages (paper, section on the objective; GRPO, arXiv 2402.03300, Eq. 4 for the idea)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Added to the standard deviation, so that nearly equal rewards do not blow up.
STD_EPSILON = 1e-6


def compute_advantages(rewards: Sequence[float]) -> Tensor:
    """A_i = (r_i - mean) / (std + 1e-6) over one group's admitted members; std with n - 1.

    Returns float32 [len(rewards)]. Equal rewards, or fewer than two, give exactly 0: such a group has no gradient.
    """
    values = torch.tensor(list(rewards), dtype=torch.float64)
    if len(values) < 2 or bool((values == values[0]).all()):
        return torch.zeros(len(values))
    return ((values - values.mean()) / (values.std(correction=1) + STD_EPSILON)).float()
