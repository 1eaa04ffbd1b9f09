"""The model behind the torch engine: Hugging Face Qwen3-MoE on a CPU, with its routers watched.

Shape letters: B sequences, T tokens, V vocabulary, L MoE layers, K experts per token, E experts, H hidden size,
N = B * T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch
import torch.nn.functional as F
from transformers import AutoConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm
from transformers.utils import logging as hf_logging

from producers.proxy.engines.base import RoutingShape
from producers.proxy.engines.torch_engine_cache import BatchCache
from producers.proxy.engines.torch_engine_decode import DENSE_MAX_TOKENS, LeanDecoder, unsupported_reason

hf_logging.disable_progress_bar()
log = structlog.get_logger()

EXPERTS = "rollstream_small_batch"


class ModelError(ValueError):
    """A policy directory that this engine cannot run: names what it found."""


class KeyValueStore(Protocol):
    """What attention layers need of a cache."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Add this step's keys and values of a layer; returns all of them."""


def _small_batch_experts(
    self: Any, hidden_NH: torch.Tensor, experts_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """The chosen experts' weighted sum [N, H]."""
    if hidden_NH.shape[0] > DENSE_MAX_TOKENS:
        out: torch.Tensor = grouped_mm_experts_forward(self, hidden_NH, experts_NK, weights_NK)
        return out
    mix_NE = hidden_NH.new_zeros(hidden_NH.shape[0], self.num_experts).scatter_(1, experts_NK, weights_NK)
    gate_up = torch.matmul(hidden_NH, self.gate_up_proj.transpose(1, 2))  # [E, N, 2I]
    down_ENH = torch.bmm(self._apply_gate(gate_up), self.down_proj.transpose(1, 2))
    return torch.einsum("ne,enh->nh", mix_NE, down_ENH)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _small_batch_experts)


def _fuse_norms(model: Qwen3MoeForCausalLM) -> None:
    """Put torch's one-kernel RMSNorm, with the same weights, in place of Hugging Face's six operations.

    A decoding step of a small model is bound by the number of operations. In fp32 only: in bf16 the two round at
    different places.
    """
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, Qwen3MoeRMSNorm):
                fused = torch.nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon)
                fused.weight = norm.weight
                setattr(parent, name, fused)


class PrefillStore:
    """Keeps every layer's keys and values of one prefill, [B, heads, T, head size]."""

    def __init__(self) -> None:
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Layers come in order."""
        self.layers.append((keys, values))
        return keys, values


@dataclass
class Prefilled:
    """One sequence after its prefill: per-layer (keys, values) [heads, T, head size], next-token logits, routing."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    logits_V: torch.Tensor
    #: [T, L, K] as bytes, row-major.
    routing: bytes

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(k.nbytes + v.nbytes for k, v in self.layers) + self.logits_V.nbytes + len(self.routing)


