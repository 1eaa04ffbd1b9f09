"""The admission table: what becomes of a trajectory by the reason its trial ended."""

from __future__ import annotations

from collections.abc import Mapping

RULES = ("keep", "mask", "zero_reward")

#: Version -> termination reason -> rule. A table never changes once released; a new one gets a new version.
TABLES: dict[str, dict[str, str]] = {
    "v1": {
        "agent_completed": "keep",
        "max_turns_reached": "keep",
        "overlong": "keep",
        "agent_crashed": "keep",
        "parser_failed": "zero_reward",
        "agent_timeout": "mask",
        "verifier_timeout": "mask",
        "env_setup_failed": "mask",
        "sandbox_lost": "mask",
        "inference_failed": "mask",
        "no_tokens": "mask",
        "capture_broken": "mask",
    }
}


def make_table(version: str, overrides: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The name under which the table is recorded, and the table. ValueError names the wrong key and what is known."""
    if version not in TABLES:
        raise ValueError(f"admission.table: no table {version!r}; known: {', '.join(sorted(TABLES))}")
    table = dict(TABLES[version])
    for reason, rule in overrides.items():
        if reason not in table:
            known = ", ".join(sorted(table))
            raise ValueError(f"admission.overrides.{reason}: no such termination reason; known: {known}")
        if rule not in RULES:
            raise ValueError(f"admission.overrides.{reason}: no rule {rule!r}; use one of {', '.join(RULES)}")
        table[reason] = rule
    changed = [f"{r}={table[r]}" for r in sorted(overrides) if table[r] != TABLES[version][r]]
    return "+".join([version, *changed]), table
