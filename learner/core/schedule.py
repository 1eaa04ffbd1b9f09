"""Learning-rate schedule: a function of the step number alone, so there is no scheduler state to lose."""

from __future__ import annotations


def compute_learning_rate(step: int, num_steps: int, *, peak: float, end_share: float, warmup_steps: int) -> float:
    """Linear warm-up over `warmup_steps`, times a linear decay from 1 to `end_share` at the last step.

    `step` counts from 0. With `end_share` 1 and no warm-up the rate is constant.
    """
    done = step + 1
    warm = min(1.0, done / warmup_steps) if warmup_steps > 0 else 1.0
    progress = min(1.0, done / num_steps) if num_steps > 0 else 1.0
    return peak * warm * (1.0 - (1.0 - end_share) * progress)
