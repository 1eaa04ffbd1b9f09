"""What a sandbox lets through: real bubblewrap, real namespaces. Each attack is seen to work without the defence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from producers.trials.sandboxes.bubblewrap import (
    Container,
    SandboxLostError,
    SandboxSetupError,
    SandboxTimeoutError,
    TrialResult,
)
from producers.trials.sandboxes.inside import Limits
from producers.trials.sandboxes.layout import Layout, SandboxUnavailableError
from producers.trials.sandboxes.seccomp import UnsupportedArchitectureError, build_filter
from producers.trials.worktree import BaseTree, Worktrees
from tests.unit.trials.conftest import COMMAND
from tests.unit.trials.sample_task import HIDDEN, OPS, make_task


@dataclass
class Box:
    """Runs shell commands in sandboxes over one task's tree."""

    container: Container
    layout: Layout
    tree: BaseTree

    def run(self, script: str, timeout_sec: float = 30.0) -> TrialResult:
        argv = ["/bin/bash", "-c", script]
        return self.run_argv(argv, timeout_sec)

    def python(self, source: str) -> TrialResult:
        return self.run_argv([self.layout.python, "-c", source])

    def run_argv(self, argv: list[str], timeout_sec: float = 30.0) -> TrialResult:
        request = {"tree": f"trees/{self.tree.path.name}", "listen": False, "argv": argv, "env": self.layout.env}
        trial = self.container.start_trial(request, collect_changes=True)
        trial.wait_started(30)
        return trial.wait_result(timeout_sec)[0]


