"""The proxy on a real broker: what harnesses get, and what the log holds afterwards."""

from __future__ import annotations

import asyncio
import json
import socket
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from infra.paths import proxy_socket_path
from infra.settings import Settings
from producers.proxy.engines.scripted import (
    SCRIPTED_ROUTING,
    ScriptEntry,
    scripted_experts,
    scripted_logprob,
)
from producers.proxy.rendering import Renderer
from schemas.events import (
    ConversationOpened,
    ModelCallCompleted,
    ModelCallFailed,
    RoutingRecorded,
)
from schemas.packing import unpack_bits, unpack_floats, unpack_ints
from streams.alignment.segments import align_calls
from tests.unit.proxy import tiny
from tests.unit.proxy.live import (
    RUN,
    TOKEN,
    Worker,
    base_url,
    calls_of,
    client,
    proxy_settings,
    read_log,
    running,
    scripted,
    session,
)

TOOLS: list[Any] = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "bash", "arguments": {"command": "ls -l"}}</tool_call>'


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tokenizer(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def settings(kafka_settings: Settings, policy: Path) -> Settings:
    return proxy_settings(kafka_settings, policy)


def contexts_of(calls: list[ModelCallCompleted]) -> dict[str, array[int]]:
    """Each call's full context, rebuilt from the log alone."""
    tokens: dict[str, array[int]] = {}
    contexts = {}
    for call in calls:
        prefix = tokens[call.parent_call_id][: call.shared_prefix_len] if call.parent_call_id else array("i")
        contexts[call.call_id] = prefix + unpack_ints(call.prompt_delta_ids)
        assert len(contexts[call.call_id]) == call.prompt_len
        tokens[call.call_id] = contexts[call.call_id] + unpack_ints(call.sampled_ids)
    return contexts


async def converse(sdk: openai.AsyncOpenAI, turns: int, *, stream: bool = False) -> list[dict[str, Any]]:
    """A tool-using conversation that resends its history as harnesses do."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "go"}]
    for turn in range(turns):
        if stream:
            async with sdk.chat.completions.stream(model="policy", messages=messages, tools=TOOLS) as events:
                choice = (await events.get_final_completion()).choices[0]
        else:
            reply = await sdk.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            choice = reply.choices[0]
        messages.append(json.loads(choice.message.model_dump_json(exclude={"parsed"})))
        for call in choice.message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"file{turn}.py\n"})
        if not choice.message.tool_calls:
            messages.append({"role": "user", "content": [{"type": "text", "text": f"and {turn}?"}]})
    return messages


async def test_turns_continue_the_sampled_tokens(settings, policy):
    renderer = Renderer.from_policy(policy)
    # Spelt byte by byte: encoding this text again would give other, longer tokens.
    spelt = tuple(i for c in "the quick brown fox" for i in renderer.encode(c))
    assert renderer.encode("the quick brown fox") != list(spelt)
    engine = scripted(
        policy, ScriptEntry(ids=spelt), ScriptEntry(text=CALL), ScriptEntry(text=CALL + CALL), ScriptEntry(ids=spelt)
    )
    async with running(settings, engine) as proxy, session(proxy, "r.t0") as worker:
        await converse(client(proxy, "r.t0"), 4)
        counts = await worker.close_session()
    assert counts == {
        "ok": True, "num_calls": 4, "num_failed_calls": 0, "num_parser_failures": 0, "context_overflow": False,
        "length_stop": False, "num_sampled_tokens": sum(len(c["sampled"]) for c in engine.calls),
    }  # fmt: skip
    events = read_log(settings, ["model-calls", "routing"])
    calls = calls_of(events)
    contexts = contexts_of(calls)
    for call, truth in zip(calls, engine.calls, strict=True):
        assert contexts[call.call_id].tolist() == truth["prompt"]
        assert unpack_ints(call.sampled_ids).tolist() == truth["sampled"]
        positions = range(call.prompt_len, call.prompt_len + len(truth["sampled"]))
        expected = [scripted_logprob(t, p) for t, p in zip(truth["sampled"], positions, strict=True)]
        assert unpack_floats(call.logprobs).tolist() == expected
    assert [c.parent_call_id for c in calls] == [None, *(c.call_id for c in calls[:-1])]
    assert [c.finish_reason for c in calls] == ["stop", "tool_calls", "tool_calls", "stop"]
    assert [c.parser_outcome for c in calls] == ["none", "ok", "ok", "none"]
    # The model read what the template renders for the whole conversation: nothing but the spelling differs.
    text = renderer.decode(engine.calls[3]["prompt"])
    assert text.count("the quick brown fox<|im_end|>\n<|im_start|>user\nand 0?<|im_end|>") == 1
    assert text.count(CALL) == 3 and text.endswith("<|im_start|>assistant\n")
    # Storage grows with what is new: only the first call holds the beginning.
    assert [json.loads(c.request_json)["messages"][0]["role"] for c in calls] == ["system", "user", "tool", "tool"]
    assert [c.num_messages for c in calls] == [2, 4, 6, 9]
    opened = [e for e in events if isinstance(e, ConversationOpened)]
    assert [(o.kind, o.reason) for o in opened] == [("main", "first_request")]
    alignment = align_calls(calls, {opened[0].conversation_id: "main"}, {"main"})
    assert len(alignment.segments) == 1 and not alignment.excluded
    check_routing(events, calls, contexts)


def check_routing(events: list[Any], calls: list[ModelCallCompleted], contexts: dict[str, array[int]]) -> None:
    """Every context token but the newest has its row, in the call that forwarded it first; each row is its token's."""
    size = SCRIPTED_ROUTING.row_bytes
    end = 0
    for call in calls:
        chunks = [e for e in events if isinstance(e, RoutingRecorded) and e.call_id == call.call_id]
        context = contexts[call.call_id] + unpack_ints(call.sampled_ids)
        assert [c.chunk_index for c in chunks] == list(range(chunks[0].num_chunks))
        for chunk in chunks:
            assert chunk.token_start == end and all(unpack_bits(chunk.valid, chunk.num_tokens))
            for i in range(chunk.num_tokens):
                row = chunk.expert_ids[i * size : (i + 1) * size]
                assert row == scripted_experts(context[end + i], end + i)
            end += chunk.num_tokens
        assert end == len(context) - 1


async def test_a_stream_carries_the_same_reply(settings, policy):
    texts = [
        CALL,
        "plain text, then \u2603 and \U0001f600",
        "before " + CALL,
        "<tool_call>{oops}</tool_call> after",
        "x",
    ]
    async with running(settings, scripted(policy, *(ScriptEntry(text=t) for t in texts))) as proxy:
        async with session(proxy, "whole"):
            whole = await converse(client(proxy, "whole"), 5)
    async with running(settings, scripted(policy, *(ScriptEntry(text=t) for t in texts))) as proxy:
        async with session(proxy, "stream"):
            streamed = await converse(client(proxy, "stream"), 5, stream=True)

    def shape(messages: list[dict[str, Any]]) -> list[Any]:
        assistant = [m for m in messages if m["role"] == "assistant"]
        return [(m["content"] or "", [c["function"]["arguments"] for c in m["tool_calls"] or []]) for m in assistant]

    assert shape(whole) == shape(streamed)
    assert shape(whole)[0] == ("", ['{"command": "ls -l"}']) and shape(whole)[3] == (texts[3], [])
    calls = calls_of([e for e in read_log(settings, ["model-calls"]) if e.trial_id == "stream"])
    assert all(c.streamed for c in calls) and [c.parser_outcome for c in calls][3] == "failed"


async def test_tokens_are_streamed_as_they_are_sampled(settings, policy):
    engine = scripted(policy, ScriptEntry(text="one two three four five"))
    async with running(settings, engine) as proxy, session(proxy, "t"):
        ask: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        stream = await client(proxy, "t").chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
        pieces, usage = [], None
        async for chunk in stream:
            if chunk.usage:
                usage = chunk.usage
            elif chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
                if len(pieces) == 1:
                    await engine.pause()  # the first token is here while the others are not sampled yet
                    await engine.resume()
    assert "".join(pieces) == "one two three four five" and len(pieces) > 5
    assert usage is not None and usage.completion_tokens == len(engine.calls[0]["sampled"])


async def test_a_changed_history_starts_a_new_segment(settings, policy):
    engine = scripted(policy, ScriptEntry(text="first"), ScriptEntry(text="second"), ScriptEntry(text="third"))
    async with running(settings, engine) as proxy, session(proxy, "t"):
        sdk = client(proxy, "t")
        ask = sdk.chat.completions.create
        head = [{"role": "user", "content": "go"}]
        await ask(model="m", messages=head)
        await ask(model="m", messages=head)  # a retry
        await ask(
            model="m",
            messages=[*head, {"role": "assistant", "content": "rewritten"}, {"role": "user", "content": "on"}],
        )
        await ask(model="m", messages=[{"role": "system", "content": "title"}, {"role": "user", "content": "other"}])
    events = read_log(settings, ["model-calls"])
    calls = calls_of(events)
    opened = [e for e in events if isinstance(e, ConversationOpened)]
    assert [(o.kind, o.reason, o.parent_conversation_id) for o in opened] == [
        ("main", "first_request", None),
        ("main", "history_changed", opened[0].conversation_id),
        ("unknown", "history_changed", None),
    ]
    assert (
        calls[0].conversation_id == calls[1].conversation_id and calls[0].prompt_delta_ids == calls[1].prompt_delta_ids
    )
    assert contexts_of(calls)[calls[2].call_id].tolist() == engine.calls[2]["prompt"]
    kinds = {o.conversation_id: o.kind for o in opened}
    alignment = align_calls(calls, kinds, {"main"})
    assert [e.reason for e in alignment.excluded] == ["orphaned_retry", "conversation_not_trained"]


async def test_a_reply_cut_at_the_limit_is_closed_before_it_is_continued(settings, policy):
    engine = scripted(policy, ScriptEntry(text="one two three"), ScriptEntry(text="done"))
    async with running(settings, engine) as proxy, session(proxy, "t") as worker:
        ask = client(proxy, "t").chat.completions.create
        first = await ask(model="m", messages=[{"role": "user", "content": "go"}], max_tokens=3)
        text = first.choices[0].message.content
        assert first.choices[0].finish_reason == "length" and text and "one two three".startswith(text)
        messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": text}]
        await ask(model="m", messages=[*messages, {"role": "user", "content": "go on"}])
        assert (await worker.close_session())["length_stop"] is False
    first_call, second_call = engine.calls
    kept = len(first_call["prompt"]) + len(first_call["sampled"])
    assert second_call["prompt"][:kept] == first_call["prompt"] + first_call["sampled"]
    assert second_call["prompt"][kept] == tiny.IM_END
    calls = calls_of(read_log(settings, ["model-calls"]))
    assert calls[1].shared_prefix_len == kept and calls[1].parent_call_id == calls[0].call_id


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{not json", 400, None),
        (b"[]", 400, None),
        (b'{"messages": []}', 400, "messages"),
        (b'{"messages": [{"role": "wizard", "content": "x"}]}', 400, "messages[0].role"),
        (b'{"messages": [{"role": "user"}]}', 400, "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, "messages"),
        (b'{"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]}', 400, "messages[0]"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', 400, "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', 400, "n"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', 400, "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stream": 1}', 400, "stream"),
        (b'{"messages": [{"role": "user", "content": "' + b"a" * 2**20 + b'"}]}', 413, None),
    ],
)  # fmt: skip
async def test_bad_requests_get_openai_errors_and_are_recorded(settings, policy, body, status, param):
    settings = replace(settings, proxy=replace(settings.proxy, max_body_mb=1))
    async with running(settings, scripted(policy, ScriptEntry(text="x"))) as proxy, session(proxy, "t") as worker:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(base_url(proxy, "t") + "/chat/completions", data=body) as response:
                error = (await response.json())["error"]
                assert response.status == status and error["param"] == param, error
                assert error["type"] == "invalid_request_error" and error["message"]
            good = {"messages": [{"role": "user", "content": "x"}]}
            async with http.post(base_url(proxy, "t") + "/chat/completions", json=good) as response:
                assert response.status == 200
        counts = await worker.close_session()
    assert counts["num_calls"] == 2 and counts["num_failed_calls"] == 0
    failed = [e for e in read_log(settings, ["model-calls"]) if isinstance(e, ModelCallFailed)]
    assert [(e.call_index, e.http_status, e.error_class) for e in failed] == [(0, status, "bad_request")]


async def test_the_path_and_the_token_decide_whose_call_it_is(settings, policy):
    async with running(settings, scripted(policy, ScriptEntry(text="x"))) as proxy:
        async with session(proxy, "a", token="token-a"), session(proxy, "b", token="token-b") as worker_b:
            messages: Any = [{"role": "user", "content": "x"}]
            with pytest.raises(openai.AuthenticationError) as denied:
                await client(proxy, "a", "token-b").chat.completions.create(model="m", messages=messages)
            assert denied.value.code == "invalid_api_key"
            with pytest.raises(openai.NotFoundError) as unknown:
                await client(proxy, "nobody", "token-a").chat.completions.create(model="m", messages=messages)
            assert unknown.value.code == "trial_not_found"
            assert [m.id async for m in client(proxy, "a", "token-a").models.list()] == ["policy"]
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://127.0.0.1:{proxy.port}/elsewhere") as response:
                    assert response.status == 404 and "error" in await response.json()
                async with http.get(base_url(proxy, "a") + "/chat/completions") as response:
                    assert response.status == 405
            assert (await worker_b.close_session())["num_calls"] == 0
            with pytest.raises(openai.InternalServerError, match="closing"):
                await client(proxy, "b", "token-b").chat.completions.create(model="m", messages=messages)
        with pytest.raises(openai.NotFoundError):
            await client(proxy, "b", "token-b").chat.completions.create(model="m", messages=messages)
    assert read_log(settings, ["model-calls"]) == []


async def test_two_hundred_parallel_calls_do_not_mix(settings, policy):
    entries = [ScriptEntry(match=f"question {i};", text=f"answer {i}", delay_ms=1) for i in range(200)]
    async with running(settings, scripted(policy, *entries)) as proxy:
        workers = []
        for trial in range(10):
            worker = Worker(proxy_socket_path(settings, 0))
            assert await worker.open(f"t{trial}", token=f"token{trial}") == {"ok": True}
            workers.append(worker)

        async def one(i: int) -> str | None:
            sdk = client(proxy, f"t{i % 10}", f"token{i % 10}")
            ask: Any = [{"role": "user", "content": f"question {i};"}]
            if i % 3:
                reply = await sdk.chat.completions.create(model="m", messages=ask)
                return reply.choices[0].message.content
            async with sdk.chat.completions.stream(model="m", messages=ask) as events:
                return (await events.get_final_completion()).choices[0].message.content

        assert await asyncio.gather(*map(one, range(200))) == [f"answer {i}" for i in range(200)]
        assert [(await w.close_session())["num_calls"] for w in workers] == [20] * 10
        for worker in workers:
            worker.hang_up()
    calls = [e for e in read_log(settings, ["model-calls"]) if isinstance(e, ModelCallCompleted)]
    assert sorted(c.call_id for c in calls) == [f"t{t}/a1/c{i:04d}" for t in range(10) for i in range(20)]
    for call in calls:
        number = json.loads(call.response_json)["content"].removeprefix("answer ")
        assert json.loads(call.request_json)["messages"][0]["content"] == f"question {number};"
        assert call.trial_id == f"t{int(number) % 10}"


async def test_a_handed_over_listener_serves_the_trial(settings, policy):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        async with running(settings, scripted(policy, ScriptEntry(text="hello"))) as proxy:
            worker = Worker(proxy_socket_path(settings, 0))
            opening = {"op": "open", "trial_id": "t", "attempt": 1, "token": TOKEN, "run_id": RUN, "kind": "listener"}
            assert await worker.ask(opening, [listener.fileno()]) == {"ok": True}
            listener.close()  # the worker keeps no copy
            sdk = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/t/t/v1", api_key=TOKEN, max_retries=0)
            reply = await sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
            assert reply.choices[0].message.content == "hello"
            assert (await worker.close_session())["num_calls"] == 1
            worker.hang_up()
            while len(proxy.sessions):
                await asyncio.sleep(0)
            with pytest.raises(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=5)


async def test_control_messages_that_make_no_sense(settings, policy):
    async with running(settings, scripted(policy, ScriptEntry(text="hello"))) as proxy:
        worker = Worker(proxy_socket_path(settings, 0))
        assert "no session" in (await worker.close_session())["error"]
        assert "`attempt`" in (await worker.open("t", attempt="one"))["error"]  # type: ignore[arg-type]
        assert "unknown op" in (await worker.ask({"op": "sing"}))["error"]
        assert "0 file descriptors" in (await worker.open("t", kind="listener"))["error"]
        with socket.socket() as silent:
            reply = await worker.ask(
                {"op": "open", "trial_id": "t", "attempt": 1, "token": "x", "run_id": RUN, "kind": "listener"},
                [silent.fileno()],
            )
            assert "not a listening TCP socket" in reply["error"]
        assert await worker.open("t") == {"ok": True}
        other = Worker(proxy_socket_path(settings, 0))
        refused = await other.open("t")
        assert "open already" in refused["error"]
        assert refused["code"] == "duplicate_attempt"
        assert await other.open("t", attempt=2, token="second") == {"ok": True}  # the next attempt may overlap
        with pytest.raises(RuntimeError, match="another proxy"):
            async with running(settings, scripted(policy, ScriptEntry(text="x"))):
                pass
        assert len(proxy.sessions) == 2
        assert (await worker.close_session())["ok"]
        again = Worker(proxy_socket_path(settings, 0))
        assert (await again.open("t"))["code"] == "duplicate_attempt", "its calls' ids exist already"
        again.hang_up()
        worker.hang_up()
        other.hang_up()


async def first_token(proxy: Any, trial: str) -> tuple[Any, Any]:
    stream = await client(proxy, trial).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}], stream=True
    )
    iterator = aiter(stream)
    while not (await anext(iterator)).choices[0].delta.content:
        pass
    return stream, iterator


