"""Which accelerators serve one replica together, at which level, and which worker can take them.

Without a table of rates each accelerator is a replica by itself. With one, a replica that is lost comes back as it was,
and accelerators that have not served anything yet begin with the smallest replicas that the table has.
"""

from collections.abc import Collection, Iterator

from services.scheduler.config import SchedulerConfig
from services.scheduler.control.ledger import Change
from services.scheduler.core.model import Accelerator, Fleet, Reassignment, Session, Target
from services.scheduler.rates import RateTable

KIND_OF_ROLE = {"ROLLOUT": "ROLLOUT", "TRAINER": "TRAINER"}
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

    def beside(self, fleet: Fleet, first: Accelerator, role: str, busy: Collection[str]) -> tuple[str, ...]:
        """The accelerators of the replica that an idle one should be part of; none if it should stay idle for now."""
        if self.rates is None:
            return (first.name,)
        idle = [
            a
            for a in fleet.accelerators.values()
            if a.name not in busy and fleet.replica_on(a.name) is None and (a.role or role) == role
        ]
        last = self._last(fleet, first, role)
        if last is not None:
            return last if set(last) <= {a.name for a in idle} else ()
        size = self.rates.least(role, first.type)
        near = [a.name for a in idle if _place(a) == _place(first) and self._last(fleet, a, role) is None]
        near = near[near.index(first.name) :]
        return tuple(near[:size]) if size is not None and len(near) >= size else ()

    def _last(self, fleet: Fleet, item: Accelerator, role: str) -> tuple[str, ...] | None:
        """What an accelerator was part of; None if that is not known, or nothing that the table has."""
        last = last_shape(fleet, item.name)
        if last and self.rates is not None and not self.rates.has(role, item.type, len(last)):
            return None
        return last

    def worker_for(self, change: Change, role: str, accelerators: tuple[str, ...]) -> Session | None:
        """Whom an idle set of accelerators is granted to."""
        if self.rates is None:
            return worker_for(change, role, accelerators)
        return free_worker(change, role, accelerators, ())


def _place(item: Accelerator) -> tuple[str, ...]:
    return item.type, item.pool, node_of(item.name), item.link_domain


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
        if worker.kind != KIND_OF_ROLE.get(role) or worker.cordoned or worker.health == "RETIRED":
            continue
        session = change.fleet.session_of(worker.name)
        if session is not None and session.state == "ALIVE" and set(accelerators) <= set(worker.accelerators):
            yield session


def last_shape(fleet: Fleet, accelerator: str) -> tuple[str, ...] | None:
    """What the newest hand-over says that an accelerator should be part of: () for nothing; None if no one knows."""
    for item in reversed(fleet.reassignments.values()):
        made = next((t.accelerators for t in item.targets if accelerator in t.accelerators), None)
        given = _given(fleet, item, accelerator)
        if made is None and given is None:
            continue
        # what came from nothing stays as it was meant, also after a failure
        return given if item.state in UNDONE and given is not None else (made or ())
    return None


def _given(fleet: Fleet, item: Reassignment, accelerator: str) -> tuple[str, ...] | None:
    """The accelerators of the source that an accelerator was part of."""
    for source in item.sources:
        replica = fleet.replicas.get(source.replica)
        if replica is not None and accelerator in replica.accelerators:
            return replica.accelerators
    return None
