"""The demo's starting policy: tokenizer, tiny model and warm-up, from a task pool to a policy directory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from tokenizers import Tokenizer

from learner.policies.tiny_moe import MAX_POSITIONS, make_model
from learner.policies.tokenizer import END, PAD, build_tokenizer, render_call, save_tokenizer, token_id
from learner.policies.warmup import (
    Demonstration,
    WarmupReport,
    WarmupSettings,
    encode_demonstrations,
    render_prompt,
    warm_up,
)

log = structlog.get_logger()

#: How the directory was made, beside the model's own files.
RECORD = "warmup.json"
_SOURCES = ("demo_policy.py", "tiny_moe.py", "tokenizer.py", "warmup.py")
#: Texts the tokenizer is trained on, per split. It never sees the held-out set.
_TOKENIZER_TEXTS = 2000
#: The noun of a function name, `cup` in `test_above_cup` and `def above_cup(x)`.
_NOUN = re.compile(r"(?<=[a-z]_)[a-z]+(?=[(\n])")


class PolicyInputError(ValueError):
    """The pool cannot be used: names the file and the remedy."""


@dataclass(frozen=True)
class PolicyInfo:
    """A starting policy on disk; `path` is what [policy] path of the run file names."""

    path: Path
    num_parameters: int
    vocab_size: int
    #: Longest action among the demonstrations, tokens.
    max_action_tokens: int
    #: Longest prompt among the demonstrations, tokens.
    max_prompt_tokens: int
    warmup: WarmupReport
    #: False: an equal policy was there already; `warmup` is what its making cost.
    made: bool
    wall_sec: float


def make_demo_policy(
    out_dir: str | Path, pool_dir: str | Path, seed: int = 0, settings: WarmupSettings | None = None
) -> PolicyInfo:
    """Make the policy, or reuse the one in `out_dir` when it was made from the same pool, seed, settings and code.

    Raises PolicyInputError when the pool's demonstrations or training index cannot be read.
    """
    started = time.monotonic()
    out, pool = Path(out_dir), Path(pool_dir)
    chosen = settings or WarmupSettings()
    demonstrations, instructions = read_demonstrations(pool), read_instructions(pool)
    inputs = _digest_inputs(demonstrations, instructions, seed, chosen)
    found = _read_record(out, inputs)
    if found is not None:
        log.info("starting policy reused", path=str(out))
        return dataclasses.replace(found, made=False, wall_sec=time.monotonic() - started)
    previous = torch.get_num_threads()
    torch.set_num_threads(1)  # one thread: deterministic, and faster for a model of this size
    try:
        info = _make(out, demonstrations, instructions, seed, chosen, inputs, started)
    finally:
        torch.set_num_threads(previous)
    log.info("starting policy ready", path=str(out), wall_sec=round(info.wall_sec, 1), loss=round(info.warmup.loss, 3))
    return info


def train_demo_tokenizer(demonstrations: list[Demonstration], instructions: list[str]) -> Tokenizer:
    """The tokenizer of the demo, from demonstrations with their actions and training prompts without.

    The nouns in function names are left out, so that no split's nouns get tokens of their own: were a noun one token
    in training and four in the held-out set, a policy would copy the line number from the wrong place there.
    """
    texts = [render_prompt(d.instruction) + render_call(d.command) for d in demonstrations[:_TOKENIZER_TEXTS]]
    texts += [render_prompt(i) for i in instructions[:_TOKENIZER_TEXTS]]
    return build_tokenizer(_NOUN.sub("", text) for text in texts)


def read_demonstrations(pool: Path) -> list[Demonstration]:
    """The pool's sft.jsonl. Raises PolicyInputError."""
    file = pool / "sft.jsonl"
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found = [Demonstration(str(r["instruction"]), str(r["command"])) for r in rows]
    except FileNotFoundError:
        raise PolicyInputError(f"{file}: file not found; make the task pool first") from None
    except (ValueError, KeyError, TypeError) as exc:
        raise PolicyInputError(f"{file}: no demonstration per line ({exc!r}); make the task pool again") from None
    if not found:
        raise PolicyInputError(f"{file}: holds no demonstration; make the task pool with num_sft above 0")
    return found


def read_instructions(pool: Path) -> list[str]:
    """The instructions of the pool's training index. Raises PolicyInputError."""
    import pyarrow.parquet as pq

    file = pool / "train.parquet"
    try:
        column: list[str] = pq.read_table(file, columns=["instruction"])["instruction"].to_pylist()
    except FileNotFoundError:
        raise PolicyInputError(f"{file}: file not found; make the task pool first") from None
    return column


def _make(
    out: Path,
    demonstrations: list[Demonstration],
    instructions: list[str],
    seed: int,
    settings: WarmupSettings,
    inputs: str,
    started: float,
) -> PolicyInfo:
    tokenizer = train_demo_tokenizer(demonstrations, instructions)
    pad_id, eos_id = token_id(tokenizer, PAD), token_id(tokenizer, END)
    model = make_model(seed, tokenizer.get_vocab_size(), pad_id, eos_id)
    examples = encode_demonstrations(tokenizer, demonstrations)
    report = warm_up(model, examples, seed=seed, pad_id=pad_id, settings=settings)
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)  # type: ignore[operator]
    (part / "model.safetensors").chmod(0o644)  # written through a private temporary file
    save_tokenizer(tokenizer, part, MAX_POSITIONS)
    generation = {"eos_token_id": [eos_id], "pad_token_id": pad_id, "do_sample": True, "temperature": 1.0}
    (part / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    info = PolicyInfo(
        path=out,
        num_parameters=sum(p.numel() for p in model.parameters()),
        vocab_size=tokenizer.get_vocab_size(),
        max_action_tokens=max(e.num_action for e in examples),
        max_prompt_tokens=max(len(e.ids) - e.num_action for e in examples),
        warmup=report,
        made=True,
        wall_sec=time.monotonic() - started,
    )
    _write_record(part, info, inputs)
    shutil.rmtree(out, ignore_errors=True)
    part.replace(out)  # whole or not at all
    return info


def _write_record(directory: Path, info: PolicyInfo, inputs: str) -> None:
    files = {f.name: _sha256(f) for f in sorted(directory.iterdir())}
    record = {"inputs_sha256": inputs, "files": files, **dataclasses.asdict(info), "path": None}
    (directory / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _read_record(out: Path, inputs: str) -> PolicyInfo | None:
    """The policy in `out` if it was made from these inputs and none of its files changed since."""
    try:
        record = json.loads((out / RECORD).read_text())
        if record.pop("inputs_sha256") != inputs:
            return None
        if any(_sha256(out / name) != digest for name, digest in record.pop("files").items()):
            return None
        return PolicyInfo(**{**record, "path": out, "warmup": WarmupReport(**record["warmup"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _digest_inputs(
    demonstrations: list[Demonstration], instructions: list[str], seed: int, settings: WarmupSettings
) -> str:
    sources = [_sha256(Path(__file__).with_name(name)) for name in _SOURCES]
    plain = [
        [dataclasses.astuple(d) for d in demonstrations],
        instructions,
        seed,
        dataclasses.asdict(settings),
        sources,
    ]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()
