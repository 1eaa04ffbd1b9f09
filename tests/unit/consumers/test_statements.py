"""Where a statement's data begins, and what is refused."""

from __future__ import annotations

import pytest

from consumers.clickhouse.statements import Insert, Query, StatementError, parse_request

POISON = b"1\ta\n\nDROP TABLE t;\n"


VALUES = b" (1, 'a\n\n;b'), (2, 'c')"
HIDDEN = b"/* FORMAT x */ INSERT INTO t -- VALUES\n "
QUOTED = b"INSERT INTO t SETTINGS a = 'VALUES' "
NAMED = b"INSERT INTO t (a, `format`) "
SETTING = b"SELECT 1 FORMAT CSV SETTINGS max_threads = 1"


@pytest.mark.parametrize(
    ("query", "body", "expected"),
    [
        (b"", b"INSERT INTO t FORMAT TSV\n" + POISON, Insert(b"INSERT INTO t ", "TSV", POISON)),
        (b"INSERT INTO t FORMAT TSV", POISON, Insert(b"INSERT INTO t ", "TSV", POISON)),
        (NAMED + b"FORMAT  CSV ", b"1,2", Insert(NAMED, "CSV", b"1,2")),
        (b"", b"insert into t values" + VALUES + b";", Insert(b"insert into t ", "Values", VALUES)),
        (b"INSERT INTO t", b"1\t2\n", Insert(b"INSERT INTO t", None, b"1\t2\n")),
        (HIDDEN + b"FORMAT TSV", b"", Insert(HIDDEN, "TSV", b"")),
        (QUOTED + b"FORMAT TSV\r\n1", b"", Insert(QUOTED, "TSV", b"1")),
        (QUOTED + b"FORMAT TSV\n1", b"2", Insert(QUOTED, "TSV", b"1\n2")),
        (b"", b"INSERT INTO t SELECT 1, 'FORMAT'", Query(b"INSERT INTO t SELECT 1, 'FORMAT'", None, False)),
        (b"", b"SELECT ';' -- a; b\n FORMAT JSON;\n", Query(b"SELECT ';' -- a; b\n FORMAT JSON", "JSON", True)),
        (b"SELECT format('{}', x) FROM", b"t", Query(b"SELECT format('{}', x) FROM\nt", None, True)),
        (b"SELECT a format FROM t", b"", Query(b"SELECT a format FROM t", None, True)),
        (SETTING, b"", Query(SETTING, "CSV", True)),
        (b"", b"CREATE VIEW v AS SELECT 1", Query(b"CREATE VIEW v AS SELECT 1", None, False)),
        (b"", b"SELECT $x$a;b$x$", Query(b"SELECT $x$a;b$x$", None, True)),
    ],
)
def test_data_is_never_part_of_the_query(query: bytes, body: bytes, expected: Insert | Query) -> None:
    assert parse_request(query, body) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"SELECT 1; DROP TABLE t", "Multi-statements are not allowed"),
        (b"  ", "Empty query"),
        (b"-- nothing", "Empty query"),
        (b"INSERT INTO t FROM INFILE '/etc/passwd' FORMAT TSV", "INFILE is not allowed"),
        (b"SELECT 1 INTO OUTFILE '/tmp/x'", "OUTFILE is not allowed"),
        (b"INSERT INTO t FORMAT TSV;\n1", "excessive ';'"),
    ],
)
def test_what_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(StatementError, match=message):
        parse_request(b"", text)
