"""One attempt at one trial: prepare, setup, agent, verify, cleanup. Writes the facts; decides nothing."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from infra.settings import TrialsSection
from producers.tasks.harbor import Task, TaskError
from producers.trials.harnesses.base import ExitFacts, Harness
from producers.trials.pool import SandboxPool
from producers.trials.proxy_client import CaptureFacts, CaptureSession, DuplicateAttemptError, ProxyError, base_url
from producers.trials.sandboxes.bubblewrap import SandboxLostError, TrialProcess, TrialResult
from producers.trials.verifier.diff_filter import FilteredPatch, filter_changes
from producers.trials.verifier.grader import GRADER_ID, Grade, GradeTimeoutError
from producers.trials.verifier.grades import GradeCache
from producers.trials.worktree import BaseTree
from schemas.base import Event
from schemas.events import AttemptFinished, RewardGraded, StageFinished, StageStarted, TrialOffered
from schemas.ids import EventId, make_event_id, now_ms

log = structlog.get_logger()

#: Time the proxy gets to write what is still under way when the harness has ended.
CAPTURE_CLOSE_SEC = 60.0
_MAX_DETAIL = 500


@dataclass(frozen=True)
class Claim:
    """A trial this worker holds."""

    offer: TrialOffered
    lease_id: str
    worker_id: str


@dataclass
class _Facts:
    """What became known, in the order of the stages."""

    setup_ok: bool = False
    sandbox_lost: bool = False
    agent_timed_out: bool = False
    exit_code: int | None = None
    exit: ExitFacts = field(default_factory=lambda: ExitFacts(None, False))
    verifier_timed_out: bool = False
    verifier_ok: bool = False
    capture_ok: bool = False
    capture: CaptureFacts | None = None
    opened: bool = False
    reward_event_id: EventId | None = None
    patch: FilteredPatch | None = None
    notes: list[str] = field(default_factory=list)
    rewards: list[Event] = field(default_factory=list)
    #: The attempt belongs to another claim.
    duplicate: bool = False


class StageFailedError(Exception):
    """A stage ended the attempt; its StageFinished is written."""


class AttemptRunner:
    """Runs attempts. Safe to use from many threads; `emit` must be as well."""

    def __init__(
        self,
        settings: TrialsSection,
        harness: Harness,
        pool: SandboxPool,
        grades: GradeCache,
        proxy_socket: Path,
        emit: Callable[[Event], None],
    ) -> None:
        self._settings, self._harness, self._pool, self._grades = settings, harness, pool, grades
        self._proxy_socket, self._emit = proxy_socket, emit

    def run(self, claim: Claim) -> list[Event]:
        """Run the attempt. Stage events go to `emit`; the grade and AttemptFinished are returned: write them together.

        Does not raise for a trial's sake. Returns nothing when the queue handed the attempt out twice: the claim that
        opened it at the proxy reports it.
        """
        facts = _Facts()
        with contextlib.suppress(StageFailedError):
            task, tree = self._prepare(claim, facts)
            with contextlib.ExitStack() as held:  # the container, where it is the attempt's own
                process, session = self._setup(claim, facts, task, tree, held)
                result = self._agent(claim, facts, process, session)
            self._verify(claim, facts, task, tree, result)
        with contextlib.suppress(StageFailedError), self._stage(claim, facts, "cleanup"):
            pass  # the overlay went with the trial's namespaces; the stage says that nothing is held any more
        return [] if facts.duplicate else [*facts.rewards, self._finished(claim, facts)]

    # -- stages

    def _prepare(self, claim: Claim, facts: _Facts) -> tuple[Task, BaseTree]:
        with self._stage(claim, facts, "prepare"):
            task = self._pool.load_task(claim.offer.task_path, claim.offer.task_digest)
            return task, self._pool.worktrees.ensure(task)

    def _setup(
        self, claim: Claim, facts: _Facts, task: Task, tree: BaseTree, held: contextlib.ExitStack
    ) -> tuple[TrialProcess, CaptureSession]:
        offer, timeout = claim.offer, self._settings.setup_timeout_sec
        with self._stage(claim, facts, "setup"):
            token = secrets.token_urlsafe(24)
            invocation = self._harness.invocation(
                task=task.instruction,
                base_url=base_url(offer.trial_id),
                token=token,
                max_turns=offer.max_turns,
                env=self._pool.layout.env,
            )
            request: dict[str, Any] = {
                "tree": f"trees/{tree.path.name}",
                "listen": True,
                "argv": invocation.argv,
                "env": invocation.env,
                "home_files": invocation.home_files,
            }
            container = held.enter_context(self._pool.agent_container())
            process = container.start_trial(request, collect_changes=True, collect_files=invocation.collect_files)
            try:
                listener = process.wait_started(timeout)
                if listener is None:
                    raise ProxyError("the sandbox gave no listening socket")
                with listener:
                    session = CaptureSession.open(self._proxy_socket, offer, token, listener, timeout)
            except BaseException as exc:
                facts.duplicate = isinstance(exc, DuplicateAttemptError)
                process.abandon()
                raise
            facts.setup_ok = facts.opened = True
            return process, session

    def _agent(self, claim: Claim, facts: _Facts, process: TrialProcess, session: CaptureSession) -> TrialResult:
        try:
            with self._stage(claim, facts, "agent") as stage:
                try:
                    result, facts.agent_timed_out = process.wait_result(self._settings.agent_timeout_sec)
                except SandboxLostError:
                    facts.sandbox_lost = True
                    raise
                stage["peak_memory_bytes"] = result.peak_memory_bytes
                if facts.agent_timed_out:
                    stage["outcome"] = "timeout"
                else:
                    facts.exit_code = result.exit_code
                facts.exit = self._harness.read_exit(result.files)
                if result.exit_code != 0:
                    facts.notes.append(f"exit {result.exit_code}: {result.log_tail.strip()[-_MAX_DETAIL:]}")
            return result
        finally:
            try:
                facts.capture = session.close(CAPTURE_CLOSE_SEC)
                facts.capture_ok = True
            except ProxyError as exc:
                facts.notes.append(str(exc))

    def _verify(self, claim: Claim, facts: _Facts, task: Task, tree: BaseTree, result: TrialResult) -> None:
        with self._stage(claim, facts, "verify") as stage:
            facts.patch = filter_changes(result.changes, tree.read, tree.list_below, tree.top_level, result.truncated)
            facts.notes += [f"dropped {note}" for note in facts.patch.dropped[:5]]
            event_id = make_event_id()
            key = (task.digest, _sha256(facts.patch.patch), self._pool.grader.digest(task))

            def grade() -> Grade:
                assert facts.patch is not None
                timeout = min(self._settings.verify_timeout_sec, task.verifier_timeout_sec)
                return self._pool.grader.grade(task, tree.path.name, facts.patch.patch, timeout)

            try:
                if self._settings.reuse_grades:
                    grade_made, reused_from = self._grades.grade_once(key, event_id, grade)
                else:
                    grade_made, reused_from = grade(), None
            except GradeTimeoutError:
                facts.verifier_timed_out = True
                stage["outcome"] = "timeout"
                raise
            stage["peak_memory_bytes"] = None if reused_from else grade_made.peak_memory_bytes
            facts.verifier_ok, facts.reward_event_id = True, event_id
            facts.notes += [grade_made.detail] if grade_made.detail else []
            facts.rewards.append(_reward(claim, event_id, key, grade_made, reused_from))

    # -- events

    @contextlib.contextmanager
    def _stage(self, claim: Claim, facts: _Facts, stage: str) -> Iterator[dict[str, Any]]:
        """StageStarted and StageFinished around a stage; an error becomes its outcome and StageFailedError."""
        offer = claim.offer
        common: dict[str, Any] = {
            "run_id": offer.run_id,
            "producer": claim.worker_id,
            "trial_id": offer.trial_id,
            "attempt": offer.attempt,
            "stage": stage,
        }
        self._emit(StageStarted(event_id=make_event_id(), occurred_at=now_ms(), **common))
        started = time.perf_counter()
        end: dict[str, Any] = {"outcome": "ok"}
        try:
            yield end
        except Exception as exc:
            if end["outcome"] == "ok":
                end["outcome"] = "failed"
            end |= {"error_class": type(exc).__name__, "detail": str(exc)[:_MAX_DETAIL]}
            facts.notes.append(f"{stage}: {exc}")
            if not isinstance(exc, OSError | RuntimeError | TaskError):
                log.exception("stage failed unexpectedly", trial=offer.trial_id, stage=stage)
            raise StageFailedError(stage) from exc
        finally:
            end["duration_sec"] = time.perf_counter() - started
            self._emit(StageFinished(event_id=make_event_id(), occurred_at=now_ms(), **common, **end))

    def _finished(self, claim: Claim, facts: _Facts) -> AttemptFinished:
        offer, capture = claim.offer, facts.capture
        patch = facts.patch.patch if facts.patch is not None else None
        return AttemptFinished(
            event_id=make_event_id(),
            run_id=offer.run_id,
            occurred_at=now_ms(),
            producer=claim.worker_id,
            trial_id=offer.trial_id,
            attempt=offer.attempt,
            lease_id=claim.lease_id,
            worker_id=claim.worker_id,
            setup_ok=facts.setup_ok,
            sandbox_lost=facts.sandbox_lost,
            agent_timed_out=facts.agent_timed_out,
            agent_exit_code=facts.exit_code,
            agent_exit_status=facts.exit.status,
            max_turns_hit=facts.exit.max_turns_hit,
            verifier_timed_out=facts.verifier_timed_out,
            verifier_ok=facts.verifier_ok,
            capture_ok=facts.capture_ok,
            # A session that was never opened has no calls; one that was lost has an unknown number.
            num_calls=capture.num_calls if capture else (None if facts.opened else 0),
            num_failed_calls=capture.num_failed_calls if capture else None,
            num_sampled_tokens=capture.num_sampled_tokens if capture else None,
            num_parser_failures=capture.num_parser_failures if capture else None,
            context_overflow=capture.context_overflow if capture else False,
            length_stop=capture.length_stop if capture else False,
            reward_event_id=facts.reward_event_id,
            diff=patch,
            diff_sha256=_sha256(patch) if patch is not None else None,
            detail="; ".join(n for n in (facts.exit.detail, *facts.notes) if n)[:2000],
        )


def _reward(
    claim: Claim, event_id: EventId, key: tuple[str, str, str], grade: Grade, reused_from: EventId | None
) -> RewardGraded:
    offer = claim.offer
    return RewardGraded(
        event_id=event_id,
        run_id=offer.run_id,
        occurred_at=now_ms(),
        producer=claim.worker_id,
        trial_id=offer.trial_id,
        attempt=offer.attempt,
        task_id=offer.task_id,
        reward=grade.reward,
        tests=grade.tests,
        grader_id=GRADER_ID,
        grader_digest=key[2],
        grade_attempt=1,
        diff_sha256=key[1],
        task_digest=key[0],
        reused_from=reused_from,
        duration_sec=0.0 if reused_from else grade.duration_sec,
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
