"""The run file, as typed sections. What each key means, its unit and its default; loading is in `infra.config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated


@dataclass(frozen=True)
class RunSection:
    """[run]"""

    name: Annotated[str, "Name of the run; with `id` unset, a run is resumed by its name"] = "run"
    id: Annotated[str, "Run id; empty: the newest run of this name in the log, else a new one"] = ""
    seed: Annotated[int, "Every other seed is derived from it"] = 0


@dataclass(frozen=True)
class DataSection:
    """[data]"""

    dir: Annotated[str, "Directory of the local stack, policies, checkpoints and logs"] = ".rollstream"


@dataclass(frozen=True)
class KafkaSection:
    """[kafka]"""

    bootstrap: Annotated[str, "host:port[,...] of a running Kafka; empty: the local stack's own broker"] = ""
    port: Annotated[int, "Port of the local broker"] = 9092
    topic_prefix: Annotated[str, "Put before every topic, group and transactional id"] = ""
    partitions: Annotated[int, "Partitions of the topics keyed by trial"] = 4
    replication: Annotated[int, "Replication factor of created topics"] = 1
    share_groups: Annotated[str, "auto | on | off: hand out trials through a share group (broker 4.2 or newer)"] = (
        "auto"
    )
    client: Annotated[dict[str, str], "Further librdkafka properties for every client (security.protocol, ...)"] = (
        field(default_factory=dict)
    )


@dataclass(frozen=True)
class SchemaRegistrySection:
    """[schema_registry]"""

    url: Annotated[str, "Base URL of a Schema Registry; empty: Avro single-object framing"] = ""


@dataclass(frozen=True)
class ClickHouseSection:
    """[clickhouse]"""

    url: Annotated[str, "http://host:port of a ClickHouse server; empty: the local stack's embedded engine"] = ""
    port: Annotated[int, "Port of the embedded engine's HTTP front"] = 8123
    database: Annotated[str, "Database"] = "rollstream"
    user: Annotated[str, "User, for a server"] = "default"
    password: Annotated[str, "Password, for a server; better given as ROLLSTREAM_CLICKHOUSE__PASSWORD"] = ""


@dataclass(frozen=True)
class PolicySection:
    """[policy]"""

    path: Annotated[str, "Starting policy: directory with config.json, safetensors and tokenizer"] = ""


@dataclass(frozen=True)
class TasksSection:
    """[tasks]"""

    train: Annotated[str, "Task directory, or index (.parquet), of the training set"] = ""
    held_out: Annotated[str, "Task directory, or index, of the held-out set; empty: no validation"] = ""


@dataclass(frozen=True)
class ScheduleSection:
    """[schedule]"""

    num_steps: Annotated[int, "Training steps of the run"] = 100
    groups_per_step: Annotated[int, "Groups in one training step"] = 64
    group_size: Annotated[int, "G: trials per group"] = 8
    max_staleness: Annotated[int, "Policy versions a sampled token may lag behind the one being trained"] = 1
    min_admitted: Annotated[int, "A group with fewer admitted trials is dropped"] = 2
    max_attempts: Annotated[int, "Attempts per trial before it ends as lost"] = 3
    validate_every: Annotated[
        int, "Validation pass every N steps (and before the first and after the last); 0: never"
    ] = 0
    validation_tasks: Annotated[int, "Held-out tasks per pass, from the start of the set; 0: all"] = 0
    validation_final_tasks: Annotated[int, "The same for the first and the last pass; 0: as validation_tasks"] = 0


@dataclass(frozen=True)
class TrialsSection:
    """[trials]"""

    lanes: Annotated[int, "Trials one worker runs at once"] = 8
    harness: Annotated[str, "mini-swe-agent"] = "mini-swe-agent"
    harness_config: Annotated[str, "Configuration file for the harness; empty: the adapter's own"] = ""
    sandbox: Annotated[str, "bubblewrap | docker | kubernetes"] = "bubblewrap"
    warm: Annotated[bool, "Fork trials from a harness that is already imported, where the adapter can"] = True
    max_turns: Annotated[int, "Model calls per trial"] = 8
    setup_timeout_sec: Annotated[float, "Wall limit of the setup stage"] = 60.0
    agent_timeout_sec: Annotated[float, "Wall limit of the agent stage"] = 600.0
    verify_timeout_sec: Annotated[float, "Wall limit of the verify stage"] = 120.0
    lease_sec: Annotated[float, "A lease lapses after this long without renewal"] = 30.0
    memory_mb: Annotated[int, "Memory limit of one sandbox, MiB"] = 2048
    max_processes: Annotated[int, "Process limit of one sandbox"] = 256
    cpus: Annotated[float, "CPU limit of one sandbox, where cgroups can be had"] = 2.0
    disk_mb: Annotated[int, "Scratch space of one sandbox, MiB"] = 256
    reuse_grades: Annotated[bool, "Let equal (task, diff, grader) digests share a grade, recorded as reused"] = True


@dataclass(frozen=True)
class ProxySection:
    """[proxy]"""

    port: Annotated[int, "TCP port on loopback, for harnesses outside a sandbox and for tools"] = 8090
    max_body_mb: Annotated[int, "Largest request body, MiB"] = 64
    call_timeout_sec: Annotated[float, "Wall limit of one model call"] = 600.0
    ack_timeout_sec: Annotated[float, "A call fails when Kafka has not taken its record after this long"] = 60.0


@dataclass(frozen=True)
class EngineSection:
    """[engine]"""

    kind: Annotated[str, "torch | scripted | vllm"] = "torch"
    url: Annotated[str, "Base URL of a running engine (vllm)"] = ""
    script: Annotated[str, "File of the scripted engine: one JSON reply per line"] = ""
    max_batch: Annotated[int, "Sequences decoded together"] = 64
    max_model_len: Annotated[int, "Context length; 0: the model's own"] = 0
    max_tokens: Annotated[int, "Sampled tokens per call when the request gives no limit"] = 512
    temperature: Annotated[float, "Sampling temperature of training trials, when the harness sends none"] = 1.0
    record_routing: Annotated[bool, "Record the experts of every forwarded token"] = True
    threads: Annotated[int, "torch threads"] = 1
    replica: Annotated[str, "Name of this engine replica"] = "engine/0"


@dataclass(frozen=True)
class AdmissionSection:
    """[admission]"""

    table: Annotated[str, "Version of the admission table"] = "v1"
    overrides: Annotated[dict[str, str], "termination reason -> keep | mask | zero_reward"] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class TrainSection:
    """[train]; defaults are the paper's."""

    algorithm: Annotated[str, "gspo | grpo | ppo"] = "gspo"
    backend: Annotated[str, "torch | megatron"] = "torch"
    lr: Annotated[float, "Peak learning rate"] = 1e-6
    lr_end: Annotated[float, "Learning rate at the last step as a share of the peak; 1: constant"] = 1.0
    warmup_steps: Annotated[int, "Linear warm-up"] = 0
    beta1: Annotated[float, "AdamW"] = 0.9
    beta2: Annotated[float, "AdamW"] = 0.95
    weight_decay: Annotated[float, "AdamW"] = 0.0
    grad_clip: Annotated[float, "Gradient norm bound"] = 1.0
    clip_low: Annotated[float, "Lower clip of the importance ratio: 1 - clip_low"] = 3e-4
    clip_high: Annotated[float, "Upper clip: 1 + clip_high"] = 4e-4
    kl_coef: Annotated[float, "Coefficient of the k3 KL to the reference policy"] = 1e-3
    entropy_coef: Annotated[float, "Coefficient of the entropy bonus"] = 0.0
    importance_correction: Annotated[
        str, "off | token: truncated token-level correction of the rollout's log-probs"
    ] = "off"
    routing_replay: Annotated[bool, "Train with the experts recorded at rollout (R3)"] = True
    micro_batch_tokens: Annotated[int, "Padded tokens of one forward pass"] = 8192
    conversations: Annotated[tuple[str, ...], "Conversation kinds that are trained"] = ("main",)
    dtype: Annotated[str, "float32 | bfloat16"] = "float32"
    threads: Annotated[int, "torch threads"] = 1
    keep_checkpoints: Annotated[int, "Checkpoints kept on disk; 0: all"] = 3
    replay_shift_tokens: Annotated[int, "Fault injection: shift the replayed routing by this many tokens"] = 0


