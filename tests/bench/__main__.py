"""Run every bench module and write bench.json. Example: `python -m tests.bench --only codec`.

Each module runs in a process of its own, one after the other, so that one that fails does not lose the others'
figures and none measures what another left in memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
KEYS = ("name", "value", "unit", "baseline", "ratio", "aim", "met")
TIMEOUT_SEC = 900.0

#: Runs one module: its rows go to a file, so that what it prints stays visible.
_RUN_ONE = (
    "import importlib, json, pathlib, sys\n"
    "rows = importlib.import_module(sys.argv[1]).rows()\n"
    "pathlib.Path(sys.argv[2]).write_text(json.dumps(rows))\n"
)


def bench_names() -> list[str]:
    """The modules, without the prefix `bench_`."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def run_one(name: str, console: Console) -> list[dict[str, Any]] | None:
    """The rows of one module; None, after saying why, when it does not run."""
    console.print(f"[bold]{name}[/] ...", highlight=False)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rs-bench-") as directory:
        result = Path(directory) / "rows.json"
        command = [sys.executable, "-c", _RUN_ONE, f"tests.bench.bench_{name}", str(result)]
        try:
            code = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=TIMEOUT_SEC).returncode
        except subprocess.TimeoutExpired:
            console.print(f"[red]{name} did not end within {TIMEOUT_SEC:.0f} s[/]", highlight=False)
            return None
        if code != 0 or not result.is_file():
            console.print(f"[red]{name} failed with exit code {code}[/]", highlight=False)
            return None
        rows = [{key: row[key] for key in KEYS} for row in json.loads(result.read_text())]
    console.print(f"  {len(rows)} rows in {time.monotonic() - began:.0f} s", style="dim", highlight=False)
    return rows


def render(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table."""
    table = Table(*KEYS[:1], header_style="bold", pad_edge=False)
    for key in KEYS[1:]:
        table.add_column(key, justify="left" if key == "unit" else "right")
    for row in rows:
        cells = ["-" if row[k] is None else f"{row[k]:,g}" if k not in ("name", "unit") else row[k] for k in KEYS[:-1]]
        met = "-" if row["met"] is None else "[green]yes[/]" if row["met"] else "[red]no[/]"
        table.add_row(*cells, met)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every bench ran, whether or not the aims are met; 1 when one did not run; 2 for a wrong argument."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").splitlines()[0])
    known = bench_names()
    parser.add_argument("--only", action="append", choices=known, metavar="NAME", help=f"one of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="the result file (default: bench.json)")
    options = parser.parse_args(arguments)
    console = Console()
    rows: list[dict[str, Any]] = []
    failed = []
    for name in options.only or known:
        found = run_one(name, console)
        if found is None:
            failed.append(name)
            continue
        rows += found
        options.out.write_text(json.dumps(rows, indent=2) + "\n")  # what ran so far outlives a later Ctrl-C
    console.print(render(rows))
    if failed:
        console.print(f"[bold red]failed:[/] {', '.join(failed)}", highlight=False)
    elif rows:
        console.print(f"{options.out}: {len(rows)} rows", highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
