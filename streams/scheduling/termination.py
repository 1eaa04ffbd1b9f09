"""Why a trial ended: one pure decision from recorded facts, never from exception text.

Read top to bottom, the first row that holds decides:

    the sandbox was not built, or its isolation not verified   env_setup_failed
    the sandbox disappeared while the agent ran                sandbox_lost
    calls are missing from the log                             capture_broken
    the agent hit its wall limit                               agent_timeout
    no token was sampled, calls failed on the engine's side    inference_failed
    no token was sampled                                       no_tokens
    the agent's own outcome (below) is parser_failed           parser_failed
    ... is agent_crashed and calls failed on the engine's side inference_failed
    the verifier hit its wall limit                            verifier_timeout
    the verifier gave no grade                                 env_setup_failed
    otherwise                                                  the agent's own outcome

The agent's own outcome: completed; else overlong when the context was full or the last reply ended at the token
limit; else max_turns_reached when the turn limit stopped it and at least one reply could be parsed; else
parser_failed when a tool call was begun that could not be parsed; else max_turns_reached or agent_crashed.
"""

from __future__ import annotations

from schemas.events import AttemptFinished

TERMINATION_REASONS = (
    "agent_completed",
    "max_turns_reached",
    "overlong",
    "agent_timeout",
    "verifier_timeout",
    "env_setup_failed",
    "sandbox_lost",
    "inference_failed",
    "agent_crashed",
    "parser_failed",
    "no_tokens",
    "capture_broken",
)

#: Words, in lower case, by which harnesses say that they completed.
COMPLETED_WORDS = frozenset({"submitted", "completed", "complete", "success", "finished", "done"})


def decide_termination(facts: AttemptFinished) -> str:
    """The termination reason of an attempt."""
    if not facts.setup_ok:
        return "env_setup_failed"
    if facts.sandbox_lost:
        return "sandbox_lost"
    if not facts.capture_ok or facts.num_calls is None:
        return "capture_broken"
    if facts.agent_timed_out:
        return "agent_timeout"
    if not facts.num_sampled_tokens:
        return "inference_failed" if facts.num_failed_calls else "no_tokens"
    outcome = _agent_outcome(facts)
    if outcome == "parser_failed":
        return outcome  # a failure of the policy, whatever a grade would say
    if outcome == "agent_crashed" and facts.num_failed_calls:
        return "inference_failed"
    if facts.verifier_timed_out:
        return "verifier_timeout"
    if not facts.verifier_ok:
        return "env_setup_failed"
    return outcome


def is_agent_completed(facts: AttemptFinished) -> bool:
    """The harness says that it completed; one that has no word for it says so by exit code 0."""
    if facts.max_turns_hit:
        return False
    if facts.agent_exit_status:
        return facts.agent_exit_status.lower() in COMPLETED_WORDS
    return facts.agent_exit_code == 0


def _agent_outcome(facts: AttemptFinished) -> str:
    if is_agent_completed(facts):
        return "agent_completed"
    if facts.context_overflow or facts.length_stop:
        return "overlong"
    num_unparsed = facts.num_parser_failures or 0
    num_replies = (facts.num_calls or 0) - (facts.num_failed_calls or 0)
    if facts.max_turns_hit and num_unparsed < num_replies:
        return "max_turns_reached"
    if num_unparsed:
        return "parser_failed"
    return "max_turns_reached" if facts.max_turns_hit else "agent_crashed"
