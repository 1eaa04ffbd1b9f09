"""Supervised warm-up: imitate a weak teacher's demonstrations, on the very prompts that trials render."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from learner.policies.tokenizer import render_call, render_messages

log = structlog.get_logger()

#: What the harness configuration of the demo puts into the system message.
SYSTEM_PROMPT = "You fix bugs."


@dataclass(frozen=True)
class WarmupSettings:
    """Chosen for the tiny model: the known verbs are learnt after 110 steps, the rest is the teacher's guesswork."""

    steps: int = 150
    batch_size: int = 32
    lr: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.01
    lr_warmup_steps: int = 10
    grad_clip: float = 1.0


@dataclass(frozen=True)
class Demonstration:
    """One trial of the teacher: `instruction` is the task's, `command` its one tool call."""

    instruction: str
    command: str


@dataclass(frozen=True)
class Example:
    """Token ids of prompt and action; the action's `num_action` ids at the end are trained."""

    ids: list[int]
    num_action: int


@dataclass(frozen=True)
class WarmupReport:
    """What the warm-up did and cost. `loss` is the mean of the last ten steps, nats per action token."""

    steps: int
    loss: float
    cpu_sec: float
    wall_sec: float


def render_prompt(instruction: str) -> str:
    """The prompt text of a demo trial's first call: system message, user message, generation prompt."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": instruction}]
    return render_messages(messages, generation_prompt=True)


def encode_demonstrations(tokenizer: Tokenizer, demonstrations: Sequence[Demonstration]) -> list[Example]:
    """Prompt and action are encoded apart, as at rollout, where sampled ids follow the encoded prompt."""
    examples = []
    for demo in demonstrations:
        prompt = tokenizer.encode(render_prompt(demo.instruction), add_special_tokens=False).ids
        action = tokenizer.encode(render_call(demo.command), add_special_tokens=False).ids
        examples.append(Example(ids=prompt + action, num_action=len(action)))
    return examples


def warm_up(
    model: torch.nn.Module,
    examples: Sequence[Example],
    *,
    seed: int,
    pad_id: int,
    settings: WarmupSettings | None = None,
) -> WarmupReport:
    """Train `model` in place on shuffled passes over `examples`. Deterministic for one seed and one thread."""
    s = settings or WarmupSettings()
    cpu, wall = time.process_time(), time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, betas=(s.beta1, s.beta2), weight_decay=s.weight_decay)
    rng = random.Random(seed)
    order: list[int] = []
    losses: list[float] = []
    model.train()
    for step in range(1, s.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = s.lr * min(1.0, step / s.lr_warmup_steps)
        if len(order) < s.batch_size:
            order = rng.sample(range(len(examples)), len(examples))
        batch = [examples[order.pop()] for _ in range(min(s.batch_size, len(examples)))]
        loss = action_loss(model, batch, pad_id)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip)
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0:
            log.info("warm-up", step=step, steps=s.steps, loss=round(losses[-1], 3))
    model.eval()
    tail = losses[-10:]
    return WarmupReport(
        steps=s.steps,
        loss=sum(tail) / max(1, len(tail)),
        cpu_sec=time.process_time() - cpu,
        wall_sec=time.monotonic() - wall,
    )


def action_loss(model: torch.nn.Module, batch: Sequence[Example], pad_id: int) -> torch.Tensor:
    """Mean cross-entropy of the action tokens, nats. The output head runs on their positions alone."""
    longest = max(len(e.ids) for e in batch)
    ids_BL = torch.full((len(batch), longest), pad_id)
    seen_BL = torch.zeros((len(batch), longest), dtype=torch.long)
    trained_BL = torch.zeros((len(batch), longest), dtype=torch.bool)
    for row, example in enumerate(batch):
        end = len(example.ids)
        ids_BL[row, :end] = torch.tensor(example.ids)
        seen_BL[row, :end] = 1
        trained_BL[row, end - example.num_action : end] = True
    hidden_BLH = model.model(input_ids=ids_BL, attention_mask=seen_BL).last_hidden_state  # type: ignore[operator]
    picked = trained_BL[:, 1:]
    logits_NV = model.lm_head(hidden_BLH[:, :-1][picked])  # type: ignore[operator]
    return F.cross_entropy(logits_NV.float(), ids_BL[:, 1:][picked])
