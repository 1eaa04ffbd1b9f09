"""The HTTP front: paths, tokens, and the two ways of answering."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import structlog
from aiohttp import web

from producers.proxy import wire_chat
from producers.proxy.calls import Backend, CallRequest, ModelCall
from producers.proxy.errors import CallError, bad_request, openai_error
from producers.proxy.replies import Released
from producers.proxy.sessions import Session, Sessions

log = structlog.get_logger()

BACKEND = web.AppKey("backend", Backend)
SESSIONS = web.AppKey("sessions", Sessions)


def make_app(backend: Backend, sessions: Sessions, max_body_bytes: int) -> web.Application:
    """The application; the same one serves the TCP port and the listeners inside sandboxes."""
    app = web.Application(client_max_size=max_body_bytes, middlewares=[_openai_errors])
    app[BACKEND], app[SESSIONS] = backend, sessions
    app.router.add_post("/t/{trial}/v1/chat/completions", chat_completions)
    app.router.add_get("/t/{trial}/v1/models", list_models)
    return app


@web.middleware
async def _openai_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Every error leaves in OpenAI's shape."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except CallError as exc:
        return _json(exc.body(), exc.status)
    except web.HTTPException as exc:
        return _json(openai_error(exc.status, exc.reason), exc.status, exc.headers)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("request failed", path=request.path)
        return _json(openai_error(500, "the proxy failed; its log has the reason"), 500)


def _json(body: dict[str, Any], status: int = 200, headers: Any = None) -> web.Response:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    kept = {k: v for k, v in headers.items() if k == "Allow"} if headers else None
    return web.Response(text=text, status=status, content_type="application/json", headers=kept)


def _session(request: web.Request) -> Session:
    """The session that the path and the token name. Raises CallError 404 or 401."""
    sessions, trial = request.app[SESSIONS], request.match_info["trial"]
    if not sessions.knows(trial):
        raise CallError(404, "bad_request", f"trial {trial!r} has no open session here", code="trial_not_found")
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = request.headers.get("x-api-key", "")
    session = sessions.find(trial, token.strip())
    if session is None:
        raise CallError(
            401, "bad_request", "the API key is not the token of this trial; set it to the trial's token",
            code="invalid_api_key",
        )  # fmt: skip
    return session


async def list_models(request: web.Request) -> web.Response:
    """GET /t/<trial>/v1/models: one model, the policy."""
    _session(request)
    engine = request.app[BACKEND].engine
    model = {
        "id": "policy",
        "object": "model",
        "created": 0,
        "owned_by": "rollstream",
        "max_model_len": engine.max_model_len,
    }
    return _json({"object": "list", "data": [model]})


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /t/<trial>/v1/chat/completions."""
    session = _session(request)
    if session.closing:
        raise CallError(503, "overloaded", "the trial's session is closing; no further calls are taken")
    if session.broken is not None:
        raise CallError(503, "overloaded", f"{session.broken}; run the trial again", code="capture_unavailable")
    call = ModelCall(session, request.app[BACKEND], wire_chat.WIRE_FORMAT)
    task = asyncio.ensure_future(_answer(request, call))
    session.track_task(task)
    return await task


async def _answer(request: web.Request, call: ModelCall) -> web.StreamResponse:
    try:
        parsed = wire_chat.parse_request(await _read_body(request))
    except CallError as exc:
        await call.fail(exc)
    except (asyncio.CancelledError, ConnectionError):
        call.hung_up()
        raise
    response = wire_chat.ChatResponse(call.call_id, parsed)
    if parsed.stream:
        return await _stream(request, call, parsed, response)
    return _json(response.whole(await call.run(parsed, None)))


async def _read_body(request: web.Request) -> bytes:
    """The body. Raises CallError 413 above the limit, before reading when its length is announced."""
    limit = request.client_max_size
    too_large = CallError(
        413, "bad_request", f"the body is larger than proxy.max_body_mb = {limit // 2**20} MiB", code="body_too_large"
    )
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.HTTPException:
        raise
    except (ValueError, web.RequestPayloadError) as exc:
        raise bad_request(f"the body could not be read: {exc}") from exc


async def _stream(
    request: web.Request, call: ModelCall, parsed: CallRequest, builder: wire_chat.ChatResponse
) -> web.StreamResponse:
    """Server-sent events as tokens come. Errors before the first token are ordinary responses."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

    async def sink(released: Sequence[str | Released]) -> None:
        head = b""
        if not response.prepared:
            await response.prepare(request)
            head = builder.first()
        await response.write(head + builder.parts(released))

    try:
        reply = await call.run(parsed, sink)
    except CallError as exc:
        if not response.prepared:
            raise
        await response.write(builder.error(exc))
    else:
        if not response.prepared:  # a reply without text
            await response.prepare(request)
            await response.write(builder.first())
        await response.write(builder.last(reply))
    await response.write_eof()
    return response
