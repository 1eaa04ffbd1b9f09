"""The seccomp filter of a sandbox as plain BPF, without a library. Standard library only.

Denied with EPERM: tracing other processes, mounting, namespaces, keys, BPF, io_uring, kernel modules, clocks.
Sockets of other families than Unix, IPv4, IPv6 and netlink do not exist (AF_VSOCK reaches past a network namespace).
Sources: seccomp(2), the kernel's syscall tables, Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import errno
import platform
import struct

#: Call -> number on (x86_64, aarch64); None where the architecture has no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "lookup_dcookie": (212, 18),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "iopl": (172, None),
    "ioperm": (173, None),
    # from 424 on the numbers are the same everywhere
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_getfd": (438, 438),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
}
_CLONE, _IOCTL, _SOCKET, _SOCKETPAIR, _CLONE3 = (56, 220), (16, 29), (41, 198), (53, 199), 435
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_FAMILIES = (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink
_CLONE_NEW_ANY = 0x7E020000
_TIOCSTI = 0x5412

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24


class UnsupportedArchitectureError(RuntimeError):
    """No filter is known for this processor; a sandbox without one is not opened."""


def _op(code: int, k: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("HBBI", code, true, false, k)


def build_filter(machine: str = "") -> bytes:
    """The filter for `machine` (default: this one), eight bytes per instruction."""
    machine = machine or platform.machine()
    column = {"x86_64": 0, "aarch64": 1}.get(machine)
    if column is None:
        raise UnsupportedArchitectureError(
            f"no seccomp filter for processor {machine!r}; run workers on x86_64 or aarch64"
        )
    deny, allow = _op(_RET, _ERRNO | errno.EPERM), _op(_RET, _ALLOW)
    program = [_op(_LD, _ARCH), _op(_JEQ, _AUDIT_ARCH[column], 1, 0), _op(_RET, _KILL), _op(_LD, _NR)]
    if column == 0:
        program += [_op(_JGE, 0x40000000, 0, 1), deny]  # the x32 ABI has other numbers for the same calls
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            program += [_op(_JEQ, number, 0, 1), deny]
    # clone3 passes its flags by pointer, out of a filter's sight: ENOSYS makes libc fall back to clone
    program += [_op(_JEQ, _CLONE3, 0, 1), _op(_RET, _ERRNO | errno.ENOSYS)]
    program += [_op(_JEQ, _CLONE[column], 0, 4), _op(_LD, _ARG0), _op(_JSET, _CLONE_NEW_ANY, 0, 1), deny, allow]
    program += [_op(_JEQ, _IOCTL[column], 0, 4), _op(_LD, _ARG1), _op(_JEQ, _TIOCSTI, 0, 1), deny, allow]
    tests = len(_FAMILIES)
    program += [_op(_JEQ, _SOCKET[column], 1, 0), _op(_JEQ, _SOCKETPAIR[column], 0, tests + 2), _op(_LD, _ARG0)]
    program += [_op(_JEQ, family, tests - i, 0) for i, family in enumerate(_FAMILIES)]
    program += [_op(_RET, _ERRNO | errno.EAFNOSUPPORT), allow]
    return b"".join(program)
