"""mini-swe-agent, as installed from the package index: its own command line, configured by file and arguments."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

from producers.trials.harnesses.base import ExitFacts, HarnessError, Invocation
from producers.trials.sandboxes.inside import HOME
from producers.trials.sandboxes.layout import VENV

_OWN_CONFIG = Path(__file__).with_name("mini_swe_agent.yaml")
_CONFIG, _TRAJECTORY = "harness.yaml", "trajectory.json"
MODEL = "openai/policy"


class MiniSweAgent:
    """Adapter of mini-swe-agent 2.x."""

    name = "mini-swe-agent"
    warm_program: str | None = "producers.trials.harnesses.mini_swe_agent_warm"

    def __init__(self, config_path: str = "") -> None:
        path = Path(config_path).expanduser() if config_path else _OWN_CONFIG
        try:
            self._config = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise HarnessError(f"trials.harness_config = {config_path!r}: {exc}; give a mini-swe-agent YAML") from exc
        try:
            self.version = importlib.metadata.version("mini-swe-agent")
        except importlib.metadata.PackageNotFoundError:
            raise HarnessError("mini-swe-agent is not installed; `pip install 'rollstream[harness]'`") from None

    def invocation(self, *, task: str, base_url: str, token: str, max_turns: int, env: dict[str, str]) -> Invocation:
        """The command line of a trial."""
        arguments = ["-m", MODEL, "-y", "--exit-immediately", "-o", f"{HOME}/{_TRAJECTORY}"]
        arguments += ["-c", f"{HOME}/{_CONFIG}", "-c", f"agent.step_limit={max_turns}", f"--task={task}"]
        return Invocation(
            argv=[f"{VENV}/bin/python", "-m", "minisweagent", *arguments],
            env=env | _environment() | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": token},
            home_files={_CONFIG: self._config},
            collect_files=(_TRAJECTORY,),
        )

    def warm_options(self, env: dict[str, str]) -> dict[str, object]:
        """Environment and configuration of the priming run."""
        return {"env": env | _environment(), "config": self._config, "model": MODEL}

    def read_exit(self, files: dict[str, bytes]) -> ExitFacts:
        """`info.exit_status` of the trajectory file; the agent could have written it, so it decides no reward."""
        raw = files.get(_TRAJECTORY, b"")
        if not raw:
            return ExitFacts(None, False, "the harness left no trajectory")
        try:
            info = json.loads(raw)["info"]
            status = str(info["exit_status"]) or None
        except (ValueError, KeyError, TypeError):
            return ExitFacts(None, False, "the harness left an unreadable trajectory")
        return ExitFacts(status, status == "LimitsExceeded")


def _environment() -> dict[str, str]:
    return {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": "/tmp",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MODE": "PRODUCTION",  # do not look for a .env file in the repository
    }
