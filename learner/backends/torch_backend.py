"""The torch backend: a Hugging Face Qwen3-MoE on the CPU or on one GPU, with routing replay and AdamW.

Parameters, gradients and optimizer state are float32; with train.dtype = "bfloat16" the forward pass runs under
autocast. Experts run as grouped matrix products (Hugging Face's batched form is some 50 times slower on a CPU).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as transformers_logging

from learner.backends.base import BackendError, TokenOutputs
from learner.backends.router_replay import ReplayRouter, RoutingPass, install_replay_routers, replaying
from learner.core.fidelity import RoutingAgreement
from learner.core.packing import MicroBatch
from learner.core.segments import ModelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: Logits computed at once (tokens x vocabulary); above it the head runs in pieces that are recomputed for backward.
MAX_LOGITS = 2**26

#: What the optimizer keeps per parameter.
OPTIMIZER_KEYS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class TorchBackendOptions:
    """Optimizer and precision settings ([train])."""

    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    dtype: str = "float32"
    device: str = "cpu"


def load_model(directory: Path) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE with float32 parameters, grouped experts and replay routers. Raises BackendError with the remedy."""
    transformers_logging.disable_progress_bar()
    if not (directory / "config.json").is_file():
        raise BackendError(
            f"{directory}: no config.json; policy.path must name a directory with config.json, safetensors weights "
            "and the tokenizer"
        )
    try:
        config = AutoConfig.from_pretrained(directory)
    except (ValueError, OSError, KeyError) as exc:
        raise BackendError(f"{directory}/config.json: {exc}") from exc
    if config.model_type != "qwen3_moe":
        raise BackendError(
            f"{directory}/config.json: model_type {config.model_type!r}; train.backend torch trains qwen3_moe"
        )
    try:
        model = Qwen3MoeForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
    except (ValueError, OSError, RuntimeError) as exc:
        raise BackendError(f"{directory}: the weights cannot be loaded: {exc}") from exc
    model.eval()  # no dropout: the log-probs of training must be those of the rollout
    install_replay_routers(model)
    return model


