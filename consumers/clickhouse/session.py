"""Read-only questions to ClickHouse, with errors a person can act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from consumers.clickhouse.connect import ClickHouseUnavailableError, clickhouse_url, connect
from consumers.clickhouse.statements import Insert, StatementError, parse_request
from infra.settings import Settings

_UNKNOWN_TABLE, _UNKNOWN_DATABASE = 60, 81

#: One client per address and database: making one asks the server three questions.
_CLIENTS: dict[tuple[str, str, str], Any] = {}


class QueryError(RuntimeError):
    """A question that has no answer: says why and what to do."""


def _client(settings: Settings) -> Any:
    key = (clickhouse_url(settings), settings.clickhouse.database, settings.clickhouse.user)
    if key not in _CLIENTS:
        _CLIENTS[key] = connect(settings)
    return _CLIENTS[key]


def _forget(settings: Settings) -> None:
    _CLIENTS.pop((clickhouse_url(settings), settings.clickhouse.database, settings.clickhouse.user), None)


def _query(settings: Settings, sql: str, params: Mapping[str, Any] | None, **options: Any) -> Any:
    from clickhouse_connect.driver.exceptions import ClickHouseError

    try:
        return _client(settings).query(sql, parameters=dict(params or {}), settings={**options, "readonly": 1})
    except ClickHouseUnavailableError as exc:
        _forget(settings)
        if f"(code: {_UNKNOWN_DATABASE})" in str(exc) or "UNKNOWN_DATABASE" in str(exc):
            raise QueryError(_not_yet(settings)) from exc
        raise QueryError(str(exc)) from exc
    except ClickHouseError as exc:
        code = getattr(exc, "code", None)
        if code is None:
            _forget(settings)
            raise QueryError(f"ClickHouse at {clickhouse_url(settings)} does not answer: {exc}") from exc
        if code == _UNKNOWN_DATABASE or (code == _UNKNOWN_TABLE and not _migrated(settings)):
            raise QueryError(_not_yet(settings)) from exc
        raise QueryError(_message(str(exc))) from exc


def _migrated(settings: Settings) -> bool:
    return bool(_client(settings).command("EXISTS TABLE schema_migrations"))


def _not_yet(settings: Settings) -> str:
    return (
        f"database {settings.clickhouse.database} has no tables yet: the sink makes them when a run starts "
        "(`rollstream serve sink` runs it alone)"
    )


def _message(text: str) -> str:
    """The server's own sentence."""
    _, found, message = text.partition("DB::Exception: ")
    message = message if found else text
    return message.partition(" (version ")[0].strip()


#: The program's own questions are many and small: setting up threads would cost more than they save.
_SMALL = {"max_threads": 1}


def ask(settings: Settings, sql: str, params: Mapping[str, Any] | None = None) -> Sequence[Sequence[Any]]:
    """Rows of a SELECT with `{name:Type}` parameters. Raises QueryError."""
    rows: Sequence[Sequence[Any]] = _query(settings, sql, params, **_SMALL).result_rows
    return rows


def ask_dicts(settings: Settings, sql: str, params: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Rows by column name. Raises QueryError."""
    result = _query(settings, sql, params, **_SMALL)
    return [dict(zip(result.column_names, row, strict=True)) for row in result.result_rows]


def run_sql(settings: Settings, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """(column names, rows) of one SELECT, SHOW, DESCRIBE or EXPLAIN, run read-only. Raises QueryError."""
    try:
        statement = parse_request(b"", sql.encode())
    except StatementError as exc:
        raise QueryError(str(exc)) from exc
    if isinstance(statement, Insert) or not statement.reads:
        raise QueryError("only questions: SELECT, WITH, SHOW, DESCRIBE, EXISTS or EXPLAIN; only the log changes data")
    if statement.format is not None:
        raise QueryError("leave out the FORMAT clause; use --json for machine-readable rows")
    result = _query(settings, statement.text.decode(), None)
    return list(result.column_names), [tuple(row) for row in result.result_rows]
