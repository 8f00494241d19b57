"""Protobuf to model: everything that comes in is checked here, once, with the field's name and what was expected."""

import math
import re
import struct
import uuid

from services.common import errors, wire
from services.scheduler.control.trajectories import End, Progress, ToolReturn
from services.scheduler.core.model import Run, Segment, Sequence, Span, Turn

RUN_ID = re.compile(r"[a-z0-9-]{1,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")
WORKER = re.compile(r"workers/[A-Za-z0-9._-]{1,63}")
ACCELERATOR = re.compile(r"nodes/[A-Za-z0-9._-]{1,63}/accelerators/[0-9]{1,4}")
NODE = re.compile(r"nodes/[A-Za-z0-9._-]{1,63}")
MAX_COUNT = 1 << 40
MAX_BYTES = 1 << 52
MAX_SHORT_BYTES = 256
MAX_RUN_BYTES = 64 << 10
"""Settings of a run: all workers get those of every run."""
MAX_TURN_PARTS = 64


def request_id(value: str) -> str:
    """A UUID, required on mutations."""
    try:
        return str(uuid.UUID(value))
    except ValueError:
        raise errors.invalid_field(f"request_id {value!r}: expected a UUID, new for each mutation") from None


def name(value: str, pattern: re.Pattern[str], field: str, example: str) -> str:
    """A name of the expected form."""
    if not pattern.fullmatch(value):
        raise errors.invalid_field(f"{field} {value[:80]!r}: expected e.g. {example}")
    return value


def note(value: str) -> str:
    """A note for the record, bounded."""
    if len(value.encode()) > 256:
        raise errors.invalid_field(f"note: {len(value.encode())} bytes; at most 256")
    return value


def short(value: str, field: str, most: int = MAX_SHORT_BYTES) -> str:
    """A text that is kept, bounded in bytes."""
    if len(value.encode()) > most:
        raise errors.invalid_field(f"{field}: {len(value.encode())} bytes; at most {most}")
    return value


def finite(value: float, field: str) -> float:
    """A finite number."""
    if not math.isfinite(value):
        raise errors.invalid_field(f"{field}: {value} is not finite")
    return value


def count(value: int, field: str, most: int = MAX_COUNT) -> int:
    """A count: not negative, bounded, so that sums of them stay within a column of 64 bits."""
    if not 0 <= value <= most:
        raise errors.invalid_field(f"{field}: {value}; expected 0 to {most}")
    return value


def blob(ref: wire.BlobRef, field: str) -> None:
    """A reference to a blob."""
    if not ref.uri or len(ref.uri.encode()) > 512:
        raise errors.invalid_field(f"{field}.uri: expected 1 to 512 bytes")
    if not SHA256.fullmatch(ref.sha256):
        raise errors.invalid_field(f"{field}.sha256 {ref.sha256[:80]!r}: expected 64 lower-case hex digits")
    count(ref.size_bytes, f"{field}.size_bytes")


# ---- hardware


def node(message: wire.Node) -> None:
    """What a node agent says of its machine."""
    name(message.name, NODE, "node.name", "nodes/n0")
    short(message.rack, "node.rack")
    count(message.host_memory_bytes, "node.host_memory_bytes", MAX_BYTES)


def accelerator(message: wire.Accelerator) -> None:
    """What a node agent says of one accelerator."""
    name(message.name, ACCELERATOR, "accelerator", "nodes/n0/accelerators/0")
    if message.pool == wire.POOL_UNSPECIFIED:
        raise errors.invalid_field(f"{message.name}: pool is required")
    count(message.memory_bytes, f"{message.name} memory_bytes", MAX_BYTES)
    for field in ("type", "device_uuid", "link_domain", "partition"):
        short(getattr(message, field), f"{message.name} {field}")


# ---- reports


