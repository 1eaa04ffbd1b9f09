"""The scheduler: offers groups of trials, elects each trial's one end, and ends the run.

Offers are derived: their ids follow from (run, purpose, step, index), so that deciding one again decides the same.
The scheduler also reads its own offers back; what they say counts where a registration changed after the decision.
"""

from __future__ import annotations

from infra.settings import Settings
from schemas.base import Event
from schemas.events import (
    AttemptFinished,
    GroupDropped,
    GroupOffered,
    GroupReady,
    LeaseLapsed,
    LeaseRenewed,
    PolicyLoaded,
    PolicyPublished,
    RunFinished,
    RunStarted,
    StepCompleted,
    TaskRegistered,
    TaskRetired,
    TrialFinished,
    TrialLeased,
    TrialOffered,
)
from schemas.ids import RunId, TaskId, derive_id, make_group_id, make_trial_id
from streams.scheduling import election
from streams.scheduling.ordering import (
    REPLACEMENT_STRIDE,
    group_index,
    replacement_task,
    task_at,
    trial_seed,
)
from streams.scheduling.plan import (
    HELD_OUT_SET,
    MAX_REPLACEMENTS,
    TRAIN_SET,
    Due,
    is_registered,
    is_run_complete,
    next_due,
    tasks_of,
)
from streams.scheduling.state import SchedulerState

PRODUCER = election.PRODUCER


