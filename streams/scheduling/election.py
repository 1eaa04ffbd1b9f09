"""One trial's attempts: leases, lapses and the one end.

A trial's events lie on one partition of `trial-stages`, so their order is fixed for ever: the first attempt that
finished in that order wins, and a lapse counts only for the lease that held the trial then.
"""

from __future__ import annotations

from dataclasses import replace

from schemas.base import Event
from schemas.events import AttemptFinished, LeaseLapsed, LeaseRenewed, TrialFinished, TrialLeased, TrialOffered
from schemas.ids import TrialId, derive_id
from streams.scheduling.state import Lease, SchedulerState, TrialState
from streams.scheduling.termination import decide_termination

PRODUCER = "scheduler"


def apply_offer(state: SchedulerState, event: TrialOffered) -> list[Event]:
    """An offer was read back from the log: what it says is what counts."""
    if event.trial_id in state.done:
        return []
    trial = state.trials.setdefault(event.trial_id, TrialState())
    if trial.offer is None:
        trial.offer = event
    return _settle(state, event.trial_id, trial)


def apply_lease(state: SchedulerState, event: TrialLeased | LeaseRenewed) -> None:
    """A worker holds the trial; leases of attempts that were given up do not count."""
    if event.trial_id in state.done:
        return
    trial = state.trials.setdefault(event.trial_id, TrialState())
    if trial.elected is not None or trial.lost is not None or event.attempt != trial.attempt:
        return
    held = state.leases.get(event.trial_id)
    if held is not None and held.lease_id == event.lease_id:
        deadline_ms = max(held.deadline_ms, event.deadline_ms)
    elif isinstance(event, TrialLeased) and event.lease_id not in trial.lease_ids:
        trial.lease_ids.add(event.lease_id)
        deadline_ms = event.deadline_ms
    else:
        return  # a repeat, or a renewal of a lease that another claim of the same offer took over
    state.leases[event.trial_id] = Lease(event.attempt, event.lease_id, deadline_ms)


def apply_lapse(state: SchedulerState, event: LeaseLapsed, max_attempts: int) -> list[Event]:
    """The holder's lease lapsed: the next attempt, or the end."""
    held = state.leases.get(event.trial_id)
    trial = state.trials.get(event.trial_id)
    if trial is None or held is None or (held.attempt, held.lease_id) != (event.attempt, event.lease_id):
        return []  # a repeat, or the trial went on meanwhile
    if event.deadline_ms < held.deadline_ms:
        return []  # renewed before the clock's word reached the log
    del state.leases[event.trial_id]
    if event.attempt >= max_attempts:
        trial.lost = event
    else:
        trial.attempt = event.attempt + 1
        trial.pending.append(event)
    return _settle(state, event.trial_id, trial)


def apply_attempt(state: SchedulerState, event: AttemptFinished) -> list[Event]:
    """The first attempt that finishes is elected, be it a late survivor's."""
    if event.trial_id in state.done:
        return []
    trial = state.trials.setdefault(event.trial_id, TrialState())
    if trial.elected is not None or trial.lost is not None:
        return []
    trial.elected = event
    state.leases.pop(event.trial_id, None)
    return _settle(state, event.trial_id, trial)


def apply_end(state: SchedulerState, event: TrialFinished) -> None:
    """The trial's end is in the log."""
    state.done.add(event.trial_id)
    state.trials.pop(event.trial_id, None)
    state.leases.pop(event.trial_id, None)


def _settle(state: SchedulerState, trial_id: TrialId, trial: TrialState) -> list[Event]:
    """Emit what is due, once the offer is known."""
    if trial.offer is None:
        return []
    outputs: list[Event] = [offer_next_attempt(trial.offer, lapse) for lapse in trial.pending]
    trial.pending = []
    if trial.elected is not None or trial.lost is not None:
        outputs.append(end_trial(trial.offer, trial))
        state.done.add(trial_id)
        del state.trials[trial_id]
    return outputs


def offer_next_attempt(offer: TrialOffered, lapse: LeaseLapsed) -> TrialOffered:
    """The same trial, offered again."""
    attempt = lapse.attempt + 1
    return replace(
        offer,
        event_id=derive_id("TrialOffered", offer.trial_id, str(attempt)),
        occurred_at=max(offer.occurred_at, lapse.occurred_at),
        attempt=attempt,
    )


def end_trial(offer: TrialOffered, trial: TrialState) -> TrialFinished:
    """The trial's one end, from the elected attempt or from the last lapse."""
    source: AttemptFinished | LeaseLapsed | None = trial.elected or trial.lost
    assert source is not None
    facts = trial.elected
    return TrialFinished(
        event_id=derive_id("TrialFinished", offer.trial_id),
        run_id=offer.run_id,
        occurred_at=max(offer.occurred_at, source.occurred_at),
        producer=PRODUCER,
        trial_id=offer.trial_id,
        group_id=offer.group_id,
        task_id=offer.task_id,
        purpose=offer.purpose,
        policy_version=offer.policy_version,
        termination_reason=decide_termination(facts) if facts else "sandbox_lost",
        attempt=source.attempt,
        num_attempts=trial.attempt,
        attempt_event_id=facts.event_id if facts else None,
        reward_event_id=facts.reward_event_id if facts else None,
        # Calls that the log may lack must not be waited for.
        num_calls=facts.num_calls if facts and facts.capture_ok else None,
    )
