"""Chat messages to token ids: whole prompts, and exact deltas behind captured tokens.

What the model sampled is never encoded again. A continuation is `captured ids + enc(delta)`, where the delta is the
text that the chat template puts after the stop token of the assistant's turn: the new messages and the generation
prompt. It is found by rendering a two-message stand-in conversation whose assistant turn holds a sentinel, so the
work per turn is proportional to the new messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

Message = Mapping[str, Any]

#: A string that no chat template contains.
SENTINEL = "\u2603SENTINEL"

#: Code points that are never characters (Unicode 16, section 23.7): marks where text must be split before encoding.
_SPLIT_MARKS = tuple(chr(c) for c in range(0xFDD0, 0xFDF0))


class TokenizerError(ValueError):
    """A policy directory whose tokenizer files cannot be used: names the file and the remedy."""


class RenderError(ValueError):
    """The chat template refused the messages (400): carries its own words."""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as exc:
        raise TokenizerError(f"{path}: not JSON ({exc})") from exc
    if not isinstance(data, dict):
        raise TokenizerError(f"{path}: expected a JSON object")
    return data


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


class Renderer:
    """Encodes and decodes for one policy's tokenizer and chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        stop_token_ids: Sequence[int],
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        if not stop_token_ids:
            raise TokenizerError("no stop token: set eos_token_id in generation_config.json")
        self.tokenizer = tokenizer
        self.template = template
        self.stop_token_ids = frozenset(stop_token_ids)
        self._variables = dict(variables or {})
        stops = [tokenizer.id_to_token(i) for i in stop_token_ids]
        if None in stops:
            raise TokenizerError(f"stop token ids {list(stop_token_ids)} are not all in the tokenizer's vocabulary")
        self.stop_texts: tuple[str, ...] = tuple(s for s in stops if s)
        #: The token that closes a turn the model was cut off in.
        self.stop_token_id: int = next(iter(stop_token_ids))
        added = tokenizer.get_added_tokens_decoder().values()
        self._all_added = _alternation([t.content for t in added])
        self._special = _alternation([t.content for t in added if t.special])
        self.arguments_as_text = not self._takes_argument_objects()

    @classmethod
    def from_policy(cls, directory: Path) -> Renderer:
        """Read tokenizer.json, the chat template and the stop tokens of a policy directory."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: missing; a policy directory needs tokenizer.json beside config.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception
            raise TokenizerError(f"{path}: {exc}") from exc
        config = _read_json(directory / "tokenizer_config.json")
        jinja = directory / "chat_template.jinja"
        template = jinja.read_text(encoding="utf-8") if jinja.is_file() else config.get("chat_template")
        if isinstance(template, list):  # several named templates: the default one
            template = next((t.get("template") for t in template if t.get("name") == "default"), None)
        if not isinstance(template, str):
            raise TokenizerError(
                f"{directory}: no chat template; add chat_template.jinja or tokenizer_config.json's key"
            )
        variables = {
            k: t for k in ("bos_token", "eos_token", "pad_token", "unk_token") if (t := _token_text(config.get(k)))
        }
        return cls(tokenizer, template, _stop_ids(directory, config, tokenizer), variables)

    # -- text

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, generation_prompt: bool = True
    ) -> str:
        """The template's text. Raises RenderError with the template's words."""
        try:
            out, _ = render_jinja_template(
                [list(messages)],
                tools=list(tools) if tools else None,
                chat_template=self.template,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except Exception as exc:  # templates raise TemplateError, and TypeError or the like on odd messages
            raise RenderError(f"the chat template refused these messages: {exc}") from exc
        return str(out[0])

    def encode(self, text: str) -> list[int]:
        """Token ids of template text; special tokens are recognised, none are added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    # -- prompts

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
        """Ids of a whole prompt, generation prompt included."""
        mark = self._pick_mark(messages)
        return self._encode_split(self.render([self._prepare(m, mark) for m in messages], tools), mark)

    def render_delta(
        self, reply: Message, new: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[list[int], list[int]] | None:
        """What follows an assistant turn, as (closing ids, delta ids); None when the template shows no clean cut.

        The closing ids end a turn that was cut off before its stop token; a turn that ended by itself goes without.
        """
        mark = self._pick_mark(new)
        cut = self.delta_text(reply.get("tool_calls") or (), [self._prepare(m, mark) for m in new], tools)
        if cut is None:
            return None
        stop, text = cut
        return self.encode(stop), self._encode_split(text, mark)

    def delta_text(
        self, calls: Sequence[Message], new: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[str, str] | None:
        """(stop text, text after it) for `new` messages behind an assistant turn that made `calls`."""
        base = [{"role": "user", "content": "u"}, self._stand_in(calls)]
        closed = self.render(base, tools, generation_prompt=False)
        whole = self.render([*base, *new], tools)
        at = closed.rfind(SENTINEL)
        if at < 0:  # the template drops tool calls, or content beside them
            at = len(self.render(base[:1], tools))
        end, stop = max(((closed.rfind(s, at), s) for s in self.stop_texts), default=(-1, ""))
        if end >= 0 and whole.startswith(closed[: end + len(stop)]):
            return stop, whole[end + len(stop) :]
        # The turn is closed otherwise in a history than at the end of one: look behind the sentinel itself.
        at = max(whole.rfind(SENTINEL), at)
        found = [(p, s) for s in self.stop_texts if (p := whole.find(s, at)) >= 0]
        if not found:
            return None
        end, stop = min(found)
        return stop, whole[end + len(stop) :]

    def _stand_in(self, calls: Sequence[Message]) -> dict[str, Any]:
        """An assistant turn with the sentinel: in the arguments when it made calls, which keep their ids and names."""
        if not calls:
            return {"role": "assistant", "content": SENTINEL}
        arguments: Any = {"cmd": SENTINEL}
        if self.arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        made = [
            {
                "type": "function",
                "id": call.get("id"),
                "function": {"name": (call.get("function") or {}).get("name"), "arguments": arguments},
            }
            for call in calls
        ]
        return {"role": "assistant", "content": "", "tool_calls": made}

    def _takes_argument_objects(self) -> bool:
        """Whether the template takes tool arguments as objects (most do) or only as JSON text."""
        call = {"type": "function", "id": "call00001", "function": {"name": "bash", "arguments": {"cmd": SENTINEL}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            self.render([{"role": "user", "content": "u"}, turn], None, generation_prompt=False)
        except RenderError:
            return False
        return True

    # -- preparing messages

    def _prepare(self, message: Message, mark: str | None) -> dict[str, Any]:
        """A message as templates expect it: text content, tool arguments as objects, control tokens defused."""
        role = message.get("role")
        out = {k: v for k, v in message.items() if v is not None and k != "cache_control"}
        out["content"] = flatten_content(message.get("content"))
        if role == "developer":
            out["role"] = "system"
        if calls := out.get("tool_calls"):
            out["tool_calls"] = [self._prepare_call(c) for c in calls]
        if mark is not None:
            pattern = self._special if role == "assistant" else self._all_added
            if pattern is not None:
                out["content"] = pattern.sub(lambda m: m[0][0] + mark + m[0][1:], out["content"])
        return out

    def _prepare_call(self, call: Message) -> dict[str, Any]:
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not self.arguments_as_text:
            try:
                parsed = json.loads(arguments)
            except ValueError:
                parsed = None
            if isinstance(parsed, dict):
                function["arguments"] = parsed
        return {"type": "function", "id": call.get("id"), "function": function}

    def _pick_mark(self, messages: Sequence[Message]) -> str | None:
        """A split mark that occurs in no message, when some message spells a control token; else None."""
        if self._all_added is None:
            return None
        texts = [flatten_content(m.get("content")) for m in messages]
        if not any(self._all_added.search(t) for t in texts):
            return None
        return next((m for m in _SPLIT_MARKS if not any(m in t for t in texts)), None)

    def _encode_split(self, text: str, mark: str | None) -> list[int]:
        if mark is None:
            return self.encode(text)
        return [i for piece in text.split(mark) for i in self.encode(piece)]


def flatten_content(content: Any) -> str:
    """Message content as text. Raises RenderError for parts that are no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = []
        for part in content:
            if isinstance(part, str):
                parts.append(part)
            elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
                parts.append(part["text"])
            else:
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise RenderError(f"content part of type {kind!r} is not supported; send text parts only")
        return "".join(parts)
    raise RenderError(f"content must be a string or a list of parts, not {type(content).__name__}")


def _alternation(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern for any of `tokens` of two characters or more, longest first."""
    long = sorted((t for t in tokens if len(t) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, long))) if long else None


def _stop_ids(directory: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Stop tokens: generation_config.json's eos_token_id, the tokenizer's eos token, config.json's eos_token_id."""
    ids: list[int] = []
    eos = _token_text(config.get("eos_token"))
    candidates: list[Any] = [_read_json(directory / "generation_config.json").get("eos_token_id")]
    candidates.append(tokenizer.token_to_id(eos) if eos else None)
    candidates.append(_read_json(directory / "config.json").get("eos_token_id"))
    for value in candidates:
        for i in value if isinstance(value, list) else [value]:
            if isinstance(i, int) and i not in ids:
                ids.append(i)
    return ids
