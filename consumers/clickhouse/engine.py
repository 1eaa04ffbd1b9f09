"""The embedded ClickHouse engine behind the HTTP front: one chDB process, one handle per request or session.

A handle is a ClickHouse session of its own and opens in well under a millisecond, so requests never share settings,
temporary tables or a stream. Data of an INSERT goes through the engine's streaming insert, never as text of a query.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from consumers.clickhouse.statements import Insert, Query, StatementError, parse_request

_CODE = re.compile(r"Code: (\d+)\. ")
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_.]*$")
_VERSION_TRAILER = re.compile(r"\s*\(version [^)]*\)\s*$")

#: ClickHouse's error codes that a request meets most; the rest answer 500 as a server does.
HTTP_STATUS = {
    **dict.fromkeys((6, 26, 27, 38, 41, 43, 44, 53, 62, 69, 72, 117, 130, 386, 636), 400),
    **dict.fromkeys((46, 47, 50, 56, 60, 73, 81, 115, 372), 404),
    48: 501,
    164: 403,
    373: 409,
    516: 403,
}


class EngineError(RuntimeError):
    """A statement that the engine refused: ClickHouse's code and message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class ExternalTable:
    """A table sent along with a request (multipart)."""

    name: str
    structure: str
    format: str
    data: bytes


