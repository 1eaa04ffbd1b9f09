"""`rollstream demo`: from a bare checkout to a policy that improved, with the log to prove it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.config import load_settings, replace_key
from infra.demo.chart import Curve, standard_error, write_html, write_png
from infra.settings import Settings

HERE = Path(__file__).parent


@dataclass(frozen=True)
class PoolSize:
    """Tasks of the demo's pool."""

    num_train: int = 640
    num_held_out: int = 256
    num_sft: int = 4096


def demo_settings(config: Path | None, overrides: Sequence[str], *, long: bool, seed: int) -> Settings:
    """The demo's run file with its pool, policy and name for `seed` filled in. Raises ConfigError."""
    file = config or HERE / ("demo-long.toml" if long else "demo.toml")
    resolved = load_settings(file, [f"run.seed={seed}", *overrides])
    settings = resolved.settings
    home = demo_dir(settings) / f"seed{settings.run.seed}"
    computed = {
        "run.name": f"demo{'-long' if long else ''}-seed{settings.run.seed}",
        "policy.path": str(home / "policy"),
        "tasks.train": str(home / "pool" / "train.parquet"),
        "tasks.held_out": str(home / "pool" / "held_out.parquet"),
    }
    for name, value in computed.items():
        if name not in resolved.origins or name == "run.name":
            settings = replace_key(settings, name, value)
    return settings


def demo_dir(settings: Settings) -> Path:
    """Where the demo leaves its pool, policy, summary and charts."""
    return Path(settings.data.dir) / "demo"


def prepare(settings: Settings, console: Console) -> None:
    """Make the pool and the starting policy where they are missing (both follow from the seed)."""
    from learner.policies.demo_policy import make_demo_policy
    from producers.tasks.demo_pool import make_demo_pool

    size = PoolSize()
    pool = Path(settings.tasks.train).parent
    with console.status("making the task pool: small repositories, each with a real bug, whose tests are really run"):
        tasks = make_demo_pool(pool, settings.run.seed, size.num_train, size.num_held_out, size.num_sft)
    console.print(
        f"task pool    {tasks.num_train:,} training and {tasks.num_held_out:,} held-out repositories  "
        f"[dim]{tasks.path}  {_cost(tasks.made, tasks.wall_sec)}[/]",
        highlight=False,
    )
    with console.status("supervised warm-up of the tiny policy on a weak teacher's demonstrations"):
        policy = make_demo_policy(Path(settings.policy.path), pool, settings.run.seed)
    console.print(
        f"warm-up      Qwen3-MoE of {policy.num_parameters / 1e6:.2f} M parameters, {policy.warmup.steps} steps, "
        f"loss {policy.warmup.loss:.3f}  [dim]{policy.path}  {_cost(policy.made, policy.wall_sec)}[/]",
        highlight=False,
    )


def _cost(made: bool, wall_sec: float) -> str:
    return f"{wall_sec:.0f} s" if made else "reused"


def run_demo(
    console: Console, *, config: Path | None, overrides: Sequence[str], long: bool, seed: int, plain: bool
) -> int:
    """Run or resume the demo; returns the exit code."""
    from infra.local.stack import down, up
    from infra.watch import drive

    settings = demo_settings(config, overrides, long=long, seed=seed)
    prepare(settings, console)
    begun = time.monotonic()
    info = up(settings)
    console.print(
        f"local stack  Kafka at {info.kafka.address}, ClickHouse at {info.clickhouse.address}  "
        f"[dim]{time.monotonic() - begun:.0f} s[/]",
        highlight=False,
    )
    try:
        finished, run_id = drive(settings, workers=1, plain=plain, console=console)
        if not finished:
            console.print(f"run {run_id} stopped; the same command resumes it from the log")
            return 130
        summary = report(replace_key(settings, "run.id", run_id), console)
    finally:
        down(settings)
    print_next_steps(console, settings, run_id)
    return 0 if summary["held_out_after"] is not None else 1


def report(settings: Settings, console: Console) -> dict[str, Any]:
    """Write summary.json and the charts; print the table. Needs the stack up."""
    from consumers.clickhouse.queries import fetch_summary, run_sql

    summary = fetch_summary(settings, settings.run.id)
    target = demo_dir(settings)
    target.mkdir(parents=True, exist_ok=True)
    _, rows = run_sql(
        settings,
        "SELECT step, solve_rate FROM solve_rate "
        f"WHERE run_id = '{settings.run.id}' AND purpose = 'train' ORDER BY step",
    )
    evaluations = [(int(e["step"]), float(e["rate"]), int(e["n"])) for e in summary["evaluations"]]
    curve = Curve(f"{settings.run.name}: {settings.run.id}", evaluations, [(int(s), float(r)) for s, r in rows])
    (target / "summary.json").write_text(json.dumps(summary, indent=2, default=str) + "\n")
    write_png(curve, target / "curve.png")
    write_html(curve, target / "curve.html")
    console.print(summary_table(summary))
    console.print(f"curve        {target / 'curve.png'}  {target / 'curve.html'}", highlight=False)
    console.print(f"summary      {target / 'summary.json'}", highlight=False)
    return summary


def summary_table(summary: dict[str, Any]) -> Table:
    """The result in ten lines."""
    table = Table(title=f"run {summary['run_id']}", show_header=False, title_justify="left")
    for evaluation in summary["evaluations"]:
        rate, num = float(evaluation["rate"]), int(evaluation["n"])
        table.add_row(
            f"held-out solve rate after step {evaluation['step']}",
            f"{100 * rate:.1f} % ± {100 * standard_error(rate, num):.1f}  ({evaluation['solved']} of {num} trials)",
        )
    if summary["held_out_before"] is not None and summary["held_out_after"] is not None:
        gain = 100 * (float(summary["held_out_after"]) - float(summary["held_out_before"]))
        table.add_row("[bold]gain[/]", f"[bold]{gain:+.1f} points[/]")
    for key, unit in (
        ("steps", ""),
        ("trials", ""),
        ("tokens", ""),
        ("pearson", ""),
        ("mean_abs_dlogp", " nats"),
        ("wall_sec", " s"),
    ):
        value = summary[key]
        shown = f"{value:,}" if isinstance(value, int) else ("-" if value is None else f"{value:.7g}")
        table.add_row(key, shown + unit)
    return table


def print_next_steps(console: Console, settings: Settings, run_id: str) -> None:
    """Commands to look further."""
    console.print(
        "\nlook further:\n"
        "  make up                                   start the stack again (the demo stopped it)\n"
        f"  .venv/bin/rollstream trace {run_id}.t00000.000.00\n"
        f"  .venv/bin/rollstream sql \"SELECT * FROM solve_rate WHERE run_id = '{run_id}' ORDER BY step\"\n"
        "  .venv/bin/rollstream tail steps -n 1\n"
        "  make replay-verify                        derive the run again from the log, byte for byte\n",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def verify_demo(console: Console, *, config: Path | None, overrides: Sequence[str], long: bool, seed: int) -> int:
    """Verify the newest demo run of this data directory; returns the number of differences."""
    from infra.local.stack import down, stack_status, up
    from infra.verify import verify_run

    settings = demo_settings(config, overrides, long=long, seed=seed)
    path = demo_dir(settings) / "summary.json"
    if not path.is_file():
        raise ValueError(f"{path}: not there; run `make demo` first")
    run_id = json.loads(path.read_text())["run_id"]
    was_up = all(part.ready for part in stack_status(settings))
    up(settings)
    try:
        return verify_run(replace_key(settings, "run.id", run_id), console)
    finally:
        if not was_up:
            down(settings)
