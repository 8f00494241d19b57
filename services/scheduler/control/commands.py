"""Commands to workers: made in the transaction of the decision, delivered through Await, effective at most once."""

import uuid

from services.common import log, wire
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.core.lifecycle import COMMAND
from services.scheduler.core.model import Command, Replica, Session, Trajectory, WeightVersion

_log = log.get(__name__)

KEEP_FINISHED = 64
"""Terminal commands kept in memory; the store keeps all."""


def open_commands(ledger: Ledger, *, subject: str = "", kind: str = "", session: str = "") -> list[Command]:
    """Commands that are not terminal, by what is named."""
    return [
        c
        for c in ledger.fleet.commands.values()
        if c.state not in COMMAND.terminal
        and (not subject or c.subject == subject)
        and (not kind or c.kind == kind)
        and (not session or c.session == session)
    ]


def issue(
    change: Change,
    session: Session,
    action: wire.Command,
    *,
    subject: str,
    cause: str,
    valid_for: float,
    generation: int = 0,
    code: str = "",
    text: str = "",
) -> Command:
    """Puts a command into the session's outbox; `action` is a Command message with only the action set."""
    kind = str(action.WhichOneof("action"))
    session.command_sequence += 1
    if kind == "handover":
        kind = f"handover.{wire.HandoverKind.Name(action.handover.step.kind).removeprefix('HANDOVER_KIND_').lower()}"
    elif kind == "load_weights":
        kind = f"load.{wire.LoadPhase.Name(action.load_weights.phase).removeprefix('LOAD_PHASE_').lower()}"
    command = Command(
        name=f"commands/{uuid.uuid4().hex}",
        session=session.name,
        worker=session.worker,
        kind=kind,
        subject=subject,
        payload=action.SerializeToString(),
        sequence=session.command_sequence,
        generation=generation,
        cause=cause,
        valid_for=valid_for,
        reason_code=code,
        reason_text=text,
        create_time=change.now,
        deadline_at=change.at + valid_for,
    )
    change.fleet.commands[command.name] = command
    change.put(command, session)
    change.record("COMMAND", command.name, "", command.state, code or kind.upper(), text, related=(subject, cause))
    return command


def preempt(change: Change, trajectory: Trajectory, *, cause: str, at_turn_end: bool, code: str, text: str) -> Command:
    """Asks the holder to stop a trajectory and keep its tokens. `cause`: cmlfq, handover or operator."""
    action = wire.Command(
        preempt=wire.PreemptCommand(
            trajectory=trajectory.name,
            attempt=trajectory.attempt,
            lease_epoch=trajectory.lease_epoch,
            at_turn_end=at_turn_end,
        )
    )
    session = change.fleet.sessions[trajectory.holder]
    return issue(
        change, session, action,
        subject=trajectory.name, cause=cause, valid_for=change.ledger.config.handover.command_s,
        generation=trajectory.generation, code=code, text=text,
    )  # fmt: skip


def cancel(change: Change, trajectory: Trajectory, *, code: str, text: str) -> Command | None:
    """Asks the holder to end a trajectory for good; None if its session is gone."""
    session = change.fleet.sessions.get(trajectory.holder)
    if session is None or session.state not in ("ALIVE", "RECOVERING"):
        return None
    action = wire.Command(
        cancel=wire.CancelCommand(
            trajectory=trajectory.name,
            attempt=trajectory.attempt,
            lease_epoch=trajectory.lease_epoch,
            close_tool_sessions=True,
        )
    )
    return issue(
        change, session, action,
        subject=trajectory.name, cause="cancel", valid_for=change.ledger.config.handover.command_s,
        code=code, text=text,
    )  # fmt: skip


