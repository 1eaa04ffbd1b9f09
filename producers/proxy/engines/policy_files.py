"""Checks a published policy's files before they are loaded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from schemas.events import PolicyPublished


class PolicyFilesError(ValueError):
    """A published policy whose files are not what was published: names the file."""


def verify_policy_files(policy: PolicyPublished) -> Path:
    """The policy's directory, once every file has the published size and digest. Raises PolicyFilesError."""
    directory = Path(policy.path)
    listed = [[f.name, f.sha256, f.size_bytes] for f in sorted(policy.files, key=lambda f: f.name)]
    if hashlib.sha256(json.dumps(listed).encode()).hexdigest() != policy.manifest_sha256:
        raise PolicyFilesError(f"{directory}: the manifest's digest is not that of its list of files")
    for file in policy.files:
        path = directory / file.name
        if path.parent != directory:
            raise PolicyFilesError(f"{file.name}: a policy's files lie in its directory, not below or above it")
        try:
            with path.open("rb") as handle:
                digest = hashlib.file_digest(handle, "sha256").hexdigest()
        except OSError as exc:
            raise PolicyFilesError(f"{path}: {exc.strerror}") from exc
        if digest != file.sha256:
            raise PolicyFilesError(f"{path}: SHA-256 {digest}, published as {file.sha256}; the file was changed")
    return directory
