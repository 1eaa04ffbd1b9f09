"""A tiny policy directory for tests: byte-level tokenizer, chat template, random Qwen3-MoE."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from schemas.events import FileDigest, PolicyPublished
from schemas.ids import RunId, make_event_id, now_ms
from schemas.packing import pack_floats, pack_ints

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
PAD, IM_START, IM_END = 0, 1, 2

#: Qwen2.5's turn structure, without its system prompt; tool calls as Hermes regions.
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for t in tools %}{{ t.function.name }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": \
{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_CORPUS = [
    "<|im_start|>user\nFAILED test_ops.py::test_above_cup\n$ cat -n ops.py\n"
    "     1\tdef above_cup(x):\n     2\t    return x < 7\n",
    '{"name": "bash", "arguments": {"command": "sed -i \'2s/</>/\' ops.py && cat ops.py"}}',
    "assistant tool system user the quick brown fox jumps over the lazy dog",
]


def make_tokenizer() -> Tokenizer:
    """A BPE tokenizer over bytes, 512 entries at most."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    return tokenizer


def write_tokenizer(directory: Path, template: str = TEMPLATE) -> Path:
    """The tokenizer's files of a policy directory."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": IM_END}))
    return directory


def write_model(directory: Path, seed: int = 0, scale: float = 0.2) -> Path:
    """A random Qwen3-MoE with peaked distributions (a larger `scale` makes log-probs vary more)."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=IM_END,
        bos_token_id=None,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        initializer_range=scale,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(directory)
    return write_tokenizer(directory)


def publish(
    directory: Path, *, run_id: str, version: int, canary_ids: list[int], canary_logprobs: list[float]
) -> PolicyPublished:
    """The publication of a policy directory."""
    files = []
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        files.append(FileDigest(name=path.name, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data)))
    manifest = json.dumps([[f.name, f.sha256, f.size_bytes] for f in files]).encode()
    return PolicyPublished(
        event_id=make_event_id(),
        run_id=RunId(run_id),
        occurred_at=now_ms(),
        producer="test",
        version=version,
        step=version,
        path=str(directory),
        files=tuple(files),
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        canary_ids=pack_ints(canary_ids),
        canary_logprobs=pack_floats(canary_logprobs),
    )
