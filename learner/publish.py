"""Policy directories: weights, configuration, tokenizer and chat template of one version, with digests and a canary."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from learner.backends.base import Backend
from learner.durable import TEMPORARY_PREFIX, digest_files, remove_directory, write_directory
from schemas.events.training import FileDigest, PolicyPublished
from schemas.ids import RunId, make_event_id, now_ms
from schemas.packing import pack_floats, pack_ints

#: What the canary prompt says, when the policy has a tokenizer; as many tokens as CANARY_TOKENS at most.
CANARY_TEXT = "<|im_start|>user\nFAILED test_ops.py: fix the bug.<|im_end|>\n<|im_start|>assistant\n"
CANARY_TOKENS = 48

#: Newest policy directories that stay on disk, beside version 0 (the reference, and where a resume loads from).
KEEP_POLICIES = 3

#: Weight files of a source directory: written anew from the model, never copied.
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf)|.*\.index\.json")
_NAME = re.compile(r"v(\d+)")


class PolicyError(RuntimeError):
    """A policy directory that cannot be used: names it and the remedy."""


def check_starting_policy(path: str) -> Path:
    """The starting policy's directory. Raises PolicyError naming policy.path and the remedy."""
    if not path:
        raise PolicyError("policy.path is not set; set it to a directory with config.json, safetensors and tokenizer")
    directory = Path(path).expanduser()
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            what = f"has no {name}" if directory.is_dir() else "does not exist"
            raise PolicyError(
                f"policy.path: {directory} {what}; set it to a directory with config.json, safetensors and tokenizer "
                "(the demo makes one)"
            )
    if not any(directory.glob("*.safetensors")):
        raise PolicyError(f"policy.path: {directory} has no *.safetensors weights; convert them with save_pretrained")
    return directory


def compute_manifest_sha256(files: Sequence[FileDigest]) -> str:
    """Digest of a manifest: SHA-256 of the JSON list of [name, sha256, size_bytes], sorted by name."""
    ordered = sorted(files, key=lambda f: f.name)
    return hashlib.sha256(json.dumps([[f.name, f.sha256, f.size_bytes] for f in ordered]).encode()).hexdigest()


def make_canary_ids(policy: Path, vocab_size: int) -> list[int]:
    """The fixed prompt whose log-probs tell whether an engine serves these weights."""
    tokenizer = policy / "tokenizer.json"
    ids: list[int] = []
    if tokenizer.is_file():
        ids = Tokenizer.from_file(str(tokenizer)).encode(CANARY_TEXT, add_special_tokens=False).ids[:CANARY_TOKENS]
    if len(ids) < 2 or max(ids) >= vocab_size:
        ids = [(7 * i + 3) % vocab_size for i in range(CANARY_TOKENS)]
    return ids


def publish_policy(
    target: Path, backend: Backend, *, source: Path, run_id: RunId, version: int, step: int, dtype: str, producer: str
) -> PolicyPublished:
    """Write the current policy to `target` and describe it. `source`: where tokenizer and template come from."""

    def fill(temporary: Path) -> None:
        backend.export_policy(temporary)
        for path in sorted(source.iterdir()):
            if path.is_file() and not _WEIGHTS.fullmatch(path.name) and not (temporary / path.name).exists():
                shutil.copyfile(path, temporary / path.name)

    write_directory(target, fill)
    files = digest_files(target)
    canary = make_canary_ids(target, backend.shape.vocab_size)
    at = now_ms()
    return PolicyPublished(
        event_id=make_event_id(at),
        run_id=run_id,
        occurred_at=at,
        producer=producer,
        version=version,
        step=step,
        path=str(target),
        files=files,
        manifest_sha256=compute_manifest_sha256(files),
        canary_ids=pack_ints(canary),
        canary_logprobs=pack_floats(backend.compute_canary(canary)),
        dtype=dtype,
    )


def list_policies(parent: Path) -> dict[int, Path]:
    """Version -> directory, of everything written whole below `parent`."""
    if not parent.is_dir():
        return {}
    found = ((_NAME.fullmatch(p.name), p) for p in parent.iterdir() if p.is_dir())
    return {int(match.group(1)): path for match, path in found if match}


def discard_unpublished(parent: Path, newest_version: int) -> None:
    """Remove policy directories newer than the published one, and what a crash left half written."""
    for version, path in list_policies(parent).items():
        if version > newest_version:
            remove_directory(path)
    for path in parent.glob(f"{TEMPORARY_PREFIX}*"):
        remove_directory(path)


def prune_policies(parent: Path, newest_version: int) -> None:
    """Keep version 0 and the newest KEEP_POLICIES versions."""
    for version, path in list_policies(parent).items():
        if 0 < version <= newest_version - KEEP_POLICIES:
            remove_directory(path)
