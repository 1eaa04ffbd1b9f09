"""Routing replay for Hugging Face's Qwen3-MoE: the router's forward with recorded experts.

The replay data is an argument of one forward pass: it lies in a context variable that the pass sets and resets, so
nothing can leak into the next pass, and a policy and a reference in one process do not meet. Weights are gathered
from the *dense* softmax at the replayed ids: gradients flow into the router also where it would choose otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from learner.core.packing import Replay


@dataclass
class RoutingPass:
    """One forward pass under replay, R = B x T rows. `overlap` and `top1` are filled layer by layer, [R] each."""

    expert_ids: tuple[Tensor, ...]
    recorded_R1: Tensor
    overlap: list[Tensor] = field(default_factory=list)
    top1: list[Tensor] = field(default_factory=list)


_ACTIVE: ContextVar[RoutingPass | None] = ContextVar("routing_pass", default=None)


@contextmanager
def replaying(replay: Replay | None) -> Iterator[RoutingPass | None]:
    """Routers that run inside use `replay` (None: they route freely)."""
    current = None
    if replay is not None:
        num_K = replay.expert_ids[0].shape[-1]
        current = RoutingPass(
            tuple(ids.reshape(-1, num_K) for ids in replay.expert_ids), replay.recorded_BT.reshape(-1, 1)
        )
    token = _ACTIVE.set(current)
    try:
        yield current
    finally:
        _ACTIVE.reset(token)


class ReplayRouter(Qwen3MoeTopKRouter):  # type: ignore[misc]
    """The model's own router, that replays when a pass asks for it. `moe_index` counts MoE layers from 0."""

    moe_index: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits [R, E], weights [R, K], expert ids [R, K])."""
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        logits = F.linear(hidden_states, self.weight)
        probs = F.softmax(logits, dtype=torch.float, dim=-1)
        own = torch.topk(probs, self.top_k, dim=-1).indices
        active = _ACTIVE.get()
        chosen = own
        if active is not None:
            recorded = active.expert_ids[self.moe_index]
            chosen = torch.where(active.recorded_R1, recorded, own)
            with torch.no_grad():
                active.overlap.append((recorded[:, :, None] == own[:, None, :]).any(-1).float().mean(-1))
                active.top1.append((recorded[:, 0] == own[:, 0]).float())
        weights = probs.gather(-1, chosen)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen


def install_replay_routers(model: nn.Module) -> list[ReplayRouter]:
    """Turn the routers of a Qwen3-MoE model into replay routers, in place. Returns them in model order."""
    routers: list[ReplayRouter] = []
    for module in model.modules():
        if isinstance(module, Qwen3MoeTopKRouter):
            module.__class__ = ReplayRouter
            router: ReplayRouter = module
            router.moe_index = len(routers)
            routers.append(router)
    return routers
