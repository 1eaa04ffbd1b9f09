"""One model call from its request to its recorded reply, whatever the wire format."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NoReturn

import structlog

from infra.kafka import new_traceparent
from producers.proxy.capture import (
    MAX_NEW_REQUEST_CHARS,
    CallIdentity,
    Sampled,
    Sampling,
    completed_event,
    failed_event,
    opened_event,
    routing_events,
)
from producers.proxy.conversations import Conversations, Prompt, canonical_json
from producers.proxy.engines.base import (
    ContextLengthError,
    Engine,
    EngineError,
    EngineUnavailableError,
    GenerateRequest,
)
from producers.proxy.errors import CallError
from producers.proxy.recorder import NotRecordedError, Recorder
from producers.proxy.rendering import Renderer, RenderError
from producers.proxy.replies import Released, ReplyBuilder
from producers.proxy.sessions import Session
from producers.proxy.template_check import TemplateReport
from schemas.base import Event

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A request, freed of its wire format. None: the caller gave no value."""

    raw: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    stream: bool
    temperature: float | None
    top_p: float
    top_k: int
    max_tokens: int | None
    seed: int | None
    parse_tools: bool


#: Receives text and complete tool calls as they become certain, in order.
Sink = Callable[[Sequence[str | Released]], Awaitable[None]]


@dataclass
class Reply:
    """A finished reply."""

    message: dict[str, Any]
    finish_reason: str
    sampled: Sampled
    prompt_len: int


@dataclass
class Backend:
    """What calls run on. `renderer` and `template` are None until the first policy is there."""

    engine: Engine
    recorder: Recorder
    producer: str
    default_max_tokens: int
    call_timeout_sec: float
    record_routing: bool
    renderer: Renderer | None = None
    template: TemplateReport | None = None