def progress(message: wire.TrajectoryProgress) -> Progress:
    """Turns and segments of one trajectory."""
    if len(message.turns) > MAX_TURN_PARTS or len(message.sequences) > MAX_TURN_PARTS:
        raise errors.invalid_field(f"{message.trajectory}: at most {MAX_TURN_PARTS} turns and sequences in one report")
    turns, returns = [], []
    prompt, engine = 0, 0.0
    waiting = False
    for item in message.turns:
        turn, tools = _turn(message, item)
        turns.append(turn)
        returns += tools
        if item.index == 0 and item.part == 0:
            prompt += item.prompt_tokens
        engine += wire.seconds(item.engine_time)
        waiting = item.finish == wire.FINISH_REASON_TOOL_CALL and not item.tool_calls
    sequences, segments = [], []
    for row in message.sequences:
        sequences.append(
            Sequence(
                message.trajectory, message.attempt, count(row.index, "sequence.index", 255),
                row.parent if row.HasField("parent") else -1, count(row.fork_position, "fork_position"),
                wire.ForkReason.Name(row.fork_reason).removeprefix("FORK_REASON_"), row.actor,
            )
        )  # fmt: skip
        segments += [_segment(message, row.index, s) for s in row.segments]
    sessions = None
    if message.tool_sessions:
        sessions = wire.Trajectory(tool_sessions=message.tool_sessions).SerializeToString()
    return Progress(
        message.trajectory, message.attempt, message.lease_epoch, turns, sequences, segments, sessions, returns,
        prompt, engine, waiting,
    )  # fmt: skip


def _turn(message: wire.TrajectoryProgress, item: wire.Turn) -> tuple[Turn, list[ToolReturn]]:
    where = f"{message.trajectory} turn {item.index}.{item.part}"
    for field in ("index", "part", "sequence", "first_position", "prompt_tokens", "cached_tokens", "generated_tokens"):
        count(getattr(item, field), f"{where} {field}")
    if item.finish and not item.generated_tokens and not item.part:
        # an engine that reports success without a token has failed; an interrupted turn may end with nothing to add
        raise errors.invalid_field(f"{where}: finished without a generated token; that is an engine failure")
    if item.finish and item.interruption:
        raise errors.invalid_field(f"{where}: both finished and interrupted; expected one of them")
    if len(item.tool_calls) > 64:
        raise errors.invalid_field(f"{where}: {len(item.tool_calls)} tool calls; at most 64")
    finish = wire.FinishReason.Name(item.finish).removeprefix("FINISH_REASON_") if item.finish else ""
    returns = [
        ToolReturn(
            item.index, c.tool, c.payload_class, wire.ToolOutcome.Name(c.outcome).removeprefix("TOOL_OUTCOME_"),
            wire.seconds(c.latency),
        )
        for c in item.tool_calls
    ]  # fmt: skip
    record = item.SerializeToString(deterministic=True)
    return (
        Turn(
            message.trajectory, message.attempt, item.index, item.part, item.generated_tokens, finish, item.truncated,
            record,
        ),
        returns,
    )  # fmt: skip


def _segment(message: wire.TrajectoryProgress, sequence: int, item: wire.Segment) -> Segment:
    where = f"{message.trajectory} sequence {sequence} segment at {item.first_position}"
    blob(item.blob, where)
    count(item.first_position, f"{where} first_position")
    count(item.tokens, f"{where} tokens")
    if item.tokens < 1:
        raise errors.invalid_field(f"{where}: {item.tokens} tokens; a segment has at least one")
    if not 0 <= item.trainable_tokens <= item.tokens:
        raise errors.invalid_field(f"{where}: {item.trainable_tokens} trainable of {item.tokens} tokens")
    columns = {c.name for c in item.columns}
    needed = {"ids", "loss_mask"} | ({"logprob", "weight_version"} if item.trainable_tokens else set())
    if needed - columns:
        raise errors.invalid_field(f"{where}: columns {sorted(needed - columns)} are missing")
    spans = []
    for span in item.versions:
        count(span.tokens, f"{where} version span tokens")
        count(span.first_position, f"{where} version span first_position")
        if span.tokens < 1 or not 0 <= span.trainable_tokens <= span.tokens or span.version.lineage < 1:
            raise errors.invalid_field(f"{where}: malformed version span")
        spans.append(
            Span(
                span.version.lineage, count(span.version.number, f"{where} version"), span.first_position, span.tokens,
                span.trainable_tokens,
            )
        )  # fmt: skip
    spanned = sum(s.trainable_tokens for s in spans)
    if spanned != item.trainable_tokens:
        raise errors.invalid_field(
            f"{where}: version spans cover {spanned} trainable tokens, the segment has {item.trainable_tokens}"
        )
    return Segment(
        message.trajectory, message.attempt, sequence, item.first_position, item.tokens, item.trainable_tokens,
        item.blob.sha256, item.SerializeToString(deterministic=True), spans,
    )  # fmt: skip