class TorchBackend:
    """One policy, its optimizer and, with `reference`, the frozen policy of the KL term."""

    def __init__(self, policy: Path, options: TorchBackendOptions, reference: Path | None = None) -> None:
        if options.dtype not in DTYPES:
            raise BackendError(f"train.dtype {options.dtype!r}: one of {', '.join(DTYPES)}")
        self.options = options
        self.device = torch.device(options.device)
        self.model = load_model(policy).to(self.device)
        config = self.model.config
        num_layers = sum(isinstance(m, ReplayRouter) for m in self.model.modules())
        self.shape = ModelShape(num_layers, config.num_experts_per_tok, config.num_experts, config.vocab_size)
        self._params = dict(self.model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._params.values(),
            lr=0.0,  # set at every update
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
        )
        self._reference = load_model(reference).to(self.device).requires_grad_(False) if reference else None

    # -- forward

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.options.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.options.dtype])

    def _forward(
        self, model: Qwen3MoeForCausalLM, batch: MicroBatch, entropy: bool
    ) -> tuple[Tensor, Tensor | None, RoutingPass | None]:
        ids_BT, train_BT = batch.ids_BT.to(self.device), batch.train_BT.to(self.device)
        replay = batch.replay if model is self.model else None
        with replaying(replay and replay.to(self.device)) as routing, self._autocast():
            hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
            predicted_BT = train_BT[:, 1:]
            hidden_NH, target_N = hidden_BTH[:, :-1][predicted_BT], ids_BT[:, 1:][predicted_BT]
            logp_N, entropy_N = _head_logprobs(model.lm_head, hidden_NH, target_N, entropy)
        return logp_N, entropy_N, routing

    def compute_logprobs(self, batch: MicroBatch, *, grad: bool, entropy: bool = False) -> TokenOutputs:
        """See Backend. The head runs only where a token is trained."""
        with torch.set_grad_enabled(grad):
            logp_N, entropy_N, routing = self._forward(self.model, batch, entropy)
        agreement = _agreement(batch, routing) if routing is not None else None
        return TokenOutputs(logp_N, entropy_N, agreement)

    def compute_reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """See Backend."""
        if self._reference is None:
            raise BackendError("no reference policy was loaded: it is loaded when train.kl_coef > 0")
        with torch.no_grad():
            return self._forward(self._reference, batch, entropy=False)[0]

    @torch.no_grad()
    def compute_canary(self, ids: list[int]) -> list[float]:
        """See Backend. In the precision of the published weights."""
        ids_1N = torch.tensor([ids], device=self.device)
        with self._autocast():
            logits_NV = self.model(input_ids=ids_1N, use_cache=False).logits[0, :-1].float()
        canary: list[float] = (-F.cross_entropy(logits_NV, ids_1N[0, 1:], reduction="none")).tolist()
        return canary

    # -- update

    def zero_grad(self) -> None:
        """See Backend."""
        self._optimizer.zero_grad(set_to_none=True)

    def apply_gradients(self, learning_rate: float) -> float:
        """See Backend."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._params.values(), self.options.grad_clip))
        if not torch.isfinite(torch.tensor(norm)):
            self.zero_grad()
            return norm
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self.zero_grad()
        return norm

    # -- weights and state

    def export_policy(self, directory: Path) -> None:
        """See Backend: in train.dtype."""
        dtype = DTYPES[self.options.dtype]
        model = self.model if dtype == torch.float32 else copy.deepcopy(self.model).to(dtype)
        model.save_pretrained(directory)

    def weights(self) -> Mapping[str, Tensor]:
        """See Backend."""
        return {name: p.detach() for name, p in self._params.items()}

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """See Backend: `<parameter>|<exp_avg | exp_avg_sq | step>`; empty before the first update."""
        return {
            f"{name}|{key}": self._optimizer.state[p][key]
            for name, p in self._params.items()
            if p in self._optimizer.state
            for key in OPTIMIZER_KEYS
        }

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor]) -> None:
        """See Backend."""
        if weights.keys() != self._params.keys():
            odd = sorted(weights.keys() ^ self._params.keys())
            raise BackendError(f"the checkpoint's weights are of another model: {', '.join(odd[:4])} differ")
        for name, p in self._params.items():
            if p.shape != weights[name].shape:
                raise BackendError(f"checkpoint weight {name}: {tuple(weights[name].shape)}, expected {tuple(p.shape)}")
            p.copy_(weights[name])
        self._optimizer.state.clear()
        for entry, value in optimizer_state.items():
            name, _, key = entry.rpartition("|")
            if name not in self._params or key not in OPTIMIZER_KEYS:
                raise BackendError(f"checkpoint optimizer state {entry!r} is of another model")
            kept = value.clone() if key == "step" else value.to(self.device, copy=True)
            self._optimizer.state[self._params[name]][key] = kept


def _piece(lm_head: torch.nn.Linear, hidden_NH: Tensor, target_N: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    logits_NV = lm_head(hidden_NH).float()
    logp_N = -F.cross_entropy(logits_NV, target_N, reduction="none")
    if not entropy:
        return logp_N, logp_N.new_zeros(0)
    log_prob_NV = F.log_softmax(logits_NV, dim=-1)
    return logp_N, -(log_prob_NV.exp() * log_prob_NV).sum(-1)


def _head_logprobs(
    lm_head: torch.nn.Linear, hidden_NH: Tensor, target_N: Tensor, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """(log-probs [N], entropy [N] or None); in pieces when the logits would be large."""
    num_N, num_V = len(target_N), lm_head.out_features
    size = max(1, MAX_LOGITS // num_V)
    if num_N <= size:
        logp_N, entropy_N = _piece(lm_head, hidden_NH, target_N, entropy)
        return logp_N, entropy_N if entropy else None
    parts = [
        checkpoint(_piece, lm_head, h, t, entropy, use_reentrant=False)
        for h, t in zip(torch.split(hidden_NH, size), torch.split(target_N, size), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]) if entropy else None


def _agreement(batch: MicroBatch, routing: RoutingPass) -> RoutingAgreement:
    """Rows that matter: every real token but the last of its row, whose experts nothing looks at."""
    matters_BT = batch.real_BT.clone()
    matters_BT[:, :-1] &= batch.real_BT[:, 1:]
    matters_BT[:, -1] = False
    matters_R = matters_BT.reshape(-1)

    def rows(per_layer: list[Tensor]) -> Tensor:
        return torch.stack(per_layer).mean(0).cpu()[matters_R]

    return RoutingAgreement(
        overlap_R=rows(routing.overlap),
        top1_R=rows(routing.top1),
        replayed_R=routing.recorded_R1[:, 0].cpu()[matters_R],
        version_R=batch.version_BT.reshape(-1)[matters_R],
    )
