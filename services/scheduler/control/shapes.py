"""Which accelerators serve one replica together, at which level, and which worker can take them.

Without a table of rates each accelerator is a replica by itself. With one, a replica that is lost comes back as it was,
and accelerators that have not served anything yet begin with the smallest replicas that the table has.
"""

from collections.abc import Collection, Iterator

from services.scheduler.config import SchedulerConfig
from services.scheduler.control.ledger import Change
from services.scheduler.core.model import Accelerator, Fleet, Session, Target
from services.scheduler.rates import RateTable

ROLES = ("ROLLOUT", "TRAINER")
"""Of replicas; workers of the kind of the same name hold them."""
PENDING = ("PENDING", "DRAINING", "RELEASING")
"""States of hand-overs whose targets are not there yet."""
UNDONE = ("ROLLING_BACK", "ROLLED_BACK", "FAILED")
"""States of hand-overs after which what was given up should be there again."""


class Shapes:
    """Shapes of replicas, from the configuration and the table of rates, if there is one."""

    def __init__(self, config: SchedulerConfig, rates: RateTable | None) -> None:
        self._config = config
        self.rates = rates

    def target(self, fleet: Fleet, role: str, accelerators: tuple[str, ...], worker: str) -> Target:
        """A target with its level and its cap on running sequences."""
        first = fleet.accelerators[accelerators[0]]
        level = self._config.level(first.name, first.pool)
        cap = self._config.concurrency_cap(first.name, first.pool) if role == "ROLLOUT" else 0
        if self.rates is not None and role == "ROLLOUT":
            level = self.rates.level(len(accelerators))
            # not what the caches hold at the contexts of today, which a plan shows: contexts change, caps stay
            most = self.rates.max_running(first.type, len(accelerators)) or cap
            named = {first.name, first.pool} & set(self._config.concurrency_caps)
            cap = min(cap, most) if named else most
        return Target(replica="", role=role, accelerators=accelerators, worker=worker, level=level, concurrency_cap=cap)

    def idle(self, fleet: Fleet, busy: Collection[str]) -> list[tuple[str, tuple[str, ...]]]:
        """Role and accelerators of each replica that should be there and is not, as far as all of them are idle."""
        free = {n: a for n, a in fleet.accelerators.items() if n not in busy and fleet.replica_on(n) is None}
        if self.rates is None:
            return [(_role(a), (n,)) for n, a in free.items()]
        last, found = last_shapes(fleet), list[tuple[str, tuple[str, ...]]]()
        unknown: dict[tuple[str, ...], list[str]] = {}
        """Accelerators whose shape is not known, or nothing that the table has; by what may stand together."""
        for name, item in free.items():
            shape, role = last.get(name), _role(item)
            agreed = shape is not None and all(last.get(n) == shape and _alike(fleet, n, item) for n in shape)
            if shape is None or not agreed or (shape and not self.rates.has(role, item.type, len(shape))):
                beside = unknown.setdefault((role, item.type, item.pool, node_of(name), item.link_domain), [])
                beside.append(name)
                if len(beside) == self.rates.least(role, item.type):
                    found.append((role, tuple(beside)))
                    beside.clear()
            elif shape[:1] == (name,) and all(n in free and _role(free[n]) == role for n in shape):
                found.append((role, shape))
        return found

    def worker_for(self, change: Change, role: str, accelerators: tuple[str, ...]) -> Session | None:
        """Whom an idle set of accelerators is granted to."""
        if self.rates is None:
            return worker_for(change, role, accelerators)
        return free_worker(change, role, accelerators, ())


def _role(item: Accelerator) -> str:
    """What it should serve."""
    return item.role or ("TRAINER" if item.pool == "CORE_TRAINING" else "ROLLOUT")


def _alike(fleet: Fleet, name: str, item: Accelerator) -> bool:
    """True if one is still there that may serve together with `item`: a node can leave and come back with others."""
    other = fleet.accelerators.get(name)
    return other is not None and (other.type, other.pool) == (item.type, item.pool)


def node_of(accelerator: str) -> str:
    """Name of the node that an accelerator is in."""
    return accelerator.partition("/accelerators/")[0]


def worker_for(change: Change, role: str, accelerators: tuple[str, ...]) -> Session | None:
    """The live session of a worker of this role that was started with these accelerators."""
    return next(able_workers(change, role, accelerators), None)


def free_worker(
    change: Change, role: str, accelerators: tuple[str, ...], freed: Collection[str], taken: Collection[str] = ()
) -> Session | None:
    """As `worker_for`, one that holds no replica, since a worker holds one at a time: the one that was started with the
    fewest accelerators. Those in `freed` are about to give theirs up; those in `taken` are spoken for.
    """
    held = {r.worker for r in change.fleet.live_replicas()} | {
        t.worker for r in change.fleet.reassignments.values() if r.state in PENDING for t in r.targets
    }
    able = [
        s
        for s in able_workers(change, role, accelerators)
        if s.worker not in taken and (s.worker not in held or s.worker in freed)
    ]
    return min(able, key=lambda s: (len(change.fleet.workers[s.worker].accelerators), s.worker in held), default=None)


def able_workers(change: Change, role: str, accelerators: tuple[str, ...]) -> Iterator[Session]:
    """Live sessions of workers of a role that were started with these accelerators and may be granted some."""
    for worker in change.fleet.workers.values():
        if worker.kind != role or worker.cordoned or worker.health == "RETIRED":
            continue
        session = change.fleet.session_of(worker.name)
        if session is not None and session.state == "ALIVE" and set(accelerators) <= set(worker.accelerators):
            yield session


def last_shapes(fleet: Fleet) -> dict[str, tuple[str, ...]]:
    """By accelerator, which ones it should serve together with, itself among them, as its newest hand-over says, or its
    newest replica where that is forgotten; () if it was left idle. Those of which nothing is known are not in it.
    """
    found = {name: r.accelerators for r in fleet.replicas.values() for name in r.accelerators}
    for item in fleet.reassignments.values():
        sources = [fleet.replicas[s.replica].accelerators for s in item.sources if s.replica in fleet.replicas]
        given = {name: shape for shape in sources for name in shape}
        made = {name: t.accelerators for t in item.targets for name in t.accelerators}
        # after a failure what came from nothing stays as it was meant, and what was idle beside others as it was before
        found |= given if item.state in UNDONE and given else dict.fromkeys(given, ()) | made
    return found
