"""ClickHouse's HTTP interface as clients use it: one suite over the embedded engine's front and over a server."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import clickhouse_connect
import pyarrow as pa
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError
from clickhouse_connect.driver.external import ExternalData

from consumers.clickhouse.owner import OwnerError, read_owner, run_owner
from tests.unit.consumers.engine_process import OwnerProcess

URL_VARIABLE = "CLICKHOUSE_URL"
POISON = "1\ta\n\nDROP TABLE t\n"
TABLE = (
    "CREATE TABLE t (a Int32, s LowCardinality(String), d DateTime64(3, 'UTC'), f Array(Float32), "
    "n Array(Tuple(x Int64, y String))) ENGINE = MergeTree ORDER BY a SETTINGS non_replicated_deduplication_window = 9"
)


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnerProcess]:
    with OwnerProcess(tmp_path_factory.mktemp("engine") / "clickhouse") as process:
        yield process


@pytest.fixture(params=["embedded", "server"])
def url(request: pytest.FixtureRequest) -> str:
    """Both kinds of ClickHouse."""
    if request.param == "embedded":
        process: OwnerProcess = request.getfixturevalue("owner")
        return process.url
    server = os.environ.get(URL_VARIABLE, "")
    if not server:
        pytest.skip(f"needs a ClickHouse server (a container image): set {URL_VARIABLE}=http://host:port")
    return server


def _connect(url: str, **options: Any) -> Any:
    parts = urlsplit(url)
    return clickhouse_connect.get_client(host=parts.hostname, port=parts.port, **options)


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    """A client in a database of its own, with the table `t`."""
    name = f"f_{uuid.uuid4().hex[:10]}"
    admin = _connect(url)
    admin.command(f"CREATE DATABASE {name}")
    made = _connect(url, database=name)
    made.command(TABLE)
    yield made
    admin.command(f"DROP DATABASE {name}")


def _http(url: str, body: bytes | None = None, headers: dict[str, str] | None = None, **params: str) -> Any:
    """(status, headers, body) of a plain HTTP request, as curl makes it."""
    address = f"{url}/?{urllib.parse.urlencode(params)}"
    request = urllib.request.Request(address, data=body, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.headers, exc.read()


@pytest.mark.parametrize("compress", [False, True, "zstd", "lz4", "gzip"])
def test_rows_go_in_and_come_out(url: str, client: Any, compress: bool | str) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
    writer = _connect(url, database=client.database, compress=compress)
    row = [7, "x\n\nDROP TABLE t;", now, [1.5, -2.0], [(1, "q")]]
    writer.insert("t", [row], column_names=["a", "s", "d", "f", "n"])
    found = client.query("SELECT * FROM t WHERE a = {a:Int32}", parameters={"a": 7}).first_row
    assert list(found) == [7, "x\n\nDROP TABLE t;", now.replace(tzinfo=None), [1.5, -2.0], [{"x": 1, "y": "q"}]]


def test_arrow_with_a_token_counts_once(client: Any) -> None:
    table = pa.table({"a": pa.array([1, 2], pa.int32()), "s": ["p", "q"], "f": pa.array([[1.0], []])})
    for _ in range(2):
        client.insert_arrow("t", table, settings={"insert_deduplication_token": "k"})
    assert client.command("SELECT count() FROM t") == 2
    assert client.query_arrow("SELECT a, s FROM t ORDER BY a").to_pydict() == {"a": [1, 2], "s": ["p", "q"]}


@pytest.mark.parametrize("where", ["body", "parameter"])
@pytest.mark.parametrize("encoding", ["", "gzip"])
def test_data_after_a_blank_line_is_data(url: str, client: Any, where: str, encoding: str) -> None:
    """The engine would run what follows a blank line as SQL; here it must be a parse error, and the table stay."""
    statement, data = b"INSERT INTO t (a, s) FORMAT TSV", POISON.encode()
    body = data if where == "parameter" else statement + b"\n" + data
    params = {"database": client.database} | ({"query": statement.decode()} if where == "parameter" else {})
    packed = gzip.compress(body) if encoding else body
    status, _, _ = _http(url, packed, {"Content-Encoding": encoding} if encoding else {}, **params)
    assert status == 400
    assert client.command("EXISTS TABLE t") == 1
    status, _, _ = _http(url, b"8\tx\n9\ty\n", database=client.database, query=statement.decode())
    assert status == 200
    assert client.query("SELECT a FROM t ORDER BY a").result_rows == [(8,), (9,)]


@pytest.mark.parametrize(
    ("sql", "code", "status"),
    [
        ("SELECT * FROM nope", 60, 404),
        ("SELECT nope", 47, 404),
        ("SELECT (", 62, 400),
        ("SELECT 1; SELECT 2", 62, 400),
        ("", 62, 400),
    ],
)
def test_errors_have_a_code_and_a_status(url: str, sql: str, code: int, status: int) -> None:
    found, headers, body = _http(url, sql.encode() or b" ")
    assert (found, headers["X-ClickHouse-Exception-Code"]) == (status, str(code))
    assert body.startswith(f"Code: {code}. DB::Exception: ".encode())


def test_unknown_settings_and_broken_bodies_are_refused(url: str) -> None:
    assert _http(url, b"SELECT 1", nope="1")[0] == 404
    assert _http(url, b"no gzip", {"Content-Encoding": "gzip"})[0] in (400, 500)


def test_get_reads_only_and_readonly_is_kept(url: str, client: Any) -> None:
    assert _http(url, query="SELECT 1 FORMAT JSON", database=client.database)[2].startswith(b"{")
    status, headers, _ = _http(url, query=f"DROP TABLE {client.database}.t")
    assert (status, headers["X-ClickHouse-Exception-Code"]) in ((403, "164"), (500, "164"))
    with pytest.raises(DatabaseError, match="READONLY"):
        client.query("INSERT INTO t (a) SELECT 1", settings={"readonly": 1})
    assert client.command("EXISTS TABLE t") == 1


def test_formats_parameters_and_ping(url: str) -> None:
    status, headers, body = _http(
        url, b"SELECT {x:String} AS x, {n:UInt8} AS n", default_format="JSONEachRow", param_x="it's", param_n="3"
    )
    assert (status, json.loads(body), headers["X-ClickHouse-Format"]) == (200, {"x": "it's", "n": 3}, "JSONEachRow")
    assert headers["Content-Type"].startswith("application/x-ndjson")
    with urllib.request.urlopen(f"{url}/ping", timeout=10) as answer:
        assert answer.read() == b"Ok.\n"


def test_sessions_hold_settings_and_temporary_tables(url: str) -> None:
    name = uuid.uuid4().hex
    assert _http(url, b"SELECT 1", session_id=name, session_check="1")[0] == 404
    assert _http(url, b"CREATE TEMPORARY TABLE tmp (a Int32)", session_id=name)[0] == 200
    assert _http(url, b"SET max_block_size = 77", session_id=name)[0] == 200
    read = b"SELECT getSetting('max_block_size') + (SELECT count() FROM tmp)"
    assert _http(url, read, session_id=name, max_block_size="5")[2] == b"5\n"
    assert _http(url, read, session_id=name)[2] == b"77\n"
    assert _http(url, b"SELECT count() FROM tmp")[0] == 404


def test_external_data_and_streams(client: Any) -> None:
    data = ExternalData(data=b"1\n2\n", fmt="TSV", structure=["a Int32"], file_name="e.tsv")
    assert client.query("SELECT sum(a) FROM e", external_data=data).first_row == (3,)
    with client.query_row_block_stream("SELECT number FROM numbers(100000)") as stream:
        assert sum(len(block) for block in stream) == 100_000
    assert client.query("SELECT * FROM t LIMIT 0").column_names == ("a", "s", "d", "f", "n")


def test_many_at_once(url: str) -> None:
    def one(number: int) -> int:
        return int(_http(url, f"SELECT sum(number) + {number} FROM numbers(1000)".encode())[2])

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(one, range(60))) == [499_500 + n for n in range(60)]


def test_async_client(url: str, client: Any) -> None:
    async def scenario() -> list[Any]:
        parts = urlsplit(url)
        made = await clickhouse_connect.get_async_client(
            host=parts.hostname, port=parts.port, database=client.database, autogenerate_session_id=False
        )
        await made.insert("t", [[1, "async"]], column_names=["a", "s"])
        answers = await asyncio.gather(*(made.query(f"SELECT {n} + max(a) FROM t") for n in range(5)))
        await made.close()
        return [answer.first_row[0] for answer in answers]

    assert asyncio.run(scenario()) == [1, 2, 3, 4, 5]


def test_a_page_on_another_host_cannot_reach_the_loopback_front(owner: OwnerProcess) -> None:
    status, _, body = _http(owner.url, b"SELECT 1", {"Host": "evil.example:8123"})
    assert (status, b"is not local" in body) == (403, True)


def test_who_has_the_directory_or_the_port_is_named(owner: OwnerProcess, tmp_path: Path) -> None:
    assert owner.process is not None
    known = read_owner(owner.directory)
    assert known is not None
    assert (known["pid"], known["port"]) == (owner.process.pid, owner.port)
    with pytest.raises(OwnerError, match=rf"already owned by process {owner.process.pid} \(port {owner.port}\)"):
        run_owner(owner.directory, "127.0.0.1", 0)
    with pytest.raises(OwnerError, match=rf"cannot listen on 127.0.0.1:{owner.port}: .*set clickhouse.port"):
        run_owner(tmp_path / "other", "127.0.0.1", owner.port)
    (tmp_path / "file").write_text("")
    with pytest.raises(OwnerError, match=r"set data\.dir"):
        run_owner(tmp_path / "file", "127.0.0.1", 0)
    command = [sys.executable, "-m", "consumers.clickhouse.owner", "--dir", str(owner.directory), "--port", "0"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert second.stderr.startswith("error: ")


def test_rows_survive_kill_9_and_sigterm_ends_cleanly(tmp_path: Path) -> None:
    with OwnerProcess(tmp_path / "clickhouse") as process:
        _http(process.url, b"CREATE DATABASE d")
        _http(process.url, b"CREATE TABLE d.t (a Int32) ENGINE = MergeTree ORDER BY a")
        assert _http(process.url, b"INSERT INTO d.t VALUES (1), (2)")[0] == 200
        process.kill()
        process.start()
        assert _http(process.url, b"SELECT count() FROM d.t")[2] == b"2\n"
        assert process.process is not None
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(30) == 0
    assert read_owner(process.directory) is None
