"""The fork server inside the bubblewrap container: one program, already warm, from which every trial is a fork.

What makes a trial cost a tenth of a second of CPU instead of six:

- **Warm program.** `Program.warm()` imports the harness (or pytest) once, runs it once for real, undoes what that run
  left in the process, and moves everything out of the garbage collector's sight (`gc.freeze`) so that a fork's
  collections touch, and so copy, no inherited page.
- **Huge pages** under the heap (MADV_COLLAPSE): a fork copies one page-table entry where it copied 512.
- **Overlay reset.** A trial's repository is an overlay on a tmpfs over a read-only tree: nothing is copied in, and
  throwing it away is one unmount.
- **Few system calls.** One bubblewrap for all trials; a trial is `unshare`, a dozen mounts and a user namespace.
- **Concurrency** without threads: the server only forks, waits on pidfds and reads what dead trials left.

Trials are not weaker for it: each has PID, mount, network, IPC, UTS and user namespaces of its own, made by
`inside.py` before any foreign code runs. Standard library only.

Control protocol, on the SOCK_SEQPACKET descriptor given as the first argument: the server sends one JSON message when
it is ready. A request is a JSON message with two descriptors. On the first, `trial`, the fork reads a request frame and
answers with a `started` frame (the listening socket attached). On the second, `life`, the server sends the one `result`
frame when the fork is dead; a byte received there, or its end, kills the fork. When the control socket ends, so does
the server, and with the container's PID namespace everything in it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

sys.path.insert(0, "/host/code")

from producers.trials.sandboxes import channel, collect, inside, kernel, seccomp

_LOG_TAIL_BYTES = 4096


class Program(Protocol):
    """What is forked: a module with these two functions."""

    def warm(self, options: dict[str, Any]) -> dict[str, Any]:
        """Import, prime and reset; returns facts worth logging. Called once."""

    def run(self, request: dict[str, Any], blob: bytes, fds: list[int]) -> int:
        """Run one trial, in the fork, as the agent's user, in /repo. Returns the exit code."""


@dataclass
class _Fork:
    pid: int
    pidfd: int
    life: socket.socket
    scratch: socket.socket
    collect_changes: bool
    collect_files: list[str]
    killed: bool = False


