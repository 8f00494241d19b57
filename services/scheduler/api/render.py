"""Model to protobuf: resources as callers see them."""

from services.common import wire
from services.scheduler.control import commands as outbox
from services.scheduler.control.specs import spec
from services.scheduler.core.model import (
    Accelerator,
    Attempt,
    Command,
    Event,
    Fleet,
    Group,
    Lineage,
    Manifest,
    Node,
    Plan,
    Reassignment,
    Replica,
    Run,
    Segment,
    Sequence,
    Session,
    Trajectory,
    Turn,
    WeightVersion,
    Worker,
)


def stamp(fleet: Fleet, revision: int | None = None) -> wire.Stamp:
    """Term and revision of an answer."""
    return wire.Stamp(term=fleet.term, revision=fleet.revision if revision is None else revision)


def reason(code: str, text: str, numbers: dict[str, float] | None = None) -> wire.Reason:
    """A reason; empty if there is no code."""
    return wire.Reason(code=code, text=text, numbers=numbers)


def run(item: Run, *, in_flight: int = 0, ready: int = 0, terminal: list[wire.TerminalCount] | None = None) -> wire.Run:
    """A run with its settings and counters."""
    message = wire.Run()
    message.CopyFrom(spec(item))
    message.state = wire.RunState.Value(f"RUN_STATE_{item.state}")
    message.reason.CopyFrom(reason(item.reason_code, item.reason_text))
    message.cursor.CopyFrom(
        wire.TaskCursor(epoch=item.cursor_epoch, position=item.cursor_position, exhausted=item.exhausted)
    )
    message.counts.CopyFrom(
        wire.RunCounts(
            admitted=item.next_admission * item.group_size, in_flight=in_flight, ready=ready, terminal=terminal or [],
            stale_attempts=item.stale_attempts,
        )
    )  # fmt: skip
    message.policies[0].head.CopyFrom(
        wire.VersionRef(policy=item.trainable_policy, lineage=item.lineage, number=item.head)
    )
    message.etag = str(item.etag)
    message.create_time.CopyFrom(wire.timestamp(item.create_time))
    message.update_time.CopyFrom(wire.timestamp(item.update_time))
    return message


def session(item: Session, worker: Worker) -> wire.Session:
    """A session."""
    return wire.Session(
        name=item.name, epoch=item.epoch, state=wire.SessionState.Value(f"SESSION_STATE_{item.state}"),
        endpoint=item.endpoint, software_version=worker.software_version, features=worker.features,
        create_time=wire.timestamp(item.create_time), accelerators=worker.accelerators,
    )  # fmt: skip


def worker(item: Worker, newest: Session | None, load: wire.Load | None) -> wire.Worker:
    """A worker with its newest session and last load."""
    message = wire.Worker(
        name=item.name, kind=wire.WorkerKind.Value(f"WORKER_KIND_{item.kind}"),
        health=wire.WorkerHealth.Value(f"WORKER_HEALTH_{item.health}"),
        reason=reason(item.reason_code, item.reason_text), cordoned=item.cordoned,
        create_time=wire.timestamp(item.create_time), update_time=wire.timestamp(item.update_time),
    )  # fmt: skip
    if newest is not None:
        message.session.CopyFrom(session(newest, item))
    if load is not None:
        message.load.CopyFrom(load)
    return message


def node(item: Node) -> wire.Node:
    """A node."""
    return wire.Node(
        name=item.name, host_memory_bytes=item.host_memory_bytes, rack=item.rack, cordoned=item.cordoned,
        agent_session=item.agent_session, update_time=wire.timestamp(item.update_time),
    )  # fmt: skip


def accelerator(item: Accelerator, observed: wire.AcceleratorObservation | None) -> wire.Accelerator:
    """An accelerator with what its node last measured."""
    message = wire.Accelerator(
        name=item.name, type=item.type, device_uuid=item.device_uuid, memory_bytes=item.memory_bytes,
        link_domain=item.link_domain, partition=item.partition, cpu_share=item.cpu_share,
        pool=wire.Pool.Value(f"POOL_{item.pool}"), sharing=wire.Sharing.Value(f"SHARING_{item.sharing}"),
        preemptible=item.preemptible, price_per_hour=item.price_per_hour, replicas=item.replicas,
        generation=item.generation,
    )  # fmt: skip
    if observed is not None:
        message.observed.CopyFrom(observed)
    return message