class LoadedModel:
    """One policy version in memory. Used by one thread at a time."""

    def __init__(self, model: Qwen3MoeForCausalLM, version: int) -> None:
        if model.dtype == torch.float32:
            _fuse_norms(model)
        self.model = model
        self.version = version
        self._captured: list[torch.Tensor] = []
        gates = [m for m in model.model.modules() if hasattr(m, "experts") and hasattr(m, "gate")]
        for block in gates:
            block.gate.register_forward_hook(self._on_router)
        config = model.config
        dtype = "uint8" if config.num_experts <= 256 else "uint16"
        self.routing_shape = RoutingShape(len(gates), config.num_experts_per_tok, config.num_experts, dtype)
        self.max_positions: int = config.max_position_embeddings
        reason = unsupported_reason(model)
        #: None where only Hugging Face's modules can decode this model.
        self.decoder = LeanDecoder(model) if reason is None else None
        if reason is not None:
            log.info("decoding steps run by the Hugging Face modules, which is slower", reason=reason)

    @classmethod
    def load(cls, directory: Path, version: int, dtype: str) -> LoadedModel:
        """Read a policy directory. Raises ModelError."""
        try:
            config = AutoConfig.from_pretrained(directory)
        except (ValueError, OSError, KeyError) as exc:
            raise ModelError(f"{directory}/config.json: {exc}") from exc
        if config.model_type != "qwen3_moe":
            raise ModelError(
                f"{directory}/config.json: model_type {config.model_type!r}; the torch engine runs qwen3_moe"
            )
        try:
            model = Qwen3MoeForCausalLM.from_pretrained(
                directory, dtype=getattr(torch, dtype), attn_implementation="sdpa", experts_implementation=EXPERTS
            )
        except (ValueError, OSError, RuntimeError) as exc:
            raise ModelError(f"{directory}: the weights cannot be loaded: {exc}") from exc
        return cls(model.eval(), version)

    def _on_router(self, _: Any, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        chosen_NK = output[2]
        if chosen_NK.dtype.is_floating_point or chosen_NK.ndim != 2:
            raise ModelError("the router's third output is no [tokens, top_k] of expert ids; pin transformers < 5.20")
        self._captured.append(chosen_NK)

    def _take_routing(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Experts of the last forward pass, [N, L, K]."""
        captured, self._captured = self._captured, []
        if len(captured) != self.routing_shape.num_layers:
            raise ModelError(f"{len(captured)} routers ran in a model of {self.routing_shape.num_layers} MoE layers")
        return torch.stack(captured, dim=1).numpy().astype(self.routing_shape.dtype)

    def _forward(
        self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, mask: torch.Tensor, store: KeyValueStore
    ) -> torch.Tensor:
        """Hidden states after the final norm [B, T, H]. `mask` is boolean [B or 1, 1, T, keys]: True is attended."""
        self._captured.clear()
        out = self.model.model(
            input_ids=ids_BT, position_ids=positions_BT, attention_mask=mask, past_key_values=store, use_cache=True
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def prefill(self, contexts: Sequence[Sequence[int]]) -> list[Prefilled]:
        """Forward whole contexts together. Padding is on the right, where causal attention never looks."""
        lengths = [len(c) for c in contexts]
        longest = max(lengths)
        ids_BT = torch.zeros(len(contexts), longest, dtype=torch.long)
        for row, context in enumerate(contexts):
            ids_BT[row, : len(context)] = torch.tensor(context)
        positions_BT = torch.arange(longest)[None]
        mask = torch.ones(longest, longest, dtype=torch.bool).tril()[None, None]
        store = PrefillStore()
        hidden_BTH = self._forward(ids_BT, positions_BT, mask, store)
        routing = self._take_routing().reshape(len(contexts), longest, -1)
        last_BH = hidden_BTH[torch.arange(len(contexts)), torch.tensor(lengths) - 1]
        logits_BV = self.model.lm_head(last_BH).float()
        return [
            Prefilled(
                [(k[row, :, :num].clone(), v[row, :, :num].clone()) for k, v in store.layers],
                logits_BV[row],
                routing[row, :num].tobytes(),
            )
            for row, num in enumerate(lengths)
        ]

    def decode(self, tokens: Sequence[int], cache: BatchCache) -> tuple[torch.Tensor, list[bytes]]:
        """Forward one token per sequence of the cache: next-token logits [B, V] and each sequence's routing row."""
        cache.begin_step()
        if self.decoder is not None:
            logits_BV, self._captured = self.decoder(tokens, cache)
        else:
            ids_B1 = torch.tensor(tokens)[:, None]
            hidden_B1H = self._forward(ids_B1, cache.positions[:, None], cache.mask(), cache)
            logits_BV = self.model.lm_head(hidden_B1H[:, 0]).float()
        cache.end_step()
        data, size = self._take_routing().tobytes(), self.routing_shape.row_bytes
        return logits_BV, [data[i : i + size] for i in range(0, len(data), size)]

    def canary(self, ids: Sequence[int]) -> list[float]:
        """Log-probs of tokens 1..T-1 of a prompt, by one plain forward pass."""
        ids_1T = torch.tensor(list(ids), dtype=torch.long)[None]
        mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()[None, None]
        with torch.inference_mode():
            hidden = self._forward(ids_1T, torch.arange(len(ids))[None], mask, PrefillStore())
            self._captured.clear()
            logp = F.log_softmax(self.model.lm_head(hidden[0, :-1]).float(), dim=-1)
            out: list[float] = logp.gather(1, ids_1T[0, 1:, None])[:, 0].tolist()
        return out
