"""Connections to ClickHouse: the local stack's embedded engine, or a server, through the same client."""

from __future__ import annotations

import logging
import threading
from typing import Any
from urllib.parse import urlsplit

import structlog

from infra.settings import Settings

log = structlog.get_logger()

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class ClickHouseUnavailableError(RuntimeError):
    """ClickHouse could not be reached or refused the connection: names the address and the remedy."""


def clickhouse_url(settings: Settings) -> str:
    """Where ClickHouse answers: the configured server, else the local stack's engine."""
    return settings.clickhouse.url or f"http://127.0.0.1:{settings.clickhouse.port}"


def _remedy(settings: Settings) -> str:
    if settings.clickhouse.url:
        return "check clickhouse.url, clickhouse.user and clickhouse.password in the run file"
    return "start the local stack with `rollstream up`, or set clickhouse.url to a running server"


def reason_of(exc: Exception) -> str:
    """What a person needs of the client's message: the innermost cause, without the request's address."""
    text = str(exc).splitlines()[0]
    _, found, cause = text.rpartition("[Errno ")
    return cause.partition("] ")[2].split('"')[0].split("'")[0].strip(") ") if found else text


def connect(settings: Settings, *, database: str | None = None) -> Any:
    """A clickhouse-connect client without session; `database` None: the configured one.

    Raises ClickHouseUnavailableError.
    """
    import clickhouse_connect
    from clickhouse_connect.driver.exceptions import ClickHouseError

    logging.getLogger("clickhouse_connect").setLevel(logging.CRITICAL)  # it also raises what it logs
    url = urlsplit(clickhouse_url(settings))
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ClickHouseUnavailableError(f"clickhouse.url {clickhouse_url(settings)!r}: write http://host:port")
    try:
        return clickhouse_connect.get_client(
            interface=url.scheme,
            host=url.hostname,
            port=url.port or (8443 if url.scheme == "https" else 8123),
            username=settings.clickhouse.user,
            password=settings.clickhouse.password,
            database=settings.clickhouse.database if database is None else database,
            autogenerate_session_id=False,
            compress=url.hostname not in _LOOPBACK,
            connect_timeout=5,
            query_retries=0,
        )
    except (ClickHouseError, OSError) as exc:
        raise ClickHouseUnavailableError(
            f"no ClickHouse at {clickhouse_url(settings)} ({reason_of(exc)}); {_remedy(settings)}"
        ) from exc


def wait_for_clickhouse(settings: Settings, stop: threading.Event) -> Any | None:
    """A client of the configured database, which is created when missing; waits for the server. None: stopped."""
    pause_sec, told = 0.1, False
    while not stop.is_set():
        try:
            admin = connect(settings, database="default")
            admin.command(f"CREATE DATABASE IF NOT EXISTS {quote_name(settings.clickhouse.database)}")
            admin.close()
            return connect(settings)
        except ClickHouseUnavailableError as exc:
            if not told:
                log.warning("clickhouse_unreachable", detail=str(exc), remedy="waiting for it")
                told = True
        stop.wait(pause_sec)
        pause_sec = min(2.0, pause_sec * 1.5)
    return None


def quote_name(name: str) -> str:
    """An identifier in backquotes."""
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"
