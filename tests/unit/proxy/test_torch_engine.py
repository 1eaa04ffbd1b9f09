"""The torch engine against a plain forward pass of the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling  # noqa: E402

from infra.settings import EngineSection  # noqa: E402
from producers.proxy.capture import Sampled  # noqa: E402
from producers.proxy.engines.base import (  # noqa: E402
    ContextLengthError,
    EngineUnavailableError,
    GenerateRequest,
    RoutingRows,
)
from producers.proxy.engines.torch_engine import TorchEngine  # noqa: E402
from producers.proxy.engines.torch_engine_batch import PromptCache  # noqa: E402
from producers.proxy.engines.torch_engine_cache import BatchCache  # noqa: E402
from producers.proxy.engines.torch_engine_decode import DENSE_MAX_TOKENS, unsupported_reason  # noqa: E402
from producers.proxy.engines.torch_engine_model import LoadedModel  # noqa: E402
from producers.proxy.engines.torch_engine_sampling import Sampler, sample  # noqa: E402
from tests.unit.proxy import tiny  # noqa: E402

CANARY = [(7 * i + 3) % 500 for i in range(40)]
STOP = frozenset({tiny.IM_END})


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies with different weights."""
    root = tmp_path_factory.mktemp("policies")
    return [tiny.write_model(root / f"v{seed}", seed=seed) for seed in (0, 1)]


