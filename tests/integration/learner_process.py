"""A learner as a process of its own that kills itself, with -9, at a chosen point of a step.

usage: python -m tests.integration.learner_process '{"settings": {...}, "kill_at": "point:occurrence", "stop_after": N}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from dataclasses import fields, replace
from typing import Any

from infra.settings import Settings


def settings_from(values: dict[str, dict[str, Any]]) -> Settings:
    """Settings from {section: {key: value}}."""
    base = Settings()
    sections = {f.name: getattr(base, f.name) for f in fields(base)}
    return Settings(**{name: replace(section, **values.get(name, {})) for name, section in sections.items()})


def main() -> None:
    """Run until `stop_after` steps are committed by this process, or until killed."""
    args = json.loads(sys.argv[1])
    import torch

    from learner.runner import LearnerRun

    torch.set_num_threads(1)
    stop, seen = threading.Event(), Counter[str]()

    def faults(point: str) -> None:
        seen[point] += 1
        if f"{point}:{seen[point]}" == args.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{point}:{seen[point]}" == args.get("stop_at"):
            stop.set()

    LearnerRun(settings_from(args["settings"]), 0, faults).run(stop)


if __name__ == "__main__":
    main()
