"""Measure the demo's recipe in one process: warm-up, then GSPO on the demo's tasks, without broker and sandbox.

The tasks, prompts, tokenizer, model and warm-up are the demo's own; the environment is an in-process twin that
applies the model's `sed` command and compares the module with the fixed one. Used to choose the numbers in
infra/demo/*.toml. Example:

    python -m tests.bench.experiment_recipe --seeds 0,1,2 --steps 60 --groups 8 --group-size 8 --lr 1e-3 --control
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from learner.policies.demo_policy import train_demo_tokenizer
from learner.policies.tiny_moe import make_model
from learner.policies.tokenizer import END, PAD, token_id
from learner.policies.warmup import (
    Demonstration,
    Example,
    WarmupSettings,
    encode_demonstrations,
    render_prompt,
    warm_up,
)
from producers.tasks.demo_tasks import KNOWN_VERBS, SUBMIT, TEACHER_SKILL, DemoTask, make_demo_tasks, make_demonstration

_CALL = re.compile(r"<tool_call>(.*)</tool_call><\|im_end\|>", re.S)
_SED = re.compile(r"sed -i '([1-9]\d*)s/([-+*%<>])/([-+*%<>])/' ([a-z]+\.py) && " + re.escape(SUBMIT))


def parse_command(text: str) -> str | None:
    """The bash command of a sampled reply, None when the harness would reject it."""
    try:
        call = json.loads(_CALL.fullmatch(text)[1])  # type: ignore[index]
        command = call["arguments"]["command"]
    except (TypeError, ValueError, KeyError):
        return None
    return command if call.get("name") == "bash" and isinstance(command, str) else None


def grade(task: DemoTask, command: str | None) -> float:
    """1 when the command makes the task's tests pass. A command of another form counts as 0."""
    match = _SED.fullmatch(command or "")
    if match is None or match[4] != task.file:
        return 0.0
    lines = task.source(task.wrong).splitlines(keepends=True)
    at = int(match[1]) - 1
    if at >= len(lines):
        return 0.0
    lines[at] = lines[at].replace(match[2], match[3], 1)
    return float("".join(lines) == task.source(task.right))


