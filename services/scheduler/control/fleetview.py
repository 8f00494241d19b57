"""The fleet as the planner of whole layouts sees it: what is there, what may be moved, and what could be made of it.

An accelerator may serve a side only if a live worker of that side was started with it; one that nobody could take, or
that is on its way or lost, is left out, and a replica on it stays where it is.
"""

from collections import Counter
from collections.abc import Iterator

from services.common import wire
from services.scheduler.control.ledger import Change
from services.scheduler.control.observe import Observe
from services.scheduler.control.shapes import ROLES, able_workers, node_of
from services.scheduler.core import model
from services.scheduler.core.rates import EngineKind
from services.scheduler.core.topology import Accelerator, Fleet, Kind, Replica
from services.scheduler.rates import RateTable

SHOWN = ("ACTIVE", "SUSPECT", "CORDONED")
MOVABLE = ("ACTIVE", "SUSPECT")
SIDES = {"HYBRID": {"TRAINER", "ROLLOUT"}, "CORE_TRAINING": {"TRAINER"}, "CORE_ROLLOUT": {"ROLLOUT"}}
POOLS = {frozenset(sides): pool for pool, sides in SIDES.items()}


def fleet_view(change: Change, observe: Observe) -> Fleet:
    """Accelerators by what they can serve now, and the replicas that serve."""
    fleet, pools = change.fleet, _pools(change)
    accelerators: list[Accelerator] = []
    replicas: list[Replica] = []
    held: set[str] = set()
    for replica in fleet.live_replicas():
        on = [fleet.accelerators[name] for name in replica.accelerators if name in fleet.accelerators]
        held.update(replica.accelerators)
        known = len(on) == len(replica.accelerators) and all(a.sharing == "EXCLUSIVE" for a in on)
        if replica.state not in SHOWN or not known:
            continue
        movable = replica.state in MOVABLE and not replica.reassignment and all(a.name in pools for a in on)
        replicas.append(Replica(replica.name, replica.role, replica.accelerators, movable))
        accelerators += [_accelerator(a, pools.get(a.name, a.pool)) for a in on]
    accelerators += [
        _accelerator(a, pools[a.name])
        for a in fleet.accelerators.values()
        if a.name in pools and a.name not in held and a.sharing == "EXCLUSIVE"
    ]
    return Fleet(tuple(accelerators), tuple(replicas), dict(_host_free(change, observe)))


def makeable(change: Change, view: Fleet, table: RateTable) -> set[Kind]:
    """Kinds of the table of which a live worker could hold a replica within one node, and those there are."""
    widest: Counter[tuple[str, str]] = Counter()
    for role in ROLES:
        for session in able_workers(change, role, ()):
            names = [n for n in change.fleet.workers[session.worker].accelerators if n in view.by_name]
            for (type_, _), count in Counter((view.by_name[n].type, node_of(n)) for n in names).items():
                widest[role, type_] = max(widest[role, type_], count)
    engines = {k for k in table.engines if k.tp <= widest["ROLLOUT", k.type]}
    trainers = {k for k in table.trainers if k.accelerators <= widest["TRAINER", k.type]}
    return {*engines, *trainers, *(view.kind(r) for r in view.replicas)}


def unrated(view: Fleet, table: RateTable) -> Replica | None:
    """A replica whose kind the table lacks, if there is one."""
    for replica in view.replicas:
        kind = view.kind(replica)
        if not (kind in table.engines if isinstance(kind, EngineKind) else kind in table.trainers):
            return replica
    return None


def _pools(change: Change) -> dict[str, str]:
    """Pool of each accelerator by the sides that a live worker could take it for; those of no side are left out."""
    sides: dict[str, set[str]] = {}
    for role in ROLES:
        for session in able_workers(change, role, ()):
            for name in change.fleet.workers[session.worker].accelerators:
                sides.setdefault(name, set()).add(role)
    found = {}
    for item in change.fleet.accelerators.values():
        node = change.fleet.nodes.get(node_of(item.name))
        able = frozenset(SIDES.get(item.pool, set()) & sides.get(item.name, set()))
        if able and node is not None and not node.cordoned:
            found[item.name] = POOLS[able]
    return found


def _accelerator(item: model.Accelerator, pool: str) -> Accelerator:
    return Accelerator(item.name, item.type, node_of(item.name), item.link_domain, pool if pool in SIDES else "HYBRID")


def _host_free(change: Change, observe: Observe) -> Iterator[tuple[str, float]]:
    """Free host memory of the nodes whose agent has told it."""
    for node in change.fleet.nodes.values():
        agent = change.fleet.sessions.get(node.agent_session)
        load = observe.loads.get(agent.worker, wire.Load()) if agent is not None else wire.Load()
        if load.node.node.host_memory_free_bytes > 0:
            yield node.name, float(load.node.node.host_memory_free_bytes)