@dataclass(frozen=True)
class HealthSection:
    """[health]: thresholds of the run-health alerts."""

    min_replay_overlap: Annotated[float, "Alert when replayed experts agree less than this with the model's own"] = 0.98
    min_pearson: Annotated[float, "Alert below this rollout-training correlation"] = 0.99
    max_setup_failure_share: Annotated[float, "Alert above this share of trials lost to infrastructure"] = 0.2


@dataclass(frozen=True)
class Settings:
    """A resolved run file."""

    run: RunSection = field(default_factory=RunSection)
    data: DataSection = field(default_factory=DataSection)
    kafka: KafkaSection = field(default_factory=KafkaSection)
    schema_registry: SchemaRegistrySection = field(default_factory=SchemaRegistrySection)
    clickhouse: ClickHouseSection = field(default_factory=ClickHouseSection)
    policy: PolicySection = field(default_factory=PolicySection)
    tasks: TasksSection = field(default_factory=TasksSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    trials: TrialsSection = field(default_factory=TrialsSection)
    proxy: ProxySection = field(default_factory=ProxySection)
    engine: EngineSection = field(default_factory=EngineSection)
    admission: AdmissionSection = field(default_factory=AdmissionSection)
    train: TrainSection = field(default_factory=TrainSection)
    health: HealthSection = field(default_factory=HealthSection)
