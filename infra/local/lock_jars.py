"""Make `kafka-jars.lock` from Maven's own resolution: `python -m infra.local.lock_jars`. Needs `mvn`; users do not.

Maven resolves version conflicts by rules of its own (nearest first), and other resolvers come to other versions.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from pathlib import Path

from infra.local.artifacts import Artifact
from infra.local.kafka import LOCK

ROOTS = ("org.apache.kafka:kafka_2.13:4.4.0", "org.apache.logging.log4j:log4j-slf4j-impl:2.25.5")
PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin"

HEADER = """\
# Apache Kafka 4.4.0 as Maven resolves {roots} (scope runtime).
# Made by `python -m infra.local.lock_jars`; one artifact a line: group:artifact:version sha256 bytes
"""


def _pom() -> str:
    tags = ("groupId", "artifactId", "version")
    dependencies = ""
    for root in ROOTS:
        fields = "".join(f"<{tag}>{value}</{tag}>" for tag, value in zip(tags, root.split(":"), strict=True))
        dependencies += f"<dependency>{fields}</dependency>"
    return (
        "<project><modelVersion>4.0.0</modelVersion><groupId>lock</groupId><artifactId>lock</artifactId>"
        f"<version>1</version><packaging>pom</packaging><dependencies>{dependencies}</dependencies></project>"
    )


def resolve() -> list[Artifact]:
    """What Maven resolves the roots to, sorted by coordinates."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        (work / "pom.xml").write_text(_pom())
        maven = ["mvn", "-q", "-B", "-f", str(work / "pom.xml")]
        scope = "-DincludeScope=runtime"
        subprocess.run([*maven, f"{PLUGIN}:list", scope, f"-DoutputFile={work / 'list'}"], check=True)
        subprocess.run([*maven, f"{PLUGIN}:copy-dependencies", scope, f"-DoutputDirectory={work / 'jars'}"], check=True)
        artifacts = []
        listed = re.findall(r"^\s+([^:\s]+):([^:]+):jar:([^:]+):", (work / "list").read_text(), re.M)
        for group, name, version in listed:
            data = (work / "jars" / f"{name}-{version}.jar").read_bytes()
            artifacts.append(Artifact(f"{group}:{name}:{version}", hashlib.sha256(data).hexdigest(), len(data)))
        return sorted(artifacts, key=lambda a: a.coordinates)


if __name__ == "__main__":
    lines = [f"{a.coordinates} {a.sha256} {a.num_bytes}\n" for a in resolve()]
    LOCK.write_text(HEADER.format(roots=" and ".join(ROOTS)) + "".join(lines))
    print(f"{LOCK.name}: {len(lines)} artifacts")
