"""Commands that read: status, events, trajectories, explain."""

from collections import Counter
from typing import Annotated

import typer

from services.client import LibraClient
from services.common import wire
from services.common.errors import ConfigError
from services.ops import render
from services.ops.commands import options
from services.ops.commands.options import Json, Scheduler
from services.ops.names import full_name

RECENT = 5
"""Reassignments shown by status."""
LIVE_REPLICAS = {
    wire.REPLICA_STATE_PLANNED, wire.REPLICA_STATE_STARTING, wire.REPLICA_STATE_ACTIVE, wire.REPLICA_STATE_CORDONED,
    wire.REPLICA_STATE_DRAINING, wire.REPLICA_STATE_RELEASING, wire.REPLICA_STATE_ASLEEP, wire.REPLICA_STATE_SUSPECT,
    wire.REPLICA_STATE_UNCONFIRMED, wire.REPLICA_STATE_QUARANTINED,
}  # fmt: skip

trajectories = typer.Typer(help="Trajectories of a run.", no_args_is_help=True)


def status(scheduler: Scheduler = None, json: Json = False) -> None:
    """Runs, accelerators, workers, queues and the last reassignments."""
    kinds = {
        "runs": wire.RESOURCE_KIND_RUN,
        "accelerators": wire.RESOURCE_KIND_ACCELERATOR,
        "replicas": wire.RESOURCE_KIND_REPLICA,
        "workers": wire.RESOURCE_KIND_WORKER,
        "reassignments": wire.RESOURCE_KIND_REASSIGNMENT,
    }

    async def work(client: LibraClient) -> tuple[dict[str, list[wire.Resource]], Counter[int]]:
        found = {name: list((await client.list_resources(kind)).resources) for name, kind in kinds.items()}
        waiting: Counter[int] = Counter()
        for item in found["runs"]:
            if item.run.state in (wire.RUN_STATE_ACTIVE, wire.RUN_STATE_PAUSED):
                queued = await client.list_trajectories(item.run.name, states=[wire.TRAJECTORY_STATE_QUEUED])
                waiting.update(t.level for t in queued)
        return found, waiting

    found, waiting = options.call(scheduler, work)
    replicas = [r for r in found["replicas"] if r.replica.state in LIVE_REPLICAS]
    moves = sorted(found["reassignments"], key=lambda r: r.reassignment.create_time.ToNanoseconds())[-RECENT:]
    if json:
        content = {name: [render.as_json(getattr(i, name[:-1])) for i in items] for name, items in found.items()}
        content["replicas"] = [render.as_json(r.replica) for r in replicas]
        content["reassignments"] = [render.as_json(m.reassignment) for m in moves]
        render.document({**content, "queued_by_level": {str(k): v for k, v in sorted(waiting.items())}})
        return
    _runs([i.run for i in found["runs"]])
    _accelerators([i.accelerator for i in found["accelerators"]], [r.replica for r in replicas])
    _workers([i.worker for i in found["workers"]])
    render.table("Queue", ["level", "waiting"], sorted(waiting.items()))
    _reassignments([m.reassignment for m in moves])


def _runs(runs: list[wire.Run]) -> None:
    rows = [
        (
            render.short(run.name),
            render.enum(wire.RunState, "RUN_STATE_", run.state),
            render.version(run.policies[0].head) if run.policies else "-",
            run.counts.admitted,
            run.counts.in_flight,
            run.counts.ready,
            render.terminal(run),
            render.why(run.reason),
        )
        for run in runs
    ]
    render.table("Runs", ["run", "state", "version", "admitted", "in flight", "ready", "ended", "why"], rows)


def _accelerators(accelerators: list[wire.Accelerator], replicas: list[wire.Replica]) -> None:
    holders = {name: replica for replica in replicas for name in replica.desired.accelerators}
    rows = []
    for item in accelerators:
        replica = holders.get(item.name)
        weights = replica.observed.weights if replica is not None else []
        rows.append(
            (
                render.short(item.name),
                render.enum(wire.Pool, "POOL_", item.pool),
                render.enum(wire.Role, "ROLE_", replica.desired.role) if replica is not None else "-",
                render.enum(wire.ReplicaState, "REPLICA_STATE_", replica.state) if replica is not None else "-",
                render.short(replica.owner_session) if replica is not None and replica.owner_session else "-",
                replica.generation if replica is not None else item.generation,
                render.version(weights[0].serving) if weights else "-",
                f"{item.observed.free_memory_bytes >> 20:,} MiB",
                f"{item.observed.utilization:.0%}",
            )
        )
    columns = ["accelerator", "pool", "role", "state", "held by", "generation", "serves", "free", "busy"]
    render.table("Accelerators", columns, rows)


