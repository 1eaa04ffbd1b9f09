"""What a user gets wrong, and what breaks under a run: a message with the remedy, the exit code, and nothing lost."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from infra import paths
from infra.config import dump_toml
from infra.kafka import EventWriter, KafkaUnavailableError, drop_topics, ensure_topics, read_events
from infra.local.ports import free_port
from infra.local.process import running_process
from infra.local.stack import down, stack_status
from infra.settings import (
    ClickHouseSection,
    DataSection,
    EngineSection,
    KafkaSection,
    PolicySection,
    ProxySection,
    RunSection,
    ScheduleSection,
    Settings,
    TasksSection,
    TrainSection,
)
from learner.policies.demo_policy import make_demo_policy
from learner.policies.warmup import WarmupSettings
from producers.tasks.demo_pool import make_demo_pool
from schemas.events import PolicyPublished, RunStarted, StepCompleted, TrialFinished, TrialOffered
from tests.integration.command_line import REPOSITORY, assert_refused, environment, read_until, rollstream, start
from tests.unit.learner.factory import Sampler, make_policy, record_group


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task pool and a policy that has learned nothing."""
    home = tmp_path_factory.mktemp("parts")
    make_demo_pool(home / "pool", 0, num_train=3, num_held_out=1, num_sft=1)
    make_policy(home / "policy")
    return home


@pytest.fixture
def nowhere(tmp_path: Path) -> Settings:
    """Settings with nothing behind them: closed ports, an empty data directory."""
    closed = f"127.0.0.1:{free_port()}"
    return Settings(
        data=DataSection(dir=str(tmp_path / "data")),
        kafka=KafkaSection(bootstrap=closed),
        clickhouse=ClickHouseSection(port=free_port()),
        proxy=ProxySection(port=free_port()),
    )


@pytest.fixture
def good(nowhere: Settings, parts: Path, broker: str) -> Iterator[Settings]:
    """Settings of a run that would start: each test spoils one thing."""
    settings = replace(
        nowhere,
        kafka=KafkaSection(bootstrap=broker, topic_prefix=f"t{uuid.uuid4().hex[:10]}-", partitions=1),
        policy=PolicySection(path=str(parts / "policy")),
        tasks=TasksSection(train=str(parts / "pool" / "train.parquet")),
    )
    yield settings
    down(settings)
    drop_topics(settings)


# -- the run file


@pytest.mark.parametrize("command", ["run", "up", "status"])
def test_a_run_file_that_is_not_there(command: str, tmp_path: Path) -> None:
    done = rollstream(command, "--config", str(tmp_path / "no.toml"))
    assert_refused(done, str(tmp_path / "no.toml"), "no such run file", "rollstream config show")


