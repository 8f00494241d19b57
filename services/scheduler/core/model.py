"""The state that the scheduler decides on: one mutable dataclass for each noun, kept in `Fleet`.

Entities are mutable because the live state has one writer and a frozen copy per event costs what the targets do not
have. Names are resource names. Times are seconds: `*_time` on the server's wall clock (for people), `*_at` on the
leader's monotonic clock (for deadlines; never persisted, set anew at a take-over). Opaque content of the contract that
nobody decides on (a run's settings, a command's action) is kept as serialised bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Worker:
    """A service process under a lasting name, and its newest session."""

    name: str
    kind: str
    epoch: int = 0
    endpoint: str = ""
    accelerators: tuple[str, ...] = ()
    software_version: str = ""
    features: tuple[str, ...] = ()
    health: str = "OK"
    cordoned: bool = False
    reason_code: str = ""
    reason_text: str = ""
    create_time: float = 0.0
    update_time: float = 0.0


@dataclass(slots=True)
class Session:
    """One life of a worker. Holds leases until it ends."""

    name: str
    worker: str
    epoch: int
    state: str = "ALIVE"
    endpoint: str = ""
    request_id: str = ""
    ttl: float = 10.0
    acked_seq: int = 0
    acked_sha256: str = ""
    """Of the last numbered report's content, to tell a repetition from a reused seq."""
    acked_answer: bytes = b""
    """Refusals of that report, serialised, so that a repetition gets the same answer."""
    command_sequence: int = 0
    desired_revision: int = 0
    create_time: float = 0.0
    expires_at: float = 0.0


@dataclass(slots=True)
class Node:
    """A machine with a node agent."""

    name: str
    host_memory_bytes: int = 0
    rack: str = ""
    cordoned: bool = False
    agent_session: str = ""
    update_time: float = 0.0


@dataclass(slots=True)
class Accelerator:
    """One GPU or CPU slot. `replicas` are those placed on it (one, unless TIME_SLICED)."""

    name: str
    type: str = "cpu"
    device_uuid: str = ""
    memory_bytes: int = 0
    link_domain: str = ""
    partition: str = ""
    cpu_share: float = 0.0
    pool: str = "HYBRID"
    sharing: str = "EXCLUSIVE"
    preemptible: bool = False
    price_per_hour: float = 0.0
    generation: int = 0
    role: str = ""
    """Role that it should serve, as last planned; empty before the first plan."""
    replicas: tuple[str, ...] = ()


@dataclass(slots=True)
class Replica:
    """A set of accelerators with one owner: the unit of ownership."""

    name: str
    generation: int
    role: str
    accelerators: tuple[str, ...]
    worker: str
    state: str = "PLANNED"
    owner_session: str = ""
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp_shard: int = 1
    runs: tuple[str, ...] = ()
    level: int = 0
    concurrency_cap: int = 0
    micro_batch_tokens: int = 0
    reassignment: str = ""
    granted: bool = False
    """The owner acknowledged GRANT."""
    release_acked: bool = False
    """The owner acknowledged RELEASE; the node agent's confirmation is still needed."""
    fencing: str = "FENCED"
    endpoint: str = ""
    engine_build: str = ""
    positional_seed: bool = False
    restarts: int = 0
    serving_run: str = ""
    serving_lineage: int = 0
    serving_number: int = -1
    """Version served, -1 before the first load."""
    serving_checksum: str = ""
    cache_salt: str = ""
    weight_state: str = ""
    target_run: str = ""
    target_lineage: int = 0
    target_number: int = -1
    """Version it was last told to load, -1 if none is under way."""
    reason_code: str = ""
    reason_text: str = ""
    create_time: float = 0.0
    update_time: float = 0.0


@dataclass(slots=True)
class Source:
    """A replica that a reassignment takes."""

    replica: str
    generation: int
    released: bool = False
    confirmed: bool = False


@dataclass(slots=True)
class Target:
    """A replica that a reassignment makes."""

    replica: str
    role: str
    accelerators: tuple[str, ...]
    worker: str
    generation: int = 0
    level: int = 0
    concurrency_cap: int = 0
    runs: tuple[str, ...] = ()
    granted: bool = False


@dataclass(slots=True)
class Reassignment:
    """Moves accelerators between whole replicas: all releases confirmed before any grant, or all rolled back."""

    name: str
    state: str = "PENDING"
    sources: list[Source] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    plan: str = ""
    cause: str = ""
    """Who asked: "planner", "bootstrap" or "operator"."""
    predicted_gain: float = 0.0
    """Trained tokens per second expected more after the move; 0 for moves without a prediction."""
    rate_before: float = 0.0
    """Trained tokens per second measured before it."""
    rate_after: float = 0.0
    """The same after it has settled; 0 until measured."""
    timeout: float = 60.0
    reason_code: str = ""
    reason_text: str = ""
    create_time: float = 0.0
    update_time: float = 0.0
    end_time: float = 0.0
    deadline_at: float = 0.0