async def test_a_client_that_hangs_up_cancels_its_generation(settings, policy):
    engine = scripted(policy, ScriptEntry(text="a long reply " * 30, delay_ms=5), ScriptEntry(text="ok"))
    async with running(settings, engine) as proxy, session(proxy, "t") as worker:
        stream, _ = await first_token(proxy, "t")
        await stream.close()
        counts = await worker.close_session()
    assert counts["num_calls"] == 1 and counts["num_failed_calls"] == 0
    (failed,) = (e for e in read_log(settings, ["model-calls"]) if isinstance(e, ModelCallFailed))
    assert (failed.http_status, failed.error_class) == (499, "client_disconnected")
    sampled = unpack_ints(failed.sampled_ids or b"").tolist()
    assert 0 < len(sampled) < len(engine.calls[0]["sampled"]) and sampled == engine.calls[0]["sampled"][: len(sampled)]


async def test_a_lost_worker_cancels_what_runs(settings, policy):
    engine = scripted(policy, ScriptEntry(text="a long reply " * 30, delay_ms=5))
    async with running(settings, engine) as proxy:
        async with session(proxy, "t"):
            _, iterator = await first_token(proxy, "t")
        with pytest.raises(openai.APIError, match="dropped"):
            while True:
                await anext(iterator)
        assert len(proxy.sessions) == 0
    (failed,) = (e for e in read_log(settings, ["model-calls"]) if isinstance(e, ModelCallFailed))
    assert failed.error_class == "client_disconnected"


