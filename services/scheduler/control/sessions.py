"""Sessions of workers: their begin and end, leases in time, what each worker has, and what that means for its work."""

from dataclasses import dataclass, field

from services.common import errors, log
from services.common.session import item_digest
from services.scheduler.control import trajectories
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.core.lifecycle import REPLICA, SESSION
from services.scheduler.core.model import Session, Worker

_log = log.get(__name__)

MAX_TTL = 60.0
ALIVE = ("ALIVE", "RECOVERING")


@dataclass(slots=True)
class Holdings:
    """What a worker says it has, and the digest of it; in memory only, asked for again after a take-over."""

    items: dict[str, tuple[int, str]] = field(default_factory=dict)
    digest: int = 0
    complete: bool = False
    """True once the picture is known to be whole: from the session's start, or after its state pages."""

    def put(self, name: str, fence: int, state: str) -> None:
        self.drop(name)
        self.items[name] = (fence, state)
        self.digest = (self.digest + item_digest(name, fence, state)) % (1 << 64)

    def drop(self, name: str) -> None:
        old = self.items.pop(name, None)
        if old is not None:
            self.digest = (self.digest - item_digest(name, *old)) % (1 << 64)


class Holds:
    """Holdings by session."""

    def __init__(self) -> None:
        self.by_session: dict[str, Holdings] = {}

    def of(self, session: str) -> Holdings:
        return self.by_session.setdefault(session, Holdings())


def begin(
    ledger: Ledger,
    holds: Holds,
    *,
    request_id: str,
    worker_name: str,
    kind: str,
    endpoint: str,
    version: str,
    features: tuple[str, ...],
    accelerators: tuple[str, ...],
    ttl: float,
) -> tuple[Session, Change]:
    """Begins a life of a worker and fences the one before. The same request id returns the same session."""
    fleet = ledger.fleet
    change = ledger.change(worker_name, request_id)
    worker = fleet.workers.get(worker_name)
    if worker is not None:
        if worker.kind != kind:
            raise errors.invalid_field(f"{worker_name} is a {worker.kind} worker; it cannot begin as {kind}")
        current = fleet.sessions.get(f"{worker_name}/sessions/{worker.epoch}")
        if current is not None and current.request_id == request_id:
            return current, change
        if any(s.worker == worker_name and s.request_id == request_id for s in fleet.sessions.values()):
            raise errors.LibraError(
                "SESSION_FENCED", f"this request began an earlier session of {worker_name}; a newer one exists"
            )
        if current is not None and current.state in ALIVE:
            end(change, holds, current, "fence", "NEWER_SESSION", f"{worker_name} began a newer session")
    else:
        worker = Worker(name=worker_name, kind=kind, create_time=change.now)
        fleet.workers[worker_name] = worker
        change.record("WORKER", worker_name, "", "OK", "FIRST_SESSION", f"{worker_name} is new")
    worker.epoch += 1
    worker.endpoint, worker.software_version = endpoint, version
    worker.features, worker.accelerators, worker.health = features, accelerators, "OK"
    session = Session(
        name=f"{worker_name}/sessions/{worker.epoch}",
        worker=worker_name,
        epoch=worker.epoch,
        endpoint=endpoint,
        request_id=request_id,
        ttl=min(ttl or ledger.config.leases.ttl, MAX_TTL),
        create_time=change.now,
    )
    session.expires_at = change.at + session.ttl
    # a number above every earlier one of this worker, so that 0 in Await always means "everything"
    session.desired_revision = 1
    fleet.sessions[session.name] = session
    holds.of(session.name).complete = True
    change.put(worker, session)
    change.record("WORKER", session.name, "", session.state, "BEGUN", f"session {session.epoch} of {worker_name}")
    return session, change


def check(ledger: Ledger, name: str, epoch: int, seen_term: int) -> Session:
    """The live session that signs a call, renewed; SESSION_FENCED, SESSION_EXPIRED or NOT_LEADER otherwise."""
    fleet = ledger.fleet
    if seen_term > fleet.term:
        raise errors.LibraError(
            "NOT_LEADER",
            f"this scheduler leads term {fleet.term}; the caller has seen {seen_term}",
            term=str(fleet.term),
        )
    session = fleet.sessions.get(name)
    if session is None:
        raise errors.LibraError("SESSION_EXPIRED", f"no session {name!r} is known here; begin a new one", resource=name)
    if session.state == "FENCED" or epoch < session.epoch:
        raise errors.LibraError(
            "SESSION_FENCED", f"{name}: a newer session of {session.worker} exists; stop", resource=name
        )
    if session.state not in ALIVE:
        raise errors.LibraError("SESSION_EXPIRED", f"{name} is {session.state}; begin a new session", resource=name)
    session.expires_at = ledger.clock.monotonic() + session.ttl
    return session


def end(change: Change, holds: Holds, session: Session, event: str, code: str, text: str) -> None:
    """Ends a session (close, expire, fence): its trajectories queue again, its replicas become UNCONFIRMED."""
    fleet = change.fleet
    lost = [t for t in fleet.trajectories.values() if t.state == "LEASED" and t.holder == session.name]
    for trajectory in lost:
        if event == "close":
            trajectories.requeue(change, trajectory, code, text)
        else:
            trajectories.fail(change, trajectory, "WORKER", code, text)
    for replica in list(fleet.live_replicas()):
        if replica.owner_session == session.name and REPLICA.allows(replica.state, "owner_lost"):
            change.move(REPLICA, replica, "owner_lost", code, text)
    change.move(SESSION, session, event, code, text, related=[t.name for t in lost])
    worker = fleet.workers[session.worker]
    if event == "expire":
        worker.health = "LOST"
        change.put(worker)
    holds.by_session.pop(session.name, None)


def expire(change: Change, holds: Holds) -> None:
    """Ends sessions whose lease has run out."""
    for session in list(change.fleet.sessions.values()):
        if session.state in ALIVE and change.at > session.expires_at:
            text = f"{session.name} was not renewed for {session.ttl:.1f} s"
            _log.warning("session expired", session=session.name)
            end(change, holds, session, "expire", "LEASE_EXPIRED", text)


def take_over(ledger: Ledger) -> Change:
    """After a start: every live session has its ttl to report again; nothing of it is planned or moved until then."""
    change = ledger.change("scheduler/take-over")
    for session in ledger.fleet.sessions.values():
        if session.state in ALIVE:
            session.expires_at = change.at + session.ttl
            change.move(SESSION, session, "take_over", "NEW_TERM", f"term {ledger.fleet.term} began")
    for command in ledger.fleet.commands.values():
        command.deadline_at = change.at + command.valid_for
    for reassignment in ledger.fleet.reassignments.values():
        reassignment.deadline_at = change.at + reassignment.timeout
    last: dict[str, int] = {}
    for trajectory in ledger.fleet.trajectories.values():
        trajectory.queued_at = trajectory.leased_at = trajectory.progress_at = change.at
        trajectory.lease_revision = 0
        holder = ledger.fleet.sessions.get(trajectory.holder)
        if holder is not None:
            # leases are part of the first complete answer to Await of every session; each has a revision of its own, so
            # that the answer can be given in parts (a session has had at least as many revisions as it has leases)
            last[holder.name] = last.get(holder.name, holder.desired_revision + 1) - 1
            trajectory.lease_revision = max(1, last[holder.name])
    return change
