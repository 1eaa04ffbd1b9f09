"""Golden bytes: what the code wrote when an event version was made is read by the code of today."""

from __future__ import annotations

import json

import pytest

from schemas.avro_types import load_all_versions
from schemas.base import EVENTS
from schemas.codec import Codec
from schemas.examples_gen import EXAMPLES_DIR, as_json, example_event, example_paths

GOLDEN = [(name, version) for name in EVENTS for version in load_all_versions(name)]


@pytest.mark.parametrize(("name", "version"), GOLDEN)
def test_golden_bytes_are_read(name: str, version: int) -> None:
    readable, binary = example_paths(name, version)
    event = Codec().decode(binary.read_bytes())
    assert type(event) is EVENTS[name]
    then, now = json.loads(readable.read_text()), json.loads(as_json(event))
    if version == EVENTS[name].VERSION:
        assert now == then
    else:  # fields that are newer have their defaults, fields that were dropped are gone
        assert {field: now[field] for field in now if field in then} == {f: then[f] for f in then if f in now}


@pytest.mark.parametrize("name", EVENTS)
def test_the_same_bytes_are_written_today(name: str) -> None:
    """A change of the encoder, or of an event without a new version, shows here."""
    cls = EVENTS[name]
    event = example_event(cls)
    assert Codec().encode(event) == example_paths(name, cls.VERSION)[1].read_bytes()


def test_every_version_has_its_example() -> None:
    expected = {path for golden in GOLDEN for path in example_paths(*golden)}
    assert set(EXAMPLES_DIR.iterdir()) == expected
