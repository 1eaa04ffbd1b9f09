"""What the worker, the proxy and the verifier write for one attempt, event by event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from schemas.base import Event
from schemas.events import LeaseRenewed, StageFinished, StageStarted, TrialOffered, VersionSpan
from schemas.ids import ConversationId, EventId
from tests.unit.stages import builders as make

if TYPE_CHECKING:
    from tests.unit.stages.history import World

LOSSES = ("setup", "dies", "dies_after_a_call", "parser", "crash", "agent_timeout", "verifier_timeout", "no_capture")


def make_trial_script(world: World, offer: TrialOffered) -> Iterator[Event]:
    """The events of one attempt. Kinds of loss and numbers of calls are drawn from the world's random state."""
    lost = offer.attempt < 3 and world.random.random() < world.loss_share
    return _Attempt(world, offer, world.random.choice(LOSSES) if lost else "ok").events()


class _Attempt:
    def __init__(self, world: World, offer: TrialOffered, kind: str) -> None:
        self._world, self._offer, self._kind = world, offer, kind
        self._ids = {"trial_id": offer.trial_id, "attempt": offer.attempt}
        self._lease_id = f"lease-{offer.trial_id}-{offer.attempt}"
        self._num_calls = self._num_failed = self._num_sampled = 0
        self._version = max(world.version, 0)  # that served when the latest call began

    def events(self) -> Iterator[Event]:
        yield make.leased(**self._ids, lease_id=self._lease_id, deadline_ms=self._deadline())
        if self._kind == "dies":
            return
        yield StageStarted(**make.base(), **self._ids, stage="setup")
        if self._kind == "setup":
            yield self._stage("setup", "failed")
            yield self._end(setup_ok=False, verifier_ok=False, reward_event_id=None, agent_exit_code=None)
            return
        yield self._stage("setup", "ok")
        yield from self._conversation()
        if self._kind == "dies_after_a_call":
            return
        yield self._stage("agent", "timeout" if self._kind == "agent_timeout" else "ok")
        yield from self._verify()

    def _deadline(self) -> int:
        from tests.unit.stages.history import LEASE_MS

        return self._world.clock_ms + LEASE_MS

    def _stage(self, stage: str, outcome: str) -> StageFinished:
        return StageFinished(**make.base(), **self._ids, stage=stage, outcome=outcome, duration_sec=0.1)

    def _conversation(self) -> Iterator[Event]:
        """A few turns: some retried, some failed, a title call, one answer cut off by a rollback."""
        draw = self._world.random
        name = f"{self._offer.trial_id}/a{self._offer.attempt}"
        yield make.opened(f"{name}/main", **self._ids)
        if draw.random() < 0.2:
            yield make.opened(f"{name}/title", "title", **self._ids)
            yield self._call([1, 2], conversation_id=ConversationId(f"{name}/title"))
        main = ConversationId(f"{name}/main")
        parent, length = None, 0
        for _ in range(draw.randint(1, 3)):
            delta = [draw.randint(0, 500) for _ in range(draw.randint(1, 4))]
            if draw.random() < 0.1:
                self._num_failed += 1
                yield self._failed([9] * draw.randint(0, 2))
            if draw.random() < 0.1:  # a reply that never reached the harness, asked for again
                yield self._call(delta, parent=parent, shared=length, conversation_id=main)
            done = self._call(delta, parent=parent, shared=length, conversation_id=main)
            yield done
            parent, length = done.call_index, done.prompt_len + len(done.sampled_ids) // 4
            if draw.random() < 0.1:
                length -= 1  # the harness dropped the last token of the reply: no continuation
            if draw.random() < 0.3:
                yield LeaseRenewed(**make.base(), **self._ids, lease_id=self._lease_id, deadline_ms=self._deadline())

    def _call(self, delta: list[int], **changes: object):  # type: ignore[no-untyped-def]
        draw = self._world.random
        sampled = [draw.randint(0, 500) for _ in range(draw.randint(1, 5))]
        before, version = self._version, max(self._world.version, 0)
        self._version = version
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._num_sampled += len(sampled)
        done = make.call(index, delta, sampled, version=version, **self._ids, **changes)  # type: ignore[arg-type]
        if before == version or len(sampled) < 3:
            return done
        old = VersionSpan(version=before, start=0, end=2)  # new weights came in the middle
        return replace(done, version_spans=(old, VersionSpan(version=version, start=2, end=len(sampled))))

    def _failed(self, sampled: list[int]) -> Event:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._num_sampled += len(sampled)
        return make.failed_call(index, sampled, **self._ids)

    def _verify(self) -> Iterator[Event]:
        if self._kind == "verifier_timeout":
            yield self._end(verifier_ok=False, verifier_timed_out=True, reward_event_id=None)
            return
        grade = EventId(f"grade-{self._offer.trial_id}-{self._offer.attempt}")
        reward = float(self._world.random.random() < 0.5)
        yield make.graded(reward, event_id=grade, **self._ids, task_id=self._offer.task_id)
        changes: dict[str, object] = {
            "parser": {"num_parser_failures": 1, "agent_exit_code": 1, "agent_exit_status": "FormatError"},
            "crash": {"agent_exit_code": 1, "agent_exit_status": "RuntimeError"},
            "agent_timeout": {"agent_timed_out": True, "agent_exit_code": None},
            "no_capture": {"capture_ok": False, "num_calls": None},
        }.get(self._kind, {})
        yield self._end(**({"reward_event_id": grade} | changes))
        yield self._stage("cleanup", "ok")

    def _end(self, **changes: object) -> Event:
        counts = {
            "num_calls": self._num_calls,
            "num_failed_calls": self._num_failed,
            "num_sampled_tokens": self._num_sampled,
        }
        return make.attempt_finished(**(self._ids | {"lease_id": self._lease_id} | counts | changes))