def plain_model(directory: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def plain_logprobs(model: Qwen3MoeForCausalLM, ids: list[int]) -> list[float]:
    with torch.no_grad():
        logp = F.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), -1)
    return logp[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def publication(policies: list[Path], version: int):
    canary = plain_logprobs(plain_model(policies[version]), CANARY)
    return tiny.publish(policies[version], run_id="r", version=version, canary_ids=CANARY, canary_logprobs=canary)


@pytest.fixture
async def engine(policies: list[Path]) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(EngineSection(max_batch=6), replica="engine/0")
    result = await engine.load(publication(policies, 0))
    assert result.ok, result.detail
    yield engine
    await engine.close()


def request(number: int, prompt: list[int], **changes) -> GenerateRequest:
    base = GenerateRequest(
        request_id=str(number), prompt_ids=prompt, temperature=1.0, max_tokens=24, stop_token_ids=STOP, seed=number
    )
    return replace(base, **changes)


async def collect(engine: TorchEngine, req: GenerateRequest) -> Sampled:
    out = Sampled()
    async for chunk in engine.generate(req):
        out.add(chunk)
    return out


def prompt(number: int, length: int) -> list[int]:
    return [3 + (number * 31 + i * i * 7) % 480 for i in range(length)]


def rows_of(routing: list[RoutingRows], num: int, row_bytes: int) -> list[bytes | None]:
    rows: list[bytes | None] = [None] * num
    for part in routing:
        assert len(part.expert_ids) == part.num_tokens * row_bytes
        for i in range(part.num_tokens):
            assert rows[part.start + i] is None, "a position was reported twice"
            rows[part.start + i] = part.expert_ids[i * row_bytes : (i + 1) * row_bytes]
    return rows


class Replay:
    """Routers that take the recorded experts instead of their own choice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: list = []
        self.at = 0
        outer = self

        def forward(self, hidden):
            hidden = hidden.reshape(-1, self.hidden_dim)
            logits = F.linear(hidden, self.weight)
            chosen = outer.layers[outer.at]
            outer.at += 1
            scores = logits.float().softmax(-1).gather(-1, chosen)
            return logits, scores / scores.sum(-1, keepdim=True), chosen

        monkeypatch.setattr(modeling.Qwen3MoeTopKRouter, "forward", forward)


async def test_logprobs_and_routing_equal_a_plain_replayed_forward_pass(engine, policies, monkeypatch):
    requests = [request(i, prompt(i, 11 + 13 * i)) for i in range(10)]
    replies = await asyncio.gather(*(collect(engine, r) for r in requests))
    model, replay = plain_model(policies[0]), Replay(monkeypatch)
    shape = engine.routing_shape
    mine, theirs = [], []
    for req, reply in zip(requests, replies, strict=True):
        ids = [*req.prompt_ids, *reply.ids]
        rows = rows_of(reply.routing, len(ids), shape.row_bytes)
        assert rows[-1] is None and all(r is not None for r in rows[:-1])  # the last sampled token is never forwarded
        chosen = torch.tensor([list(r) for r in rows[:-1]] + [[0, 1] * shape.num_layers])
        chosen = chosen.view(len(ids), shape.num_layers, shape.top_k)
        replay.layers, replay.at = [chosen[:, layer] for layer in range(shape.num_layers)], 0
        mine += reply.logprobs
        theirs += plain_logprobs(model, ids)[len(req.prompt_ids) - 1 :]
    a, b = torch.tensor(mine), torch.tensor(theirs)
    assert len(mine) > 100 and a.std() > 0.5  # the check has something to see
    assert (a - b).abs().mean() <= 1e-5
    assert torch.corrcoef(torch.stack([a, b]))[0, 1] >= 0.9999
    assert all(s.version == 0 for reply in replies for s in reply.spans)


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_full_batch(engine):
    alone = [await collect(engine, request(i, prompt(i, 20 + i))) for i in range(4)]
    together = await asyncio.gather(*(collect(engine, request(i, prompt(i, 20 + i))) for i in range(12)))
    for one, other in zip(alone, together[:4], strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert len({tuple(r.ids) for r in together}) > 6


async def test_equal_prompts_are_prefilled_once_and_sampled_apart(engine):
    same = prompt(3, 40)
    replies = await asyncio.gather(*(collect(engine, request(i, same)) for i in range(6)))
    assert len({tuple(r.ids) for r in replies}) == 6
    again = await collect(engine, request(0, same))
    assert again.cached_prompt_tokens == 40
    assert again.ids == replies[0].ids and again.routing[0].expert_ids == replies[0].routing[0].expert_ids


async def test_streaming_gives_a_chunk_per_token_and_the_same_reply(engine):
    req = request(5, prompt(5, 30))
    whole = await collect(engine, req)
    chunks = [c async for c in engine.generate(replace(req, stream=True))]
    assert [i for c in chunks for i in c.ids] == whole.ids
    assert all(len(c.ids) == 1 for c in chunks) and len(chunks) == len(whole.ids) > 1
    assert chunks[0].queue_ms is not None and chunks[0].prefill_ms is not None and chunks[-1].finish_reason is not None


async def test_new_weights_take_over_running_generations(engine, policies, monkeypatch):
    req = request(1, prompt(1, 50), max_tokens=60, stop_token_ids=frozenset(), stream=True)
    reply, loaded = Sampled(), None
    async for chunk in engine.generate(req):
        reply.add(chunk)
        if len(reply.ids) == 10:
            await engine.pause()
            loaded = await engine.load(publication(policies, 1))
            await engine.resume()
    assert loaded is not None and loaded.ok and engine.version == 1
    assert [s.version for s in reply.spans] == [0, 1]
    switch = reply.spans[0].end
    assert reply.spans[1].end == 60 and 10 <= switch < 60
    ids = [*req.prompt_ids, *reply.ids]
    rows = rows_of(reply.routing, len(ids), engine.routing_shape.row_bytes)
    assert None not in rows[:-1]
    # Tokens after the switch were sampled by the new weights from a cache that those weights filled anew.
    expected = plain_logprobs(plain_model(policies[1]), ids)[49 + switch :]
    assert reply.logprobs[switch:] == pytest.approx(expected, abs=1e-4)
    before = plain_logprobs(plain_model(policies[0]), ids[: 50 + switch])[49:]
    assert reply.logprobs[:switch] == pytest.approx(before, abs=1e-4)


async def test_wrong_canary_fences_and_a_good_policy_heals(engine, policies):
    good = publication(policies, 1)
    wrong = replace(good, canary_logprobs=publication(policies, 0).canary_logprobs)
    running = asyncio.create_task(
        collect(engine, request(1, prompt(1, 20), max_tokens=400, stop_token_ids=frozenset()))
    )
    await asyncio.sleep(0)
    result = await engine.load(wrong)
    assert not result.ok and result.canary_max_abs_dlogp > 1e-3 and "canary" in result.detail
    with pytest.raises(EngineUnavailableError, match="fenced"):
        await running
    with pytest.raises(EngineUnavailableError, match="fenced"):
        await collect(engine, request(2, prompt(2, 20)))
    assert engine.version is None
    assert (await engine.load(good)).ok
    assert (await collect(engine, request(2, prompt(2, 20)))).ids


async def test_a_changed_file_is_refused(engine, policies, tmp_path):
    copy = tmp_path / "v1"
    copy.mkdir()
    for path in policies[1].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    policy = replace(publication(policies, 1), path=str(copy))
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    result = await engine.load(policy)
    assert not result.ok and "model.safetensors" in result.detail and "SHA-256" in result.detail
    (copy / "model.safetensors").unlink()
    assert "No such file" in (await engine.load(policy)).detail


async def test_limits_of_the_context(engine):
    with pytest.raises(ContextLengthError) as info:
        await collect(engine, request(0, prompt(0, 512)))
    assert (info.value.prompt_len, info.value.max_model_len) == (512, 512)
    reply = await collect(engine, request(0, prompt(0, 508), max_tokens=100, stop_token_ids=frozenset()))
    assert len(reply.ids) == 4 and reply.finish_reason == "length"


async def test_a_cancelled_generation_leaves_the_batch(engine):
    stream = engine.generate(request(0, prompt(0, 20), max_tokens=480, stop_token_ids=frozenset(), stream=True))
    assert (await anext(stream)).ids
    await stream.aclose()
    others = await asyncio.gather(*(collect(engine, request(i, prompt(i, 20))) for i in range(1, 8)))
    assert all(o.finish_reason for o in others)
    await engine.pause()
    assert len(engine._batch) == 0
    await engine.resume()


def test_sampling_follows_temperature_top_k_and_top_p():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    counts = torch.zeros(4)
    sampler = Sampler(0.5, 1.0, 0, 1)
    for _ in range(4000):
        ids, logprobs = sample(logits, [sampler])
        counts[ids[0]] += 1
        assert logprobs[0] == pytest.approx(float((logits[0] / 0.5).log_softmax(-1)[ids[0]]), abs=1e-6)
    assert counts / 4000 == pytest.approx((logits[0] / 0.5).softmax(-1), abs=0.03)
    for bounds in ({"top_k": 2, "top_p": 1.0}, {"top_k": 0, "top_p": 0.85}):
        sampler = Sampler(1.0, seed=2, **bounds)
        drawn = {sample(logits, [sampler])[0][0] for _ in range(300)}
        assert drawn == {0, 1}
        token, logprob = (out[0] for out in sample(logits, [sampler]))
        assert logprob == pytest.approx(float(logits[0, :2].log_softmax(-1)[token]), abs=1e-6)


def test_greedy_takes_the_likeliest_and_reports_the_raw_logprob():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 1.0]])
    greedy, other = Sampler(0.0, 1.0, 0, 1), Sampler(1.0, 1.0, 0, 3)
    ids, logprobs = sample(logits, [greedy, other])
    assert ids[0] == 1 and greedy.logprobs_mode == "raw" and other.logprobs_mode == "processed"
    assert logprobs[0] == pytest.approx(float(logits[0].log_softmax(-1)[1]))


def test_the_prompt_cache_stays_within_its_budget(policies):
    model = LoadedModel.load(policies[0], 0, "float32")
    with torch.inference_mode():
        done = model.prefill([prompt(i, 64) for i in range(5)])
    cache = PromptCache(budget=3 * done[0].num_bytes)
    for i, entry in enumerate(done):
        cache.put(str(i).encode(), entry)
        cache.get(b"0")
    assert [cache.get(str(i).encode()) is not None for i in range(5)] == [True, False, False, True, True]


def small_config(**changes) -> Qwen3MoeConfig:
    """A Qwen3-MoE unlike the tiny policy where decoding could depend on it."""
    base = {
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 80,
        "moe_intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    return Qwen3MoeConfig(**(base | changes))


def random_model(directory: Path, **changes) -> Path:
    """A random model whose norms have weights of their own."""
    torch.manual_seed(5)
    model = Qwen3MoeForCausalLM(small_config(**changes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return directory


def plain_steps(model: Qwen3MoeForCausalLM, context: list[int], tokens: list[int]) -> tuple[list, list[bytes]]:
    """Next-token logits [V] and routing rows of `tokens`, one at a time through Hugging Face's own cache."""
    chosen: list = []
    gates = [m for m in model.modules() if isinstance(m, modeling.Qwen3MoeTopKRouter)]
    hooks = [g.register_forward_hook(lambda _, __, out: chosen.append(out[2][0])) for g in gates]
    logits, rows, cache = [], [], DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.tensor([context]), past_key_values=cache)
        for token in tokens:
            chosen.clear()
            logits.append(model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, 0])
            rows.append(bytes(torch.cat(chosen).tolist()))
    for hook in hooks:
        hook.remove()
    return logits, rows