def _workers(workers: list[wire.Worker]) -> None:
    """Those that are there or were lost; who ended in order is left to `--json`."""
    rows = [
        (
            render.short(worker.name),
            render.enum(wire.WorkerKind, "WORKER_KIND_", worker.kind),
            render.enum(wire.WorkerHealth, "WORKER_HEALTH_", worker.health),
            render.enum(wire.SessionState, "SESSION_STATE_", worker.session.state),
            worker.session.epoch,
            render.load(worker),
        )
        for worker in workers
        if worker.session.state != wire.SESSION_STATE_CLOSED
    ]
    render.table("Workers", ["worker", "kind", "health", "session", "epoch", "load"], rows)


def _reassignments(moves: list[wire.Reassignment]) -> None:
    rows = [
        (
            render.clock(move.create_time),
            ", ".join(render.short(a) for t in move.targets for a in t.spec.accelerators),
            ", ".join(render.enum(wire.Role, "ROLE_", t.spec.role) for t in move.targets),
            render.enum(wire.ReassignmentState, "REASSIGNMENT_STATE_", move.state),
            render.why(move.reason),
        )
        for move in moves
    ]
    render.table("Last reassignments", ["time", "accelerators", "to", "state", "why"], rows)


def events(
    scheduler: Scheduler = None,
    json: Json = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new events until interrupted.")] = False,
    prefix: Annotated[str, typer.Option("--prefix", help="Only resources whose name begins so, e.g. runs/a.")] = "",
    kind: Annotated[list[str] | None, typer.Option("--kind", help="Only this kind, e.g. reassignment.")] = None,
    since: Annotated[int, typer.Option("--since", help="First revision; 0: the last --limit events.")] = 0,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Events shown before following.")] = 50,
) -> None:
    """What happened, and why."""
    selector = wire.Selector(kinds=[_kind(k) for k in kind or []], name_prefix=prefix)

    def show(item: wire.Event) -> None:
        if json:
            render.line(render.as_json(item))
        else:
            render.console().print(render.event(item), markup=False, soft_wrap=True)

    async def work(client: LibraClient) -> None:
        # with a first revision the oldest from there on, else the newest
        found = await client.list_events(selector=selector, start_revision=since, limit=limit if since else None)
        for item in found[-limit:]:
            show(item)
        if not follow:
            return
        start = max((e.revision for e in found), default=since - 1) + 1
        async for item in client.watch(selector=selector, start_revision=max(start, 0)):
            show(item)

    options.call(scheduler, work)


def _kind(name: str) -> "wire.ResourceKind.ValueType":
    value = f"RESOURCE_KIND_{name.upper().replace('-', '_').removesuffix('S')}"
    if value not in wire.ResourceKind.keys():  # noqa: SIM118 - an enum wrapper, not a dict
        known = ", ".join(k.removeprefix("RESOURCE_KIND_").lower() for k in wire.ResourceKind.keys()[1:])
        raise ConfigError(f"--kind {name!r}: expected one of {known}")
    return wire.ResourceKind.Value(value)