def handover(
    change: Change,
    session: Session,
    replica: Replica,
    kind: "wire.HandoverKind.ValueType",
    *,
    text: str,
) -> Command:
    """One step of a hand-over for one participant."""
    action = wire.Command(
        handover=wire.HandoverCommand(
            reassignment=replica.reassignment,
            step=wire.HandoverStep(
                kind=kind,
                participant=session.worker,
                replica=replica.name,
                generation=replica.generation,
                state=wire.HANDOVER_STEP_STATE_OFFERED,
                time_left=wire.duration(change.ledger.config.handover.command_s),
            ),
            spec=replica_spec(replica),
        )
    )
    name = wire.HandoverKind.Name(kind).removeprefix("HANDOVER_KIND_")
    return issue(
        change, session, action,
        subject=replica.name, cause=replica.reassignment or "reconcile",
        valid_for=change.ledger.config.handover.command_s, generation=replica.generation, code=name, text=text,
    )  # fmt: skip


def load_weights(
    change: Change,
    session: Session,
    replica: Replica,
    version: WeightVersion,
    model: str,
    phase: "wire.LoadPhase.ValueType",
) -> Command:
    """One phase of a weight update of one engine; the engine fetches by itself."""
    load = wire.LoadWeightsCommand(
        replica=replica.name,
        version=wire.VersionRef(policy=version.policy, lineage=version.lineage, number=version.number),
        phase=phase,
        transfer=wire.WEIGHT_TRANSFER_PULL,
        run=version.run,
        model=model,
    )
    if phase == wire.LOAD_PHASE_PREPARE and version.files:
        load.files.ParseFromString(version.files)
    text = f"{replica.name} shall serve version {version.lineage}-{version.number} of {version.run}"
    return issue(
        change, session, wire.Command(load_weights=load),
        subject=replica.name, cause="weights", valid_for=change.ledger.config.handover.command_s,
        generation=replica.generation, code=wire.LoadPhase.Name(phase), text=text,
    )  # fmt: skip


def expire(change: Change) -> None:
    """Ends commands whose deadline has passed, and those of sessions that are over."""
    for command in list(change.fleet.commands.values()):
        if command.state in COMMAND.terminal:
            continue
        session = change.fleet.sessions.get(command.session)
        if session is None or session.state not in ("ALIVE", "RECOVERING"):
            change.move(COMMAND, command, "expire", "SESSION_OVER", f"{command.session} is over")
        elif change.at > command.deadline_at:
            change.move(COMMAND, command, "expire", "DEADLINE", f"no answer within {command.valid_for:.0f} s")


def forget_finished(ledger: Ledger) -> None:
    """Drops the oldest terminal commands from memory."""
    finished = [c.name for c in ledger.fleet.commands.values() if c.state in COMMAND.terminal]
    for name in finished[: max(0, len(finished) - KEEP_FINISHED)]:
        del ledger.fleet.commands[name]


def message(command: Command, term: int, now_at: float, session_epoch: int) -> wire.Command:
    """The command as it is sent: fenced by the present leader's term, with the time that is left."""
    result = wire.Command()
    result.ParseFromString(command.payload)
    result.name = command.name
    result.session = command.session
    result.fence.CopyFrom(
        wire.Fence(term=term, session_epoch=session_epoch, generation=command.generation, sequence=command.sequence)
    )
    result.valid_for.CopyFrom(wire.duration(max(0.001, command.deadline_at - now_at)))
    result.state = wire.CommandState.Value(f"COMMAND_STATE_{command.state}")
    result.reason.CopyFrom(wire.Reason(code=command.reason_code, text=command.reason_text))
    result.create_time.CopyFrom(wire.timestamp(command.create_time))
    result.update_time.CopyFrom(wire.timestamp(command.update_time))
    return result


def replica_spec(replica: Replica) -> wire.ReplicaSpec:
    """What a replica should be, in the contract's words."""
    return wire.ReplicaSpec(
        role=wire.Role.Value(f"ROLE_{replica.role}"),
        shape=wire.Shape(tp=replica.tp, pp=replica.pp, ep=replica.ep, dp_shard=replica.dp_shard),
        accelerators=replica.accelerators,
        runs=replica.runs,
        level=replica.level,
        concurrency_cap=replica.concurrency_cap,
        micro_batch_tokens=replica.micro_batch_tokens,
    )