def call_seed(session_seed: int, call_index: int) -> int:
    """The sampling seed of a call: 63 bits, from the trial's seed and the call's index."""
    digest = hashlib.sha256(f"{session_seed}/{call_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass
class ModelCall:
    """Runs one call. `run` ends with the reply recorded in Kafka, or raises CallError with the failure recorded."""

    session: Session
    backend: Backend
    wire_format: str
    request: CallRequest | None = None
    #: Set once the call's final event is on its way: from then on it is neither failed nor cancelled.
    _settled: bool = False
    _prompt: Prompt | None = None
    _sampled: Sampled = field(default_factory=Sampled)

    def __post_init__(self) -> None:
        call_id, index = self.session.next_call()
        self._who = CallIdentity(
            run_id=self.session.run_id,
            producer=self.backend.producer,
            trial_id=self.session.trial_id,
            attempt=self.session.attempt,
            call_id=call_id,
            call_index=index,
            wire_format=self.wire_format,
        )
        self._trace = new_traceparent()

    @property
    def call_id(self) -> str:
        """The call's id."""
        return self._who.call_id

    async def run(self, request: CallRequest, sink: Sink | None) -> Reply:
        """Render, sample, parse, record. With a sink, what is certain is passed on token by token.

        Raises CallError; its event has been recorded. On cancellation the call is recorded as failed (499).
        """
        self.request = request
        try:
            return await self._run(request, sink)
        except asyncio.CancelledError:
            if self._settled:
                raise
            self._record_failure(499, "client_disconnected", "the client hung up before the reply was complete")
            if self.session.dropped:  # the session ended, not the connection: the client can be told
                raise CallError(503, "client_disconnected", "the trial's session was dropped") from None
            raise
        except CallError as exc:
            await self.fail(exc)
        except RenderError as exc:
            await self.fail(CallError(400, "bad_request", str(exc), param="messages"))
        except ContextLengthError as exc:
            self.session.counts.context_overflow = True
            await self.fail(
                CallError(400, "context_length", str(exc), param="messages", code="context_length_exceeded")
            )
        except EngineUnavailableError as exc:
            await self.fail(CallError(503, "overloaded", str(exc)))
        except TimeoutError:
            limit = self.backend.call_timeout_sec
            await self.fail(
                CallError(504, "timeout", f"the call took longer than proxy.call_timeout_sec = {limit:g} s")
            )
        except ConnectionError:
            if not self._settled:
                self._record_failure(499, "client_disconnected", "the client hung up while the reply was streamed")
            raise
        except EngineError as exc:
            log.error("engine failed", call=self.call_id, error=str(exc))
            await self.fail(CallError(500, "engine_error", str(exc)))
        except Exception as exc:  # every call index ends in an event, whatever went wrong
            log.exception("call failed", call=self.call_id)
            await self.fail(CallError(500, "engine_error", f"{type(exc).__name__}: {exc}"))

    def hung_up(self) -> None:
        """The connection went away before the request was read."""
        self._record_failure(499, "client_disconnected", "the client hung up before its request was complete")

    async def fail(self, error: CallError) -> NoReturn:
        """Record the failure, wait until it is recorded, raise it."""
        if not self._settled:
            ack = self._record_failure(error.status, error.error_class, error.message)
            try:
                await self.backend.recorder.wait(ack)
            except NotRecordedError as exc:
                raise self._not_recorded(exc) from exc
        raise error

    def _record_failure(self, status: int, error_class: str, detail: str) -> asyncio.Future[None]:
        """Queue ModelCallFailed; at most once, and never after the completed call was queued."""
        self._settled = True
        if error_class in ("engine_error", "timeout", "overloaded"):
            self.session.counts.num_failed_calls += 1
        self.session.counts.num_sampled_tokens += len(self._sampled.ids)
        opened = opened_event(self._who, self._prompt) if self._prompt is not None else []
        event = failed_event(
            self._who,
            status=status,
            error_class=error_class,
            detail=detail,
            request=self.request.raw if self.request is not None else None,
            prompt=self._prompt,
            sampled=self._sampled,
        )
        return self._write([*opened, event])

    def _write(self, events: Sequence[Event]) -> asyncio.Future[None]:
        ack = self.backend.recorder.write(events, self._trace)
        self.session.track_ack(ack)
        return ack

    def _not_recorded(self, exc: NotRecordedError) -> CallError:
        self.session.broken = str(exc)
        return CallError(
            503, "overloaded", f"{exc}; the trial's capture is broken, run the trial again", code="capture_unavailable"
        )

    async def _run(self, request: CallRequest, sink: Sink | None) -> Reply:
        session, backend = self.session, self.backend
        if backend.renderer is None or backend.template is None or backend.engine.version is None:
            raise EngineUnavailableError("no policy is loaded; wait until the proxy is ready")
        if session.conversations is None:
            prefix = f"{session.trial_id}/a{session.attempt}"
            session.conversations = Conversations(prefix, backend.renderer, backend.template)
        prompt = session.conversations.make_prompt(request.messages, request.tools)
        self._prompt = prompt
        if len(canonical_json(list(prompt.new_messages))) > MAX_NEW_REQUEST_CHARS:
            raise CallError(
                413, "bad_request", f"more than {MAX_NEW_REQUEST_CHARS} characters are new; the log cannot record them"
            )
        sampling = self._sampling(request, len(prompt.ids))
        feed = ReplyBuilder(backend.renderer, self.call_id, parse_tools=request.parse_tools)
        async with asyncio.timeout(backend.call_timeout_sec):
            await self._sample(prompt, sampling, feed, sink)
        released = feed.finish(self._sampled.ids)
        if sink is not None and released:
            await sink(released)
        reply = Reply(feed.message(), feed.finish_reason(self._sampled.finish_reason), self._sampled, len(prompt.ids))
        await self._record(prompt, sampling, reply, feed)
        return reply

    def _sampling(self, request: CallRequest, prompt_len: int) -> Sampling:
        room = self.backend.engine.max_model_len - prompt_len
        if room < 1:
            raise ContextLengthError(prompt_len, self.backend.engine.max_model_len)
        temperature = self.session.temperature if request.temperature is None else request.temperature
        seed = request.seed if request.seed is not None else call_seed(self.session.seed, self._who.call_index)
        max_tokens = min(request.max_tokens or self.backend.default_max_tokens, room)
        return Sampling(temperature, request.top_p, request.top_k, max_tokens, seed)

    async def _sample(self, prompt: Prompt, sampling: Sampling, feed: ReplyBuilder, sink: Sink | None) -> None:
        assert self.backend.renderer is not None
        generate = GenerateRequest(
            request_id=self.call_id,
            prompt_ids=prompt.ids,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop_token_ids=self.backend.renderer.stop_token_ids,
            prefix_key=prompt.conversation_id,
            first_row=prompt.parent.routed if prompt.parent is not None else 0,
            stream=sink is not None,
        )
        async with aclosing(self.backend.engine.generate(generate)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                self._sampled.add(chunk)
                if sink is not None and (released := feed.feed(chunk.ids)):
                    await sink(released)
        if self._sampled.finish_reason is None or not self._sampled.ids:
            raise EngineError(f"{self.backend.engine.replica} ended a generation without a finish reason")
        if self._sampled.finish_reason == "aborted":
            raise EngineError(f"{self.backend.engine.replica} aborted the generation")

    async def _record(self, prompt: Prompt, sampling: Sampling, reply: Reply, feed: ReplyBuilder) -> None:
        """Write the events and wait for Kafka: until then no caller learns the end of the reply."""
        session, backend = self.session, self.backend
        assert self.request is not None and session.conversations is not None
        shape = backend.engine.routing_shape if backend.record_routing else None
        routed = prompt.parent.routed if prompt.parent is not None else 0
        rows: Sequence[Event] = ()
        if shape is not None:
            rows, routed = routing_events(self._who, shape, self._sampled.routing, routed)
        completed = completed_event(
            self._who,
            prompt,
            sampling,
            self._sampled,
            request=self.request.raw,
            reply=reply.message,
            finish_reason=reply.finish_reason,
            parser_outcome=feed.outcome,
            streamed=self.request.stream,
            replica=backend.engine.replica,
        )
        ack = self._write([*opened_event(self._who, prompt), completed, *rows])
        self._settled = True
        counts = session.counts
        counts.num_sampled_tokens += len(self._sampled.ids)
        counts.num_parser_failures += feed.outcome == "failed"
        counts.length_stop = reply.finish_reason == "length"
        stopped = self._sampled.finish_reason == "stop"
        session.conversations.record(
            prompt, self._who.call_id, reply.message, self._sampled.ids, stopped=stopped, routed=routed
        )
        try:
            await backend.recorder.wait(ack)
        except NotRecordedError as exc:
            raise self._not_recorded(exc) from exc