def replica(item: Replica) -> wire.Replica:
    """A replica, desired and observed."""
    weights = []
    if item.serving_number >= 0:
        weights = [
            wire.EngineWeights(
                serving=wire.VersionRef(lineage=item.serving_lineage, number=item.serving_number), run=item.serving_run,
                checksum=item.serving_checksum, cache_salt=item.cache_salt,
                state=wire.EngineWeightState.Value(f"ENGINE_WEIGHT_STATE_{item.weight_state or 'UNSPECIFIED'}"),
            )
        ]  # fmt: skip
    return wire.Replica(
        name=item.name, generation=item.generation, desired=outbox.replica_spec(item),
        observed=wire.ReplicaStatus(
            replica=item.name, generation=item.generation, weights=weights, endpoint=item.endpoint,
            engine_build=item.engine_build, positional_seed=item.positional_seed, restarts=item.restarts,
        ),
        state=wire.ReplicaState.Value(f"REPLICA_STATE_{item.state}"), owner_session=item.owner_session,
        reassignment=item.reassignment, fencing=wire.Fencing.Value(f"FENCING_{item.fencing}"),
        reason=reason(item.reason_code, item.reason_text), create_time=wire.timestamp(item.create_time),
        update_time=wire.timestamp(item.update_time),
    )  # fmt: skip


def reassignment(item: Reassignment) -> wire.Reassignment:
    """A reassignment; its predicted and observed gain stand in the reason's numbers."""
    numbers = {"predicted_gain_tokens_per_s": item.predicted_gain}
    if item.rate_after:
        numbers |= {"observed_gain_tokens_per_s": item.rate_after - item.rate_before, "rate_before": item.rate_before}
    message = wire.Reassignment(
        name=item.name, state=wire.ReassignmentState.Value(f"REASSIGNMENT_STATE_{item.state}"),
        reason=reason(item.reason_code, item.reason_text, numbers),
        create_time=wire.timestamp(item.create_time), update_time=wire.timestamp(item.update_time),
    )  # fmt: skip
    message.sources.extend(
        wire.ReassignmentSource(replica=s.replica, generation=s.generation, confirmed=s.confirmed) for s in item.sources
    )
    for target in item.targets:
        message.targets.append(
            wire.ReassignmentTarget(
                replica=target.replica, generation=target.generation, worker=target.worker,
                spec=wire.ReplicaSpec(
                    role=wire.Role.Value(f"ROLE_{target.role}"), accelerators=target.accelerators, level=target.level,
                    concurrency_cap=target.concurrency_cap, runs=target.runs,
                ),
            )
        )  # fmt: skip
    for field in ("plan", "cause"):
        if field in message.DESCRIPTOR.fields_by_name:
            setattr(message, field, getattr(item, field))
    return message


def command(item: Command) -> wire.Command:
    """A command as recorded."""
    message = outbox.message(item, 0, item.deadline_at - item.valid_for, 0)
    message.fence.Clear()
    if item.result:
        message.result.ParseFromString(item.result)
    return message


def weight_version(item: WeightVersion) -> wire.WeightVersion:
    """A weight version."""
    message = wire.WeightVersion(
        name=item.name, version=wire.VersionRef(policy=item.policy, lineage=item.lineage, number=item.number),
        state=wire.VersionState.Value(f"VERSION_STATE_{item.state}"), manifest=item.manifest,
        checkpointed=bool(item.checkpoint), commit_time=wire.timestamp(item.commit_time),
    )  # fmt: skip
    if item.files:
        message.files.ParseFromString(item.files)
    if item.publish_time:
        message.publish_time.CopyFrom(wire.timestamp(item.publish_time))
    return message


def lineage(item: Lineage) -> wire.Lineage:
    """A lineage."""
    message = wire.Lineage(
        name=item.name, head=item.head, closed=item.closed, reason=reason(item.reason_code, item.reason_text)
    )
    if item.branched_number >= 0:
        message.branched_from.CopyFrom(wire.VersionRef(lineage=item.branched_lineage, number=item.branched_number))
    return message


def group(item: Group, members: list[Trajectory]) -> wire.Group:
    """A group with its members."""
    message = wire.Group(
        name=item.name, state=wire.GroupState.Value(f"GROUP_STATE_{item.state}"),
        admission_number=item.admission_number, priority=item.priority,
        reason=reason(item.reason_code, item.reason_text), create_time=wire.timestamp(item.create_time),
    )  # fmt: skip
    message.task.ParseFromString(item.task)
    if item.close_time:
        message.close_time.CopyFrom(wire.timestamp(item.close_time))
    for member in members:
        valid = member.state in ("SCORED", "READY", "BATCHED", "TRAINED", "DELIVERED")
        row = message.members.add(
            trajectory=member.name, attempt=member.attempt, valid=valid,
            state=wire.TrajectoryState.Value(f"TRAJECTORY_STATE_{member.state}"),
        )  # fmt: skip
        if valid and member.reward_record:
            row.reward.ParseFromString(member.reward_record)
    return message


