"""A start-up self-test that labels a chat template: where captured tokens can be continued by a delta, and where not.

Labels of a transition (what is appended behind an assistant turn):
`=` the delta is exact: captured text + delta is what the template renders for the whole history;
`R` the delta is exact and the template rewrites the history before it (old reasoning removed, say): the captured
    prefix is what the model saw, so it is kept;
`X` the delta depends on context, or is not exact in tokens: such a request starts a new segment;
`E` the template refuses these messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from producers.proxy.rendering import Renderer, RenderError

_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "run",
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
    },
}


@dataclass(frozen=True)
class TemplateReport:
    """Label per shape of the new messages; see the module's text."""

    labels: Mapping[str, str]

    @property
    def kind(self) -> str:
        """append_only | history_rewritten | context_dependent, over the shapes the template accepts."""
        seen = set(self.labels.values())
        return "context_dependent" if "X" in seen else "history_rewritten" if "R" in seen else "append_only"

    def allows_delta(self, new: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these new messages may be appended to captured tokens."""
        return self.labels.get(shape_of(new), "X") in "=R"


def shape_of(new: Sequence[Mapping[str, Any]]) -> str:
    """The shape that decides the label: which roles are appended, and whether there are several tool results."""
    roles = [str(m.get("role")) for m in new]
    if "assistant" in roles:
        return "assistant"
    if "system" in roles or "developer" in roles:
        return "system"
    tools = roles.count("tool")
    if tools and "user" in roles:
        return "tool+user"
    return "user" if not tools else "tool" if tools == 1 else "tools"


def _call(renderer: Renderer, number: int, command: str) -> dict[str, Any]:
    arguments: Any = {"cmd": command}
    if renderer.arguments_as_text:
        arguments = json.dumps(arguments)
    return {"type": "function", "id": f"call{number:05d}", "function": {"name": "bash", "arguments": arguments}}


def _result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": "bash", "content": text}


def _transitions(renderer: Renderer) -> list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]]:
    """(shape, history that ends in an assistant turn, new messages): every shape behind histories of several lengths.

    With one length alone a template that counts turns could agree with the stand-in by chance.
    """

    def turn(content: str, *calls: dict[str, Any]) -> dict[str, Any]:
        made = {"tool_calls": list(calls)} if calls else {}
        return {"role": "assistant", "content": content, "reasoning_content": "thinking", **made}

    user = {"role": "user", "content": "Now add tests"}
    starts = [[{"role": "user", "content": "Fix  the bug\n"}]]
    starts.append([{"role": "system", "content": "You code."}, *starts[0], turn("Which one?"), user])
    out = []
    for start in starts:
        one = [*start, turn("", _call(renderer, 1, "ls"))]
        after = [*one, _result(1, "a.py\n b.py\n")]
        two = [*after, turn("", _call(renderer, 2, "cat a"), _call(renderer, 3, "cat b"))]
        out += [
            ("tool", one, [_result(1, "a.py\n b.py\n")]),
            ("tools", two, [_result(2, "AAA"), _result(3, '{"x": 1}')]),
            ("user", [*start, turn("All done.")], [user]),
            ("user", [*after, turn("All done.")], [user]),
            ("tool+user", one, [_result(1, "ok"), user]),
            ("system", [*start, turn("All done.")], [{"role": "system", "content": "Be quick."}, user]),
        ]
    return out


def _label(
    renderer: Renderer, history: list[dict[str, Any]], new: list[dict[str, Any]], tools: list[Any] | None
) -> str:
    try:
        whole = renderer.render([*history, *new], tools)
        past = renderer.render(history, tools, generation_prompt=False)
        cut = renderer.delta_text(history[-1].get("tool_calls") or (), new, tools)
    except RenderError:
        return "E"
    if cut is None:
        return "X"
    stop, delta = cut
    end = past.rfind(stop)
    if end < 0:
        return "X"
    prefix = past[: end + len(stop)]
    if prefix + delta == whole:
        exact = renderer.encode(prefix) + renderer.encode(delta) == renderer.encode(whole)
        return "=" if exact else "X"
    return "R" if whole.endswith(delta) else "X"


def check_template(renderer: Renderer) -> TemplateReport:
    """Label every shape, behind several histories, with and without tools: the worst label counts.

    A history that the template refuses says nothing about the shape; `E` is left when it refuses all.
    """
    found: dict[str, set[str]] = {}
    for shape, history, new in _transitions(renderer):
        found.setdefault(shape, set()).update(_label(renderer, history, new, tools) for tools in (None, [_TOOL]))
    return TemplateReport({shape: next(mark for mark in "XR=E" if mark in marks) for shape, marks in found.items()})
