"""The in-process engine: a Hugging Face Qwen3-MoE on a CPU with continuous batching, in a thread of its own.

Sequences join and leave between decoding steps. Everything that touches the model happens in the engine's thread;
the event loop and the thread talk through an inbox and `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog
import torch

from infra.settings import EngineSection
from producers.proxy.engines.base import (
    ContextLengthError,
    EngineError,
    EngineUnavailableError,
    GenerateRequest,
    LoadResult,
    RoutingShape,
    TokenChunk,
)
from producers.proxy.engines.policy_files import PolicyFilesError, verify_policy_files
from producers.proxy.engines.torch_engine_batch import Batch, Generation
from producers.proxy.engines.torch_engine_model import LoadedModel, ModelError
from schemas.events import PolicyPublished
from schemas.packing import unpack_floats, unpack_ints

log = structlog.get_logger()

#: Largest difference to the published canary log-probs: fp32 kernels differ by rounding, wrong weights by far more.
#: bf16 rounds to 8 bits, so only gross faults show.
CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}

#: Python's thread switch interval while the engine runs: the default of 5 ms would be added to every HTTP event.
_SWITCH_INTERVAL_SEC = 0.0005


class TorchEngine:
    """See the module's text; the interface is `engines.base.Engine`."""

    def __init__(self, section: EngineSection, *, replica: str) -> None:
        self.replica = replica
        self._section = section
        self._model: LoadedModel | None = None
        self._refused = "no policy is loaded yet"
        self._batch = Batch(section.max_batch, self._deliver)
        self._waiting: deque[Generation] = deque()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._paused = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loading = asyncio.Lock()
        torch.set_num_threads(section.threads)
        sys.setswitchinterval(_SWITCH_INTERVAL_SEC)
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    # -- called from the event loop

    @property
    def version(self) -> int | None:
        """The version served; None while there is none or the replica is fenced."""
        model = self._model
        return None if model is None else model.version

    @property
    def max_model_len(self) -> int:
        """The configured limit, else the model's own."""
        model = self._model
        own = model.max_positions if model is not None else 0
        configured = self._section.max_model_len
        return min(configured, own) if configured and own else configured or own

    @property
    def routing_shape(self) -> RoutingShape | None:
        """Layout of routing rows; None before the first load."""
        model = self._model
        return None if model is None else model.routing_shape

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Sample a reply; see Engine.generate."""
        if self._closed or self._model is None:
            raise EngineUnavailableError(f"{self.replica}: {self._refused}")
        if len(request.prompt_ids) >= self.max_model_len:
            raise ContextLengthError(len(request.prompt_ids), self.max_model_len)
        if not len(request.prompt_ids):
            raise EngineError("an empty prompt cannot be continued")
        self._loop = asyncio.get_running_loop()
        sequence = Generation(request, self.max_model_len)
        self._inbox.put(lambda: self._waiting.append(sequence))
        try:
            while True:
                item = await sequence.outbox.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            sequence.cancelled = True

    async def load(self, policy: PolicyPublished) -> LoadResult:
        """Read and check aside, then swap between two steps; running generations go on with the new weights."""
        async with self._loading:
            started = time.perf_counter()
            try:
                model = await asyncio.to_thread(self._read, policy)
                canary = await self._in_thread(lambda: model.canary(unpack_ints(policy.canary_ids)))
                worst = _largest_difference(canary, unpack_floats(policy.canary_logprobs))
                limit = CANARY_TOLERANCE[policy.dtype]
                if not worst <= limit:
                    detail = f"canary log-probs differ by {worst:.3g} nats, the limit is {limit:g}"
                    await self._in_thread(lambda: self._fence(detail))
                    return LoadResult(
                        policy.version, False, tuple(canary), worst, time.perf_counter() - started, detail
                    )
            except (PolicyFilesError, ModelError, KeyError, ValueError) as exc:
                detail = f"{type(exc).__name__}: {exc}"
                await self._in_thread(lambda: self._fence(detail))
                return LoadResult(policy.version, False, (), None, time.perf_counter() - started, detail)
            await self._in_thread(lambda: self._swap(model))
            return LoadResult(policy.version, True, tuple(canary), worst, time.perf_counter() - started)

    async def pause(self) -> None:
        """Stop between two steps."""
        await self._in_thread(lambda: self._set_paused(True))

    async def resume(self) -> None:
        """Go on."""
        await self._in_thread(lambda: self._set_paused(False))

    async def close(self) -> None:
        """Abort everything and end the thread."""
        if not self._closed:
            await self._in_thread(self._shut)
            await asyncio.to_thread(self._thread.join)

    async def _in_thread(self, action: Callable[[], Any]) -> Any:
        """Run `action` in the engine's thread, between two steps."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            if not done.done():
                done.set_result(value) if error is None else done.set_exception(error)

        def work() -> None:
            try:
                value, error = action(), None
            except Exception as exc:
                value, error = None, exc
            loop.call_soon_threadsafe(settle, value, error)

        self._inbox.put(work)
        return await done

    @staticmethod
    def _read(policy: PolicyPublished) -> LoadedModel:
        return LoadedModel.load(verify_policy_files(policy), policy.version, policy.dtype)

    # -- called in the engine's thread

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._closed:
                idle = self._paused or self._model is None or not (self._waiting or len(self._batch))
                if idle:
                    self._inbox.get()()
                while not self._inbox.empty():
                    self._inbox.get()()
                if self._model is None or self._paused or self._closed:
                    continue
                try:
                    self._batch.admit(self._model, self._waiting)
                    self._batch.step(self._model)
                except Exception as exc:
                    log.exception("the engine's step failed")
                    self._fail_all(EngineError(f"{self.replica}: {type(exc).__name__}: {exc}"))

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _swap(self, model: LoadedModel) -> None:
        """Serve new weights: what was running is prefilled again from its tokens."""
        self._model = model
        self._waiting.extendleft(reversed(self._batch.evict()))

    def _fence(self, detail: str) -> None:
        self._model, self._refused = None, f"the replica is fenced: {detail}"
        self._fail_all(EngineUnavailableError(f"{self.replica}: {self._refused}"))

    def _shut(self) -> None:
        self._closed, self._model, self._refused = True, None, "the engine is closed"
        self._fail_all(EngineUnavailableError(f"{self.replica}: {self._refused}"))

    def _fail_all(self, error: Exception) -> None:
        sequences = [*self._batch.evict(), *self._waiting]
        self._waiting.clear()
        self._deliver([(s, error) for s in sequences])

    def _deliver(self, items: list[tuple[Generation, TokenChunk | Exception]]) -> None:
        """Hand results to the event loop, once per step."""
        if self._loop is None or not items:
            return

        def put() -> None:
            for sequence, item in items:
                sequence.outbox.put_nowait(item)

        try:
            self._loop.call_soon_threadsafe(put)
        except RuntimeError:
            log.warning("results of the last step were not delivered: the event loop is closed")


def _largest_difference(mine: list[float], published: Any) -> float:
    if len(mine) != len(published):
        raise ValueError(f"the canary has {len(published)} log-probs for {len(mine) + 1} tokens")
    return max((abs(a - b) for a, b in zip(mine, published, strict=True)), default=0.0)
