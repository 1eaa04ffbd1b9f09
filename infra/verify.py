"""`rollstream replay verify` as a report for a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from infra.kafka import check_cluster
from infra.settings import Settings


def verify_run(settings: Settings, console: Console) -> int:
    """Print the report of a run; returns the number of differences and broken laws together.

    Raises KafkaUnavailableError.
    """
    from streams.replay.service import verify

    check_cluster(settings)
    report = verify(settings, settings.run.id)
    table = Table("derived topic", "compared", box=None, pad_edge=False)
    for topic, compared in report.num_compared.items():
        table.add_row(topic, f"{compared:,}")
    console.print(table)
    for difference in report.differences[:20]:
        console.print(f"  {difference}", highlight=False, markup=False)
    laws = Table("law", "checked", "open", "broken", box=None, pad_edge=False)
    for row in report.checks:
        laws.add_row(row.law, f"{row.num_checked:,}", f"{row.num_open:,}", f"{len(row.violations):,}")
    console.print(laws)
    for violation in [v for row in report.checks for v in row.violations][:20]:
        console.print(f"  {violation}", highlight=False, markup=False)
    total = len(report.differences) + report.num_violations
    console.print(f"{total} differences", highlight=False)
    return total
