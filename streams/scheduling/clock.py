"""The clock that sees leases lapse. Time comes in from the shell; what a lapse means is decided by the core."""

from __future__ import annotations

from schemas.base import Event
from schemas.events import LeaseLapsed
from schemas.ids import RunId, TrialId, make_event_id, now_ms
from streams.scheduling.election import PRODUCER
from streams.scheduling.state import Lease, SchedulerState

#: A lease lapses this long after its deadline: a renewal may be on its way.
GRACE_MS = 1_000


class LeaseClock:
    """Turns deadlines that have passed into recorded facts. What they mean is decided when they are read back."""

    def __init__(self, run_id: RunId, *, grace_ms: int = GRACE_MS) -> None:
        self._run_id, self._grace_ms = run_id, grace_ms
        self._written: dict[TrialId, Lease] = {}

    def tick(self, state: SchedulerState, at_ms: int | None = None) -> list[Event]:
        """LeaseLapsed for every lease whose deadline has passed, once per deadline. Leaves the state alone."""
        now = now_ms() if at_ms is None else at_ms
        self._written = {t: lease for t, lease in self._written.items() if state.leases.get(t) == lease}
        lapsed: list[Event] = []
        for trial_id, lease in state.leases.items():
            if lease.deadline_ms + self._grace_ms > now or trial_id in self._written:
                continue
            self._written[trial_id] = lease
            lapsed.append(
                LeaseLapsed(
                    event_id=make_event_id(now),
                    run_id=self._run_id,
                    occurred_at=now,
                    producer=PRODUCER,
                    trial_id=trial_id,
                    attempt=lease.attempt,
                    lease_id=lease.lease_id,
                    deadline_ms=lease.deadline_ms,
                )
            )
        return lapsed
