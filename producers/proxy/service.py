"""The proxy's process: engine, HTTP front, control socket, policy follower."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import structlog
import uvloop
from aiohttp import web

from infra.kafka import check_cluster
from infra.paths import proxy_socket_path
from infra.settings import Settings
from producers.proxy.app import make_app
from producers.proxy.calls import Backend
from producers.proxy.control import ControlServer
from producers.proxy.engines.base import Engine, LoadResult
from producers.proxy.engines.scripted import SCRIPTED_MAX_MODEL_LEN, ScriptedEngine, parse_script
from producers.proxy.policies import PolicyFollower
from producers.proxy.recorder import NotRecordedError, Recorder
from producers.proxy.rendering import Renderer
from producers.proxy.sessions import Sessions
from producers.proxy.template_check import check_template
from schemas.events import PolicyLoaded, PolicyPublished
from schemas.ids import make_event_id, now_ms
from schemas.packing import pack_floats
from streams.runtime.metrics import start_health_server

log = structlog.get_logger()

#: How often the process looks at its stop flag, seconds.
_STOP_POLL_SEC = 0.2


class PortInUseError(RuntimeError):
    """The configured port is taken: names it and the key to change."""


def serve(settings: Settings, instance: int, stop: threading.Event) -> None:
    """Run the proxy until `stop` is set. Blocks."""
    check_cluster(settings)
    uvloop.run(_main(settings, instance, stop))


def make_engine(settings: Settings, instance: int) -> Engine:
    """The engine that [engine] asks for. Raises ValueError naming the key at fault."""
    section = settings.engine
    replica = section.replica if instance == 0 else f"{section.replica.rsplit('/', 1)[0]}/{instance}"
    if section.kind == "torch":
        from producers.proxy.engines.torch_engine import TorchEngine

        return TorchEngine(section, replica=replica)
    if section.kind == "scripted":
        if not section.script or not settings.policy.path:
            raise ValueError("engine.kind = scripted needs engine.script (replies) and policy.path (tokenizer)")
        renderer = Renderer.from_policy(Path(settings.policy.path))
        return ScriptedEngine(
            parse_script(Path(section.script)),
            encode=renderer.encode,
            decode=renderer.decode,
            stop_token_id=renderer.stop_token_id,
            replica=replica,
            max_model_len=section.max_model_len or SCRIPTED_MAX_MODEL_LEN,
        )
    raise ValueError(f"engine.kind = {section.kind!r} is not available; use torch or scripted")


class Proxy:
    """Wires the parts of one proxy process; also used by tests inside their own event loop."""

    def __init__(self, settings: Settings, instance: int, engine: Engine) -> None:
        self.settings = settings
        self.instance = instance
        self.engine = engine
        self.sessions = Sessions()
        self.recorder = Recorder(settings, settings.proxy.ack_timeout_sec)
        self.backend = Backend(
            engine=engine,
            recorder=self.recorder,
            producer=f"proxy/{instance}",
            default_max_tokens=settings.engine.max_tokens,
            call_timeout_sec=settings.proxy.call_timeout_sec,
            record_routing=settings.engine.record_routing,
        )
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._control: ControlServer | None = None
        self._follower: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """True once a policy is served."""
        return self.backend.renderer is not None and self.engine.version is not None

    async def start(self) -> None:
        """Bind, then follow the policies. Raises PortInUseError."""
        settings = self.settings
        app = make_app(self.backend, self.sessions, settings.proxy.max_body_mb * 2**20)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        port = settings.proxy.port + self.instance if settings.proxy.port else 0
        site = web.TCPSite(self._runner, "127.0.0.1", port, backlog=1024)
        try:
            await site.start()
        except OSError as exc:
            raise PortInUseError(f"127.0.0.1:{port}: {exc.strerror}; set proxy.port to a free port") from exc
        self.port = self._runner.addresses[0][1]
        server = self._runner.server
        assert server is not None
        self._control = ControlServer(proxy_socket_path(settings, self.instance), self.sessions, server)
        await self._control.start()
        if settings.policy.path:
            self._use_tokenizer(Path(settings.policy.path))
        self._follower = asyncio.create_task(PolicyFollower(settings, self._load).run())
        log.info("proxy listening", port=self.port, control=str(proxy_socket_path(settings, self.instance)))

    def _use_tokenizer(self, directory: Path) -> None:
        """All versions of a run share one tokenizer: the first directory that is known decides."""
        renderer = Renderer.from_policy(directory)
        report = check_template(renderer)
        log.info("chat template checked", kind=report.kind, labels=dict(report.labels))
        self.backend.renderer, self.backend.template = renderer, report

    async def _load(self, policy: PolicyPublished) -> None:
        """Load a published policy and say so in the log; a refused one leaves the replica fenced."""
        if self.backend.renderer is None:
            self._use_tokenizer(Path(policy.path))
        result = await self.engine.load(policy)
        level = log.info if result.ok else log.error
        level("policy loaded" if result.ok else "policy refused", version=policy.version, detail=result.detail)
        while True:
            try:
                await self.recorder.wait(self.recorder.write([self._loaded_event(policy, result)]))
                return
            except NotRecordedError as exc:  # the scheduler waits for this event: until Kafka has it, again
                log.warning("PolicyLoaded is not recorded yet", error=str(exc))

    def _loaded_event(self, policy: PolicyPublished, result: LoadResult) -> PolicyLoaded:
        now = now_ms()
        return PolicyLoaded(
            event_id=make_event_id(now),
            run_id=policy.run_id,
            occurred_at=now,
            producer=f"proxy/{self.instance}",
            version=policy.version,
            replica=self.engine.replica,
            ok=result.ok,
            manifest_sha256=policy.manifest_sha256,
            canary_logprobs=pack_floats(result.canary_logprobs),
            canary_max_abs_dlogp=result.canary_max_abs_dlogp,
            load_sec=result.load_sec,
            detail=result.detail,
        )

    async def wait_failed(self) -> None:
        """Return or raise when a part that must run for ever has ended."""
        assert self._follower is not None
        await self._follower

    async def close(self) -> None:
        """Stop taking calls, record what was running as failed, flush."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        if self._control is not None:
            await self._control.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.engine.close()
        await self.recorder.close()


async def _main(settings: Settings, instance: int, stop: threading.Event) -> None:
    proxy = Proxy(settings, instance, make_engine(settings, instance))
    health = start_health_server("proxy", instance, settings, ready=lambda: proxy.ready)
    try:
        await proxy.start()
        failed = asyncio.create_task(proxy.wait_failed())
        while not stop.is_set() and not failed.done():
            await asyncio.wait([failed], timeout=_STOP_POLL_SEC)
        if failed.done():
            failed.result()
    finally:
        await proxy.close()
        health.close()
