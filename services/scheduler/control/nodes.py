"""Nodes that leave in order: their hardware is forgotten once nothing of it is held or on its way.

A node whose agent died keeps its accelerators, since nobody has proven what still runs there; only an agent that
ended its own session, after its workers had ended and let go, takes its hardware with it.
"""

from services.scheduler.control.ledger import Change
from services.scheduler.core.lifecycle import REASSIGNMENT
from services.scheduler.core.model import Accelerator, Fleet


def forget_left(change: Change) -> None:
    """Drops nodes whose agent has ended in order, with accelerators that no replica and no hand-over needs."""
    fleet = change.fleet
    for node in list(fleet.nodes.values()):
        agent = fleet.sessions.get(node.agent_session)
        if agent is None or agent.state != "CLOSED":
            continue
        mine = [a for a in fleet.accelerators.values() if a.name.startswith(f"{node.name}/")]
        if any(fleet.replica_on(a.name) is not None for a in mine) or _under_way(fleet, mine):
            continue
        for accelerator in mine:
            del fleet.accelerators[accelerator.name]
            change.delete(accelerator)
            change.record("ACCELERATOR", accelerator.name, accelerator.pool, "", "LEFT", f"{node.name} has left")
        del fleet.nodes[node.name]
        change.delete(node)
        change.record("NODE", node.name, "", "", "LEFT", f"{agent.worker} ended its session in order")


def _under_way(fleet: Fleet, accelerators: list[Accelerator]) -> bool:
    """True if a hand-over that is not over takes or gives one of these."""
    names = {a.name for a in accelerators}
    for item in fleet.reassignments.values():
        if item.state in REASSIGNMENT.terminal:
            continue
        sources = (fleet.replicas.get(s.replica) for s in item.sources)
        touched = {a for r in sources if r is not None for a in r.accelerators}
        touched |= {a for t in item.targets for a in t.accelerators}
        if touched & names:
            return True
    return False
