"""The demo policy's tokenizer and chat template, saved so that transformers loads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.utils.chat_template_utils import render_jinja_template

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
#: In order of their ids. The call tags are content to a parser, hence no special tokens.
SPECIAL: Final = (PAD, START, END)
ADDED: Final = (*SPECIAL, CALL_OPEN, CALL_CLOSE)
#: The verbs that a task turns on are tokens of their own from about 580 entries on.
VOCAB_SIZE: Final = 640

#: ChatML with Hermes calls, append-only: what follows an assistant turn never changes what was before it. Tools are
#: not rendered: the tiny policy knows one tool. `arguments` may be an object or its JSON text.
CHAT_TEMPLATE: Final = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- elif message.content -%}
        {%- for part in message.content -%}
            {{- part.text -}}
        {%- endfor -%}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {%- set function = call.function or call -%}
        {{- '<tool_call>{"name": "' + function.name + '", "arguments": ' -}}
        {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
        {{- '}</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

#: Digits, operators and the parts of an identifier are pieces of their own, so that a policy can copy and compare
#: them; the rest (the JSON around a call, the command's tail) may merge into long tokens.
_PIECES: Final = r"\d|[<>=!]=|(?<= |/)[-+*%<>](?= |/)|[a-z]+(?=[_(.\n])|(?<![A-Z])_|\n"


def build_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE on rendered conversations. Every byte has a token: any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=t in SPECIAL, normalized=False) for t in ADDED],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The trainer takes all it is given as special; the call tags must not be.
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(data))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token. Raises KeyError for one that the vocabulary lacks."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(f"the tokenizer has no token {token!r}")
    return found


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def render_messages(messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool) -> str:
    """The text of a conversation under the demo's chat template, as a server renders it."""
    rendered, _ = render_jinja_template(
        [list(messages)], chat_template=CHAT_TEMPLATE, add_generation_prompt=generation_prompt
    )
    return str(rendered[0])


def render_call(command: str) -> str:
    """What an assistant turn samples to call bash, its stop token included."""
    arguments = json.dumps({"command": command}, ensure_ascii=False)
    return f'{CALL_OPEN}{{"name": "bash", "arguments": {arguments}}}{CALL_CLOSE}{END}'
