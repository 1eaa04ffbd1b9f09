"""The trial path: real mini-swe-agent, real sandbox, real grading; only the model is canned.

Warm forks against the cold command line: same code, same task, same machine, in one run.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.settings import TrialsSection
from producers.tasks.harbor import Task
from producers.trials.attempt import AttemptRunner, Claim
from producers.trials.harnesses.mini_swe_agent import MiniSweAgent
from producers.trials.pool import SandboxPool
from producers.trials.verifier.grades import GradeCache
from schemas.events import RewardGraded
from tests.unit.trials.sample_task import FIX, make_offer, make_task
from tests.unit.trials.scripted_proxy import SUBMIT, ScriptedProxy

LANES = 4
ROUNDS = 3
NUM_WARM = 60
NUM_COLD = 2
AIM_TRIALS_PER_SEC = 10.0
AIM_CPU_MS = 100.0


@dataclass
class Figures:
    """One way of running trials: rate per round, CPU over all of them."""

    trials_per_sec: list[float]
    cpu_ms_per_trial: float


def _script(trial: str, call: int) -> str:
    """Every other trial fixes the bug, one in ten in a way of its own, so that grades are made and reused."""
    index = int(trial.rsplit(".", 1)[1])
    if index % 2:
        return SUBMIT
    mark = f" && echo '# {index}' >> ops.py" if index % 10 == 0 else ""
    return f"{FIX}{mark} && {SUBMIT}"


def _measure(directory: Path, task: Task, settings: TrialsSection, num_trials: int, rounds: int, lanes: int) -> Figures:
    harness = MiniSweAgent()
    pool = SandboxPool(settings, harness, directory, directory, "bench")
    pool.start()
    rates = []
    try:
        runner = AttemptRunner(settings, harness, pool, GradeCache(), directory / "proxy.sock", lambda event: None)
        runner.run(Claim(make_offer(task, 0), "lease", "bench"))
        worker_sec, inside_sec = time.process_time(), pool.trial_cpu_sec()
        for number in range(rounds):
            begin = time.perf_counter()
            _round(runner, task, range(1 + number * num_trials, 1 + (number + 1) * num_trials), lanes)
            rates.append(num_trials / (time.perf_counter() - begin))
        cpu_sec = time.process_time() - worker_sec + pool.trial_cpu_sec() - inside_sec
    finally:
        pool.close()
    return Figures(rates, 1e3 * cpu_sec / (num_trials * rounds))


def _round(runner: AttemptRunner, task: Task, indices: range, lanes: int) -> None:
    def one(index: int) -> None:
        events = runner.run(Claim(make_offer(task, index), f"lease-{index}", "bench"))
        rewards = [e.reward for e in events if isinstance(e, RewardGraded)]
        if rewards != [0.0 if index % 2 else 1.0]:
            raise AssertionError(f"trial {index}: rewards {rewards}, {events[-1]}")

    with ThreadPoolExecutor(lanes) as threads:
        list(threads.map(one, indices))


def _row(name: str, unit: str, value: float, baseline: float, aim: float, *, more_is_better: bool) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 2),
        "unit": unit,
        "baseline": round(baseline, 3),
        "ratio": round(value / baseline if more_is_better else baseline / value, 2),
        "aim": aim,
        "met": value >= aim if more_is_better else value <= aim,
    }


def rows() -> list[dict[str, Any]]:
    """Rate and CPU of warm trials; the baseline is the cold command line, ratio: how many times better."""
    with tempfile.TemporaryDirectory(prefix="rs-bench-") as name:
        directory = Path(name)
        task = make_task(directory)
        settings = TrialsSection(lanes=LANES)
        with ScriptedProxy(directory / "proxy.sock", _script):
            cold = _measure(directory, task, replace(settings, warm=False), NUM_COLD, 1, NUM_COLD)
            warm = _measure(directory, task, settings, NUM_WARM, ROUNDS, LANES)
    rate = statistics.median(warm.trials_per_sec)
    what = "mini-swe-agent trials, sandbox and grading"
    return [
        _row(
            f"{what}: warm forks vs cold command line",
            "trials/s",
            rate,
            statistics.median(cold.trials_per_sec),
            AIM_TRIALS_PER_SEC,
            more_is_better=True,
        ),
        _row(
            f"{what}: CPU per trial",
            "ms",
            warm.cpu_ms_per_trial,
            cold.cpu_ms_per_trial,
            AIM_CPU_MS,
            more_is_better=False,
        ),
    ]


if __name__ == "__main__":
    print(json.dumps(rows(), indent=2))
