"""Commands that change what runs: plan, reassign, preempt."""

import asyncio
from enum import StrEnum
from typing import Annotated

import typer

from services.client import LibraClient
from services.common import wire
from services.common.errors import ConfigError, LibraError
from services.ops import render
from services.ops.commands import options
from services.ops.commands.options import Json, Note, Scheduler
from services.ops.commands.reads import LIVE_REPLICAS
from services.ops.names import full_name

REASSIGNMENT_OVER = {
    wire.REASSIGNMENT_STATE_SUCCEEDED,
    wire.REASSIGNMENT_STATE_ROLLED_BACK,
    wire.REASSIGNMENT_STATE_FAILED,
}
POLL_S = 0.2
WAIT_S = 300.0


class Side(StrEnum):
    """Where an accelerator may go."""

    TRAINING = "training"
    ROLLOUT = "rollout"


def plan(
    scheduler: Scheduler = None,
    json: Json = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show it.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Apply the moves that still fit.")] = False,
    horizon: Annotated[float | None, typer.Option("--horizon", help="Seconds over which a gain must pay.")] = None,
) -> None:
    """Computes a plan for the fleet as it is, and carries it out unless --dry-run."""

    async def work(client: LibraClient) -> wire.Plan:
        found = await client.propose_plan(horizon_s=horizon)
        return found if dry_run or not found.moves else await client.apply_plan(found.name, allow_partial=partial)

    found = options.call(scheduler, work)
    if json:
        render.document(render.as_json(found))
        return
    render.facts(
        {
            "plan": found.name,
            "state": render.enum(wire.PlanState, "PLAN_STATE_", found.state),
            "horizon": f"{wire.seconds(found.horizon):.0f} s",
            "profile": found.profile or "-",
            "why": render.why(found.reason),
        }
    )
    rows = [("chosen", *_layout(found.chosen), "")]
    rows += [(a.label, *_layout(a.layout), render.why(a.reason)) for a in found.alternatives]
    columns = ["layout", "trainers", "rollouts", "tokens/s", "rollout s", "tail s", "train s", "why not"]
    render.table("Layouts", columns, rows)
    moves = [
        (
            ", ".join(render.short(s.replica) for s in m.sources),
            ", ".join(render.short(a) for t in m.targets for a in t.spec.accelerators),
            ", ".join(render.enum(wire.Role, "ROLE_", t.spec.role) for t in m.targets),
            m.gain_tokens,
            m.cost_tokens,
            render.why(m.reason),
        )
        for m in found.moves
    ]
    render.table("Moves", ["from", "accelerators", "to", "gain tokens", "cost tokens", "why"], moves)
    for refused in found.refused:
        render.console().print(f"move {refused.move} refused: {render.why(refused.reason)}", markup=False)


def _layout(layout: wire.Layout) -> tuple[int | str, int | str, float, float, float, float]:
    p = layout.prediction
    return (
        _side(layout, wire.ROLE_TRAINER), _side(layout, wire.ROLE_ROLLOUT), p.trained_tokens_per_second,
        p.rollout_seconds, p.tail_seconds, p.train_seconds,
    )  # fmt: skip


def _side(layout: wire.Layout, role: "wire.Role.ValueType") -> int | str:
    """Replicas of one role: their number, or with their kinds where those are planned."""
    mine = [r for r in layout.replicas if r.role == role]
    if not any(r.accelerator_type for r in layout.replicas):
        return sum(r.count for r in mine)
    shape = "TP" if role == wire.ROLE_ROLLOUT else ""
    return " + ".join(f"{r.count}x{shape}{r.accelerators} {r.accelerator_type}" for r in mine) or "none"


def reassign(
    accelerator: Annotated[str, typer.Argument(help="nodes/{node}/accelerators/{index}, or n0/2.")],
    to: Annotated[Side, typer.Option("--to", help="The side it shall serve.")],
    scheduler: Scheduler = None,
    json: Json = False,
    note: Note = "",
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds for the whole; then it rolls back.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is over.")] = True,
) -> None:
    """Moves an accelerator to training or rollout under the ordinary hand-over."""
    name = full_name(accelerator)
    role = wire.ROLE_TRAINER if to is Side.TRAINING else wire.ROLE_ROLLOUT

    async def work(client: LibraClient) -> wire.Reassignment:
        replica = await _holder(client, name)
        if replica.desired.role == role:
            raise ConfigError(f"{name} serves {to.value} already, as {replica.name}; nothing was done")
        source = wire.ReassignmentSource(replica=replica.name, generation=replica.generation)
        spec = wire.ReplicaSpec(role=role, shape=replica.desired.shape, accelerators=replica.desired.accelerators)
        started = await client.reassign(
            [source], [wire.ReassignmentTarget(spec=spec)], timeout_s=timeout, note=note or "libra reassign"
        )
        return await _until_over(client, started) if wait else started

    found = options.call(scheduler, work)
    state = render.enum(wire.ReassignmentState, "REASSIGNMENT_STATE_", found.state)
    if json:
        render.document(render.as_json(found))
    else:
        render.facts({"reassignment": found.name, "state": state, "why": render.why(found.reason)})
    if found.state in (wire.REASSIGNMENT_STATE_ROLLED_BACK, wire.REASSIGNMENT_STATE_FAILED):
        raise LibraError(
            "LIMIT_BROKEN", f"{name} was not moved, the reassignment is {state}: {render.why(found.reason)}"
        )


async def _holder(client: LibraClient, accelerator: str) -> wire.Replica:
    resource = await client.get_resource(accelerator)  # NOT_FOUND says more than an empty list would
    found = await client.list_resources(wire.RESOURCE_KIND_REPLICA)
    for item in found.resources:
        if item.replica.state in LIVE_REPLICAS and accelerator in item.replica.desired.accelerators:
            return item.replica
    raise ConfigError(
        f"{accelerator} holds no replica now (generation {resource.accelerator.generation}); `libra explain "
        f"{accelerator}` says why"
    )


async def _until_over(client: LibraClient, started: wire.Reassignment) -> wire.Reassignment:
    current = started
    async with asyncio.timeout(max(WAIT_S, wire.seconds(started.timeout) * 2)):
        while current.state not in REASSIGNMENT_OVER:
            await asyncio.sleep(POLL_S)
            current = (await client.get_resource(started.name)).reassignment
    return current


def preempt(
    names: Annotated[list[str], typer.Argument(metavar="TRAJECTORY...", help="runs/{run}/trajectories/{trajectory}")],
    scheduler: Scheduler = None,
    json: Json = False,
    note: Note = "",
) -> None:
    """Stops trajectories; they keep their tokens and environment, and queue again."""
    commands = options.call(scheduler, lambda client: client.preempt(names, note=note or "libra preempt"))
    answers = dict(zip(names, commands, strict=True))
    if json:
        render.document({"commands": answers})
        return
    rows = [(name, command or "not running: left alone") for name, command in answers.items()]
    render.table("Preemption", ["trajectory", "command"], rows)
