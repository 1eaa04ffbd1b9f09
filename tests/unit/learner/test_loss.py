"""The objective by hand and against finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from learner.core.advantages import compute_advantages
from learner.core.loss import (
    Denominators,
    LossConfig,
    LossConfigError,
    LossInputs,
    compute_k3,
    compute_loss,
    compute_sequence_ratio,
)
from learner.core.schedule import compute_learning_rate

#: Two trials: the first with tokens 0, 1, 3 (two segments), the second with token 2.
SEQUENCE = torch.tensor([0, 0, 1, 0])
TRAIN = torch.tensor([-1.0, -2.0, -0.5, -0.3], dtype=torch.float64)
ROLLOUT = torch.tensor([-1.1, -1.7, -0.7, -0.4], dtype=torch.float64)
REFERENCE = torch.tensor([-1.2, -1.5, -0.6, -0.2], dtype=torch.float64)
ENTROPY = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
WIDE = Denominators(num_informative_sequences=2, num_informative_tokens=4, num_sequences=2)


def inputs(train: torch.Tensor = TRAIN, advantages: tuple[float, float] = (1.0, -2.0)) -> LossInputs:
    return LossInputs(
        train_logp_N=train,
        rollout_logp_N=ROLLOUT,
        sequence_N=SEQUENCE,
        advantage_S=torch.tensor(advantages, dtype=torch.float64),
        informative_S=torch.tensor([True, True]),
    )


def test_advantages_by_hand() -> None:
    # rewards 1, 0, 0, 1: mean 0.5, std (n - 1) = sqrt(4 * 0.25 / 3)
    std = math.sqrt(1 / 3)
    want = [0.5 / (std + 1e-6) * s for s in (1, -1, -1, 1)]
    assert compute_advantages([1, 0, 0, 1]).tolist() == pytest.approx(want)


@pytest.mark.parametrize("rewards", [[], [1.0], [0.1, 0.1, 0.1], [0.0, 0.0]])
def test_advantages_without_variation_are_exactly_zero(rewards: list[float]) -> None:
    assert compute_advantages(rewards).tolist() == [0.0] * len(rewards)


def test_sequence_ratio_is_the_exponential_of_the_mean_over_all_segments() -> None:
    ratio = compute_sequence_ratio(TRAIN, ROLLOUT, SEQUENCE, 2)
    assert ratio.tolist() == pytest.approx([math.exp((0.1 - 0.3 + 0.1) / 3), math.exp(0.2)])


def test_gspo_by_hand() -> None:
    # sigma = (exp(-1/30), exp(0.2)) = (0.967, 1.221); A = (1, -2); clip to [0.9, 1.1].
    # First: inside, gain 0.967. Second: min(1.221 * -2, 1.1 * -2) = -2.443, the unclipped branch.
    out = compute_loss(inputs(), WIDE, LossConfig("gspo", 0.1, 0.1))
    first, second = math.exp(-0.1 / 3), math.exp(0.2)
    assert out.policy_loss == pytest.approx(-(first - 2 * second) / 2)
    assert (out.num_clipped, out.num_ratios) == (0, 2)
    assert out.ratio_sum == pytest.approx(first + second)


def test_gspo_clips_asymmetrically() -> None:
    # A positive advantage with a ratio above 1 + high is clipped; a negative one below 1 - low likewise.
    out = compute_loss(inputs(advantages=(-1.0, 1.0)), WIDE, LossConfig("gspo", 0.01, 0.15))
    assert out.policy_loss == pytest.approx((0.99 - 1.15) / 2)
    assert out.num_clipped == 2


def test_grpo_is_a_mean_of_token_means_and_ppo_a_mean_of_tokens() -> None:
    ratios = [math.exp(0.1), math.exp(-0.3), math.exp(0.2), math.exp(0.1)]
    # A = (1, -2): tokens of trial 0 take min(r, 1.05), the token of trial 1 takes r * -2 (r above 1 - low).
    gains = [min(ratios[0], 1.05), min(ratios[1], 1.05), -2 * ratios[2], min(ratios[3], 1.05)]
    config = LossConfig("grpo", 0.05, 0.05)
    grpo = compute_loss(inputs(), WIDE, config)
    assert grpo.policy_loss == pytest.approx(-((gains[0] + gains[1] + gains[3]) / 3 + gains[2]) / 2)
    ppo = compute_loss(inputs(), WIDE, replace(config, algorithm="ppo"))
    assert ppo.policy_loss == pytest.approx(-sum(gains) / 4)
    assert (grpo.num_clipped, grpo.num_ratios) == (2, 4)


def test_k3_by_hand_and_in_the_loss() -> None:
    d = REFERENCE - TRAIN
    want = torch.exp(d) - d - 1
    assert torch.allclose(compute_k3(TRAIN, REFERENCE), want)
    assert bool((want >= 0).all()) and compute_k3(TRAIN, TRAIN).tolist() == [0.0] * 4
    x = replace(inputs(), reference_logp_N=REFERENCE, entropy_N=ENTROPY)
    out = compute_loss(x, WIDE, LossConfig("gspo", 0.1, 0.1, kl_coef=0.5, entropy_coef=0.25))
    kl = float(((want[0] + want[1] + want[3]) / 3 + want[2]) / 2)
    entropy = ((1.0 + 2.0 + 4.0) / 3 + 3.0) / 2
    assert out.kl_loss == pytest.approx(kl)
    assert out.entropy == pytest.approx(entropy)
    assert float(out.loss) == pytest.approx(out.policy_loss + 0.5 * kl - 0.25 * entropy)


def test_sequences_without_variation_have_kl_but_no_surrogate() -> None:
    x = replace(inputs(advantages=(1.0, 0.0)), informative_S=torch.tensor([True, False]), reference_logp_N=REFERENCE)
    one = Denominators(num_informative_sequences=1, num_informative_tokens=3, num_sequences=2)
    out = compute_loss(x, one, LossConfig("gspo", 0.1, 0.1, kl_coef=1.0))
    assert out.policy_loss == pytest.approx(-math.exp(-0.1 / 3))
    assert out.num_ratios == 1
    k3 = compute_k3(TRAIN, REFERENCE)
    assert out.kl_loss == pytest.approx(float(((k3[0] + k3[1] + k3[3]) / 3 + k3[2]) / 2))


def test_micro_batches_add_up_to_the_step() -> None:
    config = LossConfig("gspo", 0.1, 0.1, kl_coef=0.5)
    whole = compute_loss(replace(inputs(), reference_logp_N=REFERENCE), WIDE, config)
    parts = []
    for s, advantage in ((0, 1.0), (1, -2.0)):
        pick = s == SEQUENCE
        x = LossInputs(
            TRAIN[pick],
            ROLLOUT[pick],
            torch.zeros(int(pick.sum()), dtype=torch.long),
            torch.tensor([advantage], dtype=torch.float64),
            torch.tensor([True]),
            REFERENCE[pick],
        )
        parts.append(float(compute_loss(x, WIDE, config).loss))
    assert sum(parts) == pytest.approx(float(whole.loss))


@pytest.mark.parametrize("algorithm", ["gspo", "grpo", "ppo"])
@pytest.mark.parametrize("clip", [(0.5, 0.5), (0.02, 0.03)])
def test_gradient_equals_finite_differences(algorithm: str, clip: tuple[float, float]) -> None:
    config = LossConfig(algorithm, *clip, kl_coef=0.3, entropy_coef=0.0)

    def loss(train: torch.Tensor) -> torch.Tensor:
        return compute_loss(replace(inputs(train), reference_logp_N=REFERENCE), WIDE, config).loss

    assert torch.autograd.gradcheck(loss, (TRAIN.clone().requires_grad_(),), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_importance_correction_weighs_tokens_by_the_truncated_ratio(algorithm: str) -> None:
    train = torch.tensor([-1.0, -2.0, -0.5, -0.3], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([-1.1, -4.0, -0.7, -0.4], dtype=torch.float64)  # token 1: exp(2) is cut to 2
    x = replace(inputs(train), rollout_logp_N=rollout)
    out = compute_loss(x, WIDE, LossConfig(algorithm, 0.1, 0.1, importance_correction="token"))
    out.loss.backward()
    weight = [math.exp(0.1), 2.0, math.exp(0.2), math.exp(0.1)]
    # The ratio to the current policy is 1: d loss / d logp = -A w / (tokens of its sequence) / sequences.
    want = [-weight[0] / 6, -weight[1] / 6, 2 * weight[2] / 2, -weight[3] / 6]
    assert train.grad is not None and train.grad.tolist() == pytest.approx(want)
    assert out.ratio_sum / out.num_ratios == 1.0 and out.num_clipped == 0


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"algorithm": "reinforce"}, "train.algorithm"),
        ({"importance_correction": "sequence"}, "train.importance_correction"),
        ({"clip_low": 1.5}, "train.clip_low"),
    ],
)
def test_unknown_loss_settings_name_their_key(settings: dict[str, object], key: str) -> None:
    with pytest.raises(LossConfigError, match=key):
        LossConfig(**settings)  # type: ignore[arg-type]


def test_learning_rate_warms_up_and_decays_to_its_end() -> None:
    def at(step: int) -> float:
        return compute_learning_rate(step, 140, peak=5e-4, end_share=0.3, warmup_steps=5)

    assert at(0) == pytest.approx(5e-4 / 5 * (1 - 0.7 / 140))
    assert at(4) == pytest.approx(5e-4 * (1 - 0.7 * 5 / 140))
    assert at(139) == pytest.approx(5e-4 * 0.3)
    assert compute_learning_rate(7, 100, peak=1e-6, end_share=1.0, warmup_steps=0) == 1e-6