@pytest.fixture(scope="module")
def box(
    command_box: Container, layout: Layout, worktrees: Worktrees, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Box]:
    directory = tmp_path_factory.mktemp("tasks")
    task = make_task(directory)
    # A repository with a past that holds the fix.
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(task.repo_dir)]
    (task.repo_dir / "ops.py").write_text("THE_FIX_IN_THE_PAST = 1\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "fix"]):
        subprocess.run([*git, *command], check=True)
    (task.repo_dir / "ops.py").write_text(OPS)
    yield Box(command_box, layout, worktrees.ensure(make_task_like(task.path)))


def make_task_like(path: Path):  # type: ignore[no-untyped-def]
    from producers.tasks.harbor import load_task

    return load_task(path)


# -- what works


def test_the_agent_sees_the_tree_with_one_commit_and_none_of_the_past(box: Box) -> None:
    result = box.run(
        "git log --all --format=%s; git status --porcelain; git fsck --lost-found; git reflog; "
        "git grep -c THE_FIX_IN_THE_PAST $(git rev-list --all) ; "
        "cat $(find .git -type f) | grep -c THE_FIX_IN_THE_PAST; ls tests"
    )
    assert result.log_tail.split() == ["base", "0", "test_ops.py"], result.log_tail


def test_the_tree_is_the_same_for_every_digest(box: Box, tmp_path: Path) -> None:
    def head(tree: Path) -> str:
        command = ["git", "-c", "safe.directory=*", "-C", str(tree), "rev-parse", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    again = Worktrees(tmp_path / "again").ensure(make_task_like_from(box, tmp_path))
    assert head(again.path) == head(box.tree.path)


def make_task_like_from(box: Box, tmp_path: Path):  # type: ignore[no-untyped-def]
    return make_task(tmp_path / "t")


def test_changes_come_out_and_nothing_stays(box: Box) -> None:
    first = box.run(
        "echo new > new.txt; echo 'x = 1' > ops.py; rm data/one.txt; rm -r data/deep; mkdir data/deep; "
        "echo 3 > data/deep/three.txt; ln -s /etc/passwd link; chmod +x new.txt; git add -A; git commit -qm mine; id -u"
    )
    assert first.exit_code == 0 and first.log_tail.strip() == "1000"
    got = {e.path: (e.kind, e.data) for e in first.changes}
    assert got == {
        "new.txt": ("executable", b"new\n"),
        "ops.py": ("file", b"x = 1\n"),
        "data/one.txt": ("deleted", b""),
        "data/deep": ("opaque", b""),
        "data/deep/three.txt": ("file", b"3\n"),
        "link": ("symlink", b""),
    }
    second = box.run("ls; git log --format=%s; cat ops.py")
    assert second.changes == [] and "new.txt" not in second.log_tail and "def above" in second.log_tail


def test_an_unreadable_file_is_read_all_the_same(box: Box) -> None:
    result = box.run("mkdir d; echo x > d/f; chmod 000 d/f d")
    assert ("d/f", "file", b"x\n") in [(e.path, e.kind, e.data) for e in result.changes]


def test_exit_codes_and_time_limit(box: Box) -> None:
    assert box.run("exit 7").exit_code == 7
    assert box.run("kill -TERM $$").exit_code == 128 + 15
    result = box.run("(sleep 1000 & ) ; sleep 1000", timeout_sec=0.5)
    assert result.killed and result.exit_code == -9


# -- network


def test_no_network_but_loopback_of_its_own(box: Box) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = server.getsockname()[1]
        attack = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('reached')"
        assert subprocess.run([sys.executable, "-c", attack], capture_output=True, check=True).stdout == b"reached\n"
        assert "ConnectionRefusedError" in box.python(attack).log_tail
    for address in ("192.0.2.1", "169.254.169.254", "2001:db8::1"):
        out = box.python(f"import socket; socket.create_connection(('{address}', 80), 2)").log_tail
        assert "Network is unreachable" in out or "Cannot assign requested address" in out, out


def test_abstract_sockets_of_the_host_are_not_there(box: Box) -> None:
    name = f"rollstream-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen(1)
        attack = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}'); print('reached')"
        assert subprocess.run([sys.executable, "-c", attack], capture_output=True, check=True).stdout == b"reached\n"
        assert "ConnectionRefusedError" in box.python(attack).log_tail


@pytest.mark.parametrize(("family", "number"), [("vsock", 40), ("packet", 17), ("alg", 38)])
def test_other_socket_families_do_not_exist(box: Box, family: str, number: int) -> None:
    out = box.python(f"import socket; socket.socket({number}, socket.SOCK_STREAM)").log_tail
    assert "Address family not supported" in out, out


# -- files


def test_host_files_are_not_there(box: Box, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    secret.chmod(0o644)
    assert "No such file" in box.run(f"cat {secret}").log_tail
    out = box.run("ls -A /root /host /scratch /var /sys /boot /mnt /srv 2>&1; ls /home; cat /etc/shadow; ls /").log_tail
    assert "agent" in out and "shadow: No such file" in out
    listed = set(out.rsplit("No such file or directory", 1)[1].split())
    assert listed <= {
        "bin", "dev", "etc", "home", "host", "lib", "lib32", "lib64", "libx32", "opt", "proc", "repo", "run", "sbin",
        "scratch", "tmp", "usr", "var",
    }  # fmt: skip


def test_hidden_tests_and_other_tasks_are_nowhere(box: Box, worktrees: Worktrees, tmp_path: Path) -> None:
    other = make_task(tmp_path, "another-task-entirely")
    (other.repo_dir / "marker_of_the_other_task.txt").write_text("x")
    worktrees.ensure(make_task_like(other.path))
    needle = HIDDEN.splitlines()[4].strip()
    assert "assert above" in needle
    out = box.run(
        f"grep -rlF '{needle}' / --include='*.py' --exclude-dir=proc --exclude-dir=usr --exclude-dir=opt 2>/dev/null; "
        "find / -name 'marker_of*' -not -path '/proc/*' 2>/dev/null; echo done"
    )
    assert out.log_tail == "done\n"


@pytest.mark.parametrize(
    "target", ["/usr/evil", "/evil", "/opt/venv/evil", "/etc/evil", "/dev/evil", "/proc/sys/kernel/hostname"]
)
def test_the_system_is_read_only(box: Box, target: str) -> None:
    result = box.run(f"echo x > {target}")
    assert result.exit_code != 0 and ("Read-only" in result.log_tail or "denied" in result.log_tail), result.log_tail


def test_pid_1_is_closed_and_processes_are_alone(box: Box) -> None:
    out = box.run("cat /proc/1/environ /proc/1/mem /proc/1/fd/0; ls /proc/1/root; ls -d /proc/[0-9]* | wc -l").log_tail
    assert out.count("Permission denied") == 4 and int(out.split()[-1]) <= 5, out


# -- privileges


@pytest.mark.parametrize(
    "attack",
    [
        "unshare -U true",
        "unshare -r -n true",
        "mount -t tmpfs x /tmp",
        "chroot / true",
        "python3 -c 'import ctypes as c; r=c.CDLL(None).ptrace(16, 1, 0, 0); raise SystemExit(r != 0)'",
        "python3 -c 'import ctypes as c; r=c.CDLL(None).syscall(425, 8, 0); raise SystemExit(r < 0)'",
        "python3 -c 'import ctypes as c; r=c.CDLL(None).syscall(250, 0, -3, 0); raise SystemExit(r < 0)'",
        "python3 -c 'import os; os.setuid(0)'",
        "mknod /tmp/null c 1 3",
    ],
)
def test_no_privilege_can_be_had(box: Box, attack: str) -> None:
    assert box.run(attack).exit_code != 0


def test_no_capabilities_and_a_filter(box: Box) -> None:
    status = dict(line.split(":\t") for line in box.run("cat /proc/self/status").log_tail.splitlines() if ":\t" in line)
    assert {status[k] for k in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_a_seccomp_filter_is_refused_for_an_unknown_processor() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="riscv64"):
        build_filter("riscv64")
    assert len(build_filter("aarch64")) % 8 == 0 and build_filter("aarch64") != build_filter("x86_64")


# -- exhaustion


def test_a_fork_bomb_is_bounded_and_does_not_touch_its_neighbour(box: Box) -> None:
    source = (
        "import os, time\nn = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            time.sleep(60)\n"
        "        n += 1\n"
        "except OSError:\n    print('stopped at', n, flush=True)\n    os._exit(0)\n"
    )
    out = box.python(source).log_tail
    assert "stopped at" in out and int(out.split()[-1]) < 48, out
    assert box.run("true").exit_code == 0


def test_disk_and_memory_are_bounded(box: Box) -> None:
    full = box.run("head -c 60M /dev/zero > /tmp/a; head -c 60M /dev/zero > /tmp/b; head -c 1M /dev/zero > more")
    assert full.exit_code != 0 and [(e.path, len(e.data)) for e in full.changes] == [("more", 0)]
    assert "MemoryError" in box.python("x = bytearray(700 << 20)").log_tail
    assert box.run("head -c 32M /dev/zero > /tmp/ok").exit_code == 0, "the next trial has its own space"


def test_a_flood_of_output_ends_at_the_disk_limit(box: Box) -> None:
    result = box.run("yes 2>/dev/null; true")
    assert len(result.files["log"]) <= 4096


# -- loss


def _container(layout: Layout, path: Path) -> Container:
    container = Container(layout, COMMAND, Limits(disk_mb=16), path / "own.log")
    container.launch()
    container.wait_ready(60)
    return container


def _processes(marker: str) -> list[str]:
    found = subprocess.run(["pgrep", "-f", marker], capture_output=True, text=True).stdout.split()
    return [p for p in found if int(p) != os.getpid()]


def test_a_container_that_dies_is_seen_and_takes_its_trials_along(layout: Layout, tmp_path: Path) -> None:
    container, marker = _container(layout, tmp_path), f"sleep 77{os.getpid()}"
    try:
        request = {"tree": "", "listen": False, "argv": ["/bin/sh", "-c", f"{marker}; true"], "env": {}}
        trial = container.start_trial(request)
        trial.wait_started(30)
        assert container._process is not None
        container._process.kill()
        with pytest.raises(SandboxLostError, match="while a trial ran"):
            trial.wait_result(30)
        container._process.wait(10)
        assert not container.alive() and _processes(marker) == []
        with pytest.raises(SandboxLostError):
            container.start_trial(request).wait_started(30)
    finally:
        container.close()


def test_an_abandoned_trial_is_killed(box: Box) -> None:
    marker = f"sleep 88{os.getpid()}"
    request = {"tree": "", "listen": False, "argv": ["/bin/sh", "-c", f"{marker}; true"], "env": {}}
    trial = box.container.start_trial(request)
    trial.wait_started(30)
    while not _processes(marker):
        pass
    trial.abandon()
    while _processes(marker):
        pass


def test_a_sandbox_that_cannot_be_built_runs_nothing(box: Box) -> None:
    request = {"tree": "trees/none", "listen": False, "argv": ["/bin/true"], "env": {}}
    trial = box.container.start_trial(request)
    with pytest.raises(SandboxSetupError, match="overlay"):
        trial.wait_started(30)


def test_a_program_that_cannot_start_says_why(layout: Layout, tmp_path: Path) -> None:
    container = Container(layout, "no.such.module", Limits(), tmp_path / "log")
    container.launch()
    with pytest.raises(SandboxUnavailableError, match=r"No module named 'no'"):
        container.wait_ready(60)


def test_a_silent_sandbox_times_out() -> None:
    from producers.trials.sandboxes.bubblewrap import TrialProcess

    mine, its = socket.socketpair()
    life, its_life = socket.socketpair()
    with its, its_life, pytest.raises(SandboxTimeoutError):
        TrialProcess(mine, life).wait_started(0.05)
    life.close()
