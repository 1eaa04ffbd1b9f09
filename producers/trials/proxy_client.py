"""The worker's end of a capture session: one connection to the proxy per attempt, its life is the session's life."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from producers.trials.sandboxes.inside import PROXY_PORT
from schemas.events import TrialOffered


class ProxyError(RuntimeError):
    """The capture proxy refused, or is gone."""


class DuplicateAttemptError(ProxyError):
    """The attempt was opened by another claim: the queue handed it out twice, and that claim reports it."""


@dataclass(frozen=True)
class CaptureFacts:
    """What the proxy recorded in a session, every call acknowledged by the log."""

    num_calls: int
    num_failed_calls: int
    num_sampled_tokens: int
    num_parser_failures: int
    context_overflow: bool
    length_stop: bool


def proxy_answers(path: Path) -> bool:
    """Whether a proxy listens on the control socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(str(path))
        except OSError:
            return False
        return True


def base_url(trial_id: str) -> str:
    """Where the harness finds the proxy, inside its sandbox."""
    return f"http://127.0.0.1:{PROXY_PORT}/t/{trial_id}/v1"


class CaptureSession:
    """An open session. Losing the connection cancels what still runs."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    @classmethod
    def open(
        cls, path: Path, offer: TrialOffered, token: str, listener: socket.socket, timeout_sec: float
    ) -> CaptureSession:
        """Hand the sandbox's listening socket to the proxy. Raises ProxyError."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_sec)
        message = {
            "op": "open",
            "trial_id": offer.trial_id,
            "attempt": offer.attempt,
            "token": token,
            "run_id": offer.run_id,
            "seed": offer.seed,
            "temperature": offer.temperature,
            "max_turns": offer.max_turns,
            "kind": "listener",
        }
        try:
            sock.connect(str(path))
            socket.send_fds(sock, [json.dumps(message).encode() + b"\n"], [listener.fileno()])
            session = cls(sock)
            session._answer("open")
        except DuplicateAttemptError:
            sock.close()
            raise
        except (OSError, ProxyError) as exc:
            sock.close()
            raise ProxyError(f"the capture proxy at {path} did not open a session: {exc}") from exc
        return session

    def close(self, timeout_sec: float) -> CaptureFacts:
        """End the session after the harness is gone; waits for outstanding calls and their acks. Raises ProxyError."""
        try:
            self._sock.settimeout(timeout_sec)
            self._sock.sendall(b'{"op":"close"}\n')
            answer = self._answer("close")
            return CaptureFacts(
                num_calls=int(answer["num_calls"]),
                num_failed_calls=int(answer["num_failed_calls"]),
                num_sampled_tokens=int(answer["num_sampled_tokens"]),
                num_parser_failures=int(answer["num_parser_failures"]),
                context_overflow=bool(answer["context_overflow"]),
                length_stop=bool(answer["length_stop"]),
            )
        except (OSError, KeyError, TypeError, ValueError) as exc:
            raise ProxyError(f"the capture proxy did not confirm the session's end: {exc!r}") from exc
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Drop the session: generations that still run are cancelled."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def _answer(self, what: str) -> dict[str, Any]:
        while b"\n" not in self._rest:
            data = self._sock.recv(65536)
            if not data:
                raise ProxyError(f"the connection ended before {what} was answered")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if answer.get("code") == "duplicate_attempt":
            raise DuplicateAttemptError(str(answer.get("error")))
        if not answer.get("ok"):
            raise ProxyError(f"{what} was refused: {answer.get('error', answer)}")
        return answer