@trajectories.command("list")
def list_trajectories(
    run: Annotated[str, typer.Argument(help="A run by id, or a group by name.")],
    scheduler: Scheduler = None,
    json: Json = False,
    state: Annotated[list[str] | None, typer.Option("--state", help="Only in this state, e.g. queued.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 100,
) -> None:
    """A run's trajectories in admission order."""
    states = [_state(s) for s in state or []]

    async def work(client: LibraClient) -> list[wire.Trajectory]:
        return await client.list_trajectories(run, states=states, limit=limit)

    found = options.call(scheduler, work)
    if json:
        render.document([render.as_json(t) for t in found])
        return
    rows = [
        (
            "/".join(t.name.split("/")[-1:]),
            render.enum(wire.TrajectoryState, "TRAJECTORY_STATE_", t.state),
            t.attempt,
            sum(a.leases for a in t.attempts),
            t.tokens.generated,
            f"{t.reward.value:.3g}" if t.HasField("reward") else "-",
            t.level,
            render.short(t.holder) if t.holder else "-",
            render.why(t.reason),
        )
        for t in found
    ]
    columns = ["trajectory", "state", "attempt", "leases", "generated", "reward", "level", "held by", "why"]
    render.table(f"Trajectories of {run}", columns, rows)


def _state(name: str) -> "wire.TrajectoryState.ValueType":
    value = f"TRAJECTORY_STATE_{name.upper()}"
    if value not in wire.TrajectoryState.keys():  # noqa: SIM118 - an enum wrapper, not a dict
        known = ", ".join(k.removeprefix("TRAJECTORY_STATE_").lower() for k in wire.TrajectoryState.keys()[1:])
        raise ConfigError(f"--state {name!r}: expected one of {known}")
    return wire.TrajectoryState.Value(value)


@trajectories.command("show")
def show_trajectory(
    name: Annotated[str, typer.Argument(help="runs/{run}/trajectories/{trajectory}")],
    scheduler: Scheduler = None,
    json: Json = False,
) -> None:
    """One trajectory with its turns and segments."""

    async def work(client: LibraClient) -> wire.Trajectory:
        return await client.get_trajectory(name, full=True)

    found = options.call(scheduler, work)
    if json:
        render.document(render.as_json(found))
        return
    render.facts(
        {
            "name": found.name,
            "group": found.group,
            "state": render.enum(wire.TrajectoryState, "TRAJECTORY_STATE_", found.state),
            "why": render.why(found.reason),
            "attempt": found.attempt,
            "held by": found.holder or "-",
            "tokens": f"{found.tokens.prompt} prompt, {found.tokens.generated} generated, "
            f"{found.tokens.observation} observed, {found.tokens_left} left",
            "reward": f"{found.reward.value:.4g}" if found.HasField("reward") else "-",
            "level": found.level,
            "remaining": f"p50 {found.remaining.p50:.0f}, p90 {found.remaining.p90:.0f} "
            f"({found.remaining.source or '-'})",
            "queued for": f"{wire.seconds(found.queued_for):.1f} s",
            "trained by": ", ".join(render.version(c.version) for c in found.consumptions) or "-",
        }
    )
    turns = [
        (
            f"{t.index}.{t.part}",
            render.short(t.replica),
            t.prompt_tokens,
            t.generated_tokens,
            render.enum(wire.FinishReason, "FINISH_REASON_", t.finish),
            render.enum(wire.Interruption, "INTERRUPTION_", t.interruption),
            ", ".join(f"{c.tool} {render.enum(wire.ToolOutcome, 'TOOL_OUTCOME_', c.outcome)}" for c in t.tool_calls),
        )
        for t in found.turns
    ]
    render.table("Turns", ["turn", "replica", "prompt", "generated", "finish", "interrupted", "tools"], turns)
    segments = [
        (
            sequence.index,
            s.first_position,
            s.tokens,
            s.trainable_tokens,
            ", ".join(f"{v.tokens} of {render.version(v.version)}" for v in s.versions),
            s.blob.sha256[:12],
        )
        for sequence in found.sequences
        for s in sequence.segments
    ]
    render.table("Segments", ["sequence", "position", "tokens", "trainable", "versions", "sha256"], segments)


def explain(
    name: Annotated[str, typer.Argument(help="A trajectory, run, replica, worker or accelerator (n0/2 will do).")],
    scheduler: Scheduler = None,
    json: Json = False,
) -> None:
    """Why something waits, idles or stalls."""
    answer = options.call(scheduler, lambda client: client.explain(full_name(name)))
    if json:
        render.document(render.as_json(answer))
        return
    render.console().print(answer.summary, markup=False)
    rows = [
        (render.clock(d.time), d.reason.code, render.why(d.reason), render.short(d.name) if d.name else "", d.revision)
        for d in answer.decisions
    ]
    render.table("Decisions, newest first", ["time", "code", "why", "about", "revision"], rows)


__all__ = ["events", "explain", "status", "trajectories"]
