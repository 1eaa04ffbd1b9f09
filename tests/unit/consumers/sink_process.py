"""The sink as a process of its own that kills itself (kill -9) at a named point of its work.

    python -m tests.unit.consumers.sink_process '{"bootstrap": ..., "prefix": ..., ...}' after_note:2

Points: before_note, after_note, after_insert (after the n-th table), before_commit, after_commit; `:n` is the n-th time
the point is passed. Without a point it runs until SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

from infra.settings import ClickHouseSection, DataSection, KafkaSection, Settings


def settings_from(spec: dict[str, Any]) -> Settings:
    """Settings of a test from what its parent passed on."""
    return Settings(
        data=DataSection(dir=spec["data_dir"]),
        kafka=KafkaSection(bootstrap=spec["bootstrap"], topic_prefix=spec["prefix"], partitions=2),
        clickhouse=ClickHouseSection(url=spec["url"], database=spec["database"]),
    )


def spawn(settings: Settings, point: str = "", instance: int = 0) -> subprocess.Popen[bytes]:
    """Start the process; it dies by SIGKILL when it passes `point`."""
    spec = {
        "data_dir": settings.data.dir,
        "bootstrap": settings.kafka.bootstrap,
        "prefix": settings.kafka.topic_prefix,
        "url": settings.clickhouse.url,
        "database": settings.clickhouse.database,
        "instance": instance,
    }
    command = [sys.executable, "-m", "tests.unit.consumers.sink_process", json.dumps(spec), point]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


class _Killer:
    def __init__(self, point: str) -> None:
        name, _, number = point.partition(":")
        self._name, self._left = name, int(number or 1)

    def at(self, name: str) -> None:
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the sink of the spec, with its death wired in."""
    spec, killer = json.loads(sys.argv[1]), _Killer(sys.argv[2] if len(sys.argv) > 2 else "")
    settings, stop = settings_from(spec), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    from consumers.clickhouse.connect import wait_for_clickhouse
    from consumers.clickhouse.migrate import migrate
    from consumers.clickhouse.service import Sink
    from streams.runtime.group_reader import GroupReader

    commit, insert = GroupReader.commit, Sink._insert_table

    def faulty_commit(self: GroupReader, offsets: Any) -> None:
        kind = "note" if any(note.partition(";")[2] for _, note in offsets.values()) else "commit"
        if offsets:
            killer.at(f"before_{kind}")
        commit(self, offsets)
        if offsets:
            killer.at(f"after_{kind}")

    def faulty_insert(self: Sink, table: str, token: str, data: Any) -> None:
        insert(self, table, token, data)
        killer.at("after_insert")

    GroupReader.commit, Sink._insert_table = faulty_commit, faulty_insert  # type: ignore[method-assign]
    client = wait_for_clickhouse(settings, stop)
    if client is not None:
        migrate(client)
        Sink(settings, client, stop, spec["instance"]).run()


if __name__ == "__main__":
    main()
