"""The torch backend against unmodified Hugging Face, and the negative controls of routing replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from learner.backends.base import BackendError
from learner.backends.router_replay import _ACTIVE
from learner.backends.torch_backend import TorchBackend, TorchBackendOptions
from learner.core.fidelity import TokenComparison, summarize_fidelity
from learner.core.packing import MicroBatch, Replay, pack_rows
from learner.core.segments import RowOptions, make_rows
from schemas.events.training import FidelitySummary
from tests.unit.learner.factory import Sampler, make_policy, record_trial


@pytest.fixture(scope="module", params=[True, False], ids=["normed", "unnormed"])
def policy(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy") / "p", norm_topk_prob=request.param)


@pytest.fixture(scope="module")
def backend(policy: Path) -> TorchBackend:
    return TorchBackend(policy, TorchBackendOptions())


@pytest.fixture(scope="module")
def batch(policy: Path, backend: TorchBackend) -> MicroBatch:
    sampler, rows = Sampler(policy, 0), []
    for i, turns in enumerate((((20, 12),), ((10, 6), (5, 8)), ((30, 9),))):
        trajectory, routing = record_trial(sampler, f"g.{i:02d}", "g", turns=turns, seed=i)
        chunks = {c.call_id: [d for d in routing if d.call_id == c.call_id] for c in routing}
        rows += make_rows(trajectory, i, chunks, RowOptions(shape=backend.shape, oldest_version=0))
    return pack_rows(rows)


def with_replay(batch: MicroBatch, ids: list[torch.Tensor]) -> MicroBatch:
    assert batch.replay is not None
    return replace(batch, replay=Replay(tuple(ids), batch.replay.recorded_BT))


def measure(backend: TorchBackend, batch: MicroBatch) -> FidelitySummary:
    out = backend.compute_logprobs(batch, grad=False)
    tokens = TokenComparison(out.train_logp_N, batch.rollout_BT[batch.train_BT], batch.version_BT[batch.train_BT])
    return summarize_fidelity([tokens], [out.agreement] if out.agreement else [])[0]


def own_choice(backend: TorchBackend, batch: MicroBatch) -> list[torch.Tensor]:
    """What the routers choose by themselves, [B, T, K] per layer."""
    from learner.backends.router_replay import ReplayRouter

    chosen: list[torch.Tensor] = []
    routers = [m for m in backend.model.modules() if isinstance(m, ReplayRouter)]
    hooks = [r.register_forward_hook(lambda _m, _i, out: chosen.append(out[2])) for r in routers]
    backend.compute_logprobs(replace(batch, replay=None), grad=False)
    for hook in hooks:
        hook.remove()
    return [c.view(*batch.ids_BT.shape, -1) for c in chosen]


def test_logprobs_are_those_of_unmodified_hugging_face(policy: Path, backend: TorchBackend, batch: MicroBatch) -> None:
    plain = Qwen3MoeForCausalLM.from_pretrained(policy, dtype=torch.float32)
    free = backend.compute_logprobs(replace(batch, replay=None), grad=False).train_logp_N
    want = []
    for b in range(len(batch.ids_BT)):
        ids = batch.ids_BT[b, : int(batch.real_BT[b].sum())]
        with torch.no_grad():
            logp = plain(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        want.append(logp[batch.train_BT[b, 1 : len(ids)]])
    assert torch.allclose(free, torch.cat(want), atol=1e-5)


def test_replay_of_the_rollout_agrees(backend: TorchBackend, batch: MicroBatch) -> None:
    got = measure(backend, batch)
    assert got.pearson is not None and got.pearson >= 0.9999
    assert got.mean_abs_dlogp <= 1e-5
    assert (got.replay_overlap, got.replay_top1_agreement, got.replay_coverage) == (1.0, 1.0, 1.0)


def test_replay_of_the_models_own_choice_changes_nothing(backend: TorchBackend, batch: MicroBatch) -> None:
    grads = []
    assert batch.replay is not None
    everywhere = Replay(tuple(own_choice(backend, batch)), torch.ones_like(batch.replay.recorded_BT))
    logps = []
    for replay in (None, everywhere):
        backend.zero_grad()
        out = backend.compute_logprobs(replace(batch, replay=replay), grad=True)
        out.train_logp_N.mean().backward()
        logps.append(out.train_logp_N.detach())
        grads.append({n: p.grad.clone() for n, p in backend.model.named_parameters() if p.grad is not None})
    backend.zero_grad()
    assert float((logps[0] - logps[1]).abs().max()) == 0.0
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == len(list(backend.model.parameters()))
    assert max(float((grads[0][n] - grads[1][n]).abs().max()) for n in grads[0]) == 0.0


def test_gradients_flow_into_the_router_through_drifted_ids(backend: TorchBackend, batch: MicroBatch) -> None:
    assert batch.replay is not None
    drifted = with_replay(batch, [(ids + 3) % 8 for ids in batch.replay.expert_ids])
    backend.zero_grad()
    backend.compute_logprobs(drifted, grad=True).train_logp_N.mean().backward()
    routers = [p.grad for n, p in backend.model.named_parameters() if n.endswith("mlp.gate.weight")]
    backend.zero_grad()
    assert len(routers) == 2 and all(g is not None and float(g.norm()) > 1e-6 for g in routers)


def test_misaligned_replay_shows_in_the_overlap(backend: TorchBackend, batch: MicroBatch) -> None:
    assert batch.replay is not None
    ids = list(batch.replay.expert_ids)
    wrong = {
        "shifted by one token": [i.roll(1, dims=1) for i in ids],
        "layers swapped": ids[::-1],
        "expert ids + 1": [(i + 1) % 8 for i in ids],
        "rows of another sequence": [i.roll(1, dims=0) for i in ids],
    }
    for what, replayed in wrong.items():
        got = measure(backend, with_replay(batch, replayed))
        assert got.replay_overlap is not None and got.replay_overlap < 0.8, what
        assert got.mean_abs_dlogp > 1e-2, what
    # Experts in another order: the same function, and only the first choice disagrees.
    got = measure(backend, with_replay(batch, [i.flip(-1) for i in ids]))
    assert (got.replay_overlap, got.replay_top1_agreement) == (1.0, 0.0) and got.mean_abs_dlogp <= 1e-5


def test_nothing_of_a_pass_is_left_for_the_next(backend: TorchBackend, batch: MicroBatch) -> None:
    free = replace(batch, replay=None)
    before = backend.compute_logprobs(free, grad=False).train_logp_N
    assert batch.replay is not None
    backend.compute_logprobs(with_replay(batch, [(i + 1) % 8 for i in batch.replay.expert_ids]), grad=False)
    with pytest.raises(IndexError):  # a pass that fails half way: only one layer of routing
        backend.compute_logprobs(with_replay(batch, list(batch.replay.expert_ids[:1])), grad=False)
    assert _ACTIVE.get() is None
    after = backend.compute_logprobs(free, grad=False)
    assert torch.equal(before, after.train_logp_N) and after.agreement is None


def test_logits_in_pieces_give_the_same(
    backend: TorchBackend, batch: MicroBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        backend.zero_grad()
        out = backend.compute_logprobs(batch, grad=True, entropy=True)
        assert out.entropy_N is not None
        (out.train_logp_N.mean() + out.entropy_N.mean()).backward()
        grad = backend.model.model.embed_tokens.weight.grad.clone()
        backend.zero_grad()
        return out.train_logp_N.detach(), out.entropy_N.detach(), grad

    whole = run()
    monkeypatch.setattr("learner.backends.torch_backend.MAX_LOGITS", 7 * 64)
    for a, b in zip(whole, run(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_update_and_restore_are_exact(policy: Path, batch: MicroBatch, tmp_path: Path) -> None:
    def update(b: TorchBackend) -> float:
        b.zero_grad()
        b.compute_logprobs(batch, grad=True).train_logp_N.mean().backward()
        return b.apply_gradients(1e-3)

    first = TorchBackend(policy, TorchBackendOptions())
    assert first.optimizer_state() == {}
    norms = [update(first)]
    kept = (
        {n: w.clone() for n, w in first.weights().items()},
        {n: s.clone() for n, s in first.optimizer_state().items()},
    )
    norms.append(update(first))
    second = TorchBackend(policy, TorchBackendOptions())
    second.restore(*kept)
    assert update(second) == norms[1] and norms[1] != norms[0]
    assert all(torch.equal(w, second.weights()[n]) for n, w in first.weights().items())
    canary = first.compute_canary(list(range(3, 20)))
    first.export_policy(tmp_path / "out")
    assert TorchBackend(tmp_path / "out", TorchBackendOptions()).compute_canary(list(range(3, 20))) == canary


def test_a_gradient_that_is_not_finite_changes_nothing(policy: Path, batch: MicroBatch) -> None:
    backend = TorchBackend(policy, TorchBackendOptions())
    before = {n: w.clone() for n, w in backend.weights().items()}
    (backend.compute_logprobs(batch, grad=True).train_logp_N.mean() * float("inf")).backward()
    assert not backend.apply_gradients(1e-3) < float("inf")
    assert all(torch.equal(w, before[n]) for n, w in backend.weights().items())


def test_bfloat16_publishes_bfloat16_and_stays_close(policy: Path, batch: MicroBatch, tmp_path: Path) -> None:
    backend = TorchBackend(policy, TorchBackendOptions(dtype="bfloat16"))
    got = measure(backend, batch)
    assert 1e-5 < got.mean_abs_dlogp < 0.2
    backend.export_policy(tmp_path / "bf16")
    reloaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "bf16")
    assert reloaded.dtype == torch.bfloat16


def test_bad_policies_and_settings_are_refused(tmp_path: Path, policy: Path) -> None:
    with pytest.raises(BackendError, match=r"nowhere: no config\.json; policy\.path must name"):
        TorchBackend(tmp_path / "nowhere", TorchBackendOptions())
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(BackendError, match="model_type 'gpt2'"):
        TorchBackend(tmp_path, TorchBackendOptions())
    with pytest.raises(BackendError, match=r"train\.dtype 'int8'"):
        TorchBackend(policy, TorchBackendOptions(dtype="int8"))
    backend = TorchBackend(policy, TorchBackendOptions())
    with pytest.raises(BackendError, match="of another model"):
        backend.restore({"w": torch.zeros(1)}, {})
