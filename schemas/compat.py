"""Proof that the newest code reads every old log: BACKWARD_TRANSITIVE over all versions of every event.

`python -m schemas.compat` checks; `python -m schemas.compat --freeze` puts the hashes of new `.avsc` files into
`avro/RELEASED.sha256`, after which those files may not change. The hash is over the file's bytes because the Avro
fingerprint leaves out defaults, and a changed default changes what an old record means.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schemas.avro_types import AVRO_DIR, NAMESPACE, Schema, load_all_versions
from schemas.base import EVENTS

RELEASED = AVRO_DIR / "RELEASED.sha256"

#: Writer type -> other reader types it is promoted to (Avro 1.11 specification, "Schema Resolution").
PROMOTIONS: dict[str, frozenset[str]] = {
    "int": frozenset({"long", "float", "double"}),
    "long": frozenset({"float", "double"}),
    "float": frozenset({"double"}),
    "string": frozenset({"bytes"}),
    "bytes": frozenset({"string"}),
}


class CompatibilityError(ValueError):
    """Schemas that cannot be released: lists every problem."""


def find_incompatibilities(writer: Any, reader: Any, where: str = "") -> list[str]:
    """Why `reader` cannot read everything written with `writer`; empty when it can."""
    return list(_Resolution(writer, reader).compare(writer, reader, where or str(reader.get("name", "schema"))))


class _Resolution:
    """One writer and one reader schema, with the named types each defines."""

    def __init__(self, writer: Any, reader: Any) -> None:
        self._writer_names: dict[str, Any] = {}
        self._reader_names: dict[str, Any] = {}
        _collect_names(writer, self._writer_names)
        _collect_names(reader, self._reader_names)
        self._open: set[tuple[str, str]] = set()

    def compare(self, writer: Any, reader: Any, where: str) -> Iterator[str]:
        """Problems of one pair of types."""
        writer, reader = _resolve(writer, self._writer_names), _resolve(reader, self._reader_names)
        if isinstance(writer, list):
            for branch in writer:
                yield from self.compare(branch, reader, where)
            return
        if isinstance(reader, list):
            if all(list(self.compare(writer, branch, where)) for branch in reader):
                yield f"{where}: {_name(writer)} is in no branch of the newer union {[_name(b) for b in reader]}"
            return
        kind, newer = _name(writer), _name(reader)
        if kind != newer:
            if newer not in PROMOTIONS.get(kind, ()):
                yield f"{where}: {kind} cannot be read as {newer}"
        elif kind == "record":
            yield from self._compare_records(writer, reader, where)
        elif kind == "array":
            yield from self.compare(writer["items"], reader["items"], where + "[]")
        elif kind == "map":
            yield from self.compare(writer["values"], reader["values"], where + "{}")
        elif kind == "enum" and "default" not in reader and (gone := set(writer["symbols"]) - set(reader["symbols"])):
            yield f"{where}: symbols {sorted(gone)} are gone, and there is no default"
        elif kind == "fixed" and writer["size"] != reader["size"]:
            yield f"{where}: fixed of {writer['size']} bytes became {reader['size']}"

    def _compare_records(self, writer: Schema, reader: Schema, where: str) -> Iterator[str]:
        if writer["name"] not in (reader["name"], *reader.get("aliases", ())):
            yield f"{where}: record {writer['name']} became {reader['name']} without an alias"
            return
        pair = (writer["name"], reader["name"])
        if pair in self._open:  # a recursive type: it is being compared already
            return
        self._open.add(pair)
        written = {field["name"]: field for field in writer["fields"]}
        for field in reader["fields"]:
            old = next((written[n] for n in (field["name"], *field.get("aliases", ())) if n in written), None)
            inside = f"{where}.{field['name']}"
            if old is not None:
                yield from self.compare(old["type"], field["type"], inside)
            elif "default" not in field:
                yield f"{inside}: is new and has no default"
        self._open.discard(pair)


def _name(schema: Any) -> str:
    return str(schema["type"]) if isinstance(schema, dict) else str(schema)


def _resolve(schema: Any, names: dict[str, Any]) -> Any:
    """The definition behind a name, and the plain type behind `{"type": "long", "logicalType": ...}`."""
    while True:
        if isinstance(schema, str) and schema in names:
            schema = names[schema]
        elif isinstance(schema, dict) and isinstance(schema["type"], (dict, list)):
            schema = schema["type"]
        elif isinstance(schema, dict) and schema["type"] not in ("record", "array", "map", "enum", "fixed"):
            return schema["type"]
        else:
            return schema


def _collect_names(schema: Any, names: dict[str, Any]) -> None:
    if isinstance(schema, list):
        for branch in schema:
            _collect_names(branch, names)
    if not isinstance(schema, dict):
        return
    if schema["type"] in ("record", "enum", "fixed"):
        names[schema["name"]] = schema
        names[f"{NAMESPACE}.{schema['name']}"] = schema
    for field in schema.get("fields", ()):
        _collect_names(field["type"], names)
    for key in ("type", "items", "values"):
        if isinstance(schema.get(key), (dict, list)):
            _collect_names(schema[key], names)


def find_default_problems(schema: Schema, where: str) -> list[str]:
    """Defaults that fastavro does not read as the specification says: of bytes (it gives a string) and of records."""
    problems = []
    for field in schema["fields"]:
        kind = _name(field["type"]) if not isinstance(field["type"], list) else "union"
        if "default" in field and kind in ("bytes", "record"):
            problems.append(f"{where}.{field['name']}: a {kind} field may not have a default; make it optional")
    return problems


def find_version_problems(name: str, versions: dict[int, Schema]) -> list[str]:
    """Problems of an event's versions: every older one must be readable with every newer one, none may be missing."""
    problems = []
    if sorted(versions) != list(range(1, len(versions) + 1)):
        problems.append(f"{name}: versions {sorted(versions)} are not 1 to {len(versions)}")
    for version, schema in versions.items():
        problems += find_default_problems(schema, f"{name} v{version}")
    for old in versions:
        for new in versions:
            if old < new:
                found = find_incompatibilities(versions[old], versions[new], name)
                problems += [f"v{old} -> v{new}: {problem}" for problem in found]
    return problems


