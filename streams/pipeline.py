"""The services of a run, in data-flow order. `rollstream serve <name>` runs one; `rollstream run` runs them all.

Each is named by a string `module:function` and imported only in the process that runs it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Service:
    """A process of the system."""

    name: str
    entry: str
    doc: str
    #: Instances that may run side by side; 1: a second one fences the first.
    scalable: bool = False


PIPELINE: tuple[Service, ...] = (
    Service("scheduler", "streams.scheduling.service:serve", "offers groups of trials; elects each trial's one end"),
    Service("proxy", "producers.proxy.service:serve", "captures every model call; runs or reaches the engine", True),
    Service("worker", "producers.trials.service:serve", "runs trials: harness in a sandbox, then grading", True),
    Service("assembly", "streams.assembly.service:serve", "model calls to trajectories", True),
    Service("admission", "streams.admission.service:serve", "which trajectories count, and with what reward", True),
    Service("grouping", "streams.grouping.service:serve", "trajectories to groups"),
    Service("learner", "learner.service:serve", "groups to policy updates"),
    Service("sink", "consumers.clickhouse.service:serve", "every topic to ClickHouse", True),
    Service("progress", "streams.progress.service:serve", "live progress and run health (Faust)"),
)

BY_NAME: dict[str, Service] = {s.name: s for s in PIPELINE}