class SchedulingStage:
    """Scope single: one schedule per run. Events of other runs are ignored."""

    name = "scheduler"
    inputs: tuple[str, ...] = ("runs", "tasks", "policy-versions", "offers", "trial-stages", "groups", "steps")
    wanted: frozenset[str] = frozenset(
        {
            *("RunStarted", "TaskRegistered", "TaskRetired", "PolicyPublished", "PolicyLoaded", "GroupOffered"),
            *("TrialOffered", "TrialLeased", "LeaseRenewed", "LeaseLapsed", "AttemptFinished", "TrialFinished"),
            *("GroupReady", "GroupDropped", "StepCompleted"),
        }
    )
    scope = "single"

    def __init__(self, settings: Settings) -> None:
        if settings.schedule.groups_per_step > REPLACEMENT_STRIDE:
            raise ValueError(
                f"schedule.groups_per_step is {settings.schedule.groups_per_step}; "
                f"set it to {REPLACEMENT_STRIDE} or less"
            )
        self._settings = settings
        self._schedule = settings.schedule
        self._run_id = RunId(settings.run.id)

    def initial(self) -> SchedulerState:
        """Nothing is known."""
        return SchedulerState()

    def apply(self, state: SchedulerState, event: Event) -> tuple[SchedulerState, list[Event]]:
        """The next state and the offers, ends of trials and end of the run that became due."""
        if event.run_id != self._run_id:
            return state, []
        if isinstance(event, TrialLeased | LeaseRenewed):
            election.apply_lease(state, event)
            return state, []
        if isinstance(event, LeaseLapsed):
            return state, election.apply_lapse(state, event, self._schedule.max_attempts)
        if isinstance(event, AttemptFinished):
            return state, election.apply_attempt(state, event)
        if isinstance(event, TrialOffered):
            return state, election.apply_offer(state, event)
        if isinstance(event, TrialFinished):
            election.apply_end(state, event)
            return state, []
        self._note(state, event)
        return state, self._advance(state)

    def _note(self, state: SchedulerState, event: Event) -> None:
        """Write down what was seen."""
        match event:
            case RunStarted():
                if all(start.event_id != event.event_id for start in state.starts):
                    state.starts.append(event)
            case TaskRegistered():
                state.tasks[event.task_id] = event
                state.sorted_tasks.clear()
            case TaskRetired():
                state.retired.add(event.task_id)
                state.sorted_tasks.clear()
            case PolicyPublished():
                state.published_at.setdefault(event.version, event.occurred_at)
            case PolicyLoaded(ok=True):
                state.loaded_at.setdefault(event.version, event.occurred_at)
            case GroupOffered():
                state.offered.add(event.group_id)
            case GroupReady() | GroupDropped():
                state.closed_at.setdefault(event.group_id, event.occurred_at)
                if isinstance(event, GroupDropped) and event.purpose == "train":
                    state.dropped.setdefault(event.group_id, event)
            case StepCompleted():
                if event.step + 1 > state.num_steps_done:
                    state.num_steps_done, state.step_done_at = event.step + 1, event.occurred_at

    def _advance(self, state: SchedulerState) -> list[Event]:
        """Offer all that may be offered now."""
        if state.finished or state.num_starts_failed >= len(state.starts) or not is_registered(state):
            return []
        outputs: list[Event] = []
        while (due := next_due(state, self._schedule, self._run_id)) is not None:
            outputs += self._offer_due(state, due)
            if due.purpose == "train":
                state.next_step += 1
        outputs += self._replace_dropped(state)
        if is_run_complete(state, self._schedule):
            state.finished = True
            at = max([state.step_done_at, *state.pass_done_at.values(), min(s.occurred_at for s in state.starts)])
            outputs.append(self._end_run("completed", "all steps and validation passes are complete", state, at))
        return outputs

    def _offer_due(self, state: SchedulerState, due: Due) -> list[Event]:
        tasks = tasks_of(state, TRAIN_SET if due.purpose == "train" else HELD_OUT_SET)
        outputs: list[Event] = []
        for index in range(due.num_groups):
            if due.purpose == "train":
                position = due.step * due.num_groups + index
                task_id, epoch = task_at(self._settings.run.seed, position, tasks)
            else:
                task_id, epoch = tasks[index], 0
            outputs += self._offer_group(state, due, index, task_id, epoch)
        return outputs

    def _replace_dropped(self, state: SchedulerState) -> list[Event]:
        """A replacement for each dropped training group: a step always gets its number of groups."""
        outputs: list[Event] = []
        for dropped in list(state.dropped.values()):
            index = group_index(dropped.group_id) + REPLACEMENT_STRIDE
            if index // REPLACEMENT_STRIDE > MAX_REPLACEMENTS * len(state.starts):
                state.num_starts_failed = len(state.starts)
                detail = (
                    f"the replacements of one group of step {dropped.step} were all dropped, {MAX_REPLACEMENTS} of "
                    f"them (last: {dropped.group_id}, {dropped.reason}); see the termination reasons of its "
                    "trials, mend the cause and resume the run"
                )
                return [*outputs, self._end_run("failed", detail, state, dropped.occurred_at)]
            del state.dropped[dropped.group_id]
            tasks = tasks_of(state, TRAIN_SET)
            task_id = replacement_task(self._settings.run.seed, dropped.step, index, tasks, dropped.task_id)
            seen = [m.max_version for m in dropped.members if m.max_version is not None]
            version = max([dropped.policy_version, *seen])
            due = Due("train", dropped.step, version, self._schedule.groups_per_step, dropped.occurred_at)
            epoch = (dropped.step * due.num_groups + index % REPLACEMENT_STRIDE) // len(tasks)
            outputs += self._offer_group(state, due, index, task_id, epoch)
        return outputs

    def _offer_group(self, state: SchedulerState, due: Due, index: int, task_id: TaskId, epoch: int) -> list[Event]:
        """One group and its trials, unless it was offered already."""
        group_id = make_group_id(self._run_id, due.purpose, due.step, index)
        if group_id in state.offered:
            return []
        state.offered.add(group_id)
        num_trials = self._schedule.group_size if due.purpose == "train" else 1
        group = GroupOffered(
            event_id=derive_id("GroupOffered", group_id),
            run_id=self._run_id,
            occurred_at=due.occurred_at,
            producer=PRODUCER,
            group_id=group_id,
            task_id=task_id,
            task_digest=state.tasks[task_id].digest,
            purpose=due.purpose,
            policy_version=due.policy_version,
            epoch=epoch,
            step=due.step,
            num_trials=num_trials,
            trial_ids=tuple(make_trial_id(group_id, i) for i in range(num_trials)),
        )
        return [group, *(self._offer_trial(state, group, index, i) for i in range(num_trials))]

    def _offer_trial(self, state: SchedulerState, group: GroupOffered, index: int, number: int) -> TrialOffered:
        trial_id = group.trial_ids[number]
        return TrialOffered(
            event_id=derive_id("TrialOffered", trial_id, "1"),
            run_id=self._run_id,
            occurred_at=group.occurred_at,
            producer=PRODUCER,
            trial_id=trial_id,
            group_id=group.group_id,
            task_id=group.task_id,
            task_path=state.tasks[group.task_id].path,
            task_digest=group.task_digest,
            purpose=group.purpose,
            attempt=1,
            policy_version=group.policy_version,
            harness=self._settings.trials.harness,
            seed=trial_seed(self._settings.run.seed, group.purpose, group.step, index, number),
            temperature=self._settings.engine.temperature,
            max_turns=self._settings.trials.max_turns,
        )

    def _end_run(self, outcome: str, detail: str, state: SchedulerState, occurred_at: int) -> RunFinished:
        sources = (self._run_id, outcome, str(state.num_starts_failed), str(state.num_steps_done))
        return RunFinished(
            event_id=derive_id("RunFinished", *sources),
            run_id=self._run_id,
            occurred_at=occurred_at,
            producer=PRODUCER,
            outcome=outcome,
            detail=detail,
            num_steps=state.num_steps_done,
        )
