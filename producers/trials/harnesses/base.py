"""What the worker needs to know of a harness."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from infra.settings import Settings


class HarnessError(RuntimeError):
    """A harness cannot be used: names what is missing and the remedy."""


@dataclass(frozen=True)
class Invocation:
    """One start of a harness. Paths are those inside the sandbox."""

    argv: list[str]
    env: dict[str, str]
    #: Files put into the home directory before the start: name -> text.
    home_files: dict[str, str] = field(default_factory=dict)
    #: Files of the home directory to read when it has ended.
    collect_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExitFacts:
    """The harness's own account of its end."""

    status: str | None
    max_turns_hit: bool
    detail: str = ""


class Harness(Protocol):
    """An adapter. Adapters hold no state of a trial."""

    name: str
    #: Module that can be imported once and forked per trial; None: every trial starts the program anew.
    warm_program: str | None

    def invocation(self, *, task: str, base_url: str, token: str, max_turns: int, env: dict[str, str]) -> Invocation:
        """How to start it on `task`. `env`: the sandbox's base environment."""

    def warm_options(self, env: dict[str, str]) -> dict[str, object]:
        """Options of `warm_program.warm`."""

    def read_exit(self, files: dict[str, bytes]) -> ExitFacts:
        """What the collected files say about the end."""


def make_harness(settings: Settings) -> Harness:
    """The adapter of `trials.harness`. Raises HarnessError."""
    if settings.trials.harness == "mini-swe-agent":
        from producers.trials.harnesses.mini_swe_agent import MiniSweAgent

        return MiniSweAgent(settings.trials.harness_config)
    raise HarnessError(f"trials.harness = {settings.trials.harness!r}: unknown; known: mini-swe-agent")
