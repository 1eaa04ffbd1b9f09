"""Checkpoints and policy directories: whole or absent, verified, pruned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from learner.backends.torch_backend import TorchBackend, TorchBackendOptions
from learner.checkpoint import (
    Checkpoint,
    CheckpointError,
    Progress,
    discard_uncommitted,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    write_checkpoint,
)
from learner.durable import DigestError, verify_files, write_directory
from learner.publish import (
    PolicyError,
    check_starting_policy,
    compute_manifest_sha256,
    discard_unpublished,
    list_policies,
    prune_policies,
    publish_policy,
)
from schemas.ids import RunId
from schemas.packing import unpack_floats, unpack_ints
from tests.unit.learner.factory import make_policy

PROGRESS = Progress("run-1", 3, 3, (("groups", 0, 7), ("routing", 1, 9)), ("g1",), ("t1", "t2"))


def write(path: Path) -> str:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1.5)}
    return write_checkpoint(path, Checkpoint(PROGRESS, weights, {"a|step": torch.tensor(3.0)}))


def test_round_trip(tmp_path: Path) -> None:
    torch.manual_seed(4)
    path = tmp_path / "step00003"
    digest = write(path)
    state = torch.get_rng_state()
    got = load_checkpoint(path, digest)
    assert got.progress == PROGRESS
    assert torch.equal(got.weights["a"], torch.arange(6.0).view(2, 3)) and got.weights["b"].item() == 1.5
    assert got.optimizer_state["a|step"].item() == 3.0 and torch.equal(got.rng_state, state)
    assert write(path) == digest  # written again, over the first: the same bytes


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "weights.safetensors").write_bytes(b"x"), r"weights\.safetensors: 1 bytes, sha256"),
        (lambda d: (d / "optimizer.safetensors").unlink(), r"optimizer\.safetensors: missing"),
        (lambda d: (d / "manifest.json").write_text("[]"), r"manifest\.json: sha256 .* but StepCompleted names"),
        (lambda d: (d / "manifest.json").unlink(), r"manifest\.json: No such file"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "step00003"
    digest = write(path)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, digest)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "step00001"

    def good(directory: Path) -> None:
        (directory / "f").write_text("old")

    def bad(directory: Path) -> None:
        (directory / "f").write_text("ne")
        raise OSError(28, "No space left on device")

    write_directory(target, good)
    with pytest.raises(OSError, match="no space left on the device"):
        write_directory(target, bad)
    assert (target / "f").read_text() == "old"
    assert list_checkpoints(tmp_path) == {1: target}
    discard_uncommitted(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step00001"]


def test_newer_than_committed_is_discarded_and_old_ones_pruned(tmp_path: Path) -> None:
    for n in range(1, 7):
        write(tmp_path / f"step{n:05d}")
    assert [p.name for p in discard_uncommitted(tmp_path, 5)] == ["step00006"]
    prune_checkpoints(tmp_path, 5, 0)
    assert sorted(list_checkpoints(tmp_path)) == [1, 2, 3, 4, 5]
    prune_checkpoints(tmp_path, 5, 3)
    assert sorted(list_checkpoints(tmp_path)) == [3, 4, 5]
    prune_checkpoints(tmp_path, 5, 1)
    assert sorted(list_checkpoints(tmp_path)) == [5]


def test_pruning_counts_committed_checkpoints_only(tmp_path: Path) -> None:
    for n in (4, 5, 6):  # 6 was written by a step that is not committed yet
        write(tmp_path / f"step{n:05d}")
    prune_checkpoints(tmp_path, 5, 1)
    assert sorted(list_checkpoints(tmp_path)) == [5, 6]


def test_published_policy_has_everything_an_engine_needs(tmp_path: Path) -> None:
    source = make_policy(tmp_path / "source")
    backend = TorchBackend(source, TorchBackendOptions())
    target = tmp_path / "policies" / "v3"
    event = publish_policy(
        target, backend, source=source, run_id=RunId("r"), version=3, step=3, dtype="float32", producer="learner/0"
    )
    names = {f.name for f in event.files}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert names == {p.name for p in target.iterdir()}
    verify_files(target, event.files, "")
    assert event.manifest_sha256 == compute_manifest_sha256(event.files[::-1])
    ids = list(unpack_ints(event.canary_ids))
    loaded = TorchBackend(target, TorchBackendOptions())
    assert loaded.compute_canary(ids) == pytest.approx(list(unpack_floats(event.canary_logprobs)), abs=1e-6)
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(DigestError, match=r"tokenizer\.json: 2 bytes.*; fetch it again"):
        verify_files(target, event.files, "fetch it again")


def test_old_policies_are_pruned_but_never_the_first(tmp_path: Path) -> None:
    for version in range(7):
        (tmp_path / f"v{version}").mkdir()
    (tmp_path / ".writing-v7").mkdir()
    discard_unpublished(tmp_path, 5)
    prune_policies(tmp_path, 5)
    assert sorted(list_policies(tmp_path)) == [0, 3, 4, 5]
    assert not (tmp_path / ".writing-v7").exists()


def test_missing_starting_policy_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"policy\.path is not set"):
        check_starting_policy("")
    with pytest.raises(PolicyError, match=r"policy\.path: .*nowhere does not exist; set it to a directory"):
        check_starting_policy(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PolicyError, match=r"has no tokenizer\.json"):
        check_starting_policy(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PolicyError, match=r"has no \*\.safetensors"):
        check_starting_policy(str(tmp_path))
