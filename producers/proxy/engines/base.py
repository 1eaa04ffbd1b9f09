"""What the proxy asks of an inference engine: tokens in, tokens out, and what is known about each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from schemas.events import PolicyPublished


class EngineError(RuntimeError):
    """The engine cannot serve a call: fenced, closed, or failed; says which and what to do."""


class EngineUnavailableError(EngineError):
    """No policy is loaded, or the replica is fenced: nothing can be served now (503)."""


class ContextLengthError(EngineError):
    """The prompt leaves no room for a reply (400)."""

    def __init__(self, prompt_len: int, max_model_len: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, your messages resulted in "
            f"{prompt_len} tokens. Please reduce the length of the messages."
        )
        self.prompt_len = prompt_len
        self.max_model_len = max_model_len


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. `prompt_ids` is the exact context; nothing is added to it."""

    request_id: str
    prompt_ids: Sequence[int]
    temperature: float
    max_tokens: int
    stop_token_ids: frozenset[int]
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    #: Calls with an equal key share a prefix: a hint for caches and for routing to a replica.
    prefix_key: str = ""
    #: Routing rows of context positions before this one are recorded already and need not be reported.
    first_row: int = 0
    #: True: a chunk per decoding step; False: the engine may deliver everything in one chunk.
    stream: bool = False


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """Layout of routing rows: [tokens, num_layers, top_k] expert ids of `dtype` (uint8 | uint16), row-major."""

    num_layers: int
    top_k: int
    num_experts: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return self.num_layers * self.top_k * (1 if self.dtype == "uint8" else 2)


@dataclass(frozen=True, slots=True)
class RoutingRows:
    """Experts of consecutive context tokens, from position `start`, forwarded by policy `version`.

    `valid` has one flag per row; None: all rows were captured.
    """

    start: int
    num_tokens: int
    expert_ids: bytes
    version: int
    valid: tuple[bool, ...] | None = None


@dataclass(slots=True)
class TokenChunk:
    """Newly sampled tokens of one generation, in order, by one policy version.

    `logprobs[i]` is None when the engine did not report it. `finish_reason` (stop | length | aborted) is set on the
    last chunk only.
    """

    ids: list[int]
    logprobs: list[float | None]
    version: int
    routing: list[RoutingRows] = field(default_factory=list)
    finish_reason: str | None = None
    #: raw | processed: whether log-probs are of the distribution before or after temperature and truncation.
    logprobs_mode: str = "processed"
    #: Set on the first chunk.
    queue_ms: float | None = None
    prefill_ms: float | None = None
    cached_prompt_tokens: int | None = None
    #: Set on the last chunk: from the first sampled token to the last.
    decode_ms: float | None = None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of loading a policy. `ok` False: the replica is fenced and `detail` says why."""

    version: int
    ok: bool
    canary_logprobs: tuple[float, ...]
    canary_max_abs_dlogp: float | None
    load_sec: float
    detail: str = ""


class Engine(Protocol):
    """An inference replica. All methods are called from the proxy's event loop."""

    replica: str

    @property
    def version(self) -> int | None:
        """The policy version it serves; None before the first load or while fenced."""

    @property
    def max_model_len(self) -> int:
        """Longest context, tokens."""

    @property
    def routing_shape(self) -> RoutingShape | None:
        """Layout of its routing rows; None when it reports none."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Sample a reply. Closing the iterator cancels the generation.

        Raises ContextLengthError, EngineUnavailableError or EngineError, before or between chunks.
        """

    async def load(self, policy: PolicyPublished) -> LoadResult:
        """Pause, verify digests, load, compare the canary, resume running generations with the new weights."""

    async def pause(self) -> None:
        """Stop between two decoding steps; generations stay."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def close(self) -> None:
        """Abort what runs and free the replica."""
