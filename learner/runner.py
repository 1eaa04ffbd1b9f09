"""The learner's loop: read groups, train steps, publish policies, each step committed exactly once.

A step is committed by one Kafka transaction that holds StepCompleted, PolicyPublished and the offsets. Before it, the
checkpoint and the policy directory are written under their final names; without the transaction they do not count
and are thrown away at the next start. So a crash at any point repeats the step from the last committed checkpoint,
with the same groups, and gives the same bits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass

import structlog
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge

from infra.kafka import KafkaUnavailableError, headers_of, make_codec
from infra.paths import checkpoint_dir, checkpoints_dir, policies_dir, policy_dir
from infra.settings import Settings
from learner.backends import Backend, make_backend
from learner.checkpoint import Checkpoint, Progress, prune_checkpoints, write_checkpoint
from learner.consumption import INPUTS, WANTED, GroupBuffer, ReadyGroup, TopicPart
from learner.publish import check_starting_policy, prune_policies, publish_policy
from learner.recovery import discard_leftovers, load_run, only_writer, read_history
from learner.trainer import StepFigures, Trainer, make_loss_config
from schemas.base import Event
from schemas.codec import CodecError, UnknownSchemaError
from schemas.events import PolicyPublished, StepCompleted
from schemas.events.training import SourceOffset, StepTiming
from schemas.ids import GroupId, RunId, TrialId, make_event_id, now_ms
from streams.runtime.kafka_log import KafkaLog
from streams.runtime.log import AbortedError, Faults, LogLostError, Outgoing, ignore_faults
from streams.runtime.metrics import REGISTRY, LoopMetrics
from streams.runtime.step import Record, make_dead_letter

log = structlog.get_logger()

SERVICE = "learner"

#: Records of one fetch, and how long an idle loop waits for the first.
MAX_RECORDS, IDLE_WAIT_SEC = 2000, 0.2

#: How often a learner that has nothing to train says what it is waiting for.
SAY_WAITING_SEC = 30.0

STEPS = Gauge("rollstream_learner_steps", "Steps committed", registry=REGISTRY)
WAITING = Gauge("rollstream_learner_waiting_groups", "Groups read and not trained yet", registry=REGISTRY)
TOKENS = PrometheusCounter(
    "rollstream_learner_tokens", "Trained tokens by what became of them", ["kind"], registry=REGISTRY
)
STEP_SEC = Gauge("rollstream_learner_step_seconds", "Wall time of the last step by phase", ["phase"], registry=REGISTRY)


@dataclass
class _State:
    """A run in hand."""

    num_steps: int
    version: int
    backend: Backend
    trainer: Trainer
    buffer: GroupBuffer
    waiting_since: float


def _outgoing(codec_value: bytes, event: Event) -> Outgoing:
    return Outgoing(event.TOPIC, event.key.encode(), codec_value, tuple(headers_of(event)))


class LearnerRun:
    """One learner on one run. `faults` is called at named points of a step (tests crash there)."""

    def __init__(self, settings: Settings, instance: int, faults: Faults = ignore_faults) -> None:
        """Raises LossConfigError on a [train] setting that the objective does not know."""
        make_loss_config(settings.train)
        self._settings, self._faults = settings, faults
        self._run_id = RunId(settings.run.id)
        self._producer_name = f"{SERVICE}/{instance}"
        self._codec = make_codec(settings)
        self._log = KafkaLog(settings, instance)
        self._metrics = LoopMetrics(SERVICE, instance)
        self.ready = self._was_ready = False

    # -- the loop

    def run(self, stop: threading.Event) -> None:
        """Train until `stop` is set. An outage of Kafka is waited out; what it interrupted is repeated."""
        while not stop.is_set():
            try:
                self._log.open(SERVICE, INPUTS, "single", lambda _: None, stop)
                with only_writer(checkpoints_dir(self._settings), stop):
                    self._run_connected(stop)
            except (LogLostError, KafkaUnavailableError) as exc:
                if isinstance(exc, KafkaUnavailableError) and not self._was_ready:
                    raise  # nothing to reach at the start: say so and end
                log.warning("log_lost", detail=str(exc), remedy="connecting again from the last committed step")
                stop.wait(1.0)
            finally:
                self.ready = False
                self._log.close()

    def _run_connected(self, stop: threading.Event) -> None:
        if stop.is_set():
            return
        for schema in self._log.writer_schemas():
            self._codec.add_schema(schema)
        state = self._recover()
        self.ready = self._was_ready = True
        said = 0.0
        while not stop.is_set():
            records = self._log.fetch(MAX_RECORDS, IDLE_WAIT_SEC)
            self._take_in(state, records)
            WAITING.set(state.buffer.num_waiting_groups)
            if state.num_steps >= self._settings.schedule.num_steps:
                continue
            groups = state.buffer.choose_groups(state.num_steps, self._settings.schedule.groups_per_step)
            if groups is not None:
                self._step(state, groups, stop)
            elif time.monotonic() - max(said, state.waiting_since) > SAY_WAITING_SEC:
                said = time.monotonic()
                wait = state.buffer.describe_wait(state.num_steps, self._settings.schedule.groups_per_step)
                log.info("learner_waits", detail=wait, seconds=round(said - state.waiting_since))

    def _take_in(self, state: _State, records: list[Record]) -> None:
        seen: Counter[str] = Counter()
        for record in records:
            part = (record.topic, record.partition)
            seen[record.topic] += 1
            kind = record.event_type
            if record.value is None or (kind is not None and kind not in WANTED):
                state.buffer.pass_over(part, record.offset)
                continue
            try:
                event = self._codec.decode(record.value)
            except UnknownSchemaError:
                raise  # the writer is newer: stop before skipping what a newer version would read
            except CodecError as exc:
                state.buffer.pass_over(part, record.offset)
                self._write([make_dead_letter(SERVICE, record, exc)], {})
                self._metrics.dead_letters.inc()
                continue
            state.buffer.apply(event, part, record.offset)
        for topic, num in seen.items():
            self._metrics.count_in(topic, num)

    # -- starting

    def _recover(self) -> _State:
        """The run as its last committed transaction left it; a new run publishes version 0 first."""
        history = read_history(self._settings)
        discarded = discard_leftovers(self._settings, history)
        start = history.start or self._publish_start()
        backend, progress = load_run(self._settings, start, history.last)
        offsets: dict[TopicPart, int] = {(t, p): o for t, p, o in progress.next_offsets}
        self._log.resume({part: offsets.get(part) for part in self._log.committed([0])})
        trained = [GroupId(g) for g in progress.closed_groups] + list(history.trained_groups)
        buffer = GroupBuffer(
            self._run_id,
            needs_routing=self._settings.train.routing_replay and self._settings.engine.record_routing,
            next_offsets=offsets,
            closed_groups=trained,
            closed_trials=[TrialId(t) for t in progress.closed_trials],
        )
        trainer = Trainer(backend, self._settings.train, self._settings.schedule)
        log.info(
            "learner_ready",
            run=self._run_id,
            num_steps=progress.num_steps,
            version=progress.version,
            discarded=[p.name for p in discarded],
        )
        STEPS.set(progress.num_steps)
        return _State(progress.num_steps, progress.version, backend, trainer, buffer, time.monotonic())

    def _publish_start(self) -> PolicyPublished:
        source = check_starting_policy(self._settings.policy.path)
        event = publish_policy(
            policy_dir(self._settings, 0),
            make_backend(self._settings.train, source, None),
            source=source,
            run_id=self._run_id,
            version=0,
            step=0,
            dtype=self._settings.train.dtype,
            producer=self._producer_name,
        )
        self._faults("after_start_files")
        self._write([event], {})
        log.info("policy_published", run=self._run_id, version=0, path=event.path)
        return event

    # -- a step

    def _step(self, state: _State, groups: list[ReadyGroup], stop: threading.Event) -> None:
        began = time.monotonic()
        figures = state.trainer.train_step(groups, state.num_steps, state.version)
        if figures.num_unreported_tokens:
            log.warning("logprobs_missing", step=state.num_steps, num_tokens=figures.num_unreported_tokens)
        if not figures.grad_norm < float("inf"):
            log.error("gradient_not_finite", step=state.num_steps, remedy="the update was skipped; lower train.lr")
        state.buffer.consume(groups)
        saving = time.monotonic()
        progress = Progress(
            run_id=self._run_id,
            num_steps=state.num_steps + 1,
            version=state.version + 1,
            next_offsets=tuple((t, p, o) for (t, p), o in sorted(state.buffer.next_offsets().items())),
            closed_groups=state.buffer.closed_groups,
            closed_trials=state.buffer.closed_trials,
        )
        path = checkpoint_dir(self._settings, progress.num_steps)
        checkpoint = Checkpoint(progress, state.backend.weights(), state.backend.optimizer_state())
        digest = write_checkpoint(path, checkpoint)
        self._faults("after_checkpoint")
        published = publish_policy(
            policy_dir(self._settings, progress.version),
            state.backend,
            source=policy_dir(self._settings, 0),
            run_id=self._run_id,
            version=progress.version,
            step=progress.num_steps,
            dtype=self._settings.train.dtype,
            producer=self._producer_name,
        )
        self._faults("after_publish_files")
        ended = time.monotonic()
        timing = StepTiming(
            wait_sec=began - state.waiting_since,
            forward_backward_sec=figures.forward_backward_sec,
            optimizer_sec=figures.optimizer_sec,
            checkpoint_sec=ended - saving,
            total_sec=ended - state.waiting_since,
        )
        completed = self._completed(progress, groups, figures, timing, str(path), digest)
        self._write([completed, published], {(t, p): o for t, p, o in progress.next_offsets}, stop)
        state.num_steps, state.version, state.waiting_since = progress.num_steps, progress.version, time.monotonic()
        self._after_commit(completed)

    def _completed(
        self,
        progress: Progress,
        groups: list[ReadyGroup],
        figures: StepFigures,
        timing: StepTiming,
        path: str,
        digest: str,
    ) -> StepCompleted:
        at = now_ms()
        return StepCompleted(
            event_id=make_event_id(at),
            run_id=self._run_id,
            occurred_at=at,
            producer=self._producer_name,
            step=progress.num_steps - 1,
            version_before=progress.version - 1,
            version_after=progress.version,
            group_ids=tuple(g.event.group_id for g in groups),
            num_informative_groups=figures.num_informative_groups,
            num_trajectories=figures.num_trajectories,
            num_tokens=figures.num_tokens,
            num_stale_tokens=figures.num_stale_tokens,
            reward_mean=figures.reward_mean,
            learning_rate=figures.learning_rate,
            grad_norm=figures.grad_norm,
            algorithm=self._settings.train.algorithm,
            loss=figures.loss,
            fidelity=figures.fidelity,
            timing=timing,
            checkpoint_path=path,
            checkpoint_sha256=digest,
            next_offsets=tuple(SourceOffset(topic=t, partition=p, offset=o) for t, p, o in progress.next_offsets),
        )

    def _write(self, events: list[Event], offsets: dict[TopicPart, int], stop: threading.Event | None = None) -> None:
        """One transaction. An aborted one is tried again: what it holds is still what must be written."""
        batch = [_outgoing(self._codec.encode(e), e) for e in events]
        while True:
            try:
                self._log.commit(batch, offsets, self._faults)
                break
            except AbortedError as exc:
                self._metrics.aborted.inc()
                log.warning("transaction_aborted", detail=str(exc), remedy="trying again")
                if stop is not None and stop.wait(0.2):
                    raise LogLostError("stopped while the step could not be committed; it will be repeated") from exc
        self._metrics.committed.inc()
        for event in events:
            self._metrics.count_out(event.TOPIC)

    def _after_commit(self, completed: StepCompleted) -> None:
        num_steps, version = completed.step + 1, completed.version_after
        prune_checkpoints(checkpoints_dir(self._settings), num_steps, self._settings.train.keep_checkpoints)
        prune_policies(policies_dir(self._settings), version)
        STEPS.set(num_steps)
        TOKENS.labels("trained").inc(completed.num_tokens)
        TOKENS.labels("stale").inc(completed.num_stale_tokens)
        for phase in ("wait", "forward_backward", "optimizer", "checkpoint", "total"):
            STEP_SEC.labels(phase).set(getattr(completed.timing, f"{phase}_sec"))
        lag: Counter[str] = Counter()
        for (topic, _), num in self._log.lag().items():
            lag[topic] += num or 0  # None: not known yet
        for topic, num in lag.items():
            self._metrics.set_lag(topic, num)
        overall = completed.fidelity[0]
        log.info(
            "step_completed",
            step=completed.step,
            version=version,
            groups=len(completed.group_ids),
            informative=completed.num_informative_groups,
            reward_mean=round(completed.reward_mean, 4),
            loss=round(completed.loss.loss, 6),
            grad_norm=round(completed.grad_norm, 4),
            mean_abs_dlogp=overall.mean_abs_dlogp,
            replay_overlap=overall.replay_overlap,
            seconds=round(completed.timing.total_sec - completed.timing.wait_sec, 3),
        )