class Recipe:
    """A policy, its tokenizer and the tasks of one seed."""

    def __init__(self, seed: int, num_train: int, num_held_out: int, num_sft: int, skill: float) -> None:
        self.seed = seed
        self.key = hashlib.sha256(
            json.dumps([seed, num_train, num_sft, skill, sorted(KNOWN_VERBS)]).encode()
        ).hexdigest()[:12]
        self.train = make_demo_tasks(seed, "train", num_train)
        self.held_out = make_demo_tasks(seed, "held_out", num_held_out)
        rng = random.Random(f"demo:{seed}:teacher")
        self.demonstrations = [
            Demonstration(t.instruction, make_demonstration(rng, t, skill))
            for t in make_demo_tasks(seed, "sft", num_sft)
        ]
        self.tokenizer: Tokenizer = train_demo_tokenizer(self.demonstrations, [t.instruction for t in self.train])
        self.pad, self.eos = token_id(self.tokenizer, PAD), token_id(self.tokenizer, END)
        self.examples = encode_demonstrations(self.tokenizer, self.demonstrations)
        self.model: Any = None

    def warm(self, cache: Path, settings: WarmupSettings) -> float:
        """Warm the model up, or read it from the cache; returns CPU seconds."""
        self.model = make_model(self.seed, self.tokenizer.get_vocab_size(), self.pad, self.eos)
        file = cache / f"warm-{self.key}-{settings.steps}-{settings.lr}.pt"
        if file.exists():
            saved = torch.load(file)
            self.model.load_state_dict(saved["model"])
            self.model.eval()
            return float(saved["cpu_sec"])
        report = warm_up(self.model, self.examples, seed=self.seed, pad_id=self.pad, settings=settings)
        cache.mkdir(parents=True, exist_ok=True)
        torch.save({"model": self.model.state_dict(), "cpu_sec": report.cpu_sec}, file)
        return report.cpu_sec

    def prompts(self, tasks: Sequence[DemoTask]) -> list[list[int]]:
        """Prompt ids per task."""
        return [self.tokenizer.encode(render_prompt(t.instruction), add_special_tokens=False).ids for t in tasks]

    @torch.no_grad()
    def sample(self, prompts: list[list[int]], n: int, max_tokens: int = 32) -> list[list[int]]:
        """`n` replies per prompt at temperature 1, in order of prompts."""
        from transformers import DynamicCache

        longest = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (longest - len(p)) + p for p in prompts])
        seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = self.model(
            input_ids=ids,
            attention_mask=seen,
            position_ids=(seen.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            past_key_values=DynamicCache(config=self.model.config),
            logits_to_keep=1,
        )
        cache, logits = out.past_key_values, out.logits[:, -1].repeat_interleave(n, 0)
        if n > 1:
            cache.batch_repeat_interleave(n)
        seen = seen.repeat_interleave(n, 0)
        position = seen.sum(1, keepdim=True)
        done = torch.zeros(len(logits), dtype=torch.bool)
        columns = []
        for _ in range(max_tokens):
            token = torch.multinomial(F.softmax(logits.float(), -1), 1)[:, 0]
            token = torch.where(done, self.pad, token)
            columns.append(token)
            done |= token == self.eos
            if done.all():
                break
            seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
            out = self.model(
                input_ids=token[:, None],
                attention_mask=seen,
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
            )
            logits, position = out.logits[:, -1], position + 1
        rows: list[list[int]] = torch.stack(columns, 1).tolist()
        return [row[: row.index(self.eos) + 1] if self.eos in row else row for row in rows]

    def rollout(self, tasks: Sequence[DemoTask], n: int) -> tuple[list[Example], list[float], float]:
        """`n` trials per task: examples (prompt + sampled reply), rewards, share of well-formed calls."""
        prompts = self.prompts(tasks)
        replies = self.sample(prompts, n)
        examples, rewards, formed = [], [], 0
        for i, reply in enumerate(replies):
            command = parse_command(self.tokenizer.decode(reply, skip_special_tokens=False))
            formed += command is not None
            rewards.append(grade(tasks[i // n], command))
            examples.append(Example(prompts[i // n] + reply, len(reply)))
        return examples, rewards, formed / len(replies)

    def evaluate(self, seed: int = 77, repeats: int = 1) -> dict[str, float]:
        """Held-out success at temperature 1: all, known verbs, other verbs; and the share of well-formed calls."""
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        scores: dict[bool, list[float]] = {True: [], False: []}
        formed = []
        for _ in range(repeats):
            for i in range(0, len(self.held_out), 128):
                tasks = self.held_out[i : i + 128]
                _, rewards, share = self.rollout(tasks, 1)
                formed.append(share * len(tasks))
                for task, reward in zip(tasks, rewards, strict=True):
                    scores[task.verb in KNOWN_VERBS].append(reward)
        torch.set_rng_state(state)
        every = scores[True] + scores[False]
        parts = {"all": every, "known": scores[True], "unknown": scores[False]}
        means = {name: round(sum(v) / max(1, len(v)), 3) for name, v in parts.items()}
        return {**means, "formed": round(sum(formed) / len(every), 3)}

    def token_logprobs(self, batch: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities [B, L-1] of the sampled tokens, 0 elsewhere; their mask)."""
        longest = max(len(e.ids) for e in batch)
        ids = torch.full((len(batch), longest), self.pad)
        seen = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros((len(batch), longest))
        for row, example in enumerate(batch):
            end = len(example.ids)
            ids[row, :end] = torch.tensor(example.ids)
            seen[row, :end] = 1
            mask[row, end - example.num_action : end] = 1
        hidden = self.model.model(input_ids=ids, attention_mask=seen).last_hidden_state[:, :-1]
        picked = mask[:, 1:].bool()
        logp = -F.cross_entropy(self.model.lm_head(hidden[picked]).float(), ids[:, 1:][picked], reduction="none")
        return torch.zeros_like(mask[:, 1:]).masked_scatter(picked, logp), mask[:, 1:]

    def train_gspo(self, a: argparse.Namespace) -> list[dict[str, Any]]:
        """On-policy GSPO, one update per step: the ratio is 1, its gradient that of the mean log-probability."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.0)
        rng = random.Random(1000 + self.seed)
        torch.manual_seed(5000 + self.seed)
        order: list[DemoTask] = []
        history: list[dict[str, Any]] = []
        window: list[float] = []
        for step in range(1, a.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = a.lr * min(1.0, step / a.lr_warmup) * (1 - (1 - a.lr_end) * step / a.steps)
            tasks = []
            for _ in range(a.groups):
                order = order or rng.sample(self.train, len(self.train))
                tasks.append(order.pop())
            examples, rewards, _ = self.rollout(tasks, a.group_size)
            grouped = torch.tensor(rewards).view(-1, a.group_size)
            std = grouped.std(1, keepdim=True)
            advantages = ((grouped - grouped.mean(1, keepdim=True)) / (std + 1e-6)).view(-1)
            keep = [i for i in range(len(examples)) if std[i // a.group_size] > 0]
            window.append(sum(rewards) / len(rewards))
            if keep:
                logp, mask = self.token_logprobs([examples[i] for i in keep])
                length = mask.sum(1)
                ratio = torch.exp(((logp - logp.detach()) * mask).sum(1) / length)
                loss = -(ratio * advantages[keep]).mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
            if step % a.eval_every == 0 or step == a.steps:
                score = self.evaluate()
                informative = round(float((std > 0).float().mean()), 2)
                reward = round(sum(window) / len(window), 3)
                history.append({"step": step, "reward": reward, "informative": informative, **score})
                print(f"  seed {self.seed}", history[-1], flush=True)
                window = []
        return history


def run(seed: int, a: argparse.Namespace) -> dict[str, Any]:
    """One seed: warm-up, GSPO, and, with --control, more warm-up for the same CPU seconds."""
    recipe = Recipe(seed, a.num_train, a.num_held_out, a.num_sft, a.skill)
    warm_cpu = recipe.warm(Path(a.cache), WarmupSettings(steps=a.warm_steps, lr=a.warm_lr))
    result: dict[str, Any] = {"seed": seed, "warm_cpu_sec": round(warm_cpu, 1), "before": recipe.evaluate()}
    print(" ", result, flush=True)
    start = copy.deepcopy(recipe.model)
    began = time.process_time()
    result["history"] = recipe.train_gspo(a)
    spent = time.process_time() - began
    result |= {"gspo_cpu_sec": round(spent, 1), "after": recipe.evaluate(), "trials": a.steps * a.groups * a.group_size}
    if a.control:
        # As many further warm-up steps as the same CPU time buys.
        steps = round(a.warm_steps * spent / warm_cpu)
        recipe.model = start
        settings = WarmupSettings(steps=steps, lr=a.warm_lr)
        warm_up(recipe.model, recipe.examples, seed=seed + 7, pad_id=recipe.pad, settings=settings)
        result["control"] = {"steps": steps, **recipe.evaluate()}
    return result


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", default="0")
    for name, value in {
        "steps": 60, "groups": 8, "group-size": 8, "lr-warmup": 5, "eval-every": 20, "warm-steps": 155,
        "num-train": 512, "num-held-out": 512, "num-sft": 4096,
    }.items():  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=value)
    for name, rate in {"lr": 1e-3, "lr-end": 0.3, "warm-lr": 2e-3, "skill": TEACHER_SKILL}.items():
        p.add_argument(f"--{name}", type=float, default=rate)
    p.add_argument("--control", action="store_true", help="also measure further warm-up with equal compute")
    p.add_argument("--cache", default=".recipe-cache", help="directory for warmed-up weights")
    return p.parse_args()


def main() -> None:
    """Print one JSON line per seed, and the mean rise."""
    torch.set_num_threads(1)
    a = parse_arguments()
    rises = []
    for seed in map(int, a.seeds.split(",")):
        result = run(seed, a)
        rises.append(result["after"]["all"] - result["before"]["all"])
        print(json.dumps(result), flush=True)
    print(json.dumps({"rises": [round(r, 3) for r in rises], "mean": round(sum(rises) / len(rises), 3)}), flush=True)


if __name__ == "__main__":
    main()
