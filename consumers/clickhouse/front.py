"""ClickHouse's HTTP interface over the embedded engine: what clickhouse-connect, curl and Grafana speak.

Follows the ClickHouse documentation, "HTTP Interface": the query in the body or in `query`, `param_*`, settings as
URL parameters, `X-ClickHouse-*` headers, errors as text with a code and a status. Answers are not compressed: the
front listens on loopback.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import structlog
from aiohttp import web
from multidict import CIMultiDict, MultiDict

from consumers.clickhouse.engine import HTTP_STATUS, Engine, EngineError, ExternalTable, Reply, Request

log = structlog.get_logger()

#: Largest request body: a sink batch of long trials stays far below.
MAX_BODY_BYTES = 1 << 30
_LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1", ""})

# Parameters of the HTTP interface itself, which are no settings of the engine.
_RESERVED = frozenset(
    {"query", "database", "default_format", "session_id", "session_timeout", "session_check", "close_session"}
    | {"query_id", "quota_key", "user", "password", "role", "compress", "decompress", "buffer_size", "stacktrace"}
    | {"wait_end_of_query", "client_protocol_version", "send_progress_in_http_headers", "enable_http_compression"}
    | {"http_headers_progress_interval_ms", "http_zlib_compression_level", "add_http_cors_header"}
    | {"cancel_http_readonly_queries_on_client_close"}
)
_CONTENT_TYPES = {
    "JSON": "application/json; charset=UTF-8",
    "JSONCompact": "application/json; charset=UTF-8",
    "JSONStrings": "application/json; charset=UTF-8",
    "JSONEachRow": "application/x-ndjson; charset=UTF-8",
    "CSV": "text/csv; charset=UTF-8",
    "CSVWithNames": "text/csv; charset=UTF-8",
    "TabSeparated": "text/tab-separated-values; charset=UTF-8",
    "TabSeparatedWithNames": "text/tab-separated-values; charset=UTF-8",
    "Native": "application/octet-stream",
    "RowBinary": "application/octet-stream",
    "Arrow": "application/vnd.apache.arrow.file",
    "ArrowStream": "application/vnd.apache.arrow.stream",
    "Parquet": "application/vnd.apache.parquet",
}
_CODECS = {"gzip": "gzip", "zstd": "zstd", "lz4": "lz4", "br": "brotli", "bz2": "bz2"}


def decompress(data: bytes, encoding: str) -> bytes:
    """A request body without its Content-Encoding. Raises EngineError for one that is unknown or broken."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return data
    try:
        if encoding == "deflate":
            import zlib

            return zlib.decompress(data)
        if encoding in _CODECS:
            with pa.CompressedInputStream(pa.BufferReader(data), _CODECS[encoding]) as stream:
                return bytes(stream.read())
    except (OSError, ValueError, ArithmeticError) as exc:
        raise EngineError(354, f"Code: 354. DB::Exception: body is no {encoding} stream: {exc}") from exc
    raise EngineError(48, f"Code: 48. DB::Exception: Content-Encoding {encoding!r}: use zstd, lz4, gzip, br or deflate")


def _external_tables(args: MultiDict[str], files: dict[str, bytes]) -> tuple[ExternalTable, ...]:
    tables = []
    for name, data in files.items():
        structure = args.get(f"{name}_structure")
        if structure is None:  # only types: the columns are _1, _2, ...
            kinds = args.get(f"{name}_types", "").split(",")
            structure = ", ".join(f"_{i} {kind}" for i, kind in enumerate(kinds, 1))
        tables.append(ExternalTable(name, structure, args.get(f"{name}_format", "TabSeparated"), data))
    return tuple(tables)


async def _read(request: web.Request) -> tuple[MultiDict[str], bytes, dict[str, bytes]]:
    """(arguments, body, external tables' data) of a request."""
    args: MultiDict[str] = MultiDict(request.query)
    if request.content_type != "multipart/form-data":
        return args, decompress(await request.read(), request.headers.get("Content-Encoding", "")), {}
    files: dict[str, bytes] = {}
    async for part in await request.multipart():
        content = bytes(await part.read())  # type: ignore[union-attr]
        if part.filename is not None:  # type: ignore[union-attr]
            files[str(part.name)] = content  # type: ignore[union-attr]
        else:
            args[str(part.name)] = content.decode()  # type: ignore[union-attr]
    return args, b"", files


