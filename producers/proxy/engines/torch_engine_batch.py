"""The running batch of the torch engine: which sequences are decoded together, and what each has sampled."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable

import torch

from producers.proxy.engines.base import GenerateRequest, RoutingRows, TokenChunk
from producers.proxy.engines.torch_engine_cache import BatchCache
from producers.proxy.engines.torch_engine_model import LoadedModel, Prefilled
from producers.proxy.engines.torch_engine_sampling import Sampler, sample

#: Tokens of one prefill, padding included: longer queues of prompts are taken in turns with decoding steps.
PREFILL_TOKENS = 4096

#: Memory for prefilled prompts that may be asked again (the trials of a group share theirs).
PROMPT_CACHE_BYTES = 64 * 2**20


class Generation:
    """One generation."""

    def __init__(self, request: GenerateRequest, max_model_len: int) -> None:
        self.request = request
        self.limit = min(request.max_tokens, max_model_len - len(request.prompt_ids))
        self.sampler = Sampler(request.temperature, request.top_p, request.top_k, request.seed)
        self.context = array("i", request.prompt_ids)
        self.num_sampled = 0
        self.outbox: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue()
        self.cancelled = False
        self.finish_reason: str | None = None
        #: Context positions [0, routed) have been reported.
        self.routed = request.first_row
        self.cached_prompt_tokens = 0
        self._queued_at = time.perf_counter()
        self.prefill_started_at: float | None = None
        self._first_at: float | None = None
        self._chunk = TokenChunk([], [], -1)
        self._opened = False

    def add_rows(self, start: int, rows: bytes, row_bytes: int, version: int) -> None:
        """Routing rows from context position `start`; positions reported before are left out."""
        skip = max(0, self.routed - start)
        rows = rows[skip * row_bytes :]
        num = len(rows) // row_bytes
        if not num:
            return
        at = start + skip
        last = self._chunk.routing[-1] if self._chunk.routing else None
        if last is not None and last.version == version and last.start + last.num_tokens == at:
            joined = RoutingRows(last.start, last.num_tokens + num, last.expert_ids + rows, version)
            self._chunk.routing[-1] = joined
        else:
            self._chunk.routing.append(RoutingRows(at, num, rows, version))
        self.routed = at + num

    def take(self, token: int, logprob: float, version: int) -> list[TokenChunk]:
        """Add a sampled token; returns what is to be delivered now."""
        out = []
        if self._chunk.ids and self._chunk.version != version:
            # Tokens of two versions never share a chunk; the rows that came for this token stay with it.
            out.append(self._cut())
        now = time.perf_counter()
        if self._first_at is None:
            self._first_at = now
        self._chunk.ids.append(token)
        self._chunk.logprobs.append(logprob)
        self._chunk.version = version
        self.context.append(token)
        self.num_sampled += 1
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif self.num_sampled >= self.limit:
            self.finish_reason = "length"
        if self.finish_reason is not None or self.request.stream:
            out.append(self._cut())
            if self.finish_reason is not None:
                out[-1].finish_reason = self.finish_reason
                out[-1].decode_ms = (now - self._first_at) * 1000
        return out

    def _cut(self) -> TokenChunk:
        chunk, self._chunk = self._chunk, TokenChunk([], [], -1)
        chunk.logprobs_mode = self.sampler.logprobs_mode
        if not self._opened and self.prefill_started_at is not None and self._first_at is not None:
            self._opened = True
            chunk.queue_ms = (self.prefill_started_at - self._queued_at) * 1000
            chunk.prefill_ms = (self._first_at - self.prefill_started_at) * 1000
            chunk.cached_prompt_tokens = self.cached_prompt_tokens
        return chunk


Deliver = Callable[[list[tuple[Generation, TokenChunk | Exception]]], None]


class PromptCache:
    """Least recently used prefills by exact prompt, within a memory budget; valid for one set of weights."""

    def __init__(self, budget: int = PROMPT_CACHE_BYTES) -> None:
        self._budget = budget
        self._held = 0
        self._entries: OrderedDict[bytes, Prefilled] = OrderedDict()

    def get(self, key: bytes) -> Prefilled | None:
        """The prefill of an equal prompt."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, value: Prefilled) -> None:
        """Keep a prefill; the longest unused ones make room."""
        if key in self._entries or value.num_bytes > self._budget:
            return
        self._entries[key] = value
        self._held += value.num_bytes
        while self._held > self._budget:
            _, old = self._entries.popitem(last=False)
            self._held -= old.num_bytes

    def clear(self) -> None:
        """Forget all: the weights changed."""
        self._entries.clear()
        self._held = 0


