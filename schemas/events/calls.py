"""Model calls and the expert routing behind them: what the capture proxy records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from schemas.base import Event, event
from schemas.ids import CallId, ConversationId, TrialId


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of the sampled ids were made by one policy version."""

    version: Annotated[int, "Policy version"]
    start: Annotated[int, "First sampled token, from 0"]
    end: Annotated[int, "One past the last"]


@event(topic="model-calls", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class ConversationOpened(Event):
    """The proxy began a conversation or a new segment: a prompt that does not continue recorded tokens."""

    trial_id: Annotated[TrialId, "The trial"]
    attempt: Annotated[int, "The attempt"]
    conversation_id: Annotated[ConversationId, "The conversation"]
    kind: Annotated[str, "main | subagent | title | compaction | unknown"]
    reason: Annotated[str, "Why the request was not a continuation"]
    parent_conversation_id: Annotated[ConversationId | None, "The conversation it forked from"] = None


@event(topic="model-calls", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class ModelCallCompleted(Event):
    """One finished model call: what the engine read and what it sampled, exactly.

    Full context of the call = first `shared_prefix_len` tokens of (parent's full context + parent's sampled ids),
    then `prompt_delta_ids`; it has `prompt_len` tokens. A call without a parent has the whole prompt as its delta.
    """

    trial_id: Annotated[TrialId, "The trial"]
    attempt: Annotated[int, "The attempt"]
    conversation_id: Annotated[ConversationId, "The conversation"]
    call_id: Annotated[CallId, "The call"]
    call_index: Annotated[int, "Number of the call within the attempt, from 0, without gaps"]
    parent_call_id: Annotated[CallId | None, "The call whose tokens this prompt continues"]
    shared_prefix_len: Annotated[int, "Tokens shared with the parent's context and reply"]
    prompt_delta_ids: Annotated[bytes, "New prompt tokens: int32, little endian"]
    prompt_len: Annotated[int, "Tokens of the whole prompt"]
    sampled_ids: Annotated[bytes, "Tokens the policy sampled, stop token included: int32, little endian"]
    logprobs: Annotated[bytes, "Log-probability of each sampled token: float32, little endian"]
    logprob_valid: Annotated[bytes, "Bit i (least significant first) is 1 when logprobs[i] was reported"]
    logprobs_mode: Annotated[str, "raw | processed: before or after temperature and truncation"]
    temperature: Annotated[float, "Sampling temperature"]
    top_p: Annotated[float, "Nucleus bound; 1 = off"]
    top_k: Annotated[int, "Top-k bound; 0 = off"]
    max_tokens: Annotated[int, "Limit on sampled tokens"]
    seed: Annotated[int | None, "Seed of the request, when one was used"]
    version_spans: Annotated[tuple[VersionSpan, ...], "Which policy version sampled which tokens"]
    finish_reason: Annotated[str, "stop | length | tool_calls | aborted"]
    request_json: Annotated[str, "Canonical JSON of the request; of `messages` only those that are new"]
    num_messages: Annotated[int, "Messages in the whole request"]
    response_json: Annotated[str, "The assistant message as it was returned"]
    parser_outcome: Annotated[str, "none | ok | failed: what became of a tool call in the reply"]
    wire_format: Annotated[str, "chat | responses | messages"]
    streamed: Annotated[bool, "Returned as a stream"]
    num_retries: Annotated[int, "Engine attempts before this one succeeded"]
    engine_replica: Annotated[str, "Which engine replica served it"]
    queue_ms: Annotated[float | None, "Time in the engine's queue"]
    prefill_ms: Annotated[float | None, "Time to the first token after the queue"]
    decode_ms: Annotated[float | None, "Time from the first to the last token"]
    cached_prompt_tokens: Annotated[int | None, "Prompt tokens served from the engine's prefix cache"] = None


@event(topic="model-calls", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class ModelCallFailed(Event):
    """A model call that did not end in a reply; tokens sampled before the failure are kept here, and not trained."""

    trial_id: Annotated[TrialId, "The trial"]
    attempt: Annotated[int, "The attempt"]
    conversation_id: Annotated[ConversationId | None, "The conversation, when it was known"]
    call_id: Annotated[CallId, "The call"]
    call_index: Annotated[int, "Number of the call within the attempt, from 0, without gaps"]
    http_status: Annotated[int, "Status answered to the harness; 499 when the harness hung up"]
    error_class: Annotated[
        str, "bad_request | context_length | engine_error | client_disconnected | timeout | overloaded"
    ]
    detail: Annotated[str, "What was wrong"]
    request_json: Annotated[str, "Canonical JSON of the request; empty when it could not be parsed"] = ""
    sampled_ids: Annotated[bytes | None, "Tokens sampled before the failure: int32, little endian"] = None
    wire_format: Annotated[str, "chat | responses | messages"] = "chat"


@event(topic="routing", key="trial_id")
@dataclass(frozen=True, kw_only=True)
class RoutingRecorded(Event):
    """Experts that the model chose for tokens of one call's full context (prompt, then sampled tokens).

    Row i of the arrays is context token `token_start + i`. A call records the tokens it forwarded itself; tokens
    of its prefix that were forwarded by an earlier call are recorded there. Long calls are split into chunks.
    """

    trial_id: Annotated[TrialId, "The trial"]
    attempt: Annotated[int, "The attempt"]
    call_id: Annotated[CallId, "The call that forwarded the tokens"]
    chunk_index: Annotated[int, "Chunk of this call, from 0"]
    num_chunks: Annotated[int, "Chunks of this call"]
    token_start: Annotated[int, "Position of the first row in the call's full context"]
    num_tokens: Annotated[int, "Rows"]
    num_layers: Annotated[int, "MoE layers, in model order"]
    top_k: Annotated[int, "Experts per token"]
    num_experts: Annotated[int, "Experts per layer"]
    dtype: Annotated[str, "uint8 | uint16 (little endian)"]
    expert_ids: Annotated[bytes, "Expert ids, [num_tokens, num_layers, top_k], row-major"]
    valid: Annotated[bytes, "Bit i (least significant first) is 1 when row i was captured"]
    version_spans: Annotated[tuple[VersionSpan, ...], "Which policy version forwarded which rows"]
