"""One sentence on why a resource is as it is: what it waits for, and since when."""

from typing import TYPE_CHECKING

from services.common import wire
from services.scheduler.control import batches
from services.scheduler.control.shapes import last_shapes

if TYPE_CHECKING:
    from services.scheduler.control.cycle import Cycle


def explain(cycle: "Cycle", name: str, resource: wire.Resource) -> str:
    """The summary for Explain."""
    kind = resource.WhichOneof("resource")
    match kind:
        case "trajectory":
            return _trajectory(cycle, name, resource.trajectory)
        case "accelerator":
            return _accelerator(cycle, name)
        case "run":
            return _run(cycle, name)
        case "replica":
            state = wire.ReplicaState.Name(resource.replica.state).removeprefix("REPLICA_STATE_")
            why = resource.replica.reason.text or resource.replica.reason.code or "no reason recorded"
            return f"{name} is {state} ({why})"
        case _:
            message = getattr(resource, str(kind))
            reason = getattr(message, "reason", None)
            return (
                f"{name}: {reason.text or reason.code}"
                if reason is not None and reason.code
                else f"{name}: nothing is waiting"
            )


def _trajectory(cycle: "Cycle", name: str, message: wire.Trajectory) -> str:
    item = cycle.ledger.fleet.trajectories.get(name)
    if item is None:
        state = wire.TrajectoryState.Name(message.state).removeprefix("TRAJECTORY_STATE_")
        return f"{name} ended {state}: {message.reason.text or message.reason.code}"
    now = cycle.ledger.clock.monotonic()
    fleet = cycle.ledger.fleet
    if item.state == "QUEUED":
        last = cycle.decisions.of(name)
        why = last[-1].text if last else "no engine had room in the last cycle"
        run = fleet.runs[item.run]
        if run.state != "ACTIVE":
            why = f"its run is {run.state}: {run.reason_text}"
        elif not any(r.role == "ROLLOUT" and r.state == "ACTIVE" for r in fleet.live_replicas()):
            why = "no rollout engine serves"
        return f"{name} waits in level {item.level} since {now - item.queued_at:.1f} s: {why}"
    if item.state == "LEASED":
        doing = "waits for a tool" if item.in_tool_wait else "generates"
        return (
            f"{name} {doing} on {item.replica} ({item.worker}) since {now - item.leased_at:.1f} s, "
            f"{item.generated_tokens} tokens so far; last news {now - item.progress_at:.1f} s ago"
        )
    group = fleet.groups[item.group]
    if item.state == "SCORED":
        open_members = [m for m in group.members if fleet.trajectories[m].state in ("QUEUED", "LEASED")]
        return f"{name} is scored and waits for {len(open_members)} other members of {group.name}"
    if item.state == "READY":
        return f"{name} waits for a batch: {batches.why_no_batch(cycle.ledger, fleet.runs[item.run])}"
    return f"{name} is {item.state} in {item.manifest or group.name}"


def _accelerator(cycle: "Cycle", name: str) -> str:
    fleet = cycle.ledger.fleet
    item = fleet.accelerators[name]
    replica = fleet.replica_on(name)
    planned = cycle.decisions.of(name)
    tail = f"; last plan: {planned[-1].text}" if planned else ""
    if replica is None and last_shapes(fleet).get(name) == ():
        return f"{name} ({item.pool}) holds no replica: a plan left it idle{tail}"
    if replica is None:
        role = item.role or "any role"
        return f"{name} ({item.pool}) holds no replica; it should serve {role} and waits for a live worker{tail}"
    since = cycle.ledger.clock.wall() - replica.create_time
    work = sum(t.state == "LEASED" and t.replica == replica.name for t in fleet.trajectories.values())
    doing = (
        f"{work} trajectories run on it"
        if replica.role == "ROLLOUT"
        else f"trainer phase {cycle.observe.phase(replica.worker)}"
    )
    return (
        f"{name} ({item.pool}) is held by {replica.worker} as {replica.role} under generation {replica.generation}, "
        f"{replica.state} since {since:.0f} s; {doing}{tail}"
    )


def _run(cycle: "Cycle", name: str) -> str:
    fleet = cycle.ledger.fleet
    run = fleet.runs[name]
    if run.state != "ACTIVE":
        return f"{name} is {run.state}: {run.reason_text}"
    trainers = [r for r in batches.roster(fleet, run) if r.state == "ACTIVE"]
    taken = [m for m in fleet.manifests.values() if m.run == name and m.state == "TAKEN"]
    parts = [batches.why_no_batch(cycle.ledger, run)]
    if run.kind == "TRAIN":
        parts.append(f"head is version {run.lineage}-{run.head}")
        if not trainers:
            parts.append("no trainer holds a replica")
        elif taken:
            phases = ", ".join(
                f"{r.worker.removeprefix('workers/')}: {cycle.observe.phase(r.worker)}" for r in trainers
            )
            parts.append(f"step {taken[0].step} is in training ({phases})")
        else:
            parts.append("the trainers wait for a batch")
    return f"{name}: " + "; ".join(parts)
