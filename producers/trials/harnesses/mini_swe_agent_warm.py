"""mini-swe-agent, imported once and forked per trial. The package is not changed: a trial calls the console script's
own `app` with command-line arguments. Standard library only, besides the harness itself.

One priming run (its model is a canned server on the container's own loopback) pulls in what is imported late, compiles
templates and validators, and fills caches. What such a run leaves that a fork must not inherit is undone: executor
threads that exist in no fork, an event loop (its epoll is shared), HTTP clients (their sockets are), call statistics.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import gc
import http.server
import importlib
import io
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_app: Any = None


def warm(options: dict[str, Any]) -> dict[str, Any]:
    """Import, prime with two runs, reset. `options`: env, config (YAML text), model."""
    global _app
    started = time.perf_counter()
    os.environ.update(options["env"])
    server, port = _serve_canned_reply()
    try:
        from minisweagent.run import mini

        _app = mini.app
        imported = time.perf_counter()
        config = os.path.join(os.environ["TMPDIR"], "prime.yaml")  # noqa: PTH118
        with open(config, "w") as file:
            file.write(options["config"])
        environ = dict(os.environ)
        os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = f"http://127.0.0.1:{port}/v1", "prime"
        argv = ["mini", "-m", options["model"], "-y", "--exit-immediately", "-o", "/dev/null", "-c", config]
        for _ in range(2):
            with contextlib.redirect_stdout(io.StringIO()):
                _call([*argv, "-c", "agent.step_limit=2", "--task=x"])
        os.environ.clear()
        os.environ.update(environ)
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    _reset()
    return {
        "import_sec": imported - started,
        "prime_sec": time.perf_counter() - imported,
        "threads": threading.active_count(),
    }


def run(request: dict[str, Any], blob: bytes, fds: list[int]) -> int:
    """One trial: `argv` is the cold command line, of which the part after the module is the CLI's."""
    os.environ.clear()
    os.environ.update(request["env"])
    # Collections would touch inherited pages for nothing: a trial ends long before its garbage matters.
    gc.disable()
    arguments = request["argv"]
    return _call(["mini", *arguments[arguments.index("minisweagent") + 1 :]])


def _call(argv: list[str]) -> int:
    sys.argv = argv
    try:
        _app()
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _reset() -> None:
    import asyncio

    litellm: Any = importlib.import_module("litellm")
    from minisweagent.models import GLOBAL_MODEL_STATS

    litellm.in_memory_llm_clients_cache.flush_cache()
    GLOBAL_MODEL_STATS._cost, GLOBAL_MODEL_STATS._n_calls = 0.0, 0
    gc.collect()
    objects = gc.get_objects()
    for executor in [o for o in objects if isinstance(o, ThreadPoolExecutor) and o._threads]:
        executor.shutdown(wait=True)
        state: Any = executor  # back to an executor that has not started its threads yet
        state._shutdown, state._threads, state._work_queue = False, set(), queue.SimpleQueue()
        state._idle_semaphore = threading.Semaphore(0)
    threads: Any = concurrent.futures.thread
    threads._threads_queues.clear()
    for loop in [o for o in objects if isinstance(o, asyncio.AbstractEventLoop)]:
        loop.close()
    asyncio.set_event_loop_policy(None)  # also forgets this thread's current loop
    if threading.active_count() > 1:
        names = ", ".join(t.name for t in threading.enumerate())
        raise RuntimeError(f"threads outlived the priming run and would be missing in every fork: {names}")


def _serve_canned_reply() -> tuple[int, int]:
    """Fork a model server that always submits; returns (pid, port)."""
    command = json.dumps({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
    call = {"id": "call_0", "type": "function", "function": {"name": "bash", "arguments": command}}
    reply = json.dumps(
        {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "tool_calls",
                    "message": {"role": "assistant", "content": None, "tool_calls": [call]},
                }
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
    ).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    pid = os.fork()
    if pid == 0:
        try:
            server.serve_forever()
        finally:
            os._exit(0)
    server.server_close()
    return pid, server.server_port
