"""The run file: origins, coercion, and errors that name the place and the remedy."""

import json
import tomllib
from pathlib import Path

import pytest

from infra.config import KEYS, ConfigError, dump_toml, get_key, load_settings, settings_json


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_later_sources_win_and_origins_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nlr = 1\nclip_low = 0.1\n[schedule]\nnum_steps = 3\n")
    resolved = load_settings(path, ["schedule.num_steps=9"], {"ROLLSTREAM_TRAIN__LR": "0.5", "HOME": "/x"})
    assert resolved.settings.train.lr == 0.5
    assert resolved.settings.train.clip_low == 0.1
    assert resolved.settings.schedule.num_steps == 9
    assert resolved.origins == {
        "train.lr": "environment variable ROLLSTREAM_TRAIN__LR",
        "train.clip_low": str(path),
        "schedule.num_steps": "--set schedule.num_steps",
    }
    origins = {name: origin for name, _, origin, _ in resolved.rows()}
    assert origins["kafka.port"] == "default"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[train]\nlearning_rat = 1.0\n", "unknown key `train.learning_rat`"),
        ("[schedule]\ngroup_sise = 4\n", "did you mean `schedule.group_size`?"),
        ("[shedule]\ngroup_size = 4\n", "unknown section [shedule]; did you mean `schedule`?"),
        ("[schedule]\ngroup_size = 'four'\n", "`schedule.group_size` must be a whole number, not str 'four'"),
        ("[schedule]\ngroup_size = true\n", "must be a whole number"),
        ("[train]\nalgorithm = 'gsop'\n", "must be one of gspo, grpo, ppo"),
        ("[schedule]\ngroup_size = 0\n", "must be at least 1"),
        ("[admission.overrides]\noverlong = 'drop'\n", "must be keep, mask or zero_reward"),
        ("[train\n", "not valid TOML"),
        ("train = 3\n", "must be a section"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(write(tmp_path, text), environ={})
    assert expected in str(error.value)


def test_unreadable_file_and_bad_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run file"):
        load_settings(tmp_path / "none.toml", environ={})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(tmp_path, environ={})
    with pytest.raises(ConfigError, match="write --set"):
        load_settings(None, ["train.lr"], {})
    with pytest.raises(ConfigError, match="environment variable ROLLSTREAM_TRAIN__LRR"):
        load_settings(None, [], {"ROLLSTREAM_TRAIN__LRR": "1"})


def test_tables_lists_and_secrets(tmp_path: Path) -> None:
    path = write(tmp_path, "[kafka.client]\n'sasl.password' = 'hush'\n[train]\nconversations = ['main', 'subagent']\n")
    resolved = load_settings(path, ["kafka.client.security.protocol=SASL_SSL", "clickhouse.password=pw"], {})
    assert resolved.settings.kafka.client == {"sasl.password": "hush", "security.protocol": "SASL_SSL"}
    assert resolved.settings.train.conversations == ("main", "subagent")
    shown = json.loads(settings_json(resolved.settings))
    assert "hush" not in json.dumps(shown)
    assert shown["clickhouse"]["password"] == "********"


def test_dump_is_a_run_file_that_loads_back(tmp_path: Path) -> None:
    settings = load_settings(None, ["train.lr=3e-4", 'run.name=a "b"'], {}).settings
    path = write(tmp_path, dump_toml(settings))
    assert load_settings(path, environ={}).settings == settings
    assert set(tomllib.loads(path.read_text())) == {name.split(".")[0] for name in KEYS}
    assert all(spec.doc for spec in KEYS.values())
    assert get_key(settings, "train.lr") == 3e-4