def content_hash(path: Path) -> str:
    """SHA-256 of a schema file's bytes, hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def released_hashes(path: Path = RELEASED) -> dict[str, str]:
    """File name -> hash of every released schema, in the format of `sha256sum`."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: digest for digest, name in (line.split() for line in lines)}


def find_release_problems(directory: Path = AVRO_DIR, path: Path = RELEASED) -> list[str]:
    """Released files that changed or are gone, and files that are not released yet."""
    released = released_hashes(path)
    present = {file.name: content_hash(file) for file in directory.glob("*.avsc")}
    problems = [f"{name}: is released and gone; restore it" for name in sorted(released.keys() - present.keys())]
    for name, digest in sorted(present.items()):
        if name not in released:
            problems.append(f"{name}: is not in {path.name}; run `python -m schemas.compat --freeze`")
        elif released[name] != digest:
            problems.append(f"{name}: is released and was changed; restore it and make a new version of the event")
    return problems


def freeze_release(directory: Path = AVRO_DIR, path: Path = RELEASED) -> list[str]:
    """Add the hashes of schemas that have none; returns their file names. Released hashes are never altered."""
    released = released_hashes(path)
    new = {f.name: content_hash(f) for f in directory.glob("*.avsc") if f.name not in released}
    path.write_text("".join(f"{digest}  {name}\n" for name, digest in sorted((released | new).items())))
    return sorted(new)


def check_all() -> None:
    """Raise CompatibilityError with every problem of the checked-in schemas."""
    problems = [p for name in EVENTS for p in find_version_problems(name, load_all_versions(name))]
    problems += find_release_problems()
    if problems:
        raise CompatibilityError("\n".join(problems))


if __name__ == "__main__":
    if "--freeze" in sys.argv:
        print("\n".join(f"released {name}" for name in freeze_release()) or "nothing new")
    try:
        check_all()
    except CompatibilityError as exc:
        sys.exit(str(exc))
    print(f"{len(EVENTS)} events: every version is readable, and none has changed since its release")