@pytest.mark.parametrize(
    ("text", "parts_"),
    [
        ("[run\nname = 1", ("not valid TOML", "line 1")),
        ("[schedule]\nnum_stesp = 3", ("unknown key `schedule.num_stesp`", "did you mean `schedule.num_steps`")),
        ("[shedule]\nnum_steps = 3", ("unknown section [shedule]", "schedule")),
        ("[schedule]\nnum_steps = 'three'", ("`schedule.num_steps` must be a whole number", "'three'")),
        ("[schedule]\ngroup_size = 0", ("`schedule.group_size` = 0", "at least 1")),
        ("[train]\nalgorithm = 'reinforce'", ("`train.algorithm`", "gspo, grpo, ppo")),
    ],
)
def test_a_run_file_with_a_mistake(text: str, parts_: tuple[str, ...], tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(text)
    done = rollstream("run", "--config", str(run_file))
    named = () if "at least" in parts_[1] or "gspo" in parts_[1] else (str(run_file),)
    assert_refused(done, *named, *parts_)


def test_a_run_file_that_is_no_text_or_a_directory(tmp_path: Path) -> None:
    binary = tmp_path / "run.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert_refused(rollstream("run", "--config", str(binary)), str(binary), "cannot be read")
    assert_refused(rollstream("run", "--config", str(tmp_path)), str(tmp_path), "cannot be read")


def test_overrides_with_a_mistake() -> None:
    assert_refused(rollstream("status", "--set", "proxy.prot=1"), "--set", "did you mean `proxy.port`")
    assert_refused(rollstream("status", "--set", "proxy.port"), "--set section.key=value")
    done = rollstream("status", env={"ROLLSTREAM_PROXY__PROT": "1"})
    assert_refused(done, "environment variable ROLLSTREAM_PROXY__PROT", "did you mean `proxy.port`")


# -- policy and tasks


def refused_run(settings: Settings, *said: str) -> None:
    """`rollstream run` says so, and has started no run."""
    assert_refused(rollstream("run", settings=settings), *said)
    assert not _exists(settings, "runs") or list(read_events(settings, "runs", types=(RunStarted,))) == []


def _exists(settings: Settings, topic: str) -> bool:
    try:
        next(read_events(settings, topic), None)
    except KafkaUnavailableError:
        return False
    return True


def test_policy_directories_that_are_none(good: Settings, parts: Path, tmp_path: Path) -> None:
    missing = tmp_path / "no-policy"
    spoiled = replace(good, policy=PolicySection(path=str(missing)))
    refused_run(spoiled, "`policy.path`", str(missing), "no such directory", "rollstream demo")
    refused_run(replace(good, policy=PolicySection()), "`policy.path`", "no such directory")
    for gone, what in (
        ("config.json", "config.json is missing"),
        ("model.safetensors", "no weights there (*.safetensors is missing)"),
        ("tokenizer.json", "tokenizer.json is missing"),
    ):
        shutil.copytree(parts / "policy", tmp_path / gone)
        (tmp_path / gone / gone).unlink()
        refused_run(replace(good, policy=PolicySection(path=str(tmp_path / gone))), "`policy.path`", gone, what)


def test_tasks_that_are_not_there(good: Settings, tmp_path: Path) -> None:
    missing = str(tmp_path / "no-tasks")
    refused_run(replace(good, tasks=TasksSection()), "`tasks.train`", "docs/tasks.md")
    refused_run(replace(good, tasks=TasksSection(train=missing)), "`tasks.train`", missing, "no such task directory")
    held_out = replace(good.tasks, held_out=missing)
    refused_run(replace(good, tasks=held_out), "`tasks.held_out`", missing, "no such task directory")


def test_tasks_that_cannot_be_used(good: Settings, parts: Path, tmp_path: Path) -> None:
    shutil.copytree(parts / "pool", tmp_path / "pool")
    index = tmp_path / "pool" / "train.parquet"
    task = sorted(p for p in (tmp_path / "pool" / "train").iterdir() if p.is_dir())[0]
    with_index = replace(good, tasks=TasksSection(train=str(index)))

    shutil.rmtree(task / "tests")
    refused_run(replace(good, tasks=TasksSection(train=str(task))), str(task), "tests")
    refused_run(with_index, task.name, "tests")
    shutil.rmtree(task)
    refused_run(with_index, str(index), str(task), "is gone", "write the index again")
    (tmp_path / "pool" / "empty").mkdir()
    empty = TasksSection(train=str(tmp_path / "pool" / "empty"))
    refused_run(replace(good, tasks=empty), "holds no task", "task.toml, instruction.md")
    index.write_text("not parquet")
    refused_run(with_index, str(index), "not a readable parquet file")


# -- ports and directories


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def test_ports_that_are_taken(good: Settings, taken: int) -> None:
    who = f"port {taken} is in use by process {os.getpid()}"
    local = replace(good, kafka=KafkaSection(port=taken))
    assert_refused(rollstream("up", settings=local), "Kafka", who, "kafka.port")
    front = replace(good, clickhouse=ClickHouseSection(port=taken))
    assert_refused(rollstream("up", settings=front), "ClickHouse", who, "clickhouse.port")
    assert not any(part.process for part in stack_status(local))
    proxy = replace(good, proxy=ProxySection(port=taken))
    refused_run(proxy, "proxy", who, "proxy.port")


def test_a_data_directory_that_cannot_be_written(good: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = replace(good, data=DataSection(dir=str(tmp_path / "file" / "data")))
    for command in ("up", "run"):
        done = rollstream(command, settings=settings)
        assert_refused(done, str(tmp_path / "file" / "data"), "set data.dir to a directory that can be written")


def test_a_data_directory_on_a_read_only_disk(good: Settings, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "run.toml").write_text(dump_toml(good))
    disk = SmallDisk(tmp_path / "data", size_mb=1)
    try:
        disk.run(f"mount -o remount,ro {tmp_path / 'data'}")
        code, said = disk.run(f"{sys.executable} -m infra.cli up --config {tmp_path / 'run.toml'}")
    finally:
        disk.close()
    assert code == 2 and "Traceback" not in said, said
    assert f"{tmp_path}/data/run: Read-only file system; set data.dir to a directory that can be written" in said


def test_a_data_directory_of_another_stack(good: Settings) -> None:
    first = rollstream("up", settings=good)
    assert first.returncode == 0, first.stderr
    elsewhere = replace(good, clickhouse=ClickHouseSection(port=free_port()))
    done = rollstream("up", settings=elsewhere)
    owner = next(part.process for part in stack_status(good) if part.process)
    assert_refused(done, good.data.dir, f"process {owner.pid}", "rollstream down", "data.dir")


# -- nothing answers


def refused_together(settings: Settings, commands: Iterable[tuple[tuple[str, ...], tuple[str, ...]]]) -> None:
    """Each (command, what it must say) is refused; side by side, because each waits for an answer for a while."""
    with ThreadPoolExecutor(8) as pool:
        running = [(pool.submit(rollstream, *arguments, settings=settings), said) for arguments, said in commands]
        for done, said in running:
            assert_refused(done.result(), *said)


def test_kafka_down_at_the_start(nowhere: Settings, parts: Path) -> None:
    settings = replace(
        nowhere,
        run=RunSection(id="run-x"),
        policy=PolicySection(path=str(parts / "policy")),
        tasks=TasksSection(train=str(parts / "pool" / "train.parquet")),
    )
    said = (f"no Kafka at {settings.kafka.bootstrap}", "rollstream up", "kafka.bootstrap")
    commands = (("run",), ("tail", "steps"), ("serve", "assembly"), ("serve", "worker"), ("replay", "verify"))
    refused_together(settings, [(command, said) for command in commands])


def test_nothing_up_for_status_sql_and_trace(nowhere: Settings) -> None:
    kafka = f"no Kafka at {nowhere.kafka.bootstrap}"
    clickhouse = (f"no ClickHouse at http://127.0.0.1:{nowhere.clickhouse.port}", "rollstream up", "clickhouse.url")
    commands = (("sql", "SELECT 1"), ("trace", "t00000.000.00"), ("status", "--json"))
    refused_together(nowhere, [(("status",), (kafka, *clickhouse)), *((c, clickhouse) for c in commands)])
    local = replace(nowhere, kafka=KafkaSection(port=free_port()))
    assert_refused(rollstream("status", settings=local), "not running; start it with `rollstream up`")


def test_names_nobody_knows(good: Settings) -> None:
    assert rollstream("up", settings=good).returncode == 0
    commands = (
        (("tail", "model-cals"), ("unknown topic 'model-cals'", "model-calls")),
        (("tail", "steps", "--type", "StepDone"), ("'StepDone'", "StepCompleted")),
        (("serve", "lerner"), ("unknown service 'lerner'", "learner")),
        (("status",), ("no tables yet", "run")),
        (("serve", "assembly"), ("no run yet", "rollstream run")),
        (("replay", "verify", "--run", "run-nobody"), ("run-nobody",)),
    )
    refused_together(good, commands)
    again = replace(good, kafka=replace(good.kafka, topic_prefix="never-made-"))
    assert_refused(rollstream("tail", "steps", settings=again), "never-made-steps does not exist", "rollstream up")


# -- under a run


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str] | None, limit_sec: float = 90.0) -> None:
    deadline = time.monotonic() + limit_sec
    while not condition():
        assert process is None or process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def steps_of(settings: Settings) -> list[StepCompleted]:
    return [e for e in read_events(settings, "steps", types=(StepCompleted,)) if isinstance(e, StepCompleted)]


