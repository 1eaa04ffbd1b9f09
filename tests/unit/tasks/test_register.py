"""Registration of a run's task sets on a real broker."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from infra.kafka import make_codec, make_consumer, topic_name
from infra.settings import RunSection, Settings, TasksSection
from producers.tasks.demo_pool import PoolInfo
from producers.tasks.harbor import TaskError, load_tasks
from producers.tasks.register import TasksChangedError, register_tasks
from schemas.events import TaskRegistered


def with_tasks(settings: Settings, train: str, held_out: str = "") -> Settings:
    return replace(settings, run=RunSection(id="run-1"), tasks=TasksSection(train=train, held_out=held_out))


def read_registrations(settings: Settings, count: int) -> list[TaskRegistered]:
    consumer, codec = make_consumer(settings, group="check"), make_codec(settings)
    consumer.subscribe([topic_name(settings, "tasks")])
    found: list[TaskRegistered] = []
    try:
        while len(found) < count:
            message = consumer.poll(20.0)
            assert message is not None and message.error() is None, f"{len(found)} of {count} registrations arrived"
            event = codec.decode(message.value())
            assert isinstance(event, TaskRegistered)
            assert message.key() == event.task_id.encode()
            found.append(event)
    finally:
        consumer.close()
    return found


def test_every_task_of_both_sets_is_registered(kafka_settings: Settings, pool: PoolInfo) -> None:
    settings = with_tasks(kafka_settings, str(pool.train), str(pool.path / "held_out"))
    assert register_tasks(settings) == {"train": 14, "held_out": 6}
    tasks = {t.task_id: t for source in (pool.train, pool.held_out) for t in load_tasks(source)}
    events = {e.task_id: e for e in read_registrations(settings, 20)}
    assert set(events) == set(tasks)
    for task_id, event in events.items():
        task = tasks[str(task_id)]
        assert (event.task_set, event.digest, event.instruction) == (task.task_set, task.digest, task.instruction)
        assert (event.fail_to_pass, event.pass_to_pass) == (task.fail_to_pass, task.pass_to_pass)
        assert (event.run_id, event.path) == ("run-1", str(task.path.resolve()))


def test_a_run_goes_on_with_the_tasks_it_was_started_with(
    kafka_settings: Settings, pool: PoolInfo, tmp_path: Path
) -> None:
    """Seen once: the pool was made again, smaller, between a stop and a resume; every trial failed in its setup."""
    settings = with_tasks(kafka_settings, str(pool.path / "train"))
    assert register_tasks(settings) == {"train": 14}
    assert register_tasks(settings) == {"train": 14}
    smaller = tmp_path / "train"
    shutil.copytree(pool.path / "train", smaller)
    gone = sorted(smaller.iterdir())[0]
    shutil.rmtree(gone)
    with pytest.raises(TasksChangedError, match=f"1 differ; {gone.name} is gone"):
        register_tasks(with_tasks(kafka_settings, str(smaller)))
    other_run = replace(with_tasks(kafka_settings, str(smaller)), run=RunSection(id="run-2"))
    assert register_tasks(other_run) == {"train": 13}


def test_no_event_is_written_when_a_set_is_unusable(pool: PoolInfo) -> None:
    unreachable = with_tasks(Settings(), "", "")
    with pytest.raises(ValueError, match=r"tasks\.train is empty"):
        register_tasks(unreachable)
    with pytest.raises(TaskError, match="is in the training set too"):
        register_tasks(with_tasks(Settings(), str(pool.train), str(pool.path / "train")))
