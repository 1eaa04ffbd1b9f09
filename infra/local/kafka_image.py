"""Kafka's container image from the artifacts of the local stack: `python -m infra.local.kafka_image [--base IMAGE]`.

For machines that reach no container registry. The base is any image with glibc and bash; without one,
`python -m infra.local.kafka_image --rootfs FILE.tar` imports a root file system first (made, say, with
`mmdebstrap --variant=minbase bookworm FILE.tar`).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from infra.local.errors import StackError
from infra.local.java import find_java
from infra.local.kafka import LOG_CONFIG, broker_classpath

IMAGE = "rollstream-kafka:4.4.0"
BASE = "debian:bookworm-slim"
LOCAL_BASE = "rollstream-base:bookworm"
SOURCE = Path(__file__).parents[1] / "images" / "kafka"


def stage_context(directory: Path) -> None:
    """Put everything the Dockerfile copies into `directory`."""
    for name in ("Dockerfile", "kafka-entrypoint"):
        shutil.copy2(SOURCE / name, directory / name)
    shutil.copy2(LOG_CONFIG, directory / LOG_CONFIG.name)
    shutil.copytree(find_java().executable.resolve().parents[1], directory / "java")
    (directory / "libs").mkdir()
    for jar in broker_classpath():
        shutil.copy2(jar, directory / "libs" / jar.name)


def _docker(*arguments: str | Path) -> None:
    try:
        done = subprocess.run(["docker", *map(str, arguments)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise StackError("docker is not installed, or not on PATH") from None
    if done.returncode:
        raise StackError(f"docker {arguments[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def import_base(rootfs: Path, image: str = LOCAL_BASE) -> str:
    """Import a root file system (a tar file) as an image; returns its name."""
    _docker("import", rootfs, image)
    return image


def build_image(base: str = BASE, image: str = IMAGE) -> str:
    """Build the image on `base`; returns its name. Raises StackError with the end of docker's output."""
    with tempfile.TemporaryDirectory(prefix="rollstream-image-") as scratch:
        stage_context(Path(scratch))
        _docker("build", "--build-arg", f"BASE={base}", "--tag", image, scratch)
    return image


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=BASE, help="image to build on (default: %(default)s)")
    parser.add_argument("--rootfs", type=Path, help="root file system (.tar) to import and build on instead")
    options = parser.parse_args()
    base = import_base(options.rootfs) if options.rootfs else options.base
    print(f"KAFKA_IMAGE={build_image(base)}")


if __name__ == "__main__":
    main()