def trajectory(
    item: Trajectory,
    budget: int,
    estimate: wire.RemainingEstimate | None = None,
    attempts: list[Attempt] | None = None,
    now_at: float | None = None,
) -> wire.Trajectory:
    """A trajectory in view BASIC."""
    waited = item.queued_seconds + (now_at - item.queued_at if now_at is not None and item.state == "QUEUED" else 0.0)
    message = wire.Trajectory(
        name=item.name, group=item.group, sample=item.sample,
        state=wire.TrajectoryState.Value(f"TRAJECTORY_STATE_{item.state}"),
        reason=reason(item.reason_code, item.reason_text), attempt=item.attempt, lease_epoch=item.lease_epoch,
        holder=item.holder,
        tokens=wire.TokenCounts(
            prompt=item.prompt_tokens, generated=item.generated_tokens, trainable=item.trainable_tokens,
            observation=item.observation_tokens,
        ),
        tokens_left=max(0, budget - item.tokens_spent - item.generated_tokens), level=item.level,
        queued_for=wire.duration(waited), create_time=wire.timestamp(item.create_time),
        update_time=wire.timestamp(item.update_time),
    )  # fmt: skip
    if item.tool_sessions:
        message.MergeFrom(wire.Trajectory.FromString(item.tool_sessions))
    if item.reward_record:
        message.reward.ParseFromString(item.reward_record)
    if item.oldest_version >= 0:
        message.oldest_versions.add(lineage=item.oldest_lineage, number=item.oldest_version)
    if item.trained_number >= 0:
        message.consumptions.add(
            version=wire.VersionRef(lineage=item.trained_lineage, number=item.trained_number), manifest=item.manifest
        )
    if estimate is not None:
        message.remaining.CopyFrom(estimate)
    for row in attempts or []:
        part = message.attempts.add(
            number=row.number, leases=row.leases, reason=reason(row.reason_code, row.reason_text),
            start_time=wire.timestamp(row.start_time), end_time=wire.timestamp(row.end_time),
        )  # fmt: skip
        if row.failure:
            part.failure = wire.FailureClass.Value(f"FAILURE_CLASS_{row.failure}")
    return message


def sequences(rows: list[Sequence], segments: list[Segment]) -> list[wire.Sequence]:
    """The sequences of an attempt with their segments in order."""
    messages = []
    for row in sorted(rows, key=lambda r: r.index):
        message = wire.Sequence(
            index=row.index, fork_position=row.fork_position, actor=row.actor,
            fork_reason=wire.ForkReason.Value(f"FORK_REASON_{row.fork_reason or 'UNSPECIFIED'}"),
        )  # fmt: skip
        if row.parent >= 0:
            message.parent = row.parent
        mine = sorted((s for s in segments if s.sequence == row.index), key=lambda s: s.first_position)
        message.segments.extend(wire.Segment.FromString(s.record) for s in mine)
        messages.append(message)
    return messages


def turns(rows: list[Turn]) -> list[wire.Turn]:
    """The turns of an attempt in order."""
    return [wire.Turn.FromString(t.record) for t in sorted(rows, key=lambda t: (t.index, t.part))]


def manifest(item: Manifest) -> wire.Manifest:
    """A manifest's header."""
    message = wire.Manifest(
        name=item.name, policy=item.policy, step=item.step,
        base_version=wire.VersionRef(policy=item.policy, lineage=item.lineage, number=item.base),
        state=wire.ManifestState.Value(f"MANIFEST_STATE_{item.state}"), groups=len(item.groups),
        divisors=wire.Divisors(
            trainable_tokens=item.trainable_tokens, sequences=item.sequences, trajectories=len(item.members),
            groups=len(item.groups),
        ),
        members_sha256=item.members_sha256, max_versions=item.max_versions,
        create_time=wire.timestamp(item.create_time),
    )  # fmt: skip
    if item.end_time:
        message.end_time.CopyFrom(wire.timestamp(item.end_time))
    return message


def plan(item: Plan) -> wire.Plan:
    """A plan."""
    message = wire.Plan.FromString(item.record)
    message.state = wire.PlanState.Value(f"PLAN_STATE_{item.state}")
    return message


def roster(revision: int, members: "list[Replica] | tuple[Replica, ...]") -> wire.Roster:
    """Who takes part in steps."""
    return wire.Roster(
        revision=revision,
        members=[wire.RosterMember(worker=m.worker, replica=m.name, generation=m.generation) for m in members],
    )


def event(item: Event) -> wire.Event:
    """An event without its resource."""
    return wire.Event(
        revision=item.revision, index=item.index, time=wire.timestamp(item.time), term=item.term,
        kind=wire.ResourceKind.Value(f"RESOURCE_KIND_{item.kind}"), name=item.name, from_state=item.from_state,
        to_state=item.to_state, reason=reason(item.reason_code, item.reason_text, dict(item.numbers)),
        caused_by=item.caused_by, cause=item.cause, related=item.related,
    )  # fmt: skip