class Zygote:
    """The server. Single-threaded; `serve` returns when the control socket ends."""

    def __init__(self, control: socket.socket, program: Program, limits: inside.Limits) -> None:
        self._control, self._program, self._limits = control, program, limits
        self._seccomp = seccomp.build_filter()
        self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._selector = selectors.PollSelector()
        self._forks: dict[int, _Fork] = {}

    def serve(self) -> None:
        self._selector.register(self._control, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    if not self._accept():
                        return
                elif key.data.pid in self._forks:
                    self._attend(key.fd, key.data)

    def _accept(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, 65536, 2)
        if not message:
            return False
        request = json.loads(message)
        trial, life = (socket.socket(fileno=fd) for fd in fds)
        mine, its = socket.socketpair()
        inside.fork_into_pid_namespace(self._own_pid_namespace)
        pid = os.fork()
        if pid == 0:
            self._child(trial, life, its)
        trial.close()
        its.close()
        fork = _Fork(pid, os.pidfd_open(pid), life, mine, request["collect_changes"], request["collect_files"])
        self._forks[pid] = fork
        self._selector.register(life, selectors.EVENT_READ, fork)
        self._selector.register(fork.pidfd, selectors.EVENT_READ, fork)
        return True

    def _attend(self, fd: int, fork: _Fork) -> None:
        if fd == fork.pidfd:
            self._finish(fork)
            return
        # A byte means "stop it and tell me what is there"; the end means nobody is interested any more.
        self._selector.unregister(fork.life)
        fork.killed = True
        signal.pidfd_send_signal(fork.pidfd, signal.SIGKILL)

    def _finish(self, fork: _Fork) -> None:
        _, status, usage = os.wait4(fork.pid, 0)  # with PID 1 the kernel has ended its whole namespace
        del self._forks[fork.pid]
        self._selector.unregister(fork.pidfd)
        os.close(fork.pidfd)
        if fork.life in self._selector.get_map():
            self._selector.unregister(fork.life)
        result: dict[str, Any] = {
            "exit_code": os.waitstatus_to_exitcode(status),
            "killed": fork.killed,
            "cpu_sec": usage.ru_utime + usage.ru_stime,
            "peak_memory_bytes": usage.ru_maxrss * 1024,
            "container_cpu_sec": _cpu_sec(),
        }
        blob = self._collect(fork, result)
        fork.scratch.close()
        try:
            fork.life.settimeout(30)
            channel.send_frame(fork.life, result, blob)
        except OSError:
            pass  # the worker lost interest; there is nobody to tell
        fork.life.close()

    def _collect(self, fork: _Fork, result: dict[str, Any]) -> bytes:
        blob: list[bytes] = []
        fork.scratch.setblocking(False)
        try:
            _, fds, _, _ = socket.recv_fds(fork.scratch, 16, 2)
        except BlockingIOError:
            fds = []
        result["entered"] = bool(fds)
        if not fds:
            return b""
        upper, home = fds
        if fork.collect_changes:
            entries, result["truncated"] = collect.collect_changes(upper)
            result["changes"] = [[e.path, e.kind, len(e.data)] for e in entries]
            blob += [e.data for e in entries]
        files = {n: collect.read_file(home, n, collect.MAX_FILE_BYTES) for n in fork.collect_files}
        files["log"] = collect.read_file(home, ".log", _LOG_TAIL_BYTES, tail=True)
        result["files"] = {name: len(data) for name, data in files.items()}
        blob += files.values()
        os.close(upper)
        os.close(home)
        return b"".join(blob)

    def _child(self, trial: socket.socket, life: socket.socket, scratch: socket.socket) -> NoReturn:
        code = 125
        try:
            life.close()
            signal.set_wakeup_fd(-1)
            code = self._run(trial, scratch)
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code & 0xFF)

    def _run(self, trial: socket.socket, scratch: socket.socket) -> int:
        request, blob, fds = channel.receive_frame(trial)
        try:
            dirs = inside.enter(request["tree"], self._limits)
            socket.send_fds(scratch, [b"s"], [dirs.upper_fd, dirs.home_fd])
            sockets = [inside.listen()] if request["listen"] else []
            log = os.open(f"{inside.HOME}/.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.chdir(inside.REPO)
            os.setsid()
            inside.drop_privileges(self._limits, self._seccomp)
            inside.verify_isolation()
            for name, text in request.get("home_files", {}).items():
                with open(os.path.join(inside.HOME, name), "w") as file:  # noqa: PTH118
                    file.write(text)
            channel.send_frame(trial, {"ok": True}, fds=[s.fileno() for s in sockets])
        except BaseException as exc:
            channel.send_frame(trial, {"ok": False, "error": type(exc).__name__, "detail": str(exc)})
            return 125
        null = os.open("/dev/null", os.O_RDWR)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        for owner in (trial, scratch, *sockets):
            owner.detach()
        kernel.close_all_but(fds)
        return self._program.run(request, blob, fds)


def _cpu_sec() -> float:
    """Processor time of the server and of every fork that has ended."""
    usage = os.times()
    return usage.user + usage.system + usage.children_user + usage.children_system


def main() -> None:
    """Arguments: control descriptor, program module, JSON {limits, options}."""
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = json.loads(sys.argv[3])
    program: Any = importlib.import_module(sys.argv[2])
    with open("/proc/self/maps") as maps:  # opened early: `program` may not leave /proc alone
        info = program.warm(setup["options"])
        gc.collect()
        gc.freeze()
        info["huge_pages"] = kernel.collapse_heap(maps.read())
    info["warm_cpu_sec"] = round(_cpu_sec(), 3)
    zygote = Zygote(control, program, inside.Limits(**setup["limits"]))
    control.send(json.dumps(info).encode())
    zygote.serve()


if __name__ == "__main__":
    main()
