"""The `rollstream` command."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infra.config import ConfigError, Resolved, dump_toml, load_settings, replace_key
from infra.logging import configure_logging
from infra.settings import Settings

if TYPE_CHECKING:
    from infra.local.stack import ComponentStatus

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Reinforcement learning for coding agents as an event-sourced stream over Kafka.",
    epilog="Example: [bold]rollstream demo[/]. Then: [bold]rollstream status --watch[/], "
    "[bold]rollstream trace TRIAL[/], [bold]rollstream replay verify[/].",
)
config_app = typer.Typer(
    no_args_is_help=True, help="The run file.", epilog="Example: rollstream config show --set schedule.num_steps=20"
)
replay_app = typer.Typer(
    no_args_is_help=True, help="Derive again from the log.", epilog="Example: rollstream replay verify"
)
app.add_typer(config_app, name="config")
app.add_typer(replay_app, name="replay")

out = Console()
err = Console(stderr=True)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Run file (TOML).", envvar="ROLLSTREAM_CONFIG", show_envvar=True),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Override a key: section.key=value. Repeatable.")
]
RunOption = Annotated[str, typer.Option("--run", "-r", help="Run id (default: the newest run in the log).")]

#: Errors that are the user's to mend: shown as one message, without a traceback.
USER_ERRORS = (ConfigError, ValueError, RuntimeError, OSError)


def fail(message: str, code: int = 2) -> NoReturn:
    """Print an error for a person and exit."""
    err.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors that name their remedy into a message; leave bugs to their traceback."""
    try:
        yield
    except typer.Exit:
        raise
    except BrokenPipeError:  # `rollstream tail ... | head`: the reader has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (nothing more is said, not even at exit)
        raise typer.Exit(0) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as exc:
        if os.environ.get("ROLLSTREAM_LOG", "").lower() == "debug" or not str(exc):
            raise
        if not isinstance(exc, USER_ERRORS) and not _is_kafka_error(exc):
            raise
        fail(describe_error(exc))


def _is_kafka_error(exc: Exception) -> bool:
    if "infra.kafka" not in sys.modules:
        return False
    from infra.kafka import ClientError

    return isinstance(exc, ClientError)


def describe_error(exc: Exception) -> str:
    """The message for a person: a full disk and a Kafka error get the remedy that their own text lacks."""
    if _is_kafka_error(exc):
        return f"Kafka: {exc.args[0].str()}; see `rollstream status`, and the broker's log in <data.dir>/logs/kafka.log"
    if isinstance(exc, OSError) and exc.errno == errno.ENOSPC and "free some space" not in str(exc):
        where = exc.filename or "the data directory (data.dir)"
        return f"{where}: no space left on the device; free some space and start again: {exc}"
    return str(exc)


def _load(config: Path | None, overrides: list[str] | None) -> Resolved:
    try:
        return load_settings(config, overrides or [])
    except ConfigError as exc:
        fail(str(exc))


def _run_scoped(settings: Settings, run: str) -> Settings:
    from infra.run import newest_run_id

    run_id = run or settings.run.id or newest_run_id(settings)
    if not run_id:
        fail("the log holds no run yet; start one with `rollstream run` or `rollstream demo`")
    return replace_key(settings, "run.id", run_id)


def print_stack(parts: Sequence[ComponentStatus]) -> None:
    """One line per part of the local stack."""
    for part in parts:
        state = "[green]ready[/]" if part.ready else f"[red]not ready[/] {part.problem}"
        pid = f"pid {part.process.pid}" if part.process else ("external" if not part.managed else "")
        out.print(f"{part.name:<11} {part.address:<24} {state}  [dim]{pid}[/]", highlight=False, soft_wrap=True)