def _to_request(http: web.Request, args: MultiDict[str], body: bytes, files: dict[str, bytes]) -> Request:
    if args.get("decompress") == "1":
        raise EngineError(
            48, "Code: 48. DB::Exception: `decompress=1` (native blocks) is not supported; use Content-Encoding"
        )
    external = _external_tables(args, files)
    taken = {f"{t.name}_{suffix}" for t in external for suffix in ("structure", "types", "format")} | _RESERVED
    return Request(
        query=args.get("query", "").encode(),
        body=body,
        params={k.removeprefix("param_"): v for k, v in args.items() if k.startswith("param_")},
        settings={k: v for k, v in args.items() if k not in taken and not k.startswith("param_")},
        database=args.get("database") or http.headers.get("X-ClickHouse-Database") or "",
        default_format=args.get("default_format") or http.headers.get("X-ClickHouse-Format") or "",
        session_id=args.get("session_id", ""),
        session_timeout_sec=float(args.get("session_timeout", "60")),
        session_must_exist=args.get("session_check") == "1",
        read_only=http.method in ("GET", "HEAD"),
        external=external,
    )


class Front:
    """The HTTP application. Statements run on a small pool of threads, one engine handle each."""

    def __init__(self, engine: Engine, *, threads: int = 8, only_loopback_names: bool = True) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="query")
        self._only_loopback_names = only_loopback_names

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/ping", self._ping)
        app.router.add_route("*", "/replicas_status", self._ping)
        app.router.add_route("*", "/", self._statement)
        return app

    async def close(self) -> None:
        """Wait for running statements."""
        await asyncio.to_thread(self._pool.shutdown, True)

    def _foreign_host(self, http: web.Request) -> bool:
        """A web page that resolves its own name to this machine names itself in Host (DNS rebinding)."""
        name = http.host.rsplit(":", 1)[0].strip("[]") if http.host else ""
        return self._only_loopback_names and name not in _LOOPBACK_NAMES

    async def _ping(self, http: web.Request) -> web.Response:
        return web.Response(text="Ok.\n", headers=self._headers(""))

    def _headers(self, query_id: str) -> CIMultiDict[str]:
        return CIMultiDict(
            {
                "X-ClickHouse-Server-Display-Name": "rollstream (embedded engine)",
                "X-ClickHouse-Query-Id": query_id,
                "X-ClickHouse-Timezone": "UTC",
            }
        )

    async def _statement(self, http: web.Request) -> web.StreamResponse:
        query_id = http.query.get("query_id") or str(uuid.uuid4())
        headers = self._headers(query_id)
        if self._foreign_host(http):
            refusal = EngineError(516, f"Code: 516. DB::Exception: Host {http.host!r} is not local")
            return self._failure(refusal, headers)
        try:
            args, body, files = await _read(http)
            if not args.get("query") and not body and http.method in ("GET", "HEAD"):
                return web.Response(text="Ok.\n", headers=headers)
            request = _to_request(http, args, body, files)
            loop = asyncio.get_running_loop()
            reply = await loop.run_in_executor(self._pool, self._engine.execute, request)
        except EngineError as exc:
            return self._failure(exc, headers)
        except ValueError as exc:
            return self._failure(EngineError(36, f"Code: 36. DB::Exception: {exc}. (BAD_ARGUMENTS)"), headers)
        return self._success(reply, headers)

    def _success(self, reply: Reply, headers: CIMultiDict[str]) -> web.Response:
        headers["X-ClickHouse-Summary"] = json.dumps(
            {
                "read_rows": str(reply.read_rows),
                "read_bytes": str(reply.read_bytes),
                "written_rows": str(reply.written_rows),
                "written_bytes": str(reply.written_bytes),
            }
        )
        if reply.format is not None:
            headers["X-ClickHouse-Format"] = reply.format
        headers["Content-Type"] = _CONTENT_TYPES.get(reply.format or "", "text/plain; charset=UTF-8")
        return web.Response(body=reply.body, headers=headers)

    def _failure(self, error: EngineError, headers: CIMultiDict[str]) -> web.Response:
        headers["X-ClickHouse-Exception-Code"] = str(error.code)
        headers["Content-Type"] = "text/plain; charset=UTF-8"
        text = str(error)
        if "(version " not in text:
            text += f" (version {self._engine.version})"
        return web.Response(status=HTTP_STATUS.get(error.code, 500), body=text.encode() + b"\n", headers=headers)


async def start(engine: Engine, host: str, port: int) -> tuple[web.AppRunner, Front, int]:
    """Serve `engine` on host:port (0: a free one). Returns the runner, the front and the port. Raises OSError."""
    front = Front(engine, only_loopback_names=host in _LOOPBACK_NAMES)
    options: dict[str, Any] = {"auto_decompress": False, "access_log": None, "handle_signals": False}
    runner = web.AppRunner(front.app(), shutdown_timeout=10.0, **options)
    await runner.setup()
    site = web.TCPSite(runner, host, port, reuse_address=True)
    try:
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    bound = runner.addresses[0][1]
    return runner, front, int(bound)
