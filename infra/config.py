"""Loading of the run file: TOML, then `ROLLSTREAM_*` environment variables, then `--set key=value`; later wins.

Every value remembers where it came from. An unknown key is an error that names the nearest key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.settings import Settings

ENV_PREFIX = "ROLLSTREAM_"
#: Environment variables with the prefix that are no keys of the run file.
ENV_OTHER = frozenset({"ROLLSTREAM_CONFIG", "ROLLSTREAM_LOG", "ROLLSTREAM_MAVEN_MIRROR"})
ENV_OTHER_PREFIXES = ("ROLLSTREAM_TEST_", "ROLLSTREAM_INTERNAL_")

#: Keys whose value is never printed nor written into events.
SECRET_KEYS = frozenset({"clickhouse.password"})
SECRET_WORDS = ("password", "secret", "token", "sasl.jaas")


class ConfigError(ValueError):
    """The run file, an environment variable or `--set` is wrong: names the place, the key and the remedy."""


@dataclass(frozen=True)
class KeySpec:
    """One key of the run file."""

    name: str
    type: Any
    default: Any
    doc: str


@dataclass(frozen=True)
class Resolved:
    """Settings and the origin of each key that is not a default."""

    settings: Settings
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str, str]]:
        """(key, value, origin, doc) for every key; secrets are masked."""
        for name, spec in KEYS.items():
            value = get_key(self.settings, name)
            yield name, mask_secret(name, value), self.origins.get(name, "default"), spec.doc


def _key_specs() -> dict[str, KeySpec]:
    specs: dict[str, KeySpec] = {}
    for section_field in dataclasses.fields(Settings):
        section = typing.get_type_hints(Settings)[section_field.name]
        hints = typing.get_type_hints(section, include_extras=True)
        instance = section()
        for field in dataclasses.fields(section):
            base, doc = typing.get_args(hints[field.name])[:2]
            name = f"{section_field.name}.{field.name}"
            specs[name] = KeySpec(name, base, getattr(instance, field.name), doc)
    return specs


KEYS: dict[str, KeySpec] = _key_specs()


def get_key(settings: Settings, name: str) -> Any:
    """Value of `section.key`."""
    section, _, key = name.partition(".")
    return getattr(getattr(settings, section), key)


def mask_secret(name: str, value: Any) -> Any:
    """The value, or asterisks where it must not be shown."""
    if name in SECRET_KEYS and value:
        return "********"
    if isinstance(value, dict):
        return {k: "********" if any(w in k.lower() for w in SECRET_WORDS) else v for k, v in value.items()}
    return value


def _suggest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not near and "." in name:
        tail = name.rsplit(".", 1)[1]
        near = [k for k in known if k.rsplit(".", 1)[-1] == tail] or difflib.get_close_matches(
            tail, [k.rsplit(".", 1)[-1] for k in known], n=1
        )
    return f"; did you mean `{near[0]}`?" if near else f"; known: {', '.join(known)}"


def _spec(name: str, where: str) -> tuple[KeySpec, str]:
    """The key a dotted name belongs to, and for a table-valued key the rest of the name."""
    if name in KEYS:
        return KEYS[name], ""
    for key, spec in KEYS.items():
        if typing.get_origin(spec.type) is dict and name.startswith(key + "."):
            return spec, name[len(key) + 1 :]
    raise ConfigError(f"{where}: unknown key `{name}`{_suggest(name, list(KEYS))}")


def _coerce(spec: KeySpec, value: Any, where: str) -> Any:
    """A TOML value as the key's type; whole numbers serve as floats. Raises ConfigError."""
    origin = typing.get_origin(spec.type)
    wanted = origin or spec.type
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted is tuple and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if wanted is dict and isinstance(value, dict):
        return {str(k): str(v) for k, v in value.items()}
    ok = isinstance(value, bool) if wanted is bool else isinstance(value, wanted) and not isinstance(value, bool)
    if not ok:
        raise ConfigError(
            f"{where}: `{spec.name}` must be {_type_name(spec.type)}, not {type(value).__name__} {value!r} ({spec.doc})"
        )
    return value


def _type_name(tp: Any) -> str:
    names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
    if tp in names:
        return names[tp]
    return "a list of strings" if typing.get_origin(tp) is tuple else "a table of strings"


def _parse_text(spec: KeySpec, text: str, where: str) -> Any:
    """A value given as text (environment, --set): TOML where it parses, else the bare string."""
    if spec.type is str:
        return text
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    if typing.get_origin(spec.type) is tuple and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    return _coerce(spec, value, where)


