"""Sessions: the life of one trial attempt at the proxy."""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass, field
from typing import Any

from producers.proxy.conversations import Conversations
from producers.proxy.recorder import NotRecordedError
from schemas.ids import CallId, RunId, TrialId, make_call_id


class SessionError(ValueError):
    """A control message that cannot be followed: names the field and the remedy."""


class DuplicateSessionError(SessionError):
    """The attempt has, or had, a session here."""


@dataclass
class Counts:
    """What a session reports when it is closed."""

    num_calls: int = 0
    num_failed_calls: int = 0
    num_sampled_tokens: int = 0
    num_parser_failures: int = 0
    context_overflow: bool = False
    length_stop: bool = False


@dataclass(eq=False)
class Session:
    """One open trial attempt. Every call index it hands out ends in exactly one recorded event."""

    trial_id: TrialId
    attempt: int
    token: str
    run_id: RunId
    seed: int
    temperature: float
    conversations: Conversations | None = None
    counts: Counts = field(default_factory=Counts)
    #: Why the record of this attempt is incomplete; None while it is complete.
    broken: str | None = None
    closing: bool = False
    dropped: bool = False
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _acks: set[asyncio.Future[None]] = field(default_factory=set)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Session:
        """From the `open` message of the control socket. Raises SessionError."""
        for name, kind in (("trial_id", str), ("token", str), ("run_id", str), ("attempt", int)):
            value = message.get(name)
            if not isinstance(value, kind) or isinstance(value, bool) or value == "":
                raise SessionError(f"open: `{name}` must be a non-empty {kind.__name__}, not {value!r}")
        if "/" in message["trial_id"]:
            raise SessionError("open: `trial_id` is a path segment and may hold no slash")
        try:
            seed, temperature = int(message.get("seed", 0)), float(message.get("temperature", 1.0))
        except (TypeError, ValueError) as exc:
            raise SessionError(f"open: `seed` and `temperature` must be numbers ({exc})") from exc
        return cls(
            trial_id=TrialId(message["trial_id"]),
            attempt=message["attempt"],
            token=message["token"],
            run_id=RunId(message["run_id"]),
            seed=seed,
            temperature=temperature,
        )

    def next_call(self) -> tuple[CallId, int]:
        """Id and index of the next call."""
        index = self.counts.num_calls
        self.counts.num_calls += 1
        return make_call_id(self.trial_id, self.attempt, index), index

    def track_task(self, task: asyncio.Task[Any]) -> None:
        """A running call: awaited by `close`, cancelled by `drop`."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def track_ack(self, ack: asyncio.Future[None]) -> None:
        """Events on their way to Kafka: awaited by `close`; their loss breaks the session."""
        self._acks.add(ack)
        ack.add_done_callback(self._settle_ack)

    def _settle_ack(self, ack: asyncio.Future[None]) -> None:
        self._acks.discard(ack)
        if not ack.cancelled() and (error := ack.exception()) is not None:
            self.broken = str(error)

    async def close(self) -> Counts:
        """Refuse new calls, wait for those running and for their acknowledgements.

        Raises NotRecordedError when part of the attempt may not be in the log.
        """
        self.closing = True
        while self._tasks or self._acks:
            await asyncio.wait({*self._tasks, *self._acks})
            await asyncio.sleep(0)  # let done-callbacks run
        if self.broken is not None:
            raise NotRecordedError(self.broken)
        return self.counts

    async def drop(self) -> None:
        """The other side went away: cancel what runs (each call is recorded as failed)."""
        self.closing = self.dropped = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class Sessions:
    """Open sessions by trial. Two attempts of a trial may be open at once: the token tells them apart."""

    def __init__(self) -> None:
        self._by_trial: dict[str, list[Session]] = {}
        #: Attempts ever opened here: a second session would record calls under ids that exist already.
        self._seen: set[tuple[str, int]] = set()

    def __len__(self) -> int:
        return sum(map(len, self._by_trial.values()))

    def add(self, session: Session) -> None:
        """Open. Raises DuplicateSessionError when this attempt is open, or was: it was handed out twice."""
        attempt = (session.trial_id, session.attempt)
        if attempt in self._seen:
            raise DuplicateSessionError(
                f"open: attempt {session.attempt} of trial {session.trial_id} is open already, or was"
            )
        self._seen.add(attempt)
        self._by_trial.setdefault(session.trial_id, []).append(session)

    def remove(self, session: Session) -> None:
        """Forget a session; no-op when it is not open."""
        others = self._by_trial.get(session.trial_id, [])
        if session in others:
            others.remove(session)
        if not others:
            self._by_trial.pop(session.trial_id, None)

    def knows(self, trial_id: str) -> bool:
        """Whether any attempt of the trial is open."""
        return trial_id in self._by_trial

    def find(self, trial_id: str, token: str) -> Session | None:
        """The open attempt that the token belongs to."""
        given = token.encode()
        return next((s for s in self._by_trial.get(trial_id, ()) if hmac.compare_digest(s.token.encode(), given)), None)
