"""Fetch the locked `uv` with nothing but Python's standard library, into .tools/.

A bare machine may have Python without pip. The lock file names uv's wheel and its SHA-256; a wheel is a zip file
with the binary inside. Run as `python3 infra/bootstrap.py DIRECTORY`.
"""

import hashlib
import io
import platform
import sys
import tomllib
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ATTEMPTS = 3


def locked_wheel() -> tuple[str, str]:
    """(address, sha256) of the wheel for this machine. Raises SystemExit with the remedy."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    machine = platform.machine()
    for package in lock["package"]:
        if package["name"] == "uv":
            for wheel in package.get("wheels", ()):
                if f"manylinux_2_17_{machine}" in wheel["url"]:
                    return wheel["url"], wheel["hash"].removeprefix("sha256:")
    raise SystemExit(f"uv.lock has no uv for {machine}; install uv yourself and run `make UV=uv ...`")


def fetch(url: str, sha256: str) -> bytes:
    """The file behind `url`, verified."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with urllib.request.urlopen(url, timeout=120) as response:
                data: bytes = response.read()
        except OSError as exc:
            if attempt == ATTEMPTS:
                raise SystemExit(
                    f"uv could not be downloaded ({exc}); check the network, "
                    "or install uv yourself and run `make UV=uv ...`"
                ) from exc
            continue
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
        print("uv: checksum does not match, trying again", file=sys.stderr)
    raise SystemExit("uv: the download does not match the checksum in uv.lock; a proxy may be altering it")


def install(directory: Path) -> Path:
    """Put the uv binary into `directory`; returns its path."""
    target = directory / "uv"
    directory.mkdir(parents=True, exist_ok=True)
    url, sha256 = locked_wheel()
    print("fetching uv", file=sys.stderr)
    with zipfile.ZipFile(io.BytesIO(fetch(url, sha256))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith("/scripts/uv"))
        temporary = target.with_suffix(".part")
        temporary.write_bytes(wheel.read(name))
    temporary.chmod(0o755)
    temporary.replace(target)
    return target


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs before anything checks the version
        raise SystemExit(
            f"Python 3.11 or newer is needed, this is {platform.python_version()}; set PYTHON=/path/to/python3"
        )
    install(Path(sys.argv[1]))