async def test_engine_failures_and_full_contexts_are_told_and_recorded(settings, policy):
    engine = scripted(policy, ScriptEntry(error="the engine broke"), ScriptEntry(text="x"), max_model_len=40)
    async with running(settings, engine) as proxy, session(proxy, "t") as worker:
        ask = client(proxy, "t").chat.completions.create
        with pytest.raises(openai.InternalServerError, match="the engine broke"):
            await ask(model="m", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError, match="maximum context length is 40 tokens") as full:
            await ask(model="m", messages=[{"role": "user", "content": "0123456789" * 5}])
        assert full.value.code == "context_length_exceeded"
        counts = await worker.close_session()
    assert (counts["num_calls"], counts["num_failed_calls"], counts["context_overflow"]) == (2, 1, True)
    failed = [e for e in read_log(settings, ["model-calls"]) if isinstance(e, ModelCallFailed)]
    assert [(e.call_index, e.error_class, e.http_status) for e in failed] == [
        (0, "engine_error", 500),
        (1, "context_length", 400),
    ]


async def test_a_call_that_takes_too_long_is_cut(settings, policy):
    settings = replace(settings, proxy=replace(settings.proxy, call_timeout_sec=0.2))
    engine = scripted(policy, ScriptEntry(text="slow " * 50, delay_ms=20))
    async with running(settings, engine) as proxy, session(proxy, "t") as worker:
        with pytest.raises(openai.APIStatusError, match="took longer than") as late:
            await client(proxy, "t").chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        assert late.value.status_code == 504
        assert (await worker.close_session())["num_failed_calls"] == 1


