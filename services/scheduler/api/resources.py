"""Resources by name and kind, from the live state first and the store behind it, as the contract shows them."""

from services.common import errors, wire
from services.scheduler.api import render
from services.scheduler.control.cycle import Cycle
from services.scheduler.core.lifecycle import TRAJECTORY
from services.scheduler.core.model import Group, Run, Trajectory
from services.scheduler.store.store import Store

KINDS = {
    "NODE": "nodes",
    "ACCELERATOR": "accelerators",
    "REPLICA": "replicas",
    "REASSIGNMENT": "reassignments",
    "WORKER": "workers",
    "COMMAND": "commands",
    "RUN": "runs",
    "GROUP": "groups",
    "TRAJECTORY": "trajectories",
    "MANIFEST": "manifests",
    "WEIGHT_VERSION": "versions",
    "LINEAGE": "lineages",
    "PLAN": "plans",
}
"""Attribute of Fleet that holds each kind."""


def kind_of(name: str) -> str:
    """The kind that a resource name's form says; INVALID_FIELD if none."""
    parts = name.split("/")
    known = {
        ("nodes", 2): "NODE",
        ("accelerators", 4): "ACCELERATOR",
        ("replicas", 2): "REPLICA",
        ("reassignments", 2): "REASSIGNMENT",
        ("workers", 2): "WORKER",
        ("sessions", 4): "WORKER",
        ("commands", 2): "COMMAND",
        ("runs", 2): "RUN",
        ("groups", 4): "GROUP",
        ("trajectories", 4): "TRAJECTORY",
        ("manifests", 4): "MANIFEST",
        ("versions", 8): "WEIGHT_VERSION",
        ("lineages", 6): "LINEAGE",
        ("plans", 2): "PLAN",
    }
    collection = parts[-2] if len(parts) % 2 == 0 and len(parts) >= 2 else ""
    kind = known.get((collection, len(parts)))
    if kind is None:
        raise errors.invalid_field(
            f"{name[:120]!r} is no resource name; expected e.g. runs/demo or nodes/n0/accelerators/0"
        )
    return kind


class Resources:
    """Reads resources; live ones from memory, ended ones from the store."""

    def __init__(self, cycle: Cycle, store: Store) -> None:
        self._cycle = cycle
        self._fleet = cycle.ledger.fleet
        self._store = store

    async def get(self, name: str, *, missing_ok: bool = False) -> wire.Resource | None:
        """One resource by its full name; NOT_FOUND unless missing_ok."""
        kind = kind_of(name)
        if kind == "WORKER":
            name = "/".join(name.split("/")[:2])
        item = getattr(self._fleet, KINDS[kind]).get(name)
        if item is None:
            item = await self._store.get_entity(kind, name)
        if item is None:
            if missing_ok:
                return None
            raise errors.not_found(name)
        return await self.render(kind, item)

    async def page(self, kind: str, prefix: str, states: tuple[str, ...], after: str, limit: int) -> list[object]:
        """Entities of a kind in order of name, above `after`. What lives is as it is now, the rest as stored."""
        rows = await self._store.list_entities(kind, prefix, states, after, limit)
        live = getattr(self._fleet, KINDS[kind])
        return [live.get(row.name, row) for row in rows]

    async def render(self, kind: str, item: object) -> wire.Resource:
        """The contract's form of an entity."""
        fleet, observe = self._fleet, self._cycle.observe
        resource = wire.Resource()
        value: wire.Message
        match kind:
            case "NODE":
                value = render.node(item)  # type: ignore[arg-type]
            case "ACCELERATOR":
                value = render.accelerator(item, observe.observations.get(item.name))  # type: ignore[arg-type,attr-defined]
            case "REPLICA":
                value = render.replica(item)  # type: ignore[arg-type]
            case "REASSIGNMENT":
                value = render.reassignment(item)  # type: ignore[arg-type]
            case "WORKER":
                newest = fleet.sessions.get(f"{item.name}/sessions/{item.epoch}")  # type: ignore[attr-defined]
                value = render.worker(item, newest, observe.loads.get(item.name))  # type: ignore[arg-type,attr-defined]
            case "COMMAND":
                value = render.command(item)  # type: ignore[arg-type]
            case "RUN":
                value = await self.run(item)  # type: ignore[arg-type]
            case "GROUP":
                value = render.group(item, await self._members(item))  # type: ignore[arg-type]
            case "TRAJECTORY":
                value = await self._trajectory(item)  # type: ignore[arg-type]
            case "MANIFEST":
                value = render.manifest(item)  # type: ignore[arg-type]
            case "WEIGHT_VERSION":
                value = render.weight_version(item)  # type: ignore[arg-type]
            case "LINEAGE":
                value = render.lineage(item)  # type: ignore[arg-type]
            case _:
                value = render.plan(item)  # type: ignore[arg-type]
        getattr(resource, kind.lower()).CopyFrom(value)
        return resource

    async def run(self, item: Run) -> wire.Run:
        """A run with its counters."""
        mine = [t for t in self._fleet.trajectories.values() if t.run == item.name]
        ended = await self._store.terminal_counts(item.name)
        terminal = [wire.TerminalCount(state=s, count=n) for s, n in sorted(ended.items())]
        flying = sum(t.state not in TRAJECTORY.terminal for t in mine)
        ready = sum(t.state == "READY" for t in mine)
        return render.run(item, in_flight=flying, ready=ready, terminal=terminal)

    async def _members(self, group: Group) -> list[Trajectory]:
        members = []
        for name in group.members:
            item = self._fleet.trajectories.get(name) or await self._store.trajectory(name)
            if item is not None:
                members.append(item)
        return members

    async def _trajectory(self, item: Trajectory) -> wire.Trajectory:
        budget = self._fleet.runs[item.run].max_generated_tokens
        live = item.state not in TRAJECTORY.terminal
        return render.trajectory(item, budget, self._cycle.observe.estimate(item) if live else None)
