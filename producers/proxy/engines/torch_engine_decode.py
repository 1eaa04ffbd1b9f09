"""One decoding step of Qwen3-MoE by few tensor operations, without Hugging Face's modules.

A step of a small model on a CPU is bound by the number of operations and of Python calls, not by arithmetic. This
does the same computation in fp32 with fused weights; the prefill, bf16 and what `unsupported_reason` names stay with
Hugging Face's model.

Shape letters: B sequences, C columns of the cache, V vocabulary, L MoE layers, K experts per token, E experts,
H hidden size, I expert size, Q query heads, G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

from producers.proxy.engines.torch_engine_cache import BatchCache

#: Up to this many tokens all experts are computed for all tokens in one product: a decoding step is bound by the
#: overhead of many small products, not by arithmetic (measured: 0.6 ms against 1.0 ms for 8 tokens, 8 experts).
DENSE_MAX_TOKENS = 64

#: Rotary embeddings whose tables depend on the position alone, not on the length of the sequence.
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})

#: Positions are added to the rotary table in steps of this many.
_ROPE_STEP = 1024

_vector_norm: Callable[..., torch.Tensor] = torch.linalg.vector_norm
_silu: Callable[..., torch.Tensor] = F.silu


def unsupported_reason(model: Qwen3MoeForCausalLM) -> str | None:
    """Why the model must be decoded by Hugging Face's modules; None where `LeanDecoder` computes the same."""
    config = model.config
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    rotary = model.model.rotary_emb
    checks = {
        f"dtype {model.dtype}": model.dtype != torch.float32,
        f"hidden_act {config.hidden_act!r}": config.hidden_act != "silu",
        "attention_bias": bool(config.attention_bias),
        f"sliding_window {config.sliding_window}": config.sliding_window is not None,
        f"rope_type {rope!r}": rope not in _STATIC_ROPE,
        "a rotary embedding of a part of the head": 2 * rotary.inv_freq.shape[0] != _head_dim(model),
        "a biased lm_head": model.lm_head.bias is not None,
        "an unknown attention or MLP module": any(
            type(layer.self_attn) is not modeling.Qwen3MoeAttention
            or type(layer.mlp) not in (modeling.Qwen3MoeSparseMoeBlock, modeling.Qwen3MoeMLP)
            for layer in model.model.layers
        ),
    }
    return next((reason for reason, found in checks.items() if found), None)


def _head_dim(model: Qwen3MoeForCausalLM) -> int:
    size: int = model.model.layers[0].self_attn.head_dim
    return size


