"""Just enough of ClickHouse's lexer to route an HTTP request: which statement is it, and where does its data begin.

The embedded engine runs whatever follows the first blank line of an inline INSERT as SQL, so data must never reach it
as text of a query. `parse_request` finds the boundary; the engine is then given head and data apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Comments, quoted text (with backslash escapes and doubled quotes), heredocs, words, and the punctuation that matters.
_TOKEN = re.compile(
    rb"""(?P<skip>--[^\n]*|/\*.*?\*/|\#[!\ ][^\n]*)
    |(?P<quoted>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*"|`(?:[^`\\]|\\.|``)*`|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<punct>[;()])""",
    re.VERBOSE | re.DOTALL,
)
_READS = frozenset({b"SELECT", b"WITH", b"SHOW", b"DESCRIBE", b"DESC", b"EXPLAIN", b"EXISTS", b"CHECK", b"FROM"})
_FILES = frozenset({(b"FROM", b"INFILE"), (b"INTO", b"OUTFILE")})


class StatementError(ValueError):
    """A request that is no single statement; `code` is ClickHouse's error code."""

    def __init__(self, message: str, code: int = 62) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Insert:
    """An INSERT with data: `head` ends before its FORMAT or VALUES word; `format` None: the request's default."""

    head: bytes
    format: str | None
    data: bytes


@dataclass(frozen=True)
class Query:
    """Any other statement. `format` is the one in its FORMAT clause; `reads`: it returns rows and changes nothing."""

    text: bytes
    format: str | None
    reads: bool


def _data_after_format(text: bytes, start: int) -> bytes:
    """The data after `FORMAT name`: blanks and one line end are dropped, as ClickHouse's parser does."""
    rest = text[start:].lstrip(b" \t\f")
    if rest[:1] == b";":
        raise StatementError("You have excessive ';' symbol before data for INSERT; remove it")
    return rest.removeprefix(b"\r\n") if rest[:2] == b"\r\n" else rest.removeprefix(b"\n")


def _parse(text: bytes) -> Insert | Query:
    depth, first, previous = 0, b"", b""
    out_format: str | None = None
    end: int | None = None
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "skip":
            continue
        if end is not None:
            raise StatementError("Syntax error (Multi-statements are not allowed): send one statement per request")
        token = match.group()
        if kind != "word":
            if token == b";":
                end = match.start()
            depth += (token == b"(") - (token == b")")
            previous = b""
            continue
        word = token.upper()
        first = first or word
        if (previous, word) in _FILES:
            raise StatementError(f"{word.decode()} is not allowed over HTTP: send or read the data itself", 48)
        if depth == 0 and first == b"INSERT":
            if previous == b"FORMAT":
                head = text[: match.start()].rstrip()[: -len(b"FORMAT")]
                return Insert(head, token.decode(), _data_after_format(text, match.end()))
            if word == b"VALUES":
                return Insert(text[: match.start()], "Values", text[match.end() :].rstrip().removesuffix(b";"))
            if word in (b"SELECT", b"WITH"):
                first = b"INSERT SELECT"
        elif depth == 0 and previous == b"FORMAT":
            out_format = token.decode()
        elif out_format is not None and previous == out_format.upper().encode() and word != b"SETTINGS":
            out_format = None  # it was a column called format
        previous = word
    if not first:
        raise StatementError("Empty query: send SQL in the body or in the parameter `query`")
    if first == b"INSERT":
        return Insert(text[:end], None, b"")
    return Query(text[:end], out_format, first in _READS)


def parse_request(query: bytes, body: bytes) -> Insert | Query:
    """The one statement of a request whose `query` parameter and body are as given; the body continues the query.

    Raises StatementError for none, several, or one that touches the server's local files.
    """
    if not query.strip():
        return _parse(body)
    statement = _parse(query)
    if isinstance(statement, Insert):
        data = b"\n".join(part for part in (statement.data, body) if part.strip())
        return Insert(statement.head, statement.format, data)
    return _parse(query + b"\n" + body) if body.strip() else statement
