"""The Linux calls a sandbox is made of, by ctypes. Standard library only: this also runs inside the sandbox.

Sources: unshare(2), setns(2), mount(2), capabilities(7), prctl(2), close_range(2), netdevice(7).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterable

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 24, 38, 22
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
SECCOMP_MODE_FILTER = 2
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41
_CAPABILITY_VERSION_3 = 0x20080522
_MADV_COLLAPSE, _HUGE_PAGE = 25, 1 << 21

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces named by CLONE_NEW* `flags` for fresh ones."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace `fd` refers to."""
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str | None, target: str, fstype: str | None = None, flags: int = 0, data: str = "") -> None:
    """mount(2)."""

    def raw(text: str | None) -> bytes | None:
        return text.encode() if text else None

    result = _libc.mount(raw(source) or b"none", raw(target), raw(fstype), ctypes.c_ulong(flags), raw(data))
    _check(result, f"mount {fstype or source} on {target}")


def bind_read_only(source: str, target: str) -> None:
    """Bind `source` on `target` and make that mount read-only."""
    mount(source, target, None, MS_BIND | MS_REC)
    mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def unmount(target: str) -> None:
    """Detach what is mounted on `target`, with everything below it."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def raise_loopback() -> None:
    """Bring `lo` up in the current network namespace."""
    with socket.socket() as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP_RUNNING))


def map_user(inside: int, outside: int) -> None:
    """In a user namespace just made: let user and group `outside` of the parent namespace be `inside`."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside} 1"),
        ("gid_map", f"{inside} {outside} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def drop_capabilities() -> None:
    """Give up every capability, now and for whatever is executed later; no program gains privilege by exec."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # past the last capability of this kernel
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header, data = _CapHeader(_CAPABILITY_VERSION_3, 0), (_CapData * 2)()
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(data)), "capset")


def prctl(option: int, argument: int) -> None:
    """prctl(2) with one argument."""
    _check(_libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), f"prctl({option})")


def install_seccomp(program: bytes) -> None:
    """Install a classic BPF filter (`producers.trials.sandboxes.seccomp`). Needs no_new_privs."""

    class _Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    buffer = ctypes.create_string_buffer(program, len(program))
    sock_fprog = _Program(len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(sock_fprog), 0, 0), "seccomp")


def close_all_but(keep: Iterable[int]) -> None:
    """Close every descriptor from 3 up that is not in `keep` (a fork ignores close-on-exec)."""
    low = 3
    for fd in sorted(keep):
        if fd > low:
            os.closerange(low, fd)
        low = max(low, fd + 1)
    _libc.syscall(436, low, ctypes.c_uint(0xFFFFFFFF), 0)  # close_range: one number on every architecture


def collapse_heap(maps: str) -> int:
    """MADV_COLLAPSE anonymous memory into huge pages, so that a fork copies fewer page tables.

    `maps`: text of /proc/self/maps. Returns the number of huge pages made; 0 where the kernel has none.
    """
    made = 0
    for line in maps.splitlines():
        fields = line.split()
        if fields[1] != "rw-p" or not (len(fields) == 5 or fields[5] == "[heap]"):
            continue
        start, end = (int(x, 16) for x in fields[0].split("-"))
        start, end = (start + _HUGE_PAGE - 1) & ~(_HUGE_PAGE - 1), end & ~(_HUGE_PAGE - 1)
        for address in range(start, end, _HUGE_PAGE):
            made += _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE) == 0
    return made
