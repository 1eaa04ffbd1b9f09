"""A tiny random Qwen3-MoE, and events recorded from it, for the learner's tests."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from learner.backends.router_replay import install_replay_routers
from schemas.events.calls import RoutingRecorded, VersionSpan
from schemas.events.training import GroupMember, GroupReady
from schemas.events.trajectories import CallSlice, Segment, TrajectoryAssembled
from schemas.ids import (
    CallId,
    ConversationId,
    GroupId,
    RunId,
    TaskId,
    TrialId,
    derive_id,
    make_call_id,
    make_group_id,
    make_trial_id,
)
from schemas.packing import all_bits, pack_bits, pack_floats, pack_ints

VOCAB = 64


def make_policy(directory: Path, *, seed: int = 0, norm_topk_prob: bool = True, layers: int = 2) -> Path:
    """Write a random policy directory with a tokenizer-like file beside the weights."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=norm_topk_prob,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(directory / "tokenizer.json"))
    return directory


class Sampler:
    """A stand-in for the engine: samples from a policy directory and records log-probs and experts."""

    def __init__(self, policy: Path, version: int) -> None:
        self.version = version
        self.model = Qwen3MoeForCausalLM.from_pretrained(
            policy, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm"
        ).eval()
        self._chosen: list[torch.Tensor] = []
        for router in install_replay_routers(self.model):
            router.register_forward_hook(lambda _m, _i, out: self._chosen.append(out[2]))

    @torch.no_grad()
    def forward(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(log-probs of tokens 1..T-1 [T-1], experts [T, L, K]) of a context."""
        self._chosen.clear()
        tokens = torch.tensor([list(ids)])
        logits = self.model(input_ids=tokens, use_cache=False).logits[0, :-1]
        logp = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
        return logp.numpy(), torch.stack(self._chosen, dim=1).numpy()


def record_trial(
    sampler: Sampler,
    trial_id: str,
    group_id: str,
    *,
    run_id: str = "run-test",
    turns: Sequence[tuple[int, int]] = ((12, 6),),
    seed: int = 0,
    purpose: str = "train",
    chunk_rows: int = 10_000,
) -> tuple[TrajectoryAssembled, list[RoutingRecorded]]:
    """One trial of one segment. `turns`: (new prompt tokens, sampled tokens) of each call.

    As an engine does, a call records the rows that it forwarded: not those of its cached prefix, and not its last
    sampled token, which the next call forwards.
    """
    rng = np.random.default_rng(seed)
    trial, group, run = TrialId(trial_id), GroupId(group_id), RunId(run_id)
    ids: list[int] = []
    mask: list[int] = []
    slices: list[CallSlice] = []
    for index, (num_prompt, num_sampled) in enumerate(turns):
        start = len(ids)
        ids += rng.integers(3, VOCAB, num_prompt).tolist()
        sampled_start = len(ids)
        ids += rng.integers(3, VOCAB, num_sampled).tolist()
        mask += [0] * num_prompt + [1] * num_sampled
        call_id = make_call_id(trial, 1, index)
        slices.append(CallSlice(call_id=call_id, prompt_start=start, sampled_start=sampled_start, sampled_end=len(ids)))
    logp, experts = sampler.forward(ids)
    values = np.concatenate([[0.0], logp]).astype(np.float32) * np.array(mask, dtype=np.float32)
    spans = tuple(VersionSpan(version=sampler.version, start=s.sampled_start, end=s.sampled_end) for s in slices)
    trajectory = TrajectoryAssembled(
        event_id=derive_id("TrajectoryAssembled", trial),
        run_id=run,
        occurred_at=1,
        producer="assembly",
        trial_id=trial,
        group_id=group,
        task_id=TaskId("task"),
        purpose=purpose,
        attempt=1,
        termination_reason="agent_completed",
        trial_finished_event_id=derive_id("TrialFinished", trial),
        reward_event_id=derive_id("RewardGraded", trial),
        policy_version=sampler.version,
        min_version=sampler.version,
        max_version=sampler.version,
        num_calls=len(turns),
        num_sampled_tokens=sum(mask),
        segments=(
            Segment(
                conversation_id=ConversationId("main"),
                ids=pack_ints(ids),
                mask=bytes(mask),
                logprobs=pack_floats(values.tolist()),
                logprob_valid=pack_bits(mask),
                version_spans=spans,
                calls=tuple(slices),
            ),
        ),
        excluded=(),
    )
    return trajectory, _routing_of(run, trial, slices, experts, sampler.version, chunk_rows)


def _routing_of(
    run: RunId, trial: TrialId, slices: Sequence[CallSlice], experts: np.ndarray, version: int, chunk_rows: int
) -> list[RoutingRecorded]:
    out = []
    for index, part in enumerate(slices):
        first = max(0, part.prompt_start - 1)
        bounds = list(range(first, part.sampled_end - 1, chunk_rows)) or [first]
        for chunk, start in enumerate(bounds):
            rows = experts[start : min(start + chunk_rows, part.sampled_end - 1)]
            out.append(
                RoutingRecorded(
                    event_id=derive_id("RoutingRecorded", trial, str(index), str(chunk)),
                    run_id=run,
                    occurred_at=1,
                    producer="proxy/0",
                    trial_id=trial,
                    attempt=1,
                    call_id=CallId(part.call_id),
                    chunk_index=chunk,
                    num_chunks=len(bounds),
                    token_start=start,
                    num_tokens=len(rows),
                    num_layers=experts.shape[1],
                    top_k=experts.shape[2],
                    num_experts=8,
                    dtype="uint8",
                    expert_ids=rows.astype(np.uint8).tobytes(),
                    valid=all_bits(len(rows)),
                    version_spans=(VersionSpan(version=version, start=0, end=len(rows)),),
                )
            )
    return out


@dataclass(frozen=True)
class RecordedGroup:
    """A group and all that the learner reads of it."""

    ready: GroupReady
    trajectories: tuple[TrajectoryAssembled, ...]
    routing: tuple[RoutingRecorded, ...]


def record_group(
    sampler: Sampler,
    step: int,
    index: int,
    rewards: Sequence[float | None],
    *,
    run_id: str = "run-test",
    purpose: str = "train",
    turns: Sequence[tuple[int, int]] = ((12, 6), (4, 5)),
    chunk_rows: int = 10_000,
) -> RecordedGroup:
    """A group of one trial per reward; None: masked by admission."""
    group_id = make_group_id(RunId(run_id), purpose, step, index)
    trajectories, routing, members = [], [], []
    for i, reward in enumerate(rewards):
        trial_id = make_trial_id(group_id, i)
        seed = 10_000 * step + 100 * index + i
        one, chunks = record_trial(
            sampler, trial_id, group_id, run_id=run_id, turns=turns, seed=seed, purpose=purpose, chunk_rows=chunk_rows
        )
        trajectories.append(one)
        routing += chunks
        members.append(
            GroupMember(
                trial_id=trial_id,
                trajectory_event_id=one.event_id,
                admitted=reward is not None,
                reward=reward,
                termination_reason="agent_completed" if reward is not None else "sandbox_lost",
                min_version=sampler.version,
                max_version=sampler.version,
                num_sampled_tokens=one.num_sampled_tokens,
            )
        )
    admitted = [r for r in rewards if r is not None]
    ready = GroupReady(
        event_id=derive_id("GroupReady", group_id),
        run_id=RunId(run_id),
        occurred_at=1,
        producer="grouping",
        group_id=group_id,
        task_id=TaskId("task"),
        purpose=purpose,
        policy_version=sampler.version,
        step=step,
        members=tuple(members),
        num_admitted=len(admitted),
        reward_mean=sum(admitted) / max(1, len(admitted)),
        reward_std=statistics.stdev(admitted) if len(admitted) > 1 else 0.0,
        zero_variation=len(set(admitted)) < 2,
    )
    return RecordedGroup(ready, tuple(trajectories), tuple(routing))
