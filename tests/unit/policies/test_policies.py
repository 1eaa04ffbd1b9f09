"""The demo policy: tokenizer round trip, append-only template, prompts as trials render them, reproducible files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.policies.demo_policy import PolicyInfo, PolicyInputError, make_demo_policy, read_demonstrations
from learner.policies.tokenizer import ADDED, END, SPECIAL, render_call
from learner.policies.warmup import (
    SYSTEM_PROMPT,
    Example,
    WarmupSettings,
    action_loss,
    encode_demonstrations,
    render_prompt,
    warm_up,
)

QUICK = WarmupSettings(steps=3, batch_size=4)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations and training instructions as a task pool holds them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path_factory.mktemp("pool")
    rows = []
    for i, (verb, noun, wrong, right) in enumerate(
        (v, n, w, r)
        for v in ("above", "add", "mul")
        for n in ("cup", "tax", "oil")
        for w, r in (("-", ">"), ("%", "+"))
    ):
        listing = f"     1\tdef {verb}_{noun}(x):\n     2\t    return x {wrong} {i + 2}"
        command = f"sed -i '2s/{wrong}/{right}/' ops.py && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        rows.append(
            {"instruction": f"FAILED test_ops.py::test_{verb}_{noun}\n$ cat -n ops.py\n{listing}", "command": command}
        )
    (path / "sft.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    pq.write_table(pa.table({"instruction": [r["instruction"] for r in rows]}), path / "train.parquet")
    return path


@pytest.fixture(scope="module")
def policy(pool: Path, tmp_path_factory: pytest.TempPathFactory) -> PolicyInfo:
    return make_demo_policy(tmp_path_factory.mktemp("policy") / "v0", pool, seed=5, settings=QUICK)


@pytest.fixture(scope="module")
def tokenizer(policy: PolicyInfo) -> Tokenizer:
    return Tokenizer.from_file(str(policy.path / "tokenizer.json"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "FAILED test_ops.py::test_above_cup\n$ cat -n ops.py\n     1\tx = 10 >= 9\n",
        "naïve ☃ 漢字 \U0001f600 \x00\x7f\r\n\t  trailing  ",
        "<|im_start|>user\n<tool_call>{}</tool_call><|im_end|>\n",
        "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT _a_B_ a_b",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_transformers_reads_the_same_tokenizer(policy: PolicyInfo, tokenizer: Tokenizer) -> None:
    loaded = AutoTokenizer.from_pretrained(policy.path)
    text = render_prompt("return x > 12") + render_call("sed -i '2s/-/>/' ops.py")
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert (loaded.eos_token, loaded.pad_token, loaded.model_max_length) == (END, "<|pad|>", 1024)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "return x > 12"}]
    assert loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == render_prompt(
        "return x > 12"
    )
    # call tags are text for the parser, turn tags are not
    kept = loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True)
    assert "<tool_call>" in kept and "<|im_" not in kept
    for i, token in enumerate(ADDED):
        added = loaded.added_tokens_decoder[i]
        assert (added.content, added.special) == (token, token in SPECIAL)


def test_the_prompt_is_the_harness_configurations(policy: PolicyInfo) -> None:
    import yaml
    from jinja2 import Template

    import producers.trials.harnesses as harnesses

    config = yaml.safe_load((Path(harnesses.__file__).parent / "mini_swe_agent.yaml").read_text())["agent"]
    instruction = "FAILED test_ops.py::test_a\n     1\tx {{ 1 }}"
    system = Template(config["system_template"]).render(task=instruction)
    user = Template(config["instance_template"]).render(task=instruction)
    loaded = AutoTokenizer.from_pretrained(policy.path)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    sent = loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert sent == render_prompt(instruction)


def test_the_template_is_append_only_for_the_proxy(policy: PolicyInfo) -> None:
    from producers.proxy.rendering import Renderer
    from producers.proxy.template_check import check_template

    report = check_template(Renderer.from_policy(policy.path))
    assert set(report.labels.values()) == {"="}, report.labels
    assert report.kind == "append_only"


def test_sampled_turn_is_a_prefix_of_the_resent_history(policy: PolicyInfo) -> None:
    loaded = AutoTokenizer.from_pretrained(policy.path)
    command = "sed -i '2s/-/>/' ops.py"
    history = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "x"}]
    for arguments in ({"command": command}, json.dumps({"command": command})):
        call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "c1", "content": "<returncode>0</returncode>"}
        whole = loaded.apply_chat_template([*history, turn, result], add_generation_prompt=True, tokenize=False)
        sampled = render_prompt("x") + render_call(command)
        tail = "\n<|im_start|>tool\n<returncode>0</returncode><|im_end|>\n<|im_start|>assistant\n"
        assert whole == sampled + tail
        ids = [
            loaded(t, add_special_tokens=False)["input_ids"]
            for t in (whole, render_prompt("x"), render_call(command), tail)
        ]
        assert ids[0] == ids[1] + ids[2] + ids[3]


def test_the_proxys_parser_reads_a_rendered_call() -> None:
    from producers.proxy.parsing import HermesParser

    parser = HermesParser()
    calls = parser.feed(render_call('echo "é" && x\\n').removesuffix(END))
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("bash", {"command": 'echo "é" && x\\n'})]


def test_same_inputs_give_the_same_policy_and_others_another(policy: PolicyInfo, pool: Path, tmp_path: Path) -> None:
    def digests(path: Path) -> dict[str, str]:
        files = (p for p in path.iterdir() if p.name != "warmup.json")  # its timings differ
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    again = make_demo_policy(tmp_path / "again", pool, seed=5, settings=QUICK)
    assert again.made and digests(again.path) == digests(policy.path)
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(digests(policy.path))
    other = make_demo_policy(tmp_path / "other", pool, seed=6, settings=QUICK)
    assert digests(other.path)["model.safetensors"] != digests(policy.path)["model.safetensors"]


def test_an_equal_policy_is_reused_unless_a_file_changed(pool: Path, tmp_path: Path) -> None:
    first = make_demo_policy(tmp_path / "v0", pool, seed=1, settings=QUICK)
    second = make_demo_policy(tmp_path / "v0", pool, seed=1, settings=QUICK)
    assert (first.made, second.made) == (True, False)
    assert second.warmup == first.warmup
    (tmp_path / "v0" / "model.safetensors").write_bytes(b"damaged")
    assert make_demo_policy(tmp_path / "v0", pool, seed=1, settings=QUICK).made
    assert not list(tmp_path.glob("*.part"))


def test_the_saved_model_is_the_mixture_of_experts_it_says(policy: PolicyInfo) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy.path)
    config = model.config
    assert config.model_type == "qwen3_moe"
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (2, 8, 2)
    assert config.max_position_embeddings == 1024
    assert 0.9e6 < policy.num_parameters < 1.1e6
    assert policy.num_parameters == sum(p.numel() for p in model.parameters())
    assert model.generation_config.eos_token_id in (2, [2])


def test_loss_is_on_the_action_alone(policy: PolicyInfo, pool: Path, tokenizer: Tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy.path)
    example = encode_demonstrations(tokenizer, read_demonstrations(pool)[:1])[0]
    start = len(example.ids) - example.num_action
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([example.ids])).logits[0].log_softmax(-1)
        expected = -torch.stack([logp[i - 1, example.ids[i]] for i in range(start, len(example.ids))]).mean()
        # beside a longer one, padding changes nothing
        longer = Example(ids=example.ids[:1] * 9 + example.ids, num_action=example.num_action)
        alone, pair = action_loss(model, [example], 0), action_loss(model, [example, longer], 0)
        other = action_loss(model, [longer], 0)
    assert torch.allclose(alone, expected, atol=1e-5)
    assert torch.allclose(pair, (alone + other) / 2, atol=1e-5)


def test_warm_up_learns_the_demonstrations(policy: PolicyInfo, pool: Path, tokenizer: Tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy.path)
    examples = encode_demonstrations(tokenizer, read_demonstrations(pool))
    before = action_loss(model, examples, 0).item()
    report = warm_up(model, examples, seed=0, pad_id=0, settings=WarmupSettings(steps=30, batch_size=18))
    assert report.steps == 30 and report.cpu_sec > 0
    assert action_loss(model, examples, 0).item() < before / 3


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("sft.jsonl", None, "file not found; make the task pool first"),
        ("sft.jsonl", "", "holds no demonstration"),
        ("sft.jsonl", '{"instruction": "x"}\n', "no demonstration per line"),
        ("train.parquet", None, "file not found; make the task pool first"),
    ],
)
def test_an_unusable_pool_is_named(pool: Path, tmp_path: Path, file: str, content: str | None, words: str) -> None:
    for name in ("sft.jsonl", "train.parquet"):
        if name != file:
            (tmp_path / name).write_bytes((pool / name).read_bytes())
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(PolicyInputError, match=words) as error:
        make_demo_policy(tmp_path / "out", tmp_path)
    assert file in str(error.value)
    assert not (tmp_path / "out").exists()
