"""One attempt at a time: real mini-swe-agent, sandboxes and pytest; how each thing that goes wrong is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.settings import TrialsSection
from producers.tasks.harbor import Task
from producers.trials.attempt import AttemptRunner, Claim
from producers.trials.harnesses.base import HarnessError
from producers.trials.harnesses.mini_swe_agent import MiniSweAgent
from producers.trials.pool import SandboxPool
from producers.trials.verifier.grades import GradeCache
from schemas.base import Event
from schemas.events import AttemptFinished, RewardGraded, StageFinished
from tests.unit.trials.sample_task import FIX, INSTRUCTION, make_offer, make_task
from tests.unit.trials.scripted_proxy import SUBMIT, ScriptedProxy

SETTINGS = TrialsSection(lanes=2, setup_timeout_sec=120.0)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxPool]:
    directory = tmp_path_factory.mktemp("pool")
    made = SandboxPool(SETTINGS, MiniSweAgent(), directory, directory, "t")
    made.start()
    yield made
    made.close()


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path)


class Attempt:
    """The events of one attempt."""

    def __init__(self, events: list[Event]) -> None:
        (self.end,) = [e for e in events if isinstance(e, AttemptFinished)]
        self.rewards = [e for e in events if isinstance(e, RewardGraded)]
        self.stages = {e.stage: e for e in events if isinstance(e, StageFinished)}

    @property
    def outcomes(self) -> dict[str, str]:
        return {name: stage.outcome for name, stage in self.stages.items()}


def run(
    pool: SandboxPool, task: Task, socket: Path, settings: TrialsSection = SETTINGS, grades: GradeCache | None = None
) -> Attempt:
    stages: list[Event] = []
    runner = AttemptRunner(settings, MiniSweAgent(), pool, grades or GradeCache(), socket, stages.append)
    last = runner.run(Claim(make_offer(task), "lease", "worker/0"))
    return Attempt(stages + last)


def scripted(pool: SandboxPool, task: Task, tmp_path: Path, *commands: str | None, **settings: Any) -> Attempt:
    with ScriptedProxy(tmp_path / "p.sock", lambda trial, call: commands[min(call, len(commands) - 1)]):
        return run(pool, task, tmp_path / "p.sock", replace(SETTINGS, **settings))


def test_the_harness_sends_the_instruction_verbatim_and_its_own_token(
    pool: SandboxPool, task: Task, tmp_path: Path
) -> None:
    with ScriptedProxy(tmp_path / "p.sock", lambda trial, call: f"{FIX} && {SUBMIT}") as proxy:
        attempt = run(pool, task, tmp_path / "p.sock")
    first, headers, body = proxy.requests[0]
    offer = make_offer(task)
    assert first == f"POST /t/{offer.trial_id}/v1/chat/completions HTTP/1.1"
    assert headers["authorization"] == f"Bearer {proxy.sessions[0]['token']}"
    assert body["messages"] == [
        {"role": "system", "content": "You fix bugs."},
        {"role": "user", "content": INSTRUCTION},
    ]
    assert "temperature" not in body and "seed" not in body, "the proxy takes both from the offer"
    assert (proxy.sessions[0]["temperature"], proxy.sessions[0]["seed"]) == (offer.temperature, offer.seed)
    assert attempt.rewards[0].reward == 1.0 and set(attempt.outcomes.values()) == {"ok"}


def test_the_cold_command_line_does_the_same(pool: SandboxPool, task: Task, tmp_path: Path) -> None:
    cold_settings = replace(SETTINGS, warm=False)
    directory = tmp_path / "cold"
    cold = SandboxPool(cold_settings, MiniSweAgent(), directory, directory, "c")
    bodies: list[list[dict[str, Any]]] = []
    ends: list[AttemptFinished] = []
    try:
        cold.start()
        for which, settings in ((pool, SETTINGS), (cold, cold_settings)):
            with ScriptedProxy(tmp_path / "p.sock", lambda t, call: ["ls", f"{FIX} && {SUBMIT}"][call]) as proxy:
                ends.append(run(which, task, tmp_path / "p.sock", settings).end)
            (tmp_path / "p.sock").unlink()
            bodies.append([body for _, _, body in proxy.requests])
    finally:
        cold.close()
    assert bodies[0] == bodies[1] and len(bodies[0]) == 2
    fields = ("agent_exit_code", "agent_exit_status", "num_calls", "diff", "setup_ok", "verifier_ok", "detail")
    assert [getattr(ends[0], f) for f in fields] == [getattr(ends[1], f) for f in fields]
    assert not list(directory.glob("c-cold-*")), "a cold container leaves no log behind"


def test_an_agent_that_hangs_is_stopped(pool: SandboxPool, task: Task, tmp_path: Path) -> None:
    attempt = scripted(pool, task, tmp_path, f"{FIX}; sleep 20", agent_timeout_sec=2.0)
    assert attempt.end.agent_timed_out and attempt.end.agent_exit_code is None
    assert attempt.outcomes["agent"] == "timeout" and attempt.end.capture_ok and attempt.end.num_calls == 1
    assert b"x > limit" in (attempt.end.diff or b""), "what it had done is kept"


def test_without_a_proxy_nothing_runs(pool: SandboxPool, task: Task, tmp_path: Path) -> None:
    attempt = run(pool, task, tmp_path / "nobody.sock")
    assert not attempt.end.setup_ok and attempt.end.num_calls == 0 and attempt.rewards == []
    assert attempt.outcomes == {"prepare": "ok", "setup": "failed", "cleanup": "ok"}
    assert attempt.stages["setup"].error_class == "ProxyError" and "nobody.sock" in attempt.end.detail


def test_a_proxy_that_loses_the_session_leaves_the_capture_broken(
    pool: SandboxPool, task: Task, tmp_path: Path
) -> None:
    with ScriptedProxy(tmp_path / "p.sock", lambda trial, call: SUBMIT) as proxy:
        proxy.fail_close = True
        attempt = run(pool, task, tmp_path / "p.sock")
    assert not attempt.end.capture_ok and attempt.end.num_calls is None
    assert attempt.end.setup_ok and attempt.end.agent_exit_code == 0


def test_an_attempt_that_was_handed_out_twice_is_reported_once(pool: SandboxPool, task: Task, tmp_path: Path) -> None:
    claim = Claim(make_offer(task), "lease", "worker/0")
    with ScriptedProxy(tmp_path / "p.sock", lambda trial, call: SUBMIT) as proxy:
        proxy.refuse_duplicates = True
        runner = AttemptRunner(SETTINGS, MiniSweAgent(), pool, GradeCache(), tmp_path / "p.sock", lambda event: None)
        first, second = runner.run(claim), runner.run(claim)
    assert [type(e) for e in first] == [RewardGraded, AttemptFinished]
    assert second == []


def test_a_diff_that_never_ends_is_a_verifier_timeout(pool: SandboxPool, task: Task, tmp_path: Path) -> None:
    attack = f"printf 'while True:\\n    pass\\n' > ops.py && {SUBMIT}"
    attempt = scripted(pool, task, tmp_path, attack, verify_timeout_sec=3.0)
    assert attempt.end.verifier_timed_out and not attempt.end.verifier_ok and attempt.end.reward_event_id is None
    assert attempt.outcomes["verify"] == "timeout"


@pytest.mark.parametrize(
    "attack",
    [
        "printf 'def test_above(): pass\\ndef test_double(): pass\\n' > tests/test_ops.py",
        "printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport():\\n"
        '    r = yield\\n    r.get_result().outcome = "passed"\\n\' > conftest.py',
        "printf '[pytest]\\naddopts = -k nothing\\n' > pytest.ini",
        "printf 'import os\\nos._exit(0)\\n' > ops.py",
        "printf 'raise SystemExit(0)\\n' > ops.py",
        "printf 'def main(*a, **k): return 0\\n' > pytest.py",
        "ln -sf /dev/null ops.py",
        "printf 'import pytest\\npytest.skip(allow_module_level=True)\\n' > ops.py",
        "rm -rf tests ops.py",
        "git config core.fsmonitor 'touch /tmp/owned'; git config diff.external 'touch /tmp/owned'",
    ],
)
def test_tampering_earns_nothing(pool: SandboxPool, task: Task, tmp_path: Path, attack: str) -> None:
    attempt = scripted(pool, task, tmp_path, f"{attack}; {SUBMIT}")
    assert [r.reward for r in attempt.rewards] == [0.0] and attempt.end.verifier_ok, attempt.end.detail
    assert not Path("/tmp/owned").exists()


def test_tests_are_dropped_from_an_honest_diff(pool: SandboxPool, task: Task, tmp_path: Path) -> None:
    attempt = scripted(pool, task, tmp_path, f"{FIX}; echo 'x = 1' >> tests/test_ops.py; {SUBMIT}")
    assert [r.reward for r in attempt.rewards] == [1.0]
    assert attempt.end.detail == "dropped 'tests/test_ops.py': test"
    assert (attempt.end.diff or b"").count(b"diff --git") == 1


def test_a_reply_without_a_tool_call_ends_in_format_errors(pool: SandboxPool, task: Task, tmp_path: Path) -> None:
    attempt = scripted(pool, task, tmp_path, None)
    assert attempt.end.agent_exit_status in ("RepeatedFormatError", "LimitsExceeded") and attempt.end.num_calls == 3


def test_a_task_that_changed_is_refused(pool: SandboxPool, task: Task, tmp_path: Path) -> None:
    (task.path / "instruction.md").write_text("something else")
    attempt = run(pool, task, tmp_path / "p.sock")
    assert attempt.outcomes == {"prepare": "failed", "cleanup": "ok"}
    assert "changed since it was registered" in attempt.end.detail and not attempt.end.setup_ok


def test_reused_grades_say_where_they_come_from(pool: SandboxPool, task: Task, tmp_path: Path) -> None:
    grades = GradeCache()
    with ScriptedProxy(tmp_path / "p.sock", lambda trial, call: SUBMIT):
        first = run(pool, task, tmp_path / "p.sock", grades=grades).rewards[0]
        second = run(pool, task, tmp_path / "p.sock", grades=grades).rewards[0]
        third = run(pool, task, tmp_path / "p.sock", replace(SETTINGS, reuse_grades=False), grades).rewards[0]
    assert first.reused_from is None and first.duration_sec > 0
    assert second.reused_from == first.event_id and second.duration_sec == 0
    assert second.tests == first.tests and second.grader_digest == first.grader_digest
    assert third.reused_from is None


def test_a_harness_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"trials.harness_config.*nowhere.yaml"):
        MiniSweAgent(str(tmp_path / "nowhere.yaml"))


def test_a_lost_container_is_recorded_and_replaced(pool: SandboxPool, task: Task, tmp_path: Path) -> None:
    running = threading.Event()

    def script(trial: str, call: int) -> str:
        running.set()
        return f"sleep 30; {SUBMIT}"

    lost: list[Attempt] = []
    with ScriptedProxy(tmp_path / "p.sock", script):
        thread = threading.Thread(target=lambda: lost.append(run(pool, task, tmp_path / "p.sock")))
        thread.start()
        assert running.wait(60)
        assert pool._agent is not None and pool._agent._process is not None
        pool._agent._process.kill()
        thread.join(60)
    end = lost[0].end
    assert end.sandbox_lost and end.setup_ok and end.agent_exit_code is None and lost[0].rewards == []
    assert not pool.alive()
    pool.revive()
    assert pool.alive()
    after: Callable[[], Attempt] = lambda: scripted(pool, task, tmp_path / "again", f"{FIX} && {SUBMIT}")  # noqa: E731
    (tmp_path / "again").mkdir()
    assert after().rewards[0].reward == 1.0
