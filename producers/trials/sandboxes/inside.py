"""Namespaces, mounts and privileges of one trial, made from inside the bubblewrap container. Standard library only.

The container is a small read-only root made by `bubblewrap.py`: system and runtimes read-only, and under `/host` the
task trees. A trial is a fork of a process in it. The fork takes namespaces of its own, mounts one size-limited tmpfs
and an overlay on it, lets go of `/host`, becomes an unprivileged user of a further user namespace and only then runs
foreign code.
"""

from __future__ import annotations

import os
import resource
import socket
from dataclasses import dataclass

from producers.trials.sandboxes import kernel

REPO, HOME, TMP, HOST, SCRATCH = "/repo", "/home/agent", "/tmp", "/host", "/scratch"
PROXY_PORT = 8080
AGENT_UID = 1000
_MAX_INODES = 100_000
_READ_ONLY_PROC = ("sys", "sysrq-trigger", "irq", "bus")


class IsolationError(RuntimeError):
    """A sandbox is not as closed as it must be; nothing is run in it."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one sandbox that need no cgroup."""

    disk_mb: int = 256
    memory_mb: int = 2048
    max_processes: int = 256
    max_open_files: int = 4096


@dataclass(frozen=True)
class Scratch:
    """Descriptors of the directories a trial writes to; they outlive its mounts."""

    upper_fd: int
    home_fd: int


def fork_into_pid_namespace(own_namespace_fd: int) -> None:
    """Make the next fork the first process of a fresh PID namespace."""
    kernel.setns(own_namespace_fd, kernel.CLONE_NEWPID)
    kernel.unshare(kernel.CLONE_NEWPID)


def enter(tree: str, limits: Limits) -> Scratch:
    """Build the trial's file system and network around this process. `tree`: repository below /host, or empty."""
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET)
    kernel.raise_loopback()  # its own: test suites may talk to themselves
    socket.sethostname("sandbox")
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    for name in _READ_ONLY_PROC:
        if os.path.exists(f"/proc/{name}"):  # noqa: PTH110 (pathlib is not worth its import in every fork)
            kernel.bind_read_only(f"/proc/{name}", f"/proc/{name}")
    scratch = _mount_scratch(tree, limits)
    kernel.unmount(HOST)
    kernel.unmount(SCRATCH)
    return scratch


def _mount_scratch(tree: str, limits: Limits) -> Scratch:
    # One tmpfs carries everything a trial can write, so one size bounds it all.
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", SCRATCH, "tmpfs", flags, f"size={limits.disk_mb}m,mode=755,nr_inodes={_MAX_INODES}")
    for name in ("upper", "work", "home", "tmp", "shm"):
        os.mkdir(f"{SCRATCH}/{name}")  # noqa: PTH102
    if tree:
        options = f"lowerdir={HOST}/{tree},upperdir={SCRATCH}/upper,workdir={SCRATCH}/work,userxattr"
        kernel.mount("overlay", REPO, "overlay", flags, options)
    else:
        kernel.mount(f"{SCRATCH}/upper", REPO, None, kernel.MS_BIND)
    for name, target in (("home", HOME), ("tmp", TMP), ("shm", "/dev/shm")):
        kernel.mount(f"{SCRATCH}/{name}", target, None, kernel.MS_BIND)
    kernel.mount(
        "devpts",
        "/dev/pts",
        "devpts",
        kernel.MS_NOSUID | kernel.MS_NOEXEC,
        "newinstance,ptmxmode=0666,mode=620",
    )
    how = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    return Scratch(os.open(f"{SCRATCH}/upper", how), os.open(f"{SCRATCH}/home", how))


def listen() -> socket.socket:
    """The sandbox's one way out: a socket that the capture proxy accepts on from its side."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited by what is accepted; asyncio would set it only on sockets it knows to be TCP (40 ms stalls otherwise).
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.bind(("127.0.0.1", PROXY_PORT))
    sock.listen(64)
    return sock


def drop_privileges(limits: Limits, seccomp: bytes) -> None:
    """Become the agent's user: own user namespace, no capability, rlimits, seccomp. There is no way back."""
    outside = os.getuid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.map_user(AGENT_UID, outside)
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: limits.disk_mb << 20,
        resource.RLIMIT_NOFILE: limits.max_open_files,
        # After the user namespace is made: processes are then counted per trial and not per user.
        resource.RLIMIT_NPROC: limits.max_processes,
        resource.RLIMIT_DATA: limits.memory_mb << 20,
        resource.RLIMIT_MEMLOCK: 64 << 10,
    }
    for which, bound in bounds.items():
        hard = resource.getrlimit(which)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(which, (bound, bound))
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.install_seccomp(seccomp)


def verify_isolation() -> None:
    """Look at what this process can reach. Raises IsolationError before any foreign code runs."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file if ":" in line)
    wrong = [
        f"{name} is {status.get(name, 'missing').strip()}"
        for name, good in (("CapEff", 0), ("CapPrm", 0), ("CapBnd", 0), ("NoNewPrivs", 1), ("Seccomp", 2))
        if int(status.get(name, "-1").strip(), 16) != good
    ]
    interfaces = [name for _, name in socket.if_nameindex() if name != "lo"]
    if interfaces:
        wrong.append(f"network interfaces {', '.join(interfaces)}")
    for path in (HOST, SCRATCH):
        if os.listdir(path):  # noqa: PTH208
            wrong.append(f"{path} is not empty")
    if os.getpid() != 1:
        wrong.append("PID namespace is shared")
    if wrong:
        raise IsolationError("; ".join(wrong))