@pytest.fixture(scope="module")
def demo_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's pool and its policy, hardly warmed up: trials end badly, and end."""
    home = tmp_path_factory.mktemp("demo")
    make_demo_pool(home / "pool", 0, num_train=4, num_held_out=1, num_sft=64)
    make_demo_policy(home / "policy", home / "pool", 0, WarmupSettings(steps=2))
    return home


@pytest.mark.timeout(600)
def test_kafka_lost_in_the_middle(demo_parts: Path, tmp_path: Path) -> None:
    settings = replace(
        Settings(),
        data=DataSection(dir=str(tmp_path / "data")),
        kafka=KafkaSection(port=free_port(), partitions=1),
        clickhouse=ClickHouseSection(port=free_port()),
        proxy=ProxySection(port=free_port()),
        engine=EngineSection(max_tokens=16),
        policy=PolicySection(path=str(demo_parts / "policy")),
        tasks=TasksSection(train=str(demo_parts / "pool" / "train.parquet")),
        schedule=replace(ScheduleSection(), num_steps=3, groups_per_step=1, group_size=2, max_staleness=0),
        trials=replace(Settings().trials, lanes=2, max_turns=2),
    )
    run = start("run", "--plain", settings=settings)
    try:
        read_until(run, "starting run")
        wait_for(lambda: steps_of(settings), run)
        broker = running_process(paths.run_dir(settings), "kafka")
        assert broker is not None
        os.kill(broker.pid, signal.SIGKILL)
        said = read_until(run, "kafka ended unexpectedly")
        assert "rollstream up" in said and str(paths.logs_dir(settings) / "kafka.log") in said
        again = rollstream("up", settings=settings)
        assert again.returncode == 0, again.stderr
        said = read_until(run, " finished")
        assert run.wait(60) == 0 and "Traceback" not in said
        check_nothing_lost(settings, num_steps=3)
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
            run.wait(60)
        down(settings)


