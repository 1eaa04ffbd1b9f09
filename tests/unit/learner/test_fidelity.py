"""The fidelity suite by hand."""

from __future__ import annotations

import math

import pytest
import torch

from learner.core.fidelity import (
    RoutingAgreement,
    TokenComparison,
    compute_ess,
    compute_histogram,
    compute_pearson,
    summarize_fidelity,
)


def test_pearson_by_hand() -> None:
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0])
    assert compute_pearson(x, y) == pytest.approx(0.5)
    assert compute_pearson(x, x) == pytest.approx(1.0)
    assert compute_pearson(x, torch.ones(3)) is None
    assert compute_pearson(x[:1], y[:1]) is None


def test_effective_sample_size_by_hand() -> None:
    assert compute_ess(torch.zeros(5)) == pytest.approx(1.0)
    weights = torch.tensor([1.0, 3.0])
    assert compute_ess(weights.log()) == pytest.approx(16 / (2 * 10))
    assert compute_ess(torch.tensor([0.0, -1000.0])) == pytest.approx(0.5)
    assert compute_ess(torch.zeros(0)) == 0.0


def test_histogram_bins_are_half_open_decades() -> None:
    values = torch.tensor([0.0, 5e-8, 1e-7, 5e-4, 0.5, 1.0, 7.0], dtype=torch.float64)
    assert compute_histogram(values) == (2, 1, 0, 0, 1, 0, 0, 1, 2)


def test_summary_splits_by_version() -> None:
    tokens = [
        TokenComparison(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5]), torch.tensor([4, 3])),
        TokenComparison(torch.tensor([-3.0]), torch.tensor([-3.0]), torch.tensor([4])),
    ]
    rows = RoutingAgreement(
        overlap_R=torch.tensor([1.0, 0.5, 0.0, 0.25]),
        top1_R=torch.tensor([1.0, 0.0, 0.0, 0.5]),
        replayed_R=torch.tensor([True, True, False, True]),
        version_R=torch.tensor([-1, 4, 4, 3]),
    )
    every, old, new = summarize_fidelity(tokens, [rows])
    assert (every.version, old.version, new.version) == (-1, 3, 4)
    assert (every.num_tokens, old.num_tokens, new.num_tokens) == (3, 1, 2)
    assert every.mean_abs_dlogp == pytest.approx(0.5 / 3) and every.max_abs_dlogp == pytest.approx(0.5)
    assert every.k3_kl == pytest.approx((math.exp(0.5) - 1.5) / 3)
    assert new.mean_abs_dlogp == 0 and new.pearson == pytest.approx(1.0)
    assert old.pearson is None
    assert every.replay_overlap == pytest.approx(1.75 / 3)
    assert every.replay_top1_agreement == pytest.approx(0.5)
    assert every.replay_coverage == pytest.approx(0.75)
    assert (new.replay_overlap, new.replay_coverage) == (0.5, 0.5)


def test_without_replay_or_tokens_the_figures_are_absent_not_zero() -> None:
    (empty,) = summarize_fidelity([], [])
    assert empty.num_tokens == 0 and empty.pearson is None
    assert empty.replay_overlap is None and empty.replay_coverage is None
