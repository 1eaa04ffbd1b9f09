"""The learner's process. torch is imported only here, when it really runs."""

from __future__ import annotations

import threading

from infra.settings import Settings


def serve(settings: Settings, instance: int, stop: threading.Event) -> None:
    """Train the run `settings.run.id` until its steps are done, then idle until `stop` is set.

    A second learner fences the first. Raises PolicyError, BackendError, LossConfigError or CheckpointError, each naming
    the key or the file and the remedy; FencedError when another learner took over.
    """
    import torch

    from learner.runner import LearnerRun
    from streams.runtime.metrics import start_health_server

    torch.set_num_threads(max(1, settings.train.threads))
    learner = LearnerRun(settings, instance)
    start_health_server("learner", instance, settings, ready=lambda: learner.ready)
    learner.run(stop)