@dataclass(frozen=True)
class Request:
    """One HTTP request, decoded."""

    query: bytes
    body: bytes
    params: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    database: str = ""
    default_format: str = ""
    session_id: str = ""
    session_timeout_sec: float = 60.0
    session_must_exist: bool = False
    read_only: bool = False
    external: tuple[ExternalTable, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What the engine answered."""

    body: bytes
    format: str | None
    read_rows: int = 0
    read_bytes: int = 0
    written_rows: int = 0
    written_bytes: int = 0


def quote(value: str) -> str:
    """A SQL string literal."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _identifier(name: str) -> str:
    if not _NAME.match(name):
        raise EngineError(36, f"Code: 36. DB::Exception: {name!r} is no setting or table name. (BAD_ARGUMENTS)")
    return name


def _engine_error(exc: Exception) -> EngineError:
    text = str(exc)
    match = _CODE.search(text)
    if match is None:
        return EngineError(1001, f"Code: 1001. DB::Exception: {text}. (STD_EXCEPTION)")
    return EngineError(int(match.group(1)), text[match.start() :].strip())


class _Session:
    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.lock = threading.Lock()
        self.expires = 0.0


class Engine:
    """Owns a chDB directory. Safe to call from many threads. Raises EngineError for whatever the engine refuses."""

    def __init__(self, path: str) -> None:
        os.environ["TZ"] = "UTC"  # the engine's server time zone is the process's
        time.tzset()
        import chdb  # 140 MB of library: loaded only by the process that owns the directory

        self._connect = chdb.connect
        self._path = os.path.realpath(path)
        self._keeper = self._open()  # keeps the engine alive between requests
        self._sessions: dict[str, _Session] = {}
        self._sessions_lock = threading.Lock()
        self.version = self._run(self._keeper, b"SELECT version()", "TabSeparated", {}).bytes().decode().strip()

    def _open(self) -> Any:
        try:
            handle = self._connect(self._path)
            handle.query("SET async_insert = 0", "Null")  # a reply must mean that the rows are there
        except Exception as exc:
            raise _engine_error(exc) from exc
        return handle

    def close(self) -> None:
        """Close every handle; the engine flushes and releases the directory."""
        with self._sessions_lock:
            for session in self._sessions.values():
                session.handle.close()
            self._sessions.clear()
            self._keeper.close()

    def execute(self, request: Request) -> Reply:
        """Run one request to its end."""
        try:
            statement = parse_request(request.query, request.body)
        except StatementError as exc:
            raise EngineError(exc.code, f"Code: {exc.code}. DB::Exception: {exc}") from exc
        read_only = request.read_only or request.settings.get("readonly", "0") != "0"
        if read_only and not (isinstance(statement, Query) and statement.reads):
            raise EngineError(
                164, "Code: 164. DB::Exception: Cannot change data in readonly mode; POST without it. (READONLY)"
            )
        with self._handle(request) as handle:
            if request.database:
                self._run(handle, f"USE `{request.database.replace('`', '``')}`".encode(), "Null", {})
            for table in request.external:
                self._load_external(handle, table)
            with self._with_settings(handle, request):
                if isinstance(statement, Insert):
                    return self._insert(handle, statement, request)
                return self._query(handle, statement, request)

    # -- statements

    def _query(self, handle: Any, statement: Query, request: Request) -> Reply:
        default = request.default_format or "TabSeparated"
        result = self._run(handle, statement.text, default, request.params)
        returns_rows = statement.reads or statement.format is not None
        return Reply(
            body=result.bytes() or b"",
            format=(statement.format or default) if returns_rows else None,
            read_rows=result.storage_rows_read(),
            read_bytes=result.storage_bytes_read(),
            written_rows=_written(result.rows_written),
        )

    def _insert(self, handle: Any, statement: Insert, request: Request) -> Reply:
        fmt = statement.format or request.default_format or "Values"
        try:
            with handle.send_insert(statement.head.decode(), fmt) as inserter:
                if statement.data:
                    inserter.append(statement.data)
                done = inserter.finish()
        except RuntimeError as exc:
            raise _engine_error(exc) from exc
        return Reply(b"", None, written_rows=done.rows_written, written_bytes=done.bytes_written)

    def _load_external(self, handle: Any, table: ExternalTable) -> None:
        name = _identifier(table.name)
        self._run(handle, f"CREATE TEMPORARY TABLE {name} ({table.structure})".encode(), "Null", {})
        self._insert(handle, Insert(f"INSERT INTO {name}".encode(), table.format, table.data), Request(b"", b""))

    @staticmethod
    def _run(handle: Any, text: bytes, fmt: str, params: Mapping[str, str]) -> Any:
        try:
            return handle.query(text, fmt, params=dict(params))
        except RuntimeError as exc:
            raise _engine_error(exc) from exc

    # -- handles and settings

    @contextlib.contextmanager
    def _handle(self, request: Request) -> Iterator[Any]:
        if not request.session_id:
            handle = self._open()
            try:
                yield handle
            finally:
                handle.close()
            return
        session = self._session(request)
        if not session.lock.acquire(blocking=False):
            message = "Session is locked by a concurrent client. (SESSION_IS_LOCKED)"
            raise EngineError(373, f"Code: 373. DB::Exception: {message}")
        try:
            yield session.handle
        finally:
            session.expires = time.monotonic() + request.session_timeout_sec
            session.lock.release()

    def _session(self, request: Request) -> _Session:
        now = time.monotonic()
        with self._sessions_lock:
            for name in [n for n, s in self._sessions.items() if s.expires and s.expires < now and not s.lock.locked()]:
                self._sessions.pop(name).handle.close()
            session = self._sessions.get(request.session_id)
            if session is None:
                if request.session_must_exist:
                    raise EngineError(372, "Code: 372. DB::Exception: Session not found. (SESSION_NOT_FOUND)")
                session = self._sessions[request.session_id] = _Session(self._open())
            return session

    @contextlib.contextmanager
    def _with_settings(self, handle: Any, request: Request) -> Iterator[None]:
        """The request's settings on the handle; on a session they are put back afterwards."""
        wanted = {_identifier(k): v for k, v in request.settings.items()}
        if request.session_id:
            wanted.pop("readonly", None)  # it could not be put back; `execute` has refused everything but questions
        elif request.read_only:
            wanted.setdefault("readonly", "2")
        before = self._values(handle, tuple(wanted)) if request.session_id else {}
        for name in sorted(wanted, key=lambda n: n == "readonly"):  # readonly last: it locks the others
            self._run(handle, f"SET {name} = {quote(wanted[name])}".encode(), "Null", {})
        try:
            yield
        finally:
            for name, value in before.items():
                self._run(handle, f"SET {name} = {quote(value)}".encode(), "Null", {})

    def _values(self, handle: Any, names: tuple[str, ...]) -> dict[str, str]:
        if not names:
            return {}
        sql = "SELECT " + ", ".join(f"toString(getSetting({quote(name)}))" for name in names)
        row = json.loads(self._run(handle, sql.encode(), "JSONCompactEachRow", {}).bytes())
        return dict(zip(names, row, strict=True))


def _written(getter: Any) -> int:
    try:
        return int(getter())
    except TypeError:
        return int(getter)
