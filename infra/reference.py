"""Reference pages made from the code: every event, every key of the run file.

`python -m infra.reference` writes docs/reference/; a test says when they are out of date.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

from infra.config import KEYS
from schemas.avro_types import derive_schema
from schemas.base import EVENTS
from schemas.topics import CATALOGUE

DOCS = Path(__file__).resolve().parent.parent / "docs" / "reference"


def _type_text(avro: Any) -> str:
    if isinstance(avro, list):
        return f"{_type_text(avro[1])} or null"
    if not isinstance(avro, dict):
        return str(avro).rsplit(".", 1)[-1]
    if avro["type"] == "array":
        return f"array of {_type_text(avro['items'])}"
    if avro["type"] == "map":
        return f"map of {_type_text(avro['values'])}"
    return str(avro["name"]) if avro["type"] == "record" else str(avro.get("logicalType", avro["type"]))


def _nested(avro: Any) -> list[dict[str, Any]]:
    if isinstance(avro, list):
        return [r for part in avro for r in _nested(part)]
    if isinstance(avro, dict):
        if avro["type"] == "record":
            return [avro, *(r for f in avro["fields"] for r in _nested(f["type"]))]
        return _nested(avro.get("items") or avro.get("values") or "")
    return []


def _table(fields: list[dict[str, Any]]) -> list[str]:
    rows = [f"| `{f['name']}` | {_type_text(f['type'])} | {f['doc'].replace('|', '/')} |" for f in fields]
    return ["| field | type | what it is |", "|---|---|---|", *rows, ""]


def events_page() -> str:
    """Every topic and event, with its fields."""
    lines = ["# Events", "", "Made from `schemas/` by `python -m infra.reference`. Every event also has", ""]
    base = ("event_id", "run_id", "occurred_at", "producer")
    first = derive_schema(next(iter(EVENTS.values())))
    lines += _table([f for f in first["fields"] if f["name"] in base])
    for topic in CATALOGUE:
        note = ("partitioned by trial" if topic.keyed_by_trial else "one partition") + (
            ", compacted" if topic.compacted else ""
        )
        lines += [f"## {topic.name}", "", f"{topic.doc[0].upper()}{topic.doc[1:]} ({note}).", ""]
        for name in topic.events:
            schema, cls = derive_schema(EVENTS[name]), EVENTS[name]
            lines += [f"### {name} v{cls.VERSION}", "", f"{schema['doc']} Key: `{cls.KEY}`.", ""]
            lines += _table([f for f in schema["fields"] if f["name"] not in base])
            for record in [r for f in schema["fields"] for r in _nested(f["type"])]:
                lines += [f"**{record['name']}**: {record['doc']}", "", *_table(record["fields"])]
    return "\n".join(lines)


def configuration_page() -> str:
    """Every key of the run file, with its default."""
    lines = ["# The run file", "", "Made from `infra/settings.py` by `python -m infra.reference`.", ""]
    section = ""
    for name, spec in KEYS.items():
        head, key = name.split(".", 1)
        if head != section:
            section = head
            lines += ["", f"## [{head}]", "", "| key | type | default | what it is |", "|---|---|---|---|"]
        kind = (
            getattr(spec.type, "__name__", "table")
            if typing.get_origin(spec.type) is None
            else ("list" if typing.get_origin(spec.type) is tuple else "table")
        )
        default = "`" + (repr(spec.default) if spec.default != "" else '""') + "`"
        lines.append(f"| `{key}` | {kind} | {default} | {spec.doc.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


PAGES = {"events.md": events_page, "configuration.md": configuration_page}

if __name__ == "__main__":
    DOCS.mkdir(parents=True, exist_ok=True)
    for file, page in PAGES.items():
        (DOCS / file).write_text(page())
        print(f"wrote docs/reference/{file}")