@app.command(epilog="Example: rollstream up --set data.dir=/data/rollstream --set kafka.port=19092")
def up(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Start the local stack: Kafka and the ClickHouse engine, on loopback."""
    from infra.local.stack import up as stack_up

    configure_logging(json_lines=False, default_level="warning")
    settings = _load(config, set_).settings
    with user_errors():
        info = stack_up(settings)
    print_stack((info.kafka, info.clickhouse))


@app.command(epilog="Example: rollstream down")
def down(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Stop the local stack; the data stays."""
    from infra.local.stack import down as stack_down

    with user_errors():
        stopped = stack_down(_load(config, set_).settings)
    out.print(f"stopped {', '.join(record.name for record in stopped)}" if stopped else "nothing was running")


@app.command(epilog="Example: rollstream run --config my-run.toml --set schedule.num_steps=20 --workers 2")
def run(
    config: ConfigOption = None,
    set_: SetOption = None,
    workers: Annotated[int, typer.Option(help="Trial worker processes.")] = 1,
    plain: Annotated[bool, typer.Option(help="Log lines instead of the live table.")] = False,
) -> None:
    """Start the stack and every service, and drive a run to its end. Ctrl-C stops; the same command resumes."""
    from infra.local.stack import up as stack_up
    from infra.run import check_inputs
    from infra.watch import drive

    configure_logging(json_lines=False, default_level="warning")
    settings = _load(config, set_).settings
    with user_errors():
        check_inputs(settings)
        stack_up(settings)
        finished, run_id = drive(settings, workers=workers, plain=plain, console=out)
    out.print(f"run {run_id} " + ("finished" if finished else "stopped; the same command resumes it"))


@app.command(epilog="Example: rollstream serve worker --config my-run.toml --instance 1 --set run.id=RUN")
def serve(
    service: Annotated[
        str, typer.Argument(help="scheduler, proxy, worker, assembly, admission, grouping, learner, ...")
    ],
    config: ConfigOption = None,
    set_: SetOption = None,
    instance: Annotated[int, typer.Option(help="Number of this instance, for services that scale.")] = 0,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one service in this process until SIGTERM."""
    from infra.serve import run_service
    from streams.pipeline import BY_NAME

    if service not in BY_NAME:
        fail(f"unknown service {service!r}; known: {', '.join(BY_NAME)}")
    settings = _load(config, set_).settings
    with user_errors():
        if not settings.run.id:
            settings = _run_scoped(settings, "")
        run_service(settings, service, instance, parent)


@app.command(epilog="Example: rollstream tail model-calls --follow --type ModelCallCompleted | jq .sampled_ids")
def tail(
    topic: Annotated[str, typer.Argument(help="Topic of the catalogue, e.g. offers, model-calls, steps.")],
    config: ConfigOption = None,
    set_: SetOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new events.")] = False,
    num: Annotated[int, typer.Option("--num", "-n", help="Show the last N events (0: all).")] = 10,
    type_: Annotated[list[str] | None, typer.Option("--type", "-t", help="Only these event types.")] = None,
    run: Annotated[str, typer.Option("--run", "-r", help="Only this run.")] = "",
    key: Annotated[str, typer.Option("--key", "-k", help="Only this key (a trial id, for most topics).")] = "",
) -> None:
    """Print the events of a topic as JSON lines, packed arrays expanded."""
    from infra.tail import tail_topic

    settings = _load(config, set_).settings
    with user_errors():
        for line in tail_topic(settings, topic, follow=follow, num=num, types=type_ or [], run=run, key=key):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


@app.command(epilog="Example: rollstream status --watch")
def status(
    config: ConfigOption = None,
    set_: SetOption = None,
    run: RunOption = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep the table on screen.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Where the run stands: step, solve rates, throughput, trials by outcome, staleness, lag, alerts.

    Exit code 1: a part of the stack is not ready. 2: there is nothing to show.
    """
    from infra.local.stack import stack_status
    from infra.watch import show_status

    settings = _load(config, set_).settings
    if run:
        settings = replace_key(settings, "run.id", run)
    with user_errors():
        parts = stack_status(settings)
        if not as_json:
            print_stack(parts)
        show_status(settings, out, watch=watch, as_json=as_json)  # without Kafka: what ClickHouse holds
    raise typer.Exit(0 if all(part.ready for part in parts) else 1)


@app.command(epilog="Example: rollstream trace t00003.002.05")
def trace(
    trial: Annotated[str, typer.Argument(help="Trial id, or the end of one of the newest run: t00003.002.05")],
    config: ConfigOption = None,
    set_: SetOption = None,
    run: Annotated[str, typer.Option("--run", "-r", help="Look for the end of an id in this run.")] = "",
    text: Annotated[bool, typer.Option(help="Show decoded text of each call too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """One trial's whole life: offer, lease, stages, calls with tokens, reward, admission, group, step."""
    from infra.watch import show_trace

    settings = _load(config, set_).settings
    if run:
        settings = replace_key(settings, "run.id", run)
    with user_errors():
        show_trace(settings, trial, out, text=text, as_json=as_json)


@app.command(epilog='Example: rollstream sql "SELECT * FROM solve_rate ORDER BY step"')
def sql(
    query: Annotated[str, typer.Argument(help="A SELECT over the views and raw tables; read-only.")],
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per row.")] = False,
) -> None:
    """Ask ClickHouse."""
    from consumers.cli_views import render_rows
    from consumers.clickhouse.queries import run_sql

    settings = _load(config, set_).settings
    with user_errors():
        columns, rows = run_sql(settings, query)
    if as_json:
        for row in rows:
            sys.stdout.write(json.dumps(dict(zip(columns, row, strict=True)), default=str) + "\n")
    else:
        out.print(render_rows(columns, rows))


@replay_app.command("verify", epilog="Example: rollstream replay verify --run run-20261130-014223-3f9c")
def replay_verify(config: ConfigOption = None, set_: SetOption = None, run: RunOption = "") -> None:
    """Derive trajectories, admissions and groups again from the source topics and compare byte for byte."""
    from infra.verify import verify_run

    configure_logging(json_lines=False, default_level="warning")
    settings = _load(config, set_).settings
    with user_errors():
        differences = verify_run(_run_scoped(settings, run), out)
    raise typer.Exit(1 if differences else 0)


@config_app.command("show", epilog="Example: rollstream config show --config my-run.toml > resolved.toml")
def config_show(
    config: ConfigOption = None,
    set_: SetOption = None,
    toml: Annotated[bool, typer.Option(help="As a run file, instead of a table with origins.")] = False,
) -> None:
    """The resolved configuration with the origin of each value."""
    resolved = _load(config, set_)
    if toml:
        sys.stdout.write(dump_toml(resolved.settings))
        return
    table = Table("key", "value", "origin", "what it is", box=None, pad_edge=False)
    for name, value, origin, doc in resolved.rows():
        table.add_row(name, str(value), origin if origin == "default" else f"[bold]{origin}[/]", f"[dim]{doc}[/]")
    out.print(table)


@app.command(epilog="Example: rollstream demo --seed 1 --set schedule.num_steps=40")
def demo(
    config: ConfigOption = None,
    set_: SetOption = None,
    long: Annotated[bool, typer.Option("--long", help="The longer recipe.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the pool, the policy and the run.")] = 0,
    plain: Annotated[bool, typer.Option(help="Log lines instead of the live table.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Only verify the demo's last run against the log.")] = False,
) -> None:
    """Make a task pool and a tiny policy, train it on real harness trials, show the curve. Resumes after Ctrl-C."""
    from infra.demo.demo import run_demo, verify_demo

    configure_logging(json_lines=False, default_level="warning")
    with user_errors():
        if verify:
            raise typer.Exit(min(1, verify_demo(out, config=config, overrides=set_ or [], long=long, seed=seed)))
        code = run_demo(out, config=config, overrides=set_ or [], long=long, seed=seed, plain=plain)
    raise typer.Exit(code)


def install_stop_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set; a second SIGINT interrupts at once."""
    stop = threading.Event()

    def on_signal(signum: int, _: object) -> None:
        if stop.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    return stop


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