class Batch:
    """Generation i is row i of the cache. Used by the engine's thread only."""

    def __init__(self, max_batch: int, deliver: Deliver) -> None:
        self._max_batch = max_batch
        self._deliver = deliver
        self._active: list[Generation] = []
        self._joining: list[Generation] = []
        self._cache = BatchCache()
        self._prompts = PromptCache()

    def __len__(self) -> int:
        return len(self._active)

    def evict(self) -> list[Generation]:
        """Take every sequence out; each can join again from its tokens. Prefills are forgotten."""
        out = [*self._active, *(s for s in self._joining if s not in self._active)]
        self._active, self._joining = [], []
        self._cache.clear()
        self._prompts.clear()
        return out

    def admit(self, model: LoadedModel, waiting: deque[Generation]) -> None:
        """Prefill sequences that wait, as many as fit, and sample their next token."""
        joining = self._choose(waiting)
        if not joining:
            return
        self._joining = joining  # they belong to no queue while the model works on them
        now = time.perf_counter()
        for sequence in joining:
            if sequence.prefill_started_at is None:
                sequence.prefill_started_at = now
        keys = [s.context.tobytes() for s in joining]
        ready = {key: found for key in set(keys) if (found := self._prompts.get(key)) is not None}
        for sequence, key in zip(joining, keys, strict=True):
            if key in ready:
                sequence.cached_prompt_tokens = len(sequence.context)
        missing = {key: s for key, s in zip(keys, joining, strict=True) if key not in ready}
        if missing:
            for key, done in zip(missing, model.prefill([s.context for s in missing.values()]), strict=True):
                ready[key] = done
                self._prompts.put(key, done)
        row_bytes = model.routing_shape.row_bytes
        for sequence, key in zip(joining, keys, strict=True):
            self._cache.append(ready[key].layers)
            sequence.add_rows(0, ready[key].routing, row_bytes, model.version)
            self._active.append(sequence)
        logits_BV = torch.stack([ready[key].logits_V for key in keys])
        self._joining = []
        self._sample(logits_BV, joining, model.version)

    def _choose(self, waiting: deque[Generation]) -> list[Generation]:
        """The next sequences in order of arrival, within the batch limit and the prefill budget."""
        chosen: list[Generation] = []
        longest = 0
        distinct: set[bytes] = set()
        while waiting and len(self._active) + len(chosen) < self._max_batch:
            sequence = waiting[0]
            if sequence.cancelled:
                waiting.popleft()
                continue
            key = sequence.context.tobytes()
            if key not in distinct and self._prompts.get(key) is None:
                longest = max(longest, len(sequence.context))
                if distinct and longest * (len(distinct) + 1) > PREFILL_TOKENS:
                    break
                distinct.add(key)
            chosen.append(waiting.popleft())
        return chosen

    def step(self, model: LoadedModel) -> None:
        """Forward each sequence's newest token and sample the next."""
        self._drop_gone()
        if not self._active:
            return
        logits_BV, rows = model.decode([s.context[-1] for s in self._active], self._cache)
        row_bytes = model.routing_shape.row_bytes
        for sequence, row in zip(self._active, rows, strict=True):
            sequence.add_rows(len(sequence.context) - 1, row, row_bytes, model.version)
        self._sample(logits_BV, self._active, model.version)

    def _sample(self, logits_BV: torch.Tensor, sequences: list[Generation], version: int) -> None:
        tokens, logprobs = sample(logits_BV, [s.sampler for s in sequences])
        items: list[tuple[Generation, TokenChunk | Exception]] = []
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            items += [(sequence, chunk) for chunk in sequence.take(token, logprob, version)]
        if items:
            self._deliver(items)
            self._drop_gone()

    def _drop_gone(self) -> None:
        """Free the rows of finished and cancelled sequences."""
        for row in range(len(self._active) - 1, -1, -1):
            if self._active[row].cancelled or self._active[row].finish_reason is not None:
                self._cache.remove(row)
                last = self._active.pop()
                if row < len(self._active):
                    self._active[row] = last
