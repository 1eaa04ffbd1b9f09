"""Rich renderables of what the queries return: `status`, `trace` and `sql` on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from consumers.clickhouse.queries import SolveRate, Status
from consumers.clickhouse.trace import Call, Trace

_BARS = "▁▂▃▄▅▆▇█"
_STATE_STYLE = {"running": "cyan", "completed": "green", "stopped": "yellow", "failed": "red"}
_MAX_CELL = 200
_MAX_CURVE_ROWS = 12


# -- status


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def sparkline(values: Sequence[float]) -> str:
    """One character per value; 0 is the lowest bar, 1 the highest."""
    return "".join(_BARS[min(len(_BARS) - 1, int(max(0.0, v) * len(_BARS)))] for v in values)


def _rate_text(rate: SolveRate) -> str:
    text = f"{_percent(rate.rate)} ({rate.num_solved}/{rate.num_offered})"
    return text if rate.complete else f"{rate.num_solved} solved, {rate.num_finished}/{rate.num_offered} ended"


def status_line(status: Status) -> str:
    """The status in one plain line, for logs."""
    parts = [f"step {status.steps}" + (f"/{status.num_steps}" if status.num_steps else "")]
    parts.append(f"v{status.version}" if status.version is not None else "no policy yet")
    for name, rates in (("held-out", status.held_out), ("train", status.train)):
        if rates:
            parts.append(f"{name} {_rate_text(rates[-1])}")
    parts.append(f"trials {status.num_finished}/{status.num_offered} ({status.num_running} running)")
    parts.append(f"{status.tokens_per_sec:.0f} tok/s, {status.trials_per_sec:.1f} trials/s")
    if status.pearson is not None:
        parts.append(f"pearson {status.pearson:.6f}")
    if status.alerts:
        parts.append(f"{len(status.alerts)} alerts: {', '.join(sorted({a.check for a in status.alerts}))}")
    return " · ".join(parts)


def _curve(status: Status) -> Table:
    train = {rate.step: rate for rate in status.train}
    held_out = {rate.step: rate for rate in status.held_out}
    table = Table(title="solve rate", title_justify="left", header_style="bold", pad_edge=False)
    for column in ("step", "policy", "held-out", "train"):
        table.add_column(column, justify="right")
    steps = sorted(train.keys() | held_out.keys())
    if len(steps) > _MAX_CURVE_ROWS:
        shown = {step for step in steps if step in held_out}
        steps = sorted(shown | set(steps[-4:]))[-_MAX_CURVE_ROWS:]
    for step in steps:
        either = held_out.get(step) or train[step]
        table.add_row(
            str(step),
            f"v{either.policy_version}",
            _rate_text(held_out[step]) if step in held_out else "",
            _rate_text(train[step]) if step in train else "",
        )
    return table


def _facts(status: Status, now: datetime) -> Table:
    table = Table.grid(padding=(0, 2))
    step = f"{status.steps}" + (f" of {status.num_steps}" if status.num_steps else "")
    table.add_row("step", step, "policy", f"v{status.version}" if status.version is not None else "-")
    table.add_row("tokens/s", f"{status.tokens_per_sec:,.0f}", "trials/s", f"{status.trials_per_sec:.2f}")
    table.add_row(
        "trials",
        f"{status.num_finished:,} of {status.num_offered:,} ended",
        "queue",
        f"{status.num_waiting} waiting, {status.num_running} running",
    )
    staleness = "-"
    if status.staleness_mean is not None:
        staleness = f"mean {status.staleness_mean:.2f}, max {status.staleness_max}"
    age = "-"
    if status.last_event_at is not None:
        age = f"{max(0.0, (now - status.last_event_at).total_seconds()):.0f} s ago"
    table.add_row("staleness", staleness, "last event", age)
    pearson = "-" if status.pearson is None else f"{status.pearson:.7f}"
    dlogp = "-" if status.mean_abs_dlogp is None else f"{status.mean_abs_dlogp:.2g} nats"
    overlap = "-" if status.replay_overlap is None else f"{status.replay_overlap:.4f}"
    table.add_row("pearson", pearson, "mean |dlogp|", dlogp)
    table.add_row("replay overlap", overlap)
    curve = [rate.rate for rate in status.train if rate.complete]
    if curve:
        table.add_row("train curve", sparkline(curve[-40:]))
    return table


def _outcomes(outcomes: Mapping[str, int]) -> Table:
    table = Table(title="trials by outcome", title_justify="left", header_style="bold", pad_edge=False)
    table.add_column("outcome")
    table.add_column("trials", justify="right")
    table.add_column("share", justify="right")
    total = sum(outcomes.values())
    for reason, num in outcomes.items():
        table.add_row(reason, f"{num:,}", _percent(num / total))
    return table


def render_status(status: Status, now: datetime | None = None) -> RenderableType:
    """The live table. `now`: UTC without a zone, for tests."""
    now = now or datetime.now(UTC).replace(tzinfo=None)
    style = _STATE_STYLE.get(status.state, "white")
    parts: list[RenderableType] = [
        Text.assemble((status.run_id, "bold"), "  ", (status.state, style), f"  {status.name}"),
        _facts(status, now),
    ]
    tables = Table.grid(padding=(0, 4))
    tables.add_row(_curve(status), _outcomes(status.outcomes))
    parts.append(tables)
    for alert in status.alerts:
        colour = "red" if alert.severity == "critical" else "yellow"
        parts.append(Text(f"! {alert.check} ({alert.subject}): {alert.detail}", style=colour))
    return Group(*parts)


# -- sql


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return escape(text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 1] + "…")


def render_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> RenderableType:
    """A table; NULL is `-`, long cells are cut."""
    table = Table(header_style="bold")
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) or row[index] is None for row in rows)
        table.add_column(column, justify="right" if numeric and rows else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    return Group(table, Text(f"{len(rows)} row{'' if len(rows) == 1 else 's'}", style="dim"))


# -- trace

_OFFER_COLUMNS = ("attempt", "occurred_at", "harness", "seed", "temperature", "max_turns")
_LEASE_COLUMNS = ("attempt", "worker_id", "occurred_at", "num_renewals", "lapsed_at")
_STAGE_COLUMNS = ("attempt", "stage", "outcome", "duration_sec", "peak_memory_bytes", "error_class", "detail")
_ATTEMPT_COLUMNS = ("attempt", "worker_id", "agent_exit_code", "agent_exit_status", "capture_ok", "num_calls", "detail")


def _time(value: datetime | None) -> str:
    return "-" if value is None else value.strftime("%H:%M:%S.%f")[:-3]


class Decoder:
    """Token ids to text, with the tokenizer of a policy directory. Raises ValueError when it has none."""

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory) / "tokenizer.json"
        try:
            from tokenizers import Tokenizer
        except ImportError as exc:
            raise ValueError("decoded text needs the package `tokenizers` (extra `learner`); use --no-text") from exc
        if not path.is_file():
            raise ValueError(f"{path}: not there; set policy.path to a policy directory, or use --no-text")
        self._tokenizer = Tokenizer.from_file(str(path))

    def text(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _tokens(call: Call, decoder: Decoder | None) -> Text:
    """Prompt tokens dim, sampled tokens coloured; ids when there is no tokenizer."""
    if decoder is None:
        prompt = " ".join(map(str, call.prompt_delta_ids[:64])) + (" …" if len(call.prompt_delta_ids) > 64 else "")
        sampled = " ".join(map(str, call.sampled_ids[:128])) + (" …" if len(call.sampled_ids) > 128 else "")
        return Text.assemble((prompt, "dim"), " ", (sampled, "green"))
    return Text.assemble((decoder.text(call.prompt_delta_ids), "dim"), (decoder.text(call.sampled_ids), "bold green"))


def _call(call: Call, decoder: Decoder | None) -> RenderableType:
    title = f"call {call.call_index} · attempt {call.attempt} · {call.call_id}"
    if call.error:
        body = Text.assemble((call.error, "red"), f"\n{len(call.sampled_ids)} tokens sampled before; {call.place}")
        return Panel(body, title=escape(title), title_align="left", border_style="red")
    logprobs = call.logprob_summary
    versions = ", ".join(f"v{version} [{start}:{end})" for version, start, end in call.versions) or "-"
    times = " ".join(
        f"{name} {value:.1f} ms"
        for name, value in (("queue", call.queue_ms), ("prefill", call.prefill_ms), ("decode", call.decode_ms))
        if value is not None
    )
    shown_mean = "-" if logprobs.mean is None else f"{logprobs.mean:.4f}"
    shown_min = "-" if logprobs.min is None else f"{logprobs.min:.4f}"
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "prompt", f"{call.prompt_len} tokens: {call.shared_prefix_len} shared, {len(call.prompt_delta_ids)} new"
    )
    facts.add_row("sampled", f"{len(call.sampled_ids)} tokens, {call.finish_reason}, parser {call.parser_outcome}")
    facts.add_row(
        "log-probs", f"mean {shown_mean}, min {shown_min}, {logprobs.num_valid}/{len(call.sampled_ids)} reported"
    )
    facts.add_row("weights", versions)
    facts.add_row("engine", f"{call.engine_replica}  {times}")
    facts.add_row("went to", call.place or "-")
    return Panel(Group(facts, _tokens(call, decoder)), title=escape(title), title_align="left")


def _rows(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> RenderableType:
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(_time(v) if isinstance(v := row.get(c), datetime) else _cell(v) for c in columns))
    return table


def _reward(reward: Mapping[str, Any]) -> RenderableType:
    table = Table(
        title=f"reward {reward['reward']:g} · attempt {reward['attempt']} · grade {reward['grade_attempt']} by "
        f"{reward['grader_id']} in {reward['duration_sec']:.2f} s" + (" (reused)" if reward["reused_from"] else ""),
        title_justify="left",
        header_style="bold",
        pad_edge=False,
    )
    for column in ("test", "expected", "outcome"):
        table.add_column(column, overflow="fold")
    for test in reward["tests"]:
        style = "green" if test["outcome"] == "passed" else "red"
        table.add_row(escape(test["test_id"]), test["expected"], Text(test["outcome"], style=style))
    return table


def _end(trace: Trace) -> RenderableType:
    """From the end of the trial to the step."""
    table = Table.grid(padding=(0, 2))
    if trace.finished:
        end = trace.finished
        table.add_row("ended", f"{end['termination_reason']} (attempt {end['attempt']} of {end['num_attempts']})")
    if trace.trajectory:
        found = trace.trajectory
        segments = ", ".join(f"{s[1]} tokens, {s[2]} sampled" for s in map(tuple_of, found["segments"])) or "none"
        table.add_row("trajectory", f"segments: {segments}; excluded calls: {len(found['excluded'])}")
    if trace.routing.get("num_chunks"):
        r = trace.routing
        table.add_row(
            "routing",
            f"{r['num_valid']}/{r['num_rows']} rows captured, {r['num_layers']} layers, top {r['top_k']} of "
            f"{r['num_experts']}",
        )
    if trace.admission:
        reward = trace.admission["reward"]
        value = "masked" if reward is None else f"reward {reward:g}"
        table.add_row("admission", f"{trace.admission['decision']} by rule {trace.admission['rule']}: {value}")
    if trace.group_result:
        result = trace.group_result
        text = f"{result['state']} {result['reason']}".strip() + f", {result['num_admitted']} admitted"
        if result["reward_mean"] is not None:
            text += f", mean {result['reward_mean']:.3f}, std {result['reward_std']:.3f}"
        table.add_row("group", text + (", no variation" if result["zero_variation"] else ""))
    if trace.advantage is not None:
        table.add_row("advantage", f"{trace.advantage:+.4f}")
    if trace.trained:
        step = trace.trained
        table.add_row("trained in", f"step {step['step']}: v{step['version_before']} → v{step['version_after']}")
    else:
        table.add_row("trained in", "validation, not trained" if trace.group["purpose"] == "validation" else "not yet")
    return table


def tuple_of(value: Any) -> tuple[Any, ...]:
    """A ClickHouse tuple, which the client gives as a dict when its elements have names."""
    return tuple(value.values()) if isinstance(value, dict) else tuple(value)


def _diff(trace: Trace) -> RenderableType | None:
    from rich.syntax import Syntax

    diffs = [a["diff"] for a in trace.attempts if a["diff"]]
    if not diffs:
        return None
    text = diffs[-1] if isinstance(diffs[-1], str) else diffs[-1].decode("utf-8", "replace")
    return Panel(Syntax(text, "diff", background_color="default"), title="diff", title_align="left")


def render_trace(trace: Trace, tokenizer: str | Path | None = None) -> RenderableType:
    """One trial, in the order in which things happened. `tokenizer`: a policy directory, to show text for ids.

    Raises ValueError when the directory has no tokenizer.
    """
    decoder = Decoder(tokenizer) if tokenizer else None
    group = trace.group
    head = Table.grid(padding=(0, 2))
    head.add_row("run", trace.run_id)
    head.add_row("task", f"{group['task_id']} ({group['purpose']})")
    head.add_row(
        "offer",
        f"group {group['group_id']}, trial {group['trial_index']} of {group['num_trials']}, step {group['step']}, "
        f"epoch {group['epoch']}, policy v{group['policy_version']}, {group['occurred_at']} UTC",
    )
    parts: list[RenderableType] = [Text(trace.trial_id, style="bold"), head]
    parts.append(_rows("offers", trace.offers, _OFFER_COLUMNS))
    parts.append(_rows("leases", trace.leases, _LEASE_COLUMNS))
    parts.append(_rows("stages", trace.stages, _STAGE_COLUMNS))
    parts.extend(_call(call, decoder) for call in trace.calls)
    if trace.attempts:
        parts.append(_rows("attempts", trace.attempts, _ATTEMPT_COLUMNS))
    diff = _diff(trace)
    if diff is not None:
        parts.append(diff)
    parts.extend(_reward(reward) for reward in trace.rewards)
    parts.append(_end(trace))
    return Group(*parts)
