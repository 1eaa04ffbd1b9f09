"""Numbered SQL migrations, the same for the embedded engine and a server.

A file `NNNN_name.sql` holds one statement, or several separated by a line `-- next statement`. Each statement may run
twice without harm (IF NOT EXISTS, OR REPLACE), because ClickHouse has no transactional DDL: a migration that was cut
off is run again. What was applied is in `schema_migrations` with a checksum. A file of views alone may change, and
is then applied again; any other applied file never changes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIGRATIONS_DIR = Path(__file__).parent / "migrations"
SEPARATOR = "-- next statement"
_FILE = re.compile(r"^(\d{4})_([a-z0-9_]+)\.sql$")

_LEDGER = """\
CREATE TABLE IF NOT EXISTS schema_migrations
(
    version UInt32,
    name String,
    checksum String,
    applied_at DateTime64(3, 'UTC') DEFAULT now64(3)
)
ENGINE = ReplacingMergeTree
ORDER BY version
"""


class MigrationError(RuntimeError):
    """The migrations on disk and in the database do not fit: says which and what to do."""


@dataclass(frozen=True)
class Migration:
    """One migration file."""

    version: int
    name: str
    statements: tuple[str, ...]
    checksum: str

    @property
    def only_views(self) -> bool:
        """It defines views alone, which hold no data: a changed one can simply be made again."""
        return all("CREATE OR REPLACE VIEW" in _without_comments(text) for text in self.statements)


def _without_comments(statement: str) -> str:
    return "\n".join(line for line in statement.splitlines() if not line.startswith("--"))


def load_migrations(directory: Path = MIGRATIONS_DIR) -> tuple[Migration, ...]:
    """The migrations of a directory, in order. Raises MigrationError for a gap, a repeat or a file of another name."""
    found = []
    for path in sorted(directory.glob("*.sql")):
        match = _FILE.match(path.name)
        if match is None:
            raise MigrationError(f"{path}: name it NNNN_name.sql with lower-case letters, digits and _")
        text = path.read_text()
        parts = (part.strip() for part in re.split(rf"^{SEPARATOR}$", text, flags=re.MULTILINE))
        statements = tuple(part for part in parts if part)
        found.append(Migration(int(match[1]), match[2], statements, hashlib.sha256(text.encode()).hexdigest()))
    versions = [m.version for m in found]
    if versions != list(range(1, len(found) + 1)):
        raise MigrationError(f"{directory}: migrations must be numbered 1, 2, 3, ... without gaps, not {versions}")
    return tuple(found)


def applied_migrations(client: Any) -> dict[int, tuple[str, str]]:
    """version -> (name, checksum) of what the client's database has; empty when it never was migrated."""
    if not client.command("EXISTS TABLE schema_migrations"):
        return {}
    rows = client.query("SELECT version, name, checksum FROM schema_migrations FINAL").result_rows
    return {int(version): (name, checksum) for version, name, checksum in rows}


def migrate(client: Any, migrations: tuple[Migration, ...] | None = None) -> list[str]:
    """Bring the client's database up to date; returns the names applied now.

    `client` is a clickhouse-connect client whose database exists. Raises MigrationError when an applied migration
    was changed, or the database is newer than this program.
    """
    wanted = load_migrations() if migrations is None else migrations
    client.command(_LEDGER)
    applied = applied_migrations(client)
    by_version = {m.version: m for m in wanted}
    for version, (name, checksum) in sorted(applied.items()):
        known = by_version.get(version)
        if known is None:
            raise MigrationError(
                f"database {client.database} has migration {version:04d}_{name}, which this version does not know; "
                "upgrade, or set clickhouse.database to another name"
            )
        if known.checksum != checksum and not known.only_views:
            raise MigrationError(
                f"migration {version:04d}_{name} was changed after it was applied to database {client.database}; "
                "restore the file and write a new migration, or set clickhouse.database to another name (the sink "
                "fills it from the log)"
            )
    done = []
    for migration in wanted:
        if applied.get(migration.version) == (migration.name, migration.checksum):
            continue
        for number, statement in enumerate(migration.statements, 1):
            try:
                client.command(statement)
            except Exception as exc:
                raise MigrationError(
                    f"migration {migration.version:04d}_{migration.name}, statement {number}: {exc}"
                ) from exc
        row = [[migration.version, migration.name, migration.checksum]]
        client.insert("schema_migrations", row, column_names=["version", "name", "checksum"])
        done.append(migration.name)
    return done
