"""A small world that produces whole event histories: offers, leases, calls, grades, steps, and all that follows.

Everything but the model, the sandbox and the learner is the real thing: the stages of the system run on partitioned
in-memory topics, one batch at a time and in random order, and may crash between a batch and its commit. Workers, the
proxy, the learner and the clock are played. A history follows from its seed alone, so tests can reuse and replay it.

Use `make_history(seed)` for the records of a finished run, by (topic, partition), in log order.
"""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from infra.settings import RunSection, ScheduleSection, Settings
from schemas.base import Event
from schemas.events import GroupReady, PolicyPublished, StepCompleted, TrialOffered
from schemas.ids import EventId
from streams.admission.core import AdmissionStage
from streams.assembly.core import AssemblyStage
from streams.grouping.core import GroupingStage
from streams.scheduling.clock import LeaseClock
from streams.scheduling.core import SchedulingStage
from tests.unit.stages import builders as make
from tests.unit.stages.trial_scripts import make_trial_script

NUM_PARTITIONS = 2
KEYED = {"offers", "trial-stages", "model-calls", "routing", "rewards", "trajectories"}
LEASE_MS = 400

TopicPart = tuple[str, int]


def partition_of(event: Event) -> int:
    """Where an event lies."""
    return zlib.crc32(event.key.encode()) % NUM_PARTITIONS if event.TOPIC in KEYED else 0


class World:
    """Topics, the real stages, and the players around them."""

    def __init__(self, seed: int, settings: Settings, *, crash_share: float = 0.0, loss_share: float = 0.25) -> None:
        self.random = random.Random(seed)
        self.settings, self.loss_share = settings, loss_share
        self.log: dict[TopicPart, list[Event]] = defaultdict(list)
        self.clock_ms = 1_000
        self.version = -1
        self._numbers = 0
        self.scheduler = Unit(self, SchedulingStage(settings), None, crash_share)
        self.units = [self.scheduler, Unit(self, GroupingStage(settings), None, crash_share)]
        for partition in range(NUM_PARTITIONS):
            self.units.append(Unit(self, AssemblyStage(settings), partition, crash_share))
            self.units.append(Unit(self, AdmissionStage(settings), partition, crash_share))
        self._clock = LeaseClock(make.RUN, grace_ms=0)
        self._scripts: list[Iterator[Event]] = []
        self._claimed: dict[TopicPart, int] = defaultdict(int)
        self._ready: dict[int, list[GroupReady]] = defaultdict(list)
        self._groups_read = self._versions_read = self._num_steps = 0

    def write(self, event: Event) -> None:
        """Append an event as it is."""
        self.log[event.TOPIC, partition_of(event)].append(event)

    def record(self, event: Event) -> None:
        """Append a source event: stamped by the world's clock, with an id of its own."""
        self.clock_ms += self.random.randint(1, 5)
        named = event.event_id.startswith("grade-")
        self._numbers += 1
        event_id = event.event_id if named else EventId(f"s{self._numbers:06d}")
        self.write(replace(event, event_id=event_id, occurred_at=self.clock_ms, run_id=make.RUN))

    def events(self, topic: str) -> list[Event]:
        """All events of a topic, partition by partition."""
        return [e for (name, _), events in sorted(self.log.items()) if name == topic for e in events]

    def run(self, max_rounds: int = 200_000) -> None:
        """Play until the run is finished and nothing moves any more."""
        self._begin()
        idle = 0
        for _ in range(max_rounds):
            before = sum(map(len, self.log.values()))
            player = self.random.randrange(10)
            if player < 5:
                self.random.choice(self.units).poll()
            elif player < 8:
                self._work()
            elif player == 8:
                self._learn()
            else:
                self._tick()
            moved = sum(map(len, self.log.values())) != before
            idle = 0 if moved or any(unit.lag for unit in self.units) or self._scripts else idle + 1
            if idle > 200:
                return
        raise AssertionError("the world did not come to rest")

    def _begin(self) -> None:
        for task_set, num in (("train", 5), ("held_out", 3)):
            for i in range(num):
                self.record(make.registered(f"{task_set}-{i}", task_set))
        self.record(make.run_started({"train": 5, "held_out": 3}))
        self.record(make.published(0))

    def _tick(self) -> None:
        self.clock_ms += self.random.randint(0, 60)
        for event in self._clock.tick(self.scheduler.state, self.clock_ms):
            self.record(event)

    def _work(self) -> None:
        """Claim an offer, or let one trial move on by one event."""
        if len(self._scripts) < 4:
            for partition in range(NUM_PARTITIONS):
                offers = self.log["offers", partition]
                while self._claimed["offers", partition] < len(offers):
                    offer = offers[self._claimed["offers", partition]]
                    self._claimed["offers", partition] += 1
                    if isinstance(offer, TrialOffered):
                        self._scripts.append(make_trial_script(self, offer))
                        break
        if self._scripts:
            script = self.random.choice(self._scripts)
            event = next(script, None)
            if event is None:
                self._scripts.remove(script)
            else:
                self.record(event)

    def _learn(self) -> None:
        """The engine loads what is published; the learner trains a step once it has its groups."""
        versions = [e for e in self.log["policy-versions", 0] if isinstance(e, PolicyPublished)]
        if self._versions_read < len(versions):
            self.version = versions[self._versions_read].version
            self._versions_read += 1
            self.record(make.loaded(self.version))
        groups = self.log["groups", 0]
        for event in groups[self._groups_read :]:
            if isinstance(event, GroupReady) and event.purpose == "train":
                self._ready[event.step].append(event)
        self._groups_read = len(groups)
        step = self._num_steps
        if len(self._ready[step]) >= self.settings.schedule.groups_per_step:
            self._num_steps += 1
            self.record(make.step_completed(step, group_ids=tuple(g.group_id for g in self._ready[step])))
            self.record(make.published(step + 1))