@dataclass(slots=True)
class Command:
    """One thing that a worker shall do."""

    name: str
    session: str
    worker: str
    kind: str
    """Name of the action field in the contract, e.g. "preempt"."""
    subject: str
    """Resource that it is about."""
    payload: bytes
    """The action, a serialised libra.v1.Command with only the action set."""
    sequence: int
    generation: int = 0
    state: str = "PENDING"
    cause: str = ""
    """cmlfq, handover, operator, weights ... or a reassignment's name."""
    valid_for: float = 60.0
    result: bytes = b""
    reason_code: str = ""
    reason_text: str = ""
    create_time: float = 0.0
    update_time: float = 0.0
    deadline_at: float = 0.0


@dataclass(slots=True)
class Run:
    """One RL job. `spec` is the whole libra.v1.Run as accepted; the fields beside it are what is decided on."""

    name: str
    kind: str
    spec: bytes
    state: str = "ACTIVE"
    group_size: int = 8
    batch_groups: int = 16
    batch_min_groups: int = 0
    batch_multiple_of: int = 1
    max_versions: int = 2
    on_exceed: str = "HOLD_TRAINER"
    hold_timeout: float = 300.0
    no_progress_timeout: float = 600.0
    priority: int = 0
    max_in_flight: int = 0
    max_generated_tokens: int = 32_768
    max_turns: int = 64
    max_run_time: float = 3_600.0
    seed: int = 0
    trainable_policy: str = ""
    lineage: int = 1
    head: int = 0
    """Newest committed version of the open lineage."""
    next_admission: int = 0
    cursor_epoch: int = 0
    cursor_position: int = 0
    exhausted: bool = False
    """True if no further group will come: task file at its end, or the client said so by finishing."""
    task_epochs: int = 1
    task_lines: int = 0
    task_shuffle: bool = False
    task_blob: bytes = b""
    pinned_lineage: int = 0
    pinned_number: int = -1
    model: str = ""
    environment: str = ""
    stale_attempts: int = 0
    etag: int = 1
    reason_code: str = ""
    reason_text: str = ""
    create_time: float = 0.0
    update_time: float = 0.0


@dataclass(slots=True)
class Lineage:
    """An unbroken line of versions of one policy."""

    name: str
    run: str
    policy: str
    number: int
    head: int = 0
    branched_lineage: int = 0
    branched_number: int = -1
    closed: bool = False
    reason_code: str = ""
    reason_text: str = ""


@dataclass(slots=True)
class WeightVersion:
    """One version of a policy's weights."""

    name: str
    run: str
    policy: str
    lineage: int
    number: int
    state: str = "COMMITTED"
    manifest: str = ""
    files: bytes = b""
    """Serialised libra.v1.WeightManifest; empty until published, and for number 0 of the first lineage."""
    checksum: str = ""
    checkpoint: bytes = b""
    """Serialised BlobRef of a checkpoint's index that contains it; empty if none."""
    commit_time: float = 0.0
    publish_time: float = 0.0


@dataclass(slots=True)
class Group:
    """The trajectories of one prompt."""

    name: str
    run: str
    admission_number: int
    task: bytes
    """Serialised libra.v1.Task."""
    state: str = "OPEN"
    priority: int = 0
    members: list[str] = field(default_factory=list)
    """Names of all trajectories, also void and cancelled ones."""
    manifest: str = ""
    task_line: int = -1
    replacements: int = 0
    reason_code: str = ""
    reason_text: str = ""
    create_time: float = 0.0
    close_time: float = 0.0


@dataclass(slots=True)
class Span:
    """A run of generated tokens of one version in a segment."""

    lineage: int
    number: int
    first_position: int
    tokens: int
    trainable_tokens: int


@dataclass(slots=True)
class Segment:
    """A stretch of tokens in the blob store, as registered. `record` is the serialised libra.v1.Segment."""

    trajectory: str
    attempt: int
    sequence: int
    first_position: int
    tokens: int
    trainable_tokens: int
    sha256: str
    record: bytes
    spans: list[Span] = field(default_factory=list)


@dataclass(slots=True)
class Sequence:
    """One line of tokens of an attempt."""

    trajectory: str
    attempt: int
    index: int
    parent: int = -1
    fork_position: int = 0
    fork_reason: str = ""
    actor: str = ""


@dataclass(slots=True)
class Turn:
    """One generation and the tool calls that follow it. `record` is the serialised libra.v1.Turn."""

    trajectory: str
    attempt: int
    index: int
    part: int
    generated_tokens: int
    finish: str
    truncated: bool
    record: bytes


@dataclass(slots=True)
class Attempt:
    """One try at an episode from its start."""

    trajectory: str
    number: int
    leases: int = 0
    failure: str = ""
    reason_code: str = ""
    reason_text: str = ""
    start_time: float = 0.0
    end_time: float = 0.0


