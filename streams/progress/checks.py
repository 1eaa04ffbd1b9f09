"""Run-health checks: what was seen in one event against the thresholds. Pure; raising and clearing is in `core`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infra.settings import HealthSection
from schemas.events import FidelitySummary, GroupMember, PolicyLoaded, StepCompleted

#: Reasons for which the infrastructure, not the policy, is to blame.
INFRASTRUCTURE = frozenset({"env_setup_failed", "sandbox_lost", "inference_failed", "capture_broken"})

#: The share of trials lost to infrastructure is taken over this many trials, and not before there are so many.
WINDOW_TRIALS = 200
MIN_TRIALS = 20

#: Tokens of an older version differ by the update itself: per version of lag, bounds are lower by this much.
STALE_ALLOWANCE = 0.1


@dataclass(frozen=True)
class Finding:
    """A check was made: it passes, or it fails."""

    check: str
    subject: str
    ok: bool
    severity: str
    detail: str
    value: float | None = None
    threshold: float | None = None


def check_step(step: StepCompleted, bounds: HealthSection) -> list[Finding]:
    """Fidelity of a learner step. What was not measured is not judged."""
    entry = judged_entry(step)
    if entry is None:
        return []
    lag = max(step.version_before - entry.version, 0) if entry.version >= 0 else 0
    of_version = f"step {step.step}, tokens of version {entry.version}"
    findings = []
    if entry.replay_overlap is not None:
        bound = bounds.min_replay_overlap - STALE_ALLOWANCE * lag
        findings.append(
            Finding(
                check="replay_overlap_low",
                subject="learner",
                ok=entry.replay_overlap >= bound,
                severity="critical",
                detail=f"{of_version}: replayed experts agree {entry.replay_overlap:.4f} with the model's own choice; "
                "the replay does not belong to these tokens: look at how routing rows are aligned",
                value=entry.replay_overlap,
                threshold=bound,
            )
        )
    if entry.pearson is not None:
        bound = bounds.min_pearson - STALE_ALLOWANCE * lag
        findings.append(
            Finding(
                check="rollout_training_mismatch",
                subject="learner",
                ok=entry.pearson >= bound,
                severity="critical",
                detail=f"{of_version}: log-probs of rollout and training correlate {entry.pearson:.5f}; compare "
                "temperature, logprobs_mode, weights and routing of engine and learner",
                value=entry.pearson,
                threshold=bound,
            )
        )
    return findings


def judged_entry(step: StepCompleted) -> FidelitySummary | None:
    """The entry that says most: of the version the step started from, else of the newest version before it."""
    by_version = {entry.version: entry for entry in step.fidelity if entry.num_tokens > 0}
    known = [version for version in by_version if 0 <= version <= step.version_before]
    return by_version[max(known)] if known else by_version.get(-1)


def check_replica(event: PolicyLoaded) -> Finding:
    """A replica that refused a policy version serves no call."""
    return Finding(
        check="replica_fenced",
        subject=event.replica,
        ok=event.ok,
        severity="critical",
        detail=f"replica {event.replica} refused version {event.version} and is fenced: {event.detail}",
        value=event.canary_max_abs_dlogp,
    )


def check_losses(window: Sequence[str], bounds: HealthSection) -> list[Finding]:
    """Share of trials lost to infrastructure. `window`: termination reasons, oldest first."""
    if len(window) < MIN_TRIALS:
        return []
    share = sum(reason in INFRASTRUCTURE for reason in window) / len(window)
    worst = max(sorted(INFRASTRUCTURE), key=window.count)
    return [
        Finding(
            check="setup_failures_high",
            subject="trials",
            ok=share <= bounds.max_setup_failure_share,
            severity="warning",
            detail=f"{share:.0%} of the last {len(window)} trials were lost to infrastructure, most by {worst}; "
            "see the stages of such a trial with `rollstream trace <trial>`",
            value=share,
            threshold=bounds.max_setup_failure_share,
        )
    ]


def slide_window(window: Iterable[str], members: Iterable[GroupMember]) -> list[str]:
    """The window after one more group."""
    return [*window, *(member.termination_reason for member in members)][-WINDOW_TRIALS:]