def trajectory_end(message: wire.TrajectoryEnd) -> End:
    """How an attempt ended."""
    which = message.WhichOneof("end")
    if which is None:
        raise errors.invalid_field(f"{message.trajectory}: the end says neither reward, failure nor interruption")
    end = End(message.trajectory, message.attempt, message.lease_epoch)
    if which == "reward":
        if not message.reward.HasField("value"):
            raise errors.invalid_field(f"{message.trajectory}: reward without a value; a missing value is not 0")
        value = finite(message.reward.value, f"{message.trajectory} reward")
        for key, part in message.reward.components.items():
            finite(part, f"{message.trajectory} reward component {key}")
        record = message.reward.SerializeToString()
        return End(end.trajectory, end.attempt, end.lease_epoch, reward=value, reward_record=record)
    if which == "failure":
        failure = wire.FailureClass.Name(message.failure.failure).removeprefix("FAILURE_CLASS_")
        if failure == "UNSPECIFIED":
            raise errors.invalid_field(f"{message.trajectory}: failure without a class")
        reason = message.failure.reason
        return End(
            end.trajectory,
            end.attempt,
            end.lease_epoch,
            failure=failure,
            code=reason.code[:64],
            text=reason.text[:1024],
        )
    interruption = wire.Interruption.Name(message.interrupted).removeprefix("INTERRUPTION_")
    if interruption == "UNSPECIFIED":
        raise errors.invalid_field(f"{message.trajectory}: interrupted without saying by what")
    return End(end.trajectory, end.attempt, end.lease_epoch, interrupted=interruption)


# ---- runs


