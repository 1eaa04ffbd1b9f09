"""Live progress and run health: a fold that can be repeated.

Every fact is kept under its own id, so applying an event twice changes nothing; alerts have ids made from the event
that led to them. That suits a service that reads at least once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from infra.settings import Settings
from schemas.base import Event
from schemas.events import (
    AlertCleared,
    AlertRaised,
    GroupDropped,
    GroupOffered,
    GroupReady,
    PolicyLoaded,
    PolicyPublished,
    RunFinished,
    RunStarted,
    StepCompleted,
    TrajectoryAdmitted,
    TrajectoryRejected,
)
from schemas.ids import EventId, GroupId, RunId, TrialId, derive_id
from streams.progress.checks import Finding, check_losses, check_replica, check_step, slide_window

PRODUCER = "progress"

#: Termination reasons that are shown as set-up failures.
SETUP_FAILURES = frozenset({"env_setup_failed"})


@dataclass(frozen=True)
class TrialLine:
    """What progress keeps of a trial that ended."""

    group_id: GroupId
    reason: str
    reward: float | None
    num_tokens: int


@dataclass
class ProgressState:
    """State of one run."""

    name: str = ""
    started_at: int = 0
    outcome: str | None = None
    newest_at: int = 0
    offers: dict[GroupId, GroupOffered] = field(default_factory=dict)
    trials: dict[TrialId, TrialLine] = field(default_factory=dict)
    closed: dict[GroupId, str] = field(default_factory=dict)
    steps: dict[int, StepCompleted] = field(default_factory=dict)
    version: int | None = None
    served: dict[str, int] = field(default_factory=dict)
    #: Health: events that were judged, the window of ends, and the alerts that are raised by (check, subject).
    judged: set[EventId] = field(default_factory=set)
    ends: list[str] = field(default_factory=list)
    alerts: dict[tuple[str, str], AlertRaised] = field(default_factory=dict)


class ProgressStage:
    """Scope single; reads one run."""

    name = "progress"
    inputs: tuple[str, ...] = ("runs", "offers", "trajectories", "groups", "steps", "policy-versions")
    wanted: frozenset[str] = frozenset(
        {
            *("RunStarted", "RunFinished", "GroupOffered", "TrajectoryAdmitted", "TrajectoryRejected"),
            *("GroupReady", "GroupDropped", "StepCompleted", "PolicyPublished", "PolicyLoaded"),
        }
    )
    scope = "single"

    def __init__(self, settings: Settings) -> None:
        self._run_id = RunId(settings.run.id)
        self._health = settings.health

    def initial(self) -> ProgressState:
        """Nothing happened."""
        return ProgressState()

    def apply(self, state: ProgressState, event: Event) -> tuple[ProgressState, list[Event]]:
        """The next state and the alerts that were raised or cleared."""
        if event.run_id != self._run_id:
            return state, []
        state.newest_at = max(state.newest_at, event.occurred_at)
        note_progress(state, event)
        if not isinstance(event, StepCompleted | PolicyLoaded | GroupReady | GroupDropped):
            return state, []
        if event.event_id in state.judged:
            return state, []
        state.judged.add(event.event_id)
        if isinstance(event, StepCompleted):
            findings = check_step(event, self._health)
        elif isinstance(event, PolicyLoaded):
            findings = [check_replica(event)]
        else:
            state.ends = slide_window(state.ends, event.members)
            findings = check_losses(state.ends, self._health)
        return state, [alert for finding in findings for alert in judge(state, finding, event)]


def judge(state: ProgressState, finding: Finding, source: Event) -> list[Event]:
    """Raise an alert when a check begins to fail; clear it when it passes again."""
    place = (finding.check, finding.subject)
    raised = state.alerts.get(place)
    if finding.ok == (raised is None):
        return []
    kind = "AlertCleared" if finding.ok else "AlertRaised"
    common: dict[str, Any] = {
        "event_id": derive_id(kind, *place, source.event_id),
        "run_id": source.run_id,
        "occurred_at": source.occurred_at,
        "producer": PRODUCER,
        "check": finding.check,
        "subject": finding.subject,
    }
    if raised is not None:
        del state.alerts[place]
        return [AlertCleared(**common, raised_event_id=raised.event_id)]
    alert = AlertRaised(
        **common, severity=finding.severity, detail=finding.detail, value=finding.value, threshold=finding.threshold
    )
    state.alerts[place] = alert
    return [alert]


def note_progress(state: ProgressState, event: Event) -> None:
    """Write down what the event says, under its own id."""
    match event:
        case RunStarted():
            state.name = event.name
            state.started_at = min(state.started_at or event.occurred_at, event.occurred_at)
            state.outcome = None
        case RunFinished():
            state.outcome = event.outcome
        case GroupOffered():
            state.offers[event.group_id] = event
        case TrajectoryAdmitted():
            state.trials[event.trial_id] = TrialLine(
                event.group_id, event.termination_reason, event.reward, event.num_sampled_tokens
            )
        case TrajectoryRejected():
            state.trials[event.trial_id] = TrialLine(
                event.group_id, event.termination_reason, None, event.num_sampled_tokens
            )
        case GroupReady():
            state.closed[event.group_id] = "ready"
        case GroupDropped():
            state.closed[event.group_id] = event.reason
        case StepCompleted():
            state.steps[event.step] = event
        case PolicyPublished():
            state.version = max(state.version or 0, event.version)
        case PolicyLoaded(ok=True):
            state.served[event.replica] = event.version


@dataclass
class PassLine:
    """Trials of one purpose and step."""

    num_offered: int = 0
    num_finished: int = 0
    num_setup_failures: int = 0
    num_admitted: int = 0
    reward_sum: float = 0.0


def sum_passes(state: ProgressState) -> dict[tuple[str, int], PassLine]:
    """(purpose, step) -> its trials; the denominator is what was offered."""
    lines: dict[tuple[str, int], PassLine] = {}
    for offer in state.offers.values():
        lines.setdefault((offer.purpose, offer.step), PassLine()).num_offered += offer.num_trials
    for trial in state.trials.values():
        offered = state.offers.get(trial.group_id)
        if offered is None:
            continue
        line = lines[offered.purpose, offered.step]
        line.num_finished += 1
        line.num_setup_failures += trial.reason in SETUP_FAILURES
        if trial.reward is not None:
            line.num_admitted += 1
            line.reward_sum += trial.reward
    return lines


def make_snapshot(state: ProgressState, settings: Settings) -> dict[str, Any]:
    """The state as plain JSON for a live table. Times are milliseconds since the Unix epoch."""
    lines = sum_passes(state)
    opened = [key for key, line in lines.items() if line.num_finished < line.num_offered]
    current = min(opened, key=lambda key: (key[1], key[0] == "train")) if opened else None
    return {
        "run_id": settings.run.id,
        "name": state.name,
        "state": state.outcome or "running",
        "started_at": state.started_at,
        "newest_event_at": state.newest_at,
        "headline": make_headline(lines[current]) if current else "no trial is open",
        "current": {"purpose": current[0], "step": current[1], **vars(lines[current])} if current else None,
        "num_steps_done": len(state.steps),
        "num_steps": settings.schedule.num_steps,
        "version": state.version,
        "served": dict(state.served),
        "trials": {
            "offered": sum(line.num_offered for line in lines.values()),
            "finished": len(state.trials),
            "by_reason": dict(Counter(trial.reason for trial in state.trials.values())),
        },
        "groups": {"offered": len(state.offers), **Counter(state.closed.values())},
        "tokens": {
            "sampled": sum(trial.num_tokens for trial in state.trials.values()),
            "trained": sum(step.num_tokens for step in state.steps.values()),
        },
        "solve_rates": [
            {
                "purpose": purpose,
                "step": step,
                "trials": line.num_offered,
                "finished": line.num_finished,
                "solve_rate": line.reward_sum / line.num_offered,
            }
            for (purpose, step), line in sorted(lines.items(), key=lambda item: (item[0][1], item[0][0] == "train"))
        ],
        "alerts": [
            {"check": alert.check, "subject": alert.subject, "severity": alert.severity, "detail": alert.detail}
            for alert in state.alerts.values()
        ],
    }


def make_headline(line: PassLine) -> str:
    """One line: "234/512 trials, 12 setup failures"."""
    failures = f", {line.num_setup_failures} setup failures" if line.num_setup_failures else ""
    return f"{line.num_finished}/{line.num_offered} trials{failures}"
