"""A stage in a process of its own, which kills itself with SIGKILL at a point of a transaction.

python -m tests.integration.runtime_process BOOTSTRAP PREFIX SCOPE POINT NTH
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from infra.settings import KafkaSection, Settings
from streams.runtime.loop import LoopOptions, TransactionalLoop
from tests.unit.runtime.stages import JoinStage


class KillAt:
    """kill -9 of this process when `point` is reached for the `nth` time."""

    def __init__(self, point: str, nth: int) -> None:
        self._point, self._left = point, nth

    def __call__(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    bootstrap, prefix, scope, point, nth = sys.argv[1:]
    settings = Settings(kafka=KafkaSection(bootstrap=bootstrap, topic_prefix=prefix))
    options = LoopOptions(max_records=7, commit_interval_sec=0.0, idle_wait_sec=0.1)
    loop = TransactionalLoop(JoinStage(scope), settings, options=options, faults=KillAt(point, int(nth)))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    loop.run(stop)


if __name__ == "__main__":
    main()