def new_run(run_id: str, message: wire.Run, now: float, drawn_seed: int) -> Run:
    """A run with its defaults filled in; INVALID_FIELD or INCONSISTENT_SETTINGS with both numbers."""
    name(run_id, RUN_ID, "run_id", "my-run-1 ([a-z0-9-], at most 63)")
    spec = wire.Run()
    spec.CopyFrom(message)
    spec.name = f"runs/{run_id}"
    spec.kind = spec.kind or wire.RUN_KIND_TRAIN
    kind = wire.RunKind.Name(spec.kind).removeprefix("RUN_KIND_")
    if not 1 <= len(spec.policies) <= 16:
        raise errors.invalid_field(f"policies: {len(spec.policies)} given; expected 1 to 16")
    if any(not p.model for p in spec.policies):
        raise errors.invalid_field("policies: each needs a model (path or hub name)")
    if kind == "TRAIN" and all(p.frozen for p in spec.policies):
        raise errors.invalid_field("policies: a TRAIN run needs one that is not frozen")
    if len(spec.policies) > 1:
        raise errors.LibraError(
            "INVALID_FIELD", "policies: several policies in one run are not supported yet; docs/limits.md"
        )
    spec.group_size = spec.group_size or 8
    if not 1 <= spec.group_size <= 1_024:
        raise errors.invalid_field(f"group_size: {spec.group_size}; expected 1 to 1,024")
    if kind == "TRAIN" and spec.group_size == 1:
        raise errors.inconsistent(
            "group_size is 1, but a TRAIN run compares the members of a group; expected at least 2 "
            "(an EVAL run may have 1)"
        )
    if not spec.staleness.HasField("max_versions"):
        spec.staleness.max_versions = 2
    count(spec.staleness.max_versions, "staleness.max_versions", 1_000)
    spec.staleness.on_exceed = spec.staleness.on_exceed or wire.ON_EXCEED_HOLD_TRAINER
    if not spec.staleness.HasField("hold_timeout"):
        spec.staleness.hold_timeout.CopyFrom(wire.duration(300))
    if not spec.HasField("no_progress_timeout"):
        spec.no_progress_timeout.CopyFrom(wire.duration(600))
    if spec.ByteSize() > MAX_RUN_BYTES:
        raise errors.invalid_field(f"run: {spec.ByteSize()} bytes of settings; at most {MAX_RUN_BYTES}")
    limits = spec.limits
    limits.max_generated_tokens = limits.max_generated_tokens or 32_768
    limits.max_turns = limits.max_turns or 64
    if not limits.HasField("max_run_time"):
        limits.max_run_time.CopyFrom(wire.duration(3_600))
    count(limits.max_generated_tokens, "limits.max_generated_tokens", 1 << 31)
    count(limits.max_sequence_tokens, "limits.max_sequence_tokens", 1 << 31)
    count(limits.max_turns, "limits.max_turns", 1 << 20)
    count(limits.oversample, "limits.oversample", 1_024)
    count(spec.quota.max_in_flight, "quota.max_in_flight", 1 << 31)
    if not spec.sampling.HasField("temperature"):
        spec.sampling.temperature = 1.0
    if finite(spec.sampling.temperature, "sampling.temperature") < 0:
        raise errors.invalid_field(f"sampling.temperature: {spec.sampling.temperature}; expected at least 0")
    if not spec.sampling.HasField("top_p"):
        spec.sampling.top_p = 1.0
    if not 0 < finite(spec.sampling.top_p, "sampling.top_p") <= 1:
        raise errors.invalid_field(f"sampling.top_p: {spec.sampling.top_p}; expected above 0, at most 1")
    if not spec.HasField("seed"):
        spec.seed = drawn_seed
    batch = spec.batch
    batch.groups = batch.groups or 16
    batch.min_groups = batch.min_groups or batch.groups
    batch.multiple_of = batch.multiple_of or 1
    if not 1 <= batch.groups <= 65_536:
        raise errors.invalid_field(f"batch.groups: {batch.groups}; expected 1 to 65,536")
    for field in ("min_groups", "multiple_of"):
        count(getattr(batch, field), f"batch.{field}", 65_536)
    if batch.min_groups > batch.groups:
        raise errors.inconsistent(f"batch.min_groups is {batch.min_groups}, above batch.groups {batch.groups}")
    if batch.multiple_of > batch.groups:
        raise errors.inconsistent(
            f"batch.multiple_of is {batch.multiple_of}, but a step takes only {batch.groups} groups: no batch could "
            "ever be taken; raise batch.groups or lower batch.multiple_of"
        )
    has_tasks = spec.HasField("tasks")
    if has_tasks:
        blob(spec.tasks.file, "tasks.file")
        spec.tasks.epochs = count(spec.tasks.epochs or 1, "tasks.epochs", 1_000_000)
    policy = spec.policies[0]
    pinned = policy.HasField("pinned")
    return Run(
        name=spec.name,
        kind=kind,
        spec=spec.SerializeToString(),
        group_size=spec.group_size,
        batch_groups=batch.groups,
        batch_min_groups=batch.min_groups,
        batch_multiple_of=batch.multiple_of,
        max_versions=spec.staleness.max_versions,
        on_exceed=wire.OnExceed.Name(spec.staleness.on_exceed).removeprefix("ON_EXCEED_"),
        hold_timeout=wire.seconds(spec.staleness.hold_timeout),
        no_progress_timeout=wire.seconds(spec.no_progress_timeout),
        priority=spec.priority,
        max_in_flight=spec.quota.max_in_flight,
        max_generated_tokens=limits.max_generated_tokens,
        max_turns=limits.max_turns,
        max_run_time=wire.seconds(limits.max_run_time),
        seed=spec.seed,
        trainable_policy=policy.id,
        task_epochs=spec.tasks.epochs if has_tasks else 1,
        task_shuffle=spec.tasks.shuffle,
        task_blob=spec.tasks.file.SerializeToString() if has_tasks else b"",
        pinned_lineage=policy.pinned.lineage if pinned else (1 if kind == "EVAL" else 0),
        pinned_number=policy.pinned.number if pinned else (0 if kind == "EVAL" else -1),
        model=policy.model,
        environment=spec.environment,
        create_time=now,
        update_time=now,
    )


def reward_bits(value: float) -> str:
    """The 16 hex digits of a reward's IEEE bits, as the manifest's hash wants them."""
    return struct.pack(">d", value).hex()