def assert_decodes_like_plain(directory: Path, batch: int, steps: int = 5, limit: float = 1e-5) -> LoadedModel:
    model, plain = LoadedModel.load(directory, 0, "float32"), plain_model(directory)
    contexts = [[(3 + 31 * i + 7 * t * t) % 290 for t in range(9 + 5 * (i % 7))] for i in range(batch)]
    tokens = [[(11 * i + 53 * step) % 290 for step in range(steps)] for i in range(batch)]
    cache = BatchCache()
    expected = {}
    with torch.inference_mode():
        for i, done in enumerate(model.prefill(contexts)):
            cache.append(done.layers)
            if i < 7 or i == batch - 1:
                expected[i] = plain_steps(plain, contexts[i], tokens[i])
        for step in range(steps):
            logits, rows = model.decode([t[step] for t in tokens], cache)
            for i, (want_logits, want_rows) in expected.items():
                worst = float((logits[i].log_softmax(-1) - want_logits[step].log_softmax(-1)).abs().max())
                assert worst <= limit, (batch, step, i, worst)
                assert rows[i] == want_rows[step]
    return model


@pytest.mark.parametrize("batch", [1, 2, 7, DENSE_MAX_TOKENS + 2])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False, "num_key_value_heads": 6},
        {"mlp_only_layers": [1]},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    ],
    ids=["plain", "scores-as-they-are", "a-dense-layer", "yarn"],
)
def test_lean_decoding_equals_hugging_face(tmp_path, changes, batch):
    assert assert_decodes_like_plain(random_model(tmp_path, **changes), batch).decoder is not None


def test_lean_decoding_goes_on_when_the_cache_and_the_rotary_table_grow(tmp_path):
    directory = random_model(tmp_path)
    model, plain = LoadedModel.load(directory, 0, "float32"), plain_model(directory)
    context, tokens = [(7 * t * t + 3) % 290 for t in range(1021)], [5, 6, 7, 8, 9, 10]
    logits, rows = plain_steps(plain, context, tokens)
    cache = BatchCache()
    with torch.inference_mode():
        cache.append(model.prefill([context])[0].layers)
        for token, want, row in zip(tokens, logits, rows, strict=True):
            got, got_rows = model.decode([token], cache)
            assert float((got[0].log_softmax(-1) - want.log_softmax(-1)).abs().max()) <= 1e-4
            assert got_rows == [row]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window 64"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'dynamic'"),
    ],
)
def test_what_lean_decoding_cannot_run_is_decoded_by_hugging_face(tmp_path, changes, reason):
    model = assert_decodes_like_plain(random_model(tmp_path, **changes), 3)
    assert model.decoder is None and unsupported_reason(model.model) == reason


def test_bf16_is_decoded_by_hugging_face(policies):
    assert LoadedModel.load(policies[0], 0, "bfloat16").decoder is None