async def test_what_cannot_be_recorded_is_refused(settings, policy):
    async with running(settings, scripted(policy, ScriptEntry(text="x"))) as proxy, session(proxy, "t") as worker:
        ask = client(proxy, "t").chat.completions.create
        with pytest.raises(openai.APIStatusError, match="characters are new") as large:
            await ask(model="m", messages=[{"role": "user", "content": "a" * 3_000_001}])
        assert large.value.status_code == 413
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
            body = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
            async with http.post(base_url(proxy, "t") + "/chat/completions", data=body) as response:
                assert response.status == 400 and "surrogate" in (await response.json())["error"]["message"]
            body = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'  # a pair is one character
            async with http.post(base_url(proxy, "t") + "/chat/completions", data=body) as response:
                assert response.status == 200
        assert (await worker.close_session())["num_calls"] == 3
    events = read_log(settings, ["model-calls"])
    failed = [(e.call_index, e.http_status) for e in events if isinstance(e, ModelCallFailed)]
    assert failed == [(0, 413), (1, 400)] and [c.call_index for c in calls_of(events)] == [2]


async def test_a_worker_that_leaves_while_closing_cancels_what_runs(settings, policy):
    engine = scripted(policy, ScriptEntry(text="a long reply " * 100, delay_ms=20))
    async with running(settings, engine) as proxy:
        async with session(proxy, "t") as worker:
            await first_token(proxy, "t")
            closing = asyncio.create_task(worker.close_session())
            while proxy.sessions.find("t", TOKEN) is None or not proxy.sessions.find("t", TOKEN).closing:
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
        async with asyncio.timeout(10):
            while len(proxy.sessions):
                await asyncio.sleep(0.01)
    (failed,) = (e for e in read_log(settings, ["model-calls"]) if isinstance(e, ModelCallFailed))
    assert failed.error_class == "client_disconnected"
