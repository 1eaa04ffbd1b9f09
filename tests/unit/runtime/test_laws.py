"""The law functions hold for a lawful stage and catch each way of breaking them."""

from __future__ import annotations

import pytest

from schemas.base import Event
from tests import laws
from tests.unit.runtime.stages import JoinStage, State, make_events

EVENTS = make_events(range(12))


class Impatient(JoinStage):
    """Emits for whichever fact comes second, named after it: depends on order."""

    def apply(self, state: State, event: Event) -> tuple[State, list[Event]]:
        state, outputs = super().apply(state, event)
        return state, [out for out in outputs if type(event).__name__ == "LeaseRenewed"]


class Opinionated(JoinStage):
    """Emits for the rest of its life only if a renewal was the first thing it ever saw."""

    def apply(self, state: State, event: Event) -> tuple[State, list[Event]]:
        state.setdefault("first", {type(event).__name__: event})
        state, outputs = super().apply(state, event)
        return state, outputs if "LeaseRenewed" in state["first"] else []


class Forgetful(JoinStage):
    """Emits again when a fact is repeated."""

    def apply(self, state: State, event: Event) -> tuple[State, list[Event]]:
        state, outputs = super().apply(state, event)
        facts = state[event.key]
        facts.pop("done", None)
        return state, outputs


@pytest.mark.parametrize("scope", ["partition", "single"])
def test_lawful_stage(scope: str) -> None:
    laws.check_laws(lambda: JoinStage(scope), EVENTS)


def test_order_law_catches_dependence_on_order() -> None:
    with pytest.raises(AssertionError, match="outputs missing"):
        laws.check_order_and_repeats(Impatient, EVENTS)


def test_order_law_catches_repeated_outputs() -> None:
    with pytest.raises(AssertionError, match="more than once"):
        laws.check_order_and_repeats(Forgetful, EVENTS)


def test_replay_law_catches_state_that_depends_on_order() -> None:
    with pytest.raises(AssertionError, match="restored after"):
        laws.check_replay_equals_live(lambda: Opinionated("single"), EVENTS, seed=1)