class Unit:
    """One stage on its partitions, reading in random order; commits a batch's outputs and offsets together."""

    def __init__(self, world: World, stage: Any, partition: int | None, crash_share: float) -> None:
        self.world, self.stage, self.partition, self.crash_share = world, stage, partition, crash_share
        self.state = stage.initial()
        self.offsets: dict[TopicPart, int] = defaultdict(int)

    def _parts(self) -> list[TopicPart]:
        numbers = range(NUM_PARTITIONS) if self.partition is None else [self.partition]
        return [(topic, n) for topic in self.stage.inputs for n in numbers if self.world.log[topic, n]]

    @property
    def lag(self) -> int:
        """Events not read yet."""
        return sum(len(self.world.log[tp]) - self.offsets[tp] for tp in self._parts())

    def poll(self) -> None:
        """Apply a random batch and commit it, or crash before the commit and restore."""
        offsets = self.offsets.copy()
        outputs: list[Event] = []
        for _ in range(self.world.random.randint(1, 12)):
            behind = [tp for tp in self._parts() if offsets[tp] < len(self.world.log[tp])]
            if not behind:
                break
            tp = self.world.random.choice(behind)
            outputs += self._apply(self.world.log[tp][offsets[tp]])
            offsets[tp] += 1
        if self.world.random.random() < self.crash_share:
            self.restore()
            return
        self.offsets = offsets
        for event in outputs:
            self.world.write(event)

    def restore(self) -> None:
        """State is made again by re-reading up to the committed offsets, in another order; outputs are dropped."""
        self.state = self.stage.initial()
        done: dict[TopicPart, int] = defaultdict(int)
        while behind := [tp for tp, end in self.offsets.items() if done[tp] < end]:
            tp = self.world.random.choice(behind)
            self._apply(self.world.log[tp][done[tp]])
            done[tp] += 1

    def _apply(self, event: Event) -> list[Event]:
        if type(event).__name__ not in self.stage.wanted:
            return []
        self.state, outputs = self.stage.apply(self.state, event)
        return list(outputs)


def world_settings(**schedule: Any) -> Settings:
    """A short run: 4 steps of 2 groups of 3, validated at 0, 2 and 4."""
    fields: dict[str, Any] = {
        "num_steps": 4,
        "groups_per_step": 2,
        "group_size": 3,
        "max_staleness": 1,
        "max_attempts": 3,
        "validate_every": 2,
    }
    return Settings(run=RunSection(id=make.RUN, seed=7), schedule=ScheduleSection(**(fields | schedule)))


@dataclass(frozen=True)
class History:
    """A finished run's records."""

    settings: Settings
    log: dict[TopicPart, list[Event]]

    def events(self, *topics: str) -> list[Event]:
        """The events of some topics, partition by partition."""
        return [e for topic in topics for part in sorted(self.log) if part[0] == topic for e in self.log[part]]


def make_history(
    seed: int = 0, settings: Settings | None = None, *, crash_share: float = 0.0, loss_share: float = 0.25
) -> History:
    """Play a run to its end. `loss_share`: share of attempts that go wrong in one way or another."""
    settings = settings or world_settings()
    world = World(seed, settings, crash_share=crash_share, loss_share=loss_share)
    world.run()
    return History(settings, {tp: events for tp, events in world.log.items() if events})


def has_step(history: History, step: int) -> bool:
    """The run committed this step."""
    return any(isinstance(e, StepCompleted) and e.step == step for e in history.events("steps"))
