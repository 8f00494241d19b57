"""What sessions should have, and the commands to them: the answers to Await, built from the live state.

Level-based: a session says which desired revision it has taken over and gets what changed since; 0 asks for all of it.
Losing an answer loses nothing, since the next one says it again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.control import batches, commands
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.core.lifecycle import COMMAND
from services.scheduler.core.model import Command, Replica, Run, Session, Trajectory

MAX_LEASES = 256
MAX_COMMANDS = 256


@dataclass(frozen=True, slots=True)
class Wanted:
    """What changed for a session since the revision that it has."""

    revision: int
    complete: bool
    replicas: tuple[Replica, ...]
    trajectories: tuple[Trajectory, ...]
    removed: tuple[str, ...]
    roster: tuple[Replica, ...]
    roster_revision: int
    runs: tuple[Run, ...]
    more: bool


class Dispatcher:
    """Reads the live state for Await; keeps only the roster's revision."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._roster: tuple[tuple[str, int], ...] = ()
        self._runs: tuple[tuple[str, str, int], ...] = ()
        self.roster_revision = ledger.fleet.revision

    def refresh(self, change: Change) -> None:
        """Tells trainers of a changed roster, and all workers of changed runs."""
        fleet = change.fleet
        members = tuple((r.name, r.generation) for r in batches.roster(fleet, None))
        runs = tuple((r.name, r.state, r.etag) for r in fleet.runs.values() if r.state in ("ACTIVE", "PAUSED"))
        if members == self._roster and runs == self._runs:
            return
        if members != self._roster:
            self.roster_revision = fleet.revision + 1
        for worker in fleet.workers.values():
            session = fleet.session_of(worker.name)
            if session is None or worker.kind not in ("TRAINER", "ROLLOUT"):
                continue
            if worker.kind == "TRAINER" or runs != self._runs:
                session.desired_revision += 1
                change.put(session)
        self._roster, self._runs = members, runs

    def wanted(self, session: Session, have: int) -> Wanted | None:
        """What the session should take over; None if it has the newest."""
        if have >= session.desired_revision:
            return None
        fleet = self._ledger.fleet
        complete = have == 0
        worker = fleet.workers[session.worker]
        leased = [
            t
            for t in fleet.trajectories.values()
            if t.state == "LEASED" and t.holder == session.name and (complete or t.lease_revision > have)
        ]
        leased.sort(key=lambda t: (t.lease_revision, t.name))
        more = len(leased) > MAX_LEASES
        revision = session.desired_revision
        if more:
            leased = leased[:MAX_LEASES]
            revision = max(have + 1, leased[-1].lease_revision)
        held = {t.name for t in fleet.trajectories.values() if t.state == "LEASED" and t.holder == session.name}
        revoked = self._ledger.revoked.by_session.get(session.name, ())
        return Wanted(
            revision=revision,
            complete=complete and not more,
            replicas=tuple(r for r in fleet.live_replicas() if r.owner_session == session.name),
            trajectories=tuple(leased),
            removed=tuple(name for at, name in revoked if at > have and name not in held),
            roster=tuple(batches.roster(fleet, None)) if worker.kind == "TRAINER" else (),
            roster_revision=self.roster_revision,
            runs=tuple(r for r in fleet.runs.values() if r.state in ("ACTIVE", "PAUSED")),
            more=more,
        )

    def outbox(self, session: Session, after: int) -> Iterator[Command]:
        """Open commands of the session above a sequence, in order, at most MAX_COMMANDS."""
        mine = [c for c in commands.open_commands(self._ledger, session=session.name) if c.sequence > after]
        yield from sorted(mine, key=lambda c: c.sequence)[:MAX_COMMANDS]

    def delivered(self, change: Change, sent: list[Command]) -> None:
        """Records the first sending of commands; later ones are no news."""
        for command in sent:
            if command.state == "PENDING":
                change.move(COMMAND, command, "deliver")