def _flatten(table: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    sections = {f.name for f in dataclasses.fields(Settings)}
    for section, body in table.items():
        if section not in sections:
            raise ConfigError(f"{where}: unknown section [{section}]{_suggest(section, sorted(sections))}")
        if not isinstance(body, dict):
            raise ConfigError(f"{where}: `{section}` must be a section [{section}], not a value")
        for key, value in body.items():
            yield f"{section}.{key}", value


def load_settings(
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Resolve the configuration. Raises ConfigError.

    `path`: the run file (default: $ROLLSTREAM_CONFIG, else defaults only). `overrides`: `section.key=value` items.
    Environment: `ROLLSTREAM_SECTION__KEY=value`.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    path = path or environ.get("ROLLSTREAM_CONFIG") or None
    if path is not None:
        for name, value in _flatten(_read_toml(Path(path)), str(path)):
            spec, _ = _spec(name, str(path))
            values[name], origins[name] = _coerce(spec, value, str(path)), str(path)
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in ENV_OTHER or variable.startswith(ENV_OTHER_PREFIXES):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".", 1)
        _assign(values, origins, name, text, f"environment variable {variable}")
    for item in overrides:
        name, sep, text = item.partition("=")
        if not sep:
            raise ConfigError(f"--set {item}: write --set section.key=value")
        _assign(values, origins, name.strip(), text, f"--set {name.strip()}")
    return Resolved(_build(values), origins)


def _assign(values: dict[str, Any], origins: dict[str, str], name: str, text: str, where: str) -> None:
    spec, rest = _spec(name, where)
    if rest:
        values[spec.name] = {**values.get(spec.name, spec.default), rest: text}
    else:
        values[spec.name] = _parse_text(spec, text, where)
    origins[spec.name] = where


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such run file; `rollstream config show` prints every key to start from"
        ) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path}: not valid TOML: {exc}") from exc


def _build(values: Mapping[str, Any]) -> Settings:
    sections: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        section = typing.get_type_hints(Settings)[field.name]
        given = {n.split(".", 1)[1]: v for n, v in values.items() if n.split(".", 1)[0] == field.name}
        sections[field.name] = section(**given)
    settings = Settings(**sections)
    check_settings(settings)
    return settings


_CHOICES: dict[str, tuple[str, ...]] = {
    "train.algorithm": ("gspo", "grpo", "ppo"),
    "train.backend": ("torch", "megatron"),
    "train.dtype": ("float32", "bfloat16"),
    "train.importance_correction": ("off", "token"),
    "trials.sandbox": ("bubblewrap", "docker", "kubernetes"),
    "engine.kind": ("torch", "scripted", "vllm"),
    "kafka.share_groups": ("auto", "on", "off"),
}
_AT_LEAST: dict[str, float] = {
    "schedule.num_steps": 0,
    "schedule.groups_per_step": 1,
    "schedule.group_size": 1,
    "schedule.max_staleness": 0,
    "schedule.max_attempts": 1,
    "kafka.partitions": 1,
    "trials.lanes": 1,
    "trials.lease_sec": 1,
    "engine.max_batch": 1,
    "train.micro_batch_tokens": 1,
}


def check_settings(settings: Settings) -> None:
    """Raise ConfigError for values that no run can have."""
    for name, allowed in _CHOICES.items():
        if get_key(settings, name) not in allowed:
            raise ConfigError(f"`{name}` = {get_key(settings, name)!r}: must be one of {', '.join(allowed)}")
    for name, bound in _AT_LEAST.items():
        if get_key(settings, name) < bound:
            raise ConfigError(f"`{name}` = {get_key(settings, name)!r}: must be at least {bound:g}")
    for reason, rule in settings.admission.overrides.items():
        if rule not in ("keep", "mask", "zero_reward"):
            raise ConfigError(f"`admission.overrides.{reason}` = {rule!r}: must be keep, mask or zero_reward")
    if settings.engine.temperature <= 0:
        raise ConfigError("`engine.temperature` must be above 0: the learner needs the sampled distribution")


def replace_key(settings: Settings, name: str, value: Any) -> Settings:
    """A copy with one key changed."""
    section, _, key = name.partition(".")
    return dataclasses.replace(settings, **{section: dataclasses.replace(getattr(settings, section), **{key: value})})


def settings_json(settings: Settings) -> str:
    """Canonical JSON of the resolved configuration with secrets masked, for RunStarted."""
    tree: dict[str, dict[str, Any]] = {}
    for name in KEYS:
        section, key = name.split(".", 1)
        tree.setdefault(section, {})[key] = mask_secret(name, get_key(settings, name))
    return json.dumps(tree, sort_keys=True, separators=(",", ":"))


def dump_toml(settings: Settings) -> str:
    """The resolved configuration as a run file."""
    lines: list[str] = []
    current = ""
    for name, spec in KEYS.items():
        section, key = name.split(".", 1)
        if section != current:
            lines += [""] * bool(lines) + [f"[{section}]"]
            current = section
        lines.append(f"{key} = {_toml_value(get_key(settings, name))}  # {spec.doc}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return json.dumps(list(value))
    return json.dumps(value)
