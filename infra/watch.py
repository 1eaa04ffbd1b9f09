"""What a person sees while a run goes on, and afterwards."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from infra import paths
from infra.config import replace_key
from infra.kafka import KafkaUnavailableError
from infra.lag import LagWatch, describe_lag, fetch_lag
from infra.local.process import running_process
from infra.settings import Settings

#: Seconds between two looks at the views.
REFRESH_SEC = 5.0
PLAIN_SEC = 15.0


def _status_or_note(settings: Settings) -> tuple[Any, RenderableType]:
    """(status, what to show); while the sink has not made the views yet, (None, a note)."""
    from consumers.cli_views import render_status
    from consumers.clickhouse.queries import QueryError, fetch_status

    try:
        status = fetch_status(settings, settings.run.id)
    except QueryError as exc:
        return None, Text(f"waiting for the views: {exc}", style="dim")
    return status, render_status(status)


class Progress:
    """Redraws the live table (on a terminal), or prints a line now and then."""

    def __init__(
        self,
        settings: Settings,
        console: Console,
        *,
        plain: bool,
        extra: Callable[[], RenderableType] | None = None,
    ) -> None:
        self._settings, self._console, self._extra = settings, console, extra
        self._plain = plain or not console.is_terminal
        self._next = 0.0
        self._last = ""
        self._lag = LagWatch(settings)
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if not self._plain:
            self._live = Live(Text("starting"), console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.tick(force=True)
        if self._live is not None:
            self._live.stop()

    def tick(self, *, force: bool = False) -> None:
        """Look again when it is time."""
        now = time.monotonic()
        if now < self._next and not force:
            return
        self._next = now + (PLAIN_SEC if self._plain else REFRESH_SEC)
        status, shown = _status_or_note(self._settings)
        lag = describe_lag(self._lag.latest())
        if self._live is not None:
            parts = [shown, *([Text(f"lag  {lag}")] if lag else []), *([self._extra()] if self._extra else [])]
            self._live.update(Group(*parts), refresh=True)
            return
        from consumers.cli_views import status_line

        line = status_line(status) if status is not None else str(shown)
        if line != self._last:  # a change of the lag alone is no news
            self._last = line
            self._console.print(line + (f" · lag {lag}" if lag and status else ""), highlight=False, soft_wrap=True)


#: Below this much space on the data directory's disk a run says so; the broker needs some to go on.
LOW_SPACE_BYTES = 128 * 1024 * 1024
_LOOK_SEC = 2.0


class StackWatch:
    """Says, once each, when a part of the local stack has ended under a run, or when its disk fills up."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings, self._console = settings, console
        self._said: set[str] = set()
        self._next = 0.0

    def tick(self) -> None:
        """Look again when it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_SEC
        problems = dict(self._find())
        for what in problems.keys() - self._said:
            self._console.print(f"[bold yellow]warning:[/] {problems[what]}", highlight=False, soft_wrap=True)
        for what in self._said - problems.keys():
            self._console.print(f"{what}: well again", highlight=False)
        self._said = set(problems)

    def _find(self) -> Iterator[tuple[str, str]]:
        run_dir = paths.run_dir(self._settings)
        configured = {"kafka": self._settings.kafka.bootstrap, "clickhouse": self._settings.clickhouse.url}
        for name, elsewhere in configured.items():
            if not elsewhere and running_process(run_dir, name) is None:
                log = paths.logs_dir(self._settings) / f"{name}.log"
                yield (
                    name,
                    f"{name} ended unexpectedly; see {log}; the services wait for it: "
                    "`rollstream up` with this configuration starts it again, and the run goes on",
                )
        free = shutil.disk_usage(paths.data_dir(self._settings)).free
        if free < LOW_SPACE_BYTES:
            yield (
                "disk space",
                f"only {free >> 20} MiB free in {paths.data_dir(self._settings)}; free some space: a service that "
                "cannot write ends and is started again, and what was committed stays",
            )


def drive(settings: Settings, *, workers: int, plain: bool, console: Console) -> tuple[bool, str]:
    """Run the services until the run ends or a signal comes; returns (finished, run id)."""
    from infra.cli import install_stop_signals
    from infra.run import Run

    stop = install_stop_signals()
    run = Run(settings, workers=workers)
    run_id = str(run.identity.run_id)
    console.print(f"{'resuming' if run.identity.resumed else 'starting'} run [bold]{run_id}[/]")
    finished = False
    failure: Exception | None = None
    stack = StackWatch(run.settings, console)
    run.start()
    try:
        with Progress(run.settings, console, plain=plain) as progress:

            def look() -> None:
                progress.tick()
                stack.tick()

            finished = run.wait(stop.is_set, look)
            if finished:
                run.wait_for_sink()
    except Exception as exc:
        failure = exc
        raise
    finally:
        if not finished:
            console.print("stopping: services drain, the log keeps everything")
        outcome = None if finished else ("failed" if failure else "stopped")
        run.stop(outcome=outcome, detail=str(failure or ""))
    return finished, run_id


def show_status(settings: Settings, console: Console, *, watch: bool, as_json: bool) -> None:
    """`rollstream status`; an empty run.id means the newest run. Raises QueryError when the views are not there."""
    from consumers.cli_views import render_status
    from consumers.clickhouse.queries import fetch_status

    if watch:
        _watch_status(settings, console)
        return
    status = fetch_status(settings, settings.run.id)
    lag, problem = None, ""
    try:
        lag = fetch_lag(settings)
    except KafkaUnavailableError as exc:
        problem = str(exc)
    if as_json:
        plain = dataclasses.asdict(status) | {"lag": lag}
        sys.stdout.write(json.dumps(plain, default=str) + "\n")
        return
    console.print(render_status(status))
    console.print(f"lag  {describe_lag(lag) or f'not known: {problem}'}", highlight=False, soft_wrap=True)


def _watch_status(settings: Settings, console: Console) -> None:
    from infra.cli import install_stop_signals

    stop = install_stop_signals()
    with Progress(settings, console, plain=False) as progress:
        while not stop.wait(0.2):
            progress.tick()


def show_trace(settings: Settings, trial: str, console: Console, *, text: bool, as_json: bool) -> None:
    """`rollstream trace`. Raises QueryError when no such trial is known, or when `trial` ends several ids."""
    from consumers.cli_views import render_trace
    from consumers.clickhouse.queries import fetch_trace

    found = fetch_trace(settings, trial)
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(found), default=str) + "\n")
        return
    tokenizer = _tokenizer_of(settings, found.run_id) if text else None
    console.print(render_trace(found, tokenizer))
    if text and tokenizer is None:
        console.print("[dim]token ids: the run's policy directory is not here; set policy.path to see text[/]")


def _tokenizer_of(settings: Settings, run_id: str) -> str | None:
    """A directory with the run's tokenizer: policy.path of the run file, else of the run, else its version 0."""
    from consumers.clickhouse.trace import fetch_policy_path

    if settings.policy.path:
        return settings.policy.path
    candidates = [
        fetch_policy_path(settings, run_id),
        str(paths.policy_dir(replace_key(settings, "run.id", run_id), 0)),
    ]
    return next((c for c in candidates if c and (Path(c) / "tokenizer.json").is_file()), None)