@dataclass(slots=True)
class Trajectory:
    """One episode."""

    name: str
    run: str
    group: str
    sample: int
    admission_number: int
    state: str = "QUEUED"
    attempt: int = 1
    lease_epoch: int = 0
    holder: str = ""
    """Session that holds the lease; empty if none."""
    replica: str = ""
    """Engine of the lease; the last one while queued again."""
    generation: int = 0
    worker: str = ""
    level: int = 0
    prefer: str = ""
    """Engine that the queue has in mind for it; empty if any."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    trainable_tokens: int = 0
    observation_tokens: int = 0
    tokens_spent: int = 0
    """Generated tokens over all attempts; what is left of the budget follows from it."""
    turns_done: int = 0
    lease_generated: int = 0
    """Generated tokens when the present lease began: the quantum is counted from there."""
    in_tool_wait: bool = False
    oldest_lineage: int = 0
    oldest_version: int = -1
    """Oldest version among its trainable tokens; -1 if it has none yet."""
    reward: float | None = None
    reward_record: bytes = b""
    finish: str = ""
    truncated: bool = False
    tool_sessions: bytes = b""
    """Serialised Trajectory with only tool_sessions set."""
    trained_lineage: int = 0
    trained_number: int = -1
    manifest: str = ""
    preempted: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Failed attempts and resumptions by failure class."""
    queued_seconds: float = 0.0
    run_seconds: float = 0.0
    reason_code: str = ""
    reason_text: str = ""
    create_time: float = 0.0
    update_time: float = 0.0
    queued_at: float = 0.0
    leased_at: float = 0.0
    progress_at: float = 0.0
    """When its holder last reported anything of it."""
    lease_revision: int = 0
    """Desired revision of its holder's session at which the lease was given; not persisted."""


@dataclass(slots=True)
class MaskedSpan:
    """Tokens of a manifest's member that are too old to be trained."""

    trajectory: str
    sequence: int
    first_position: int
    tokens: int


@dataclass(slots=True)
class Manifest:
    """The frozen content of one step."""

    name: str
    run: str
    policy: str
    step: int
    lineage: int
    base: int
    state: str = "TAKEN"
    groups: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    """Trajectories in manifest order."""
    attempts: list[int] = field(default_factory=list)
    """Attempt of each member."""
    masked: list[MaskedSpan] = field(default_factory=list)
    trainable_tokens: int = 0
    sequences: int = 0
    members_sha256: str = ""
    max_versions: int = 0
    wanted_groups: int = 0
    wanted_min: int = 0
    wanted_multiple: int = 1
    create_time: float = 0.0
    end_time: float = 0.0


@dataclass(slots=True)
class Plan:
    """A plan as proposed or applied; `record` is the serialised libra.v1.Plan."""

    name: str
    state: str
    record: bytes
    create_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """One change, as recorded. `index` orders the events of one revision."""

    revision: int
    index: int
    time: float
    term: int
    kind: str
    name: str
    from_state: str
    to_state: str
    reason_code: str = ""
    reason_text: str = ""
    numbers: tuple[tuple[str, float], ...] = ()
    caused_by: str = ""
    cause: str = ""
    related: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The stored answer of a mutation, found again by its request id for a day."""

    request_id: str
    method: str
    content_sha256: str
    answer: bytes
    create_time: float = 0.0


Entity = (
    Worker
    | Session
    | Node
    | Accelerator
    | Replica
    | Reassignment
    | Command
    | Run
    | Lineage
    | WeightVersion
    | Group
    | Sequence
    | Segment
    | Turn
    | Attempt
    | Trajectory
    | Manifest
    | Plan
)


@dataclass(slots=True)
class Fleet:
    """All live state. One writer: the scheduler's event loop. Terminal trajectories, their segments and turns leave it
    once no manifest, batch or open group needs them; the store keeps them.
    """

    term: int = 0
    revision: int = 0
    next_generation: int = 1
    workers: dict[str, Worker] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    accelerators: dict[str, Accelerator] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    reassignments: dict[str, Reassignment] = field(default_factory=dict)
    commands: dict[str, Command] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    lineages: dict[str, Lineage] = field(default_factory=dict)
    versions: dict[str, WeightVersion] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    attempts: dict[tuple[str, int], Attempt] = field(default_factory=dict)
    sequences: dict[tuple[str, int], list[Sequence]] = field(default_factory=dict)
    """By (trajectory, attempt)."""
    segments: dict[tuple[str, int], list[Segment]] = field(default_factory=dict)
    """By (trajectory, attempt), in order of registration."""
    turns: dict[tuple[str, int], list[Turn]] = field(default_factory=dict)
    """By (trajectory, attempt), in order of registration."""
    manifests: dict[str, Manifest] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)

    def session_of(self, worker: str) -> Session | None:
        """The newest session of a worker if it is not terminal."""
        known = self.workers.get(worker)
        session = self.sessions.get(f"{worker}/sessions/{known.epoch}") if known else None
        return session if session is not None and session.state in ("ALIVE", "RECOVERING") else None

    def live_replicas(self) -> Iterator[Replica]:
        """Replicas that are not terminal."""
        return (r for r in self.replicas.values() if r.state not in ("RELEASED", "RETIRED"))

    def replica_on(self, accelerator: str) -> Replica | None:
        """The live replica on an accelerator, if any."""
        for name in self.accelerators[accelerator].replicas:
            replica = self.replicas.get(name)
            if replica is not None and replica.state not in ("RELEASED", "RETIRED"):
                return replica
        return None