class _Norm:
    """RMSNorm over the last dimension in five operations, where torch's own takes eight on a CPU."""

    __slots__ = ("_eps", "_inverse_size", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = weight.new_full((1,), eps)
        self._inverse_size = 1.0 / weight.shape[-1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        size = _vector_norm(x, 2, -1, True)
        scale = torch.addcmul(self._eps, size, size, value=self._inverse_size).rsqrt_()
        return scale.mul(x).mul_(self._weight)


class _Dense:
    """The MLP of a layer without experts, added to the residual [B, H]."""

    def __init__(self, mlp: Any) -> None:
        self._gate_up_T = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).detach().t()
        self._down_T = mlp.down_proj.weight.detach().t()

    def __call__(self, x_BH: torch.Tensor, residual_BH: torch.Tensor, _: list[torch.Tensor]) -> torch.Tensor:
        gate, up = torch.mm(x_BH, self._gate_up_T).chunk(2, -1)
        return torch.addmm(residual_BH, _silu(gate).mul_(up), self._down_T)


class _Experts:
    """The routed experts of a layer, added to the residual [B, H]. Holds a second copy of the down projections.

    One token reads its own experts' weights; a few share one product over all experts; many are grouped by expert.
    """

    def __init__(self, block: Any) -> None:
        self._grouped = block.experts
        self._router_T = block.gate.weight.detach().t()
        self._top_k: int = block.gate.top_k
        self._normed: bool = block.gate.norm_topk_prob
        gate_up, down = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
        self._num: int = gate_up.shape[0]
        self._size: int = down.shape[2]
        self._gate_up_T = gate_up.flatten(0, 1).t()  # [H, E * 2I]
        self._down_T = down.transpose(1, 2).flatten(0, 1)  # [E * I, H]
        self._gate_up_T_each = gate_up.transpose(1, 2).unbind(0)
        self._down_T_each = self._down_T.split_with_sizes([self._size] * self._num)

    def __call__(self, x_BH: torch.Tensor, residual_BH: torch.Tensor, routing: list[torch.Tensor]) -> torch.Tensor:
        scores_BK, chosen_BK = torch.topk(torch.softmax(torch.mm(x_BH, self._router_T), -1), self._top_k, -1)
        routing.append(chosen_BK)
        num = x_BH.shape[0]
        if num == 1:
            return self._own(x_BH, residual_BH, chosen_BK.tolist()[0], scores_BK.tolist()[0])
        if self._normed:
            scores_BK = scores_BK / scores_BK.sum(-1, True)
        if num > DENSE_MAX_TOKENS:
            out: torch.Tensor = residual_BH + self._grouped(x_BH, chosen_BK, scores_BK)
            return out
        mix_BE1 = x_BH.new_zeros(num, self._num).scatter_(1, chosen_BK, scores_BK).unsqueeze(-1)
        gate, up = torch.mm(x_BH, self._gate_up_T).view(num, self._num, 2 * self._size).chunk(2, -1)
        inner = _silu(gate).mul_(up).mul_(mix_BE1).view(num, -1)
        return torch.addmm(residual_BH, inner, self._down_T)

    def _own(self, x_1H: torch.Tensor, out_1H: torch.Tensor, experts: list[int], scores: list[float]) -> torch.Tensor:
        total = sum(scores) if self._normed else 1.0
        for expert, score in zip(experts, scores, strict=True):
            gate, up = torch.mm(x_1H, self._gate_up_T_each[expert]).chunk(2, -1)
            inner = _silu(gate).mul_(up)
            out_1H = torch.addmm(out_1H, inner, self._down_T_each[expert], alpha=score / total)
        return out_1H


@dataclass(slots=True)
class _Layer:
    """Weights of one layer, as the step uses them."""

    norm: _Norm
    qkv_T: torch.Tensor  # [H, (Q + 2G) * D]
    #: Norm of query and key heads together.
    head_norm: _Norm
    out_T: torch.Tensor  # [Q * D, H]
    mlp_norm: _Norm
    mlp: _Dense | _Experts


class LeanDecoder:
    """The fused weights of one model. Shares memory with it where layouts allow. Used by one thread at a time."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        """Raises ValueError where `unsupported_reason` has one."""
        if reason := unsupported_reason(model):
            raise ValueError(f"the lean decoder cannot run this model: {reason}")
        config = model.config
        self._eps: float = config.rms_norm_eps
        self._queries: int = config.num_attention_heads
        self._keys: int = config.num_key_value_heads
        self._size = _head_dim(model)
        self._half = self._size // 2
        self._scale: float = model.model.layers[0].self_attn.scaling
        self._rotary = model.model.rotary_emb
        self._rope = torch.zeros(0, 2, 1, self._size)
        self._embeddings = model.model.embed_tokens.weight.detach()
        self._layers = [self._layer(layer) for layer in model.model.layers]
        self._norm = _Norm(model.model.norm.weight.detach(), self._eps)
        self._lm_head_T = model.lm_head.weight.detach().t()

    def _layer(self, layer: Any) -> _Layer:
        attention = layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv = torch.cat([p.weight.detach() for p in projections])
        for projection, part in zip(
            projections, qkv.split_with_sizes([p.weight.shape[0] for p in projections]), strict=True
        ):
            projection.weight = torch.nn.Parameter(part, requires_grad=False)
        heads = torch.cat(
            (
                attention.q_norm.weight.detach().expand(self._queries, -1),
                attention.k_norm.weight.detach().expand(self._keys, -1),
            )
        )
        moe = isinstance(layer.mlp, modeling.Qwen3MoeSparseMoeBlock)
        return _Layer(
            norm=_Norm(layer.input_layernorm.weight.detach(), self._eps),
            qkv_T=qkv.t(),
            head_norm=_Norm(heads, self._eps),
            out_T=attention.o_proj.weight.detach().t(),
            mlp_norm=_Norm(layer.post_attention_layernorm.weight.detach(), self._eps),
            mlp=_Experts(layer.mlp) if moe else _Dense(layer.mlp),
        )

    def _rotation(self, positions_B: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Cosines and sines of this step, each [B, 1, D]; sines are negated in the first half, see `__call__`."""
        if (last := max(positions_B)) >= self._rope.shape[0]:
            num = (last // _ROPE_STEP + 1) * _ROPE_STEP
            cos, sin = self._rotary(self._embeddings[:1], torch.arange(num)[None])
            sign = torch.ones(self._size)
            sign[: self._half] = -1
            self._rope = torch.stack((cos[0], sin[0] * sign), dim=1)[:, :, None]
        return _rows(self._rope, positions_B).unbind(1)

    def __call__(self, tokens: Sequence[int], cache: BatchCache) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Forward one token per sequence, between the cache's begin_step and end_step.

        Returns next-token logits [B, V], fp32, and per MoE layer the chosen experts [B, K], int64.
        """
        keys, group = self._keys, self._queries // self._keys
        num, size, half, rotated = len(tokens), self._size, self._half, self._queries + self._keys
        heads = rotated + keys
        mask = None if cache.is_even() else torch.zeros(()).where(cache.mask(), -torch.inf)
        cos, sin = self._rotation(cache.lengths)
        routing: list[torch.Tensor] = []
        x = _rows(self._embeddings, tokens)
        for index, layer in enumerate(self._layers):
            qkv = torch.mm(layer.norm(x), layer.qkv_T).view(num, heads, size)
            turned, value = qkv.split_with_sizes((rotated, keys), 1)
            turned = layer.head_norm(turned)
            # Rotating half a head by -90 degrees is a roll, with the sign in the table of sines.
            turned = (turned * cos).addcmul_(turned.roll(half, -1), sin)
            query, key = turned.split_with_sizes((self._queries, keys), 1)
            all_keys, all_values = cache.put(key, value, index)
            # The queries that share a key head stand as its rows: no copy of keys per query head.
            mixed = F.scaled_dot_product_attention(
                query.view(num, keys, group, size), all_keys, all_values, attn_mask=mask, scale=self._scale
            )
            x = torch.addmm(x, mixed.reshape(num, -1), layer.out_T)
            x = layer.mlp(layer.mlp_norm(x), x, routing)
        return torch.mm(self._norm(x), self._lm_head_T), routing


def _rows(table: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Rows of a table; a single one without a copy."""
    if len(indices) == 1:
        return table.narrow(0, indices[0], 1)
    return table.index_select(0, torch.tensor(indices))
