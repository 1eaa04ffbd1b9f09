"""A whole step on a tiny model: figures, staleness, groups without variation, the injected replay fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from infra.settings import ScheduleSection, TrainSection
from learner.backends.torch_backend import TorchBackend, TorchBackendOptions
from learner.consumption import ReadyGroup, ReadyTrial
from learner.trainer import Trainer
from tests.unit.learner.factory import RecordedGroup, Sampler, make_policy, record_group

TRAIN = replace(TrainSection(), lr=1e-3, kl_coef=0.0, clip_low=0.1, clip_high=0.15, micro_batch_tokens=64)
SCHEDULE = replace(ScheduleSection(), num_steps=10, max_staleness=1)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy") / "p")


@pytest.fixture(scope="module")
def sampler(policy: Path) -> Sampler:
    return Sampler(policy, version=4)


def complete(recorded: RecordedGroup) -> ReadyGroup:
    trials = []
    for member, trajectory in zip(recorded.ready.members, recorded.trajectories, strict=True):
        if member.reward is None:
            continue
        chunks = {
            c.call_id: [r for r in recorded.routing if r.call_id == c.call_id]
            for s in trajectory.segments
            for c in s.calls
        }
        trials.append(ReadyTrial(trajectory, member.reward, chunks))
    return ReadyGroup(recorded.ready, tuple(trials))


def make_trainer(policy: Path, train: TrainSection = TRAIN) -> tuple[TorchBackend, Trainer]:
    backend = TorchBackend(policy, TorchBackendOptions(), policy if train.kl_coef > 0 else None)
    return backend, Trainer(backend, train, SCHEDULE)


def test_a_step_on_fresh_samples(policy: Path, sampler: Sampler) -> None:
    groups = [
        complete(record_group(sampler, 4, 0, [0.0, 1.0, 1.0])),
        complete(record_group(sampler, 4, 1, [1.0, 1.0])),
        complete(record_group(sampler, 4, 2, [0.0, None, 1.0])),
    ]
    backend, trainer = make_trainer(policy)
    before = {n: w.clone() for n, w in backend.weights().items()}
    got = trainer.train_step(groups, 4, 4)
    assert (got.num_informative_groups, got.num_trajectories, got.num_tokens) == (2, 5, 5 * 11)
    assert (got.num_stale_tokens, got.num_unreported_tokens) == (0, 0)
    assert got.reward_mean == pytest.approx(5 / 7)
    assert got.learning_rate == 1e-3 and got.grad_norm > 0
    # The policy that sampled is the one that is trained: every ratio is 1, and the advantages cancel.
    assert got.loss.ratio_mean == pytest.approx(1.0, abs=1e-5) and got.loss.clip_fraction == 0
    assert got.loss.policy_loss == pytest.approx(0.0, abs=1e-5)
    overall, per_version = got.fidelity
    assert (overall.version, per_version.version) == (-1, 4)
    assert overall.pearson is not None and overall.pearson >= 0.9999 and overall.mean_abs_dlogp <= 1e-5
    assert overall.replay_overlap == 1.0 and overall.replay_coverage == 1.0
    assert sum(overall.histogram) == overall.num_tokens == 55
    assert any(not torch.equal(w, before[n]) for n, w in backend.weights().items())


def test_repeating_a_group_makes_its_good_answers_likelier(policy: Path, sampler: Sampler) -> None:
    group = complete(record_group(sampler, 4, 0, [0.0, 1.0, 0.0, 1.0]))
    _, trainer = make_trainer(policy)
    losses = [trainer.train_step([group], s, 4).loss for s in range(4)]
    assert [x.policy_loss for x in losses] == sorted([x.policy_loss for x in losses], reverse=True)
    assert losses[3].policy_loss < -1e-3
    assert losses[3].ratio_mean != 1.0 and losses[3].clip_fraction <= 1.0


def test_micro_batches_do_not_change_the_update(policy: Path, sampler: Sampler) -> None:
    groups = [complete(record_group(sampler, 4, i, [0.0, 1.0])) for i in range(3)]
    weights = []
    for size in (1, 10_000):
        backend, trainer = make_trainer(policy, replace(TRAIN, micro_batch_tokens=size))
        got = trainer.train_step(groups, 0, 4)
        weights.append((got.grad_norm, {n: w.clone() for n, w in backend.weights().items()}))
    assert weights[0][0] == pytest.approx(weights[1][0], rel=1e-4)
    assert all(torch.allclose(weights[0][1][n], w, atol=2e-4) for n, w in weights[1][1].items())


def test_groups_without_variation_change_nothing_and_still_tell_the_fidelity(policy: Path, sampler: Sampler) -> None:
    groups = [complete(record_group(sampler, 4, i, [1.0, 1.0])) for i in range(2)]
    backend, trainer = make_trainer(policy)
    before = {n: w.clone() for n, w in backend.weights().items()}
    got = trainer.train_step(groups, 0, 4)
    assert (got.num_informative_groups, got.num_trajectories, got.num_tokens, got.grad_norm) == (0, 0, 0, 0.0)
    assert got.fidelity[0].num_tokens > 0 and got.fidelity[0].mean_abs_dlogp <= 1e-5
    assert got.loss.loss == 0.0 and got.loss.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert all(torch.equal(w, before[n]) for n, w in backend.weights().items())


def test_kl_pulls_back_to_the_reference_also_without_variation(policy: Path, sampler: Sampler) -> None:
    informative = complete(record_group(sampler, 4, 0, [0.0, 1.0]))
    flat = complete(record_group(sampler, 4, 1, [1.0, 1.0]))
    _, trainer = make_trainer(policy, replace(TRAIN, kl_coef=10.0))
    first = trainer.train_step([informative], 0, 4)
    assert first.loss.kl_loss == pytest.approx(0.0, abs=1e-6)  # still the reference itself
    second = trainer.train_step([flat], 1, 4)
    assert second.loss.kl_loss > 1e-5 and second.num_trajectories == 2 and second.grad_norm > 0
    assert second.loss.loss == pytest.approx(10 * second.loss.kl_loss)


def test_entropy_is_reported_when_it_is_asked_for(policy: Path, sampler: Sampler) -> None:
    group = complete(record_group(sampler, 4, 0, [0.0, 1.0]))
    _, trainer = make_trainer(policy, replace(TRAIN, entropy_coef=0.01))
    got = trainer.train_step([group], 0, 4)
    assert got.loss.entropy is not None and 0 < got.loss.entropy <= torch.log(torch.tensor(64.0)).item()
    assert got.loss.loss == pytest.approx(got.loss.policy_loss - 0.01 * got.loss.entropy, abs=1e-6)


def test_tokens_beyond_the_staleness_bound_are_masked_and_counted(policy: Path, sampler: Sampler) -> None:
    group = complete(record_group(sampler, 4, 0, [0.0, 1.0]))
    _, trainer = make_trainer(policy)
    assert trainer.train_step([group], 5, 5).num_stale_tokens == 0
    got = trainer.train_step([group], 6, 6)
    assert (got.num_stale_tokens, got.num_tokens, got.num_trajectories, got.grad_norm) == (22, 0, 0, 0.0)
    assert got.fidelity[0].num_tokens == 0 and got.fidelity[0].pearson is None


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_other_algorithms_train_too(policy: Path, sampler: Sampler, algorithm: str) -> None:
    group = complete(record_group(sampler, 4, 0, [0.0, 1.0]))
    _, trainer = make_trainer(policy, replace(TRAIN, algorithm=algorithm, clip_low=0.9, clip_high=9.0))
    trainer.train_step([group], 0, 4)
    got = trainer.train_step([group], 1, 4)
    assert got.grad_norm > 0 and got.loss.policy_loss < 0


def test_a_shifted_replay_shows_in_the_overlap_and_free_routing_has_none(policy: Path, sampler: Sampler) -> None:
    group = complete(record_group(sampler, 4, 0, [0.0, 1.0]))
    _, shifted = make_trainer(policy, replace(TRAIN, replay_shift_tokens=1))
    got = shifted.train_step([group], 0, 4).fidelity[0]
    assert got.replay_overlap is not None and got.replay_overlap < 0.8 and got.mean_abs_dlogp > 1e-2
    _, free = make_trainer(policy, replace(TRAIN, routing_replay=False))
    got = free.train_step([group], 0, 4).fidelity[0]
    assert got.replay_overlap is None and got.replay_coverage is None and got.mean_abs_dlogp <= 1e-5
