"""The tables: one for each noun, one column for each field. A change here needs a migration; a test compares the two.

All text sorts by its bytes, on Postgres too, so that names come in the same order from both databases. Lists and
dicts are JSON. Counters are 64 bits. Times are seconds on the wall clock.
"""

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import SchemaItem

METADATA = sa.MetaData(
    naming_convention={
        "ix": "%(table_name)s_by_%(column_0_N_name)s",
        "uq": "%(table_name)s_one_%(column_0_N_name)s",
        "fk": "%(table_name)s_of_%(referred_table_name)s",
        "pk": "%(table_name)s_key",
    }
)

TEXT = sa.Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")
SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""A number given at the first insert: the order of registration."""

LIVE_TRAJECTORY = "state IN ('QUEUED', 'LEASED', 'SCORED', 'READY', 'BATCHED')"
ENDED_TRAJECTORY = "state IN ('TRAINED', 'FILTERED', 'STALE', 'VOID', 'CANCELLED', 'DELIVERED')"
LIVE_GROUP = "state IN ('OPEN', 'CLOSED', 'BATCHED')"
LIVE_COMMAND = "state IN ('PENDING', 'DELIVERED', 'ACCEPTED')"
LIVE_REPLICA = "state NOT IN ('RELEASED', 'RETIRED')"
LIVE_REASSIGNMENT = "state NOT IN ('SUCCEEDED', 'ROLLED_BACK', 'FAILED')"
LIVE_MANIFEST = "state IN ('TAKEN', 'COMMITTED')"
"""Conditions of partial indexes; queries use the same text, or SQLite would not see that the index fits."""


def _columns(
    *,
    text: str = "",
    integer: str = "",
    real: str = "",
    flag: str = "",
    blob: str = "",
    json: str = "",
) -> Iterator[sa.Column[object]]:
    """Columns of each type by name, none of them nullable."""
    kinds: tuple[tuple[str, sa.types.TypeEngine[Any]], ...] = (
        (text, TEXT),
        (integer, sa.BigInteger()),
        (real, sa.Double()),
        (flag, sa.Boolean()),
        (blob, sa.LargeBinary()),
        (json, sa.JSON()),
    )
    for names, kind in kinds:
        for name in names.split():
            yield sa.Column(name, kind, nullable=False)


def _table(name: str, key: str, columns: Iterator[sa.Column[object]], *more: SchemaItem) -> sa.Table:
    return sa.Table(name, METADATA, *columns, sa.PrimaryKeyConstraint(*key.split()), *more)


def _registered(name: str, key: str, columns: Iterator[sa.Column[object]], *more: SchemaItem) -> sa.Table:
    """A table that remembers in which order its rows came; `key` is unique."""
    serial: sa.Column[int] = sa.Column("serial", SERIAL, primary_key=True, autoincrement=True)
    return sa.Table(name, METADATA, serial, *columns, sa.UniqueConstraint(*key.split()), *more)


def _reference(column: str, target: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [target])


def _partial(name: str, condition: str, *columns: str) -> sa.Index:
    return sa.Index(name, *columns, sqlite_where=sa.text(condition), postgresql_where=sa.text(condition))


LEADER = _table(
    "leader",
    "id",
    _columns(integer="id term revision next_generation compacted_revision"),
    sa.CheckConstraint("id = 1", name="leader_is_one_row"),
)
"""One row. Each transaction of a leader proves here that its term is still the newest."""

WORKERS = _table(
    "workers",
    "name",
    _columns(
        text="name kind endpoint software_version health reason_code reason_text",
        integer="epoch",
        real="create_time update_time",
        flag="cordoned",
        json="accelerators features",
    ),
)

SESSIONS = _table(
    "sessions",
    "name",
    _columns(
        text="name worker state endpoint request_id acked_sha256",
        integer="epoch acked_seq command_sequence desired_revision",
        real="ttl create_time",
        blob="acked_answer",
    ),
)

NODES = _table(
    "nodes",
    "name",
    _columns(text="name rack agent_session", integer="host_memory_bytes", real="update_time", flag="cordoned"),
)

ACCELERATORS = _table(
    "accelerators",
    "name",
    _columns(
        text="name type device_uuid link_domain partition pool sharing role",
        integer="memory_bytes generation",
        real="cpu_share price_per_hour",
        flag="preemptible",
        json="replicas",
    ),
)

REPLICAS = _table(
    "replicas",
    "name",
    _columns(
        text="name role worker state owner_session reassignment fencing endpoint engine_build serving_run "
        "serving_checksum cache_salt weight_state target_run reason_code reason_text",
        integer="generation tp pp ep dp_shard level concurrency_cap micro_batch_tokens restarts serving_lineage "
        "serving_number target_lineage target_number",
        real="create_time update_time",
        flag="granted release_acked positional_seed",
        json="accelerators runs",
    ),
    _partial("replicas_live", LIVE_REPLICA, "name"),
    sa.Index("replicas_by_time", "update_time"),
)

REASSIGNMENTS = _table(
    "reassignments",
    "name",
    _columns(
        text="name state plan cause reason_code reason_text",
        real="predicted_gain rate_before rate_after timeout create_time update_time end_time",
        json="sources targets",
    ),
    _partial("reassignments_live", LIVE_REASSIGNMENT, "name"),
    sa.Index("reassignments_by_time", "create_time", "name"),
)

COMMANDS = _table(
    "commands",
    "name",
    _columns(
        text="name session worker kind subject state cause reason_code reason_text",
        integer="sequence generation",
        real="valid_for create_time update_time",
        blob="payload result",
    ),
    _partial("commands_live", LIVE_COMMAND, "name"),
    sa.Index("commands_by_time", "create_time", "name"),
)

RUNS = _table(
    "runs",
    "name",
    _columns(
        text="name kind state on_exceed trainable_policy model environment reason_code reason_text",
        integer="group_size batch_groups batch_min_groups batch_multiple_of max_versions priority max_in_flight "
        "max_generated_tokens max_turns seed lineage head next_admission cursor_epoch cursor_position task_epochs "
        "task_lines pinned_lineage pinned_number stale_attempts etag",
        real="hold_timeout no_progress_timeout max_run_time create_time update_time",
        flag="exhausted task_shuffle",
        blob="spec task_blob",
    ),
)

LINEAGES = _table(
    "lineages",
    "name",
    _columns(
        text="name run policy reason_code reason_text",
        integer="number head branched_lineage branched_number",
        flag="closed",
    ),
    sa.UniqueConstraint("run", "policy", "number"),
    _reference("run", "runs.name"),
)

WEIGHT_VERSIONS = _table(
    "weight_versions",
    "name",
    _columns(
        text="name run policy state manifest checksum",
        integer="lineage number",
        real="commit_time publish_time",
        blob="files checkpoint",
    ),
    sa.UniqueConstraint("run", "policy", "lineage", "number"),
    _reference("run", "runs.name"),
)

GROUPS = _table(
    "groups",
    "name",
    _columns(
        text="name run state manifest reason_code reason_text",
        integer="admission_number priority task_line replacements",
        real="create_time close_time",
        blob="task",
        json="members",
    ),
    sa.UniqueConstraint("run", "admission_number", "name"),
    _partial("groups_live", LIVE_GROUP, "name"),
    _reference("run", "runs.name"),
)

TRAJECTORIES = _table(
    "trajectories",
    "name",
    _columns(
        text="name run group state holder replica worker prefer finish manifest reason_code reason_text",
        integer="sample admission_number attempt lease_epoch generation level prompt_tokens generated_tokens "
        "trainable_tokens observation_tokens tokens_spent turns_done lease_generated oldest_lineage oldest_version "
        "trained_lineage trained_number preempted",
        real="queued_seconds run_seconds create_time update_time",
        flag="in_tool_wait truncated",
        blob="reward_record tool_sessions",
        json="failures",
    ),
    sa.Column("reward", sa.Double(), nullable=True),
    sa.Index("trajectories_by_admission", "run", "admission_number", "sample", "name"),
    sa.Index("trajectories_by_group", "group", "admission_number", "sample", "name"),
    _partial("trajectories_live", LIVE_TRAJECTORY, "name"),
    _partial("trajectories_ended", ENDED_TRAJECTORY, "run", "state"),
    _reference("run", "runs.name"),
)

ATTEMPTS = _table(
    "attempts",
    "trajectory number",
    _columns(text="trajectory failure reason_code reason_text", integer="number leases", real="start_time end_time"),
    _reference("trajectory", "trajectories.name"),
)

SEQUENCES = _registered(
    "sequences",
    "trajectory attempt index",
    _columns(text="trajectory fork_reason actor", integer="attempt index parent fork_position"),
    _reference("trajectory", "trajectories.name"),
)

SEGMENTS = _registered(
    "segments",
    "trajectory attempt sequence first_position",
    _columns(
        text="trajectory sha256",
        integer="attempt sequence first_position tokens trainable_tokens",
        blob="record",
        json="spans",
    ),
    _reference("trajectory", "trajectories.name"),
)

TURNS = _registered(
    "turns",
    "trajectory attempt index part",
    _columns(text="trajectory finish", integer="attempt index part generated_tokens", flag="truncated", blob="record"),
    _reference("trajectory", "trajectories.name"),
)

MANIFESTS = _table(
    "manifests",
    "name",
    _columns(
        text="name run policy state members_sha256",
        integer="step lineage base trainable_tokens sequences max_versions wanted_groups wanted_min wanted_multiple",
        real="create_time end_time",
        json="groups members attempts masked",
    ),
    sa.Index("manifests_by_step", "run", "step", "name"),
    _partial("manifests_live", LIVE_MANIFEST, "name"),
    _reference("run", "runs.name"),
)

CONSUMPTIONS = _table(
    "consumptions",
    "run policy lineage trajectory",
    _columns(text="run policy trajectory manifest", integer="lineage number"),
    _reference("trajectory", "trajectories.name"),
    _reference("manifest", "manifests.name"),
)
"""Which version a trajectory went into. The key lets each be trained once in a lineage, whoever asks."""

PLANS = _table(
    "plans",
    "name",
    _columns(text="name state", real="create_time", blob="record"),
    sa.Index("plans_by_time", "create_time", "name"),
)

EVENTS = _table(
    "events",
    "revision index",
    _columns(
        text="kind name from_state to_state reason_code reason_text caused_by cause",
        integer="revision index term",
        real="time",
        json="numbers related",
    ),
    sa.Index("events_by_name", "name", "revision", "index"),
)

ANSWERS = _table(
    "answers",
    "request_id",
    _columns(text="request_id method content_sha256", real="create_time", blob="answer"),
    sa.Index("answers_by_time", "create_time"),
)