def check_nothing_lost(settings: Settings, *, num_steps: int) -> None:
    """Each offered trial ended once, each step was made once."""
    assert [e.step for e in steps_of(settings)] == list(range(num_steps))
    offered = {
        e.trial_id for e in read_events(settings, "offers", types=(TrialOffered,)) if isinstance(e, TrialOffered)
    }
    ended = Counter(
        e.trial_id
        for e in read_events(settings, "trial-stages", types=(TrialFinished,))
        if isinstance(e, TrialFinished)
    )
    assert set(ended) == offered and set(ended.values()) == {1}
    done = rollstream("replay", "verify", settings=settings)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("0 differences"), done.stdout + done.stderr


# -- a full disk


class SmallDisk:
    """A tmpfs that only one shell and what it starts see: root there, an ordinary user outside."""

    def __init__(self, directory: Path, size_mb: int) -> None:
        self.directory = directory
        self._shell = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=environment(),
        )
        code, said = self.run(f"mount -t tmpfs -o size={size_mb}m none {directory}")
        if code:
            self.close()
            pytest.skip(f"needs user namespaces, which are off for this user: {said}")

    def run(self, command: str) -> tuple[int, str]:
        """(exit code, output) of a shell command on the disk."""
        assert self._shell.stdin is not None and self._shell.stdout is not None
        try:
            self._shell.stdin.write(f"( {command} ) 2>&1; code=$?; echo; echo :$code:\n")
            self._shell.stdin.flush()
        except BrokenPipeError:  # unshare was refused
            return 1, "unshare was refused"
        lines: list[str] = []
        for line in self._shell.stdout:
            if line.startswith(":") and line.rstrip().endswith(":"):
                break
            lines.append(line)
        else:
            return 1, "".join(lines)
        return int(line.strip().strip(":")), "".join(lines)

    def close(self) -> None:
        """End the shell; the disk goes with it."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait(30)


def command_on(disk: SmallDisk, settings: Settings, *arguments: str, until: Callable[[], object]) -> tuple[int, str]:
    """Run a service there until it ends by itself, or until `until()` and a SIGTERM."""
    file = disk.directory.parent / "run.toml"
    file.write_text(dump_toml(settings))
    pid_file = disk.directory.parent / "pid"
    pid_file.unlink(missing_ok=True)
    ended = threading.Event()

    def stop_when_done() -> None:
        while not ended.wait(0.2):
            if pid_file.exists() and until():
                os.kill(int(pid_file.read_text()), signal.SIGTERM)
                return

    watcher = threading.Thread(target=stop_when_done)
    watcher.start()
    parts_ = " ".join([sys.executable, "-m", "infra.cli", *arguments, "--config", str(file)])
    try:
        return disk.run(f"sh -c 'echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec {parts_}'")
    finally:
        ended.set()
        watcher.join()


@pytest.mark.timeout(240)
def test_a_full_disk_loses_no_committed_step(good: Settings, tmp_path: Path) -> None:
    policy = make_policy(tmp_path / "policy")
    (tmp_path / "data").mkdir()
    settings = replace(
        good,
        run=RunSection(id="run-full"),
        policy=PolicySection(path=str(policy)),
        schedule=replace(ScheduleSection(), num_steps=1, groups_per_step=1, group_size=2, max_staleness=9),
        train=replace(TrainSection(), lr=1e-3, clip_low=0.1, clip_high=0.15, micro_batch_tokens=128),
    )
    ensure_topics(settings)
    sampler, writer = Sampler(policy, 0), EventWriter(settings)
    for step in range(3):
        group = record_group(sampler, step, 0, [0.0, 1.0], run_id="run-full")
        for event in (group.ready, *group.trajectories, *group.routing):
            writer.write(event)
    writer.flush()

    disk = SmallDisk(tmp_path / "data", size_mb=64)
    try:
        code, said = command_on(disk, settings, "serve", "learner", until=lambda: len(steps_of(settings)) == 1)
        assert code == 0 and len(steps_of(settings)) == 1, said

        filler = tmp_path / "data" / "filler"
        disk.run(f"cat /dev/zero > {filler}")  # until it is full
        code, said = disk.run(
            " ".join([sys.executable, "-m", "infra.cli", "serve", "learner", "--config", str(tmp_path / "run.toml")])
        )
        assert code == 2 and "no space left on the device; free some space" in said and "Traceback" not in said, said

        disk.run(f"truncate -s -16K {filler}")  # room for a start, not for a checkpoint
        settings = replace(settings, schedule=replace(settings.schedule, num_steps=3))
        code, said = command_on(disk, settings, "serve", "learner", until=lambda: len(steps_of(settings)) > 1)
        assert code == 2, said
        assert "Traceback" not in said
        for part in (f"{tmp_path}/data/checkpoints/run-full/step00002", "no space left", "free some space"):
            assert part in said, said
        assert len(steps_of(settings)) == 1

        disk.run(f"rm {filler}")
        code, said = command_on(disk, settings, "serve", "learner", until=lambda: len(steps_of(settings)) == 3)
        assert code == 0, said
        steps = steps_of(settings)
        assert [e.step for e in steps] == [0, 1, 2]
        assert len({g for e in steps for g in e.group_ids}) == 3
        versions = [e.version for e in read_events(settings, "policy-versions") if isinstance(e, PolicyPublished)]
        assert versions == [0, 1, 2, 3]
    finally:
        disk.close()
