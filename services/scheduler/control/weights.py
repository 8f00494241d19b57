"""Which version each rollout engine serves: chosen by run and newest published version, prepared, then switched.

Each engine fetches by itself (PULL): a silent one is SUSPECT and gets no work, the others go on.
"""

from services.common import log, wire
from services.scheduler.control import batches, commands
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.core.lifecycle import REPLICA
from services.scheduler.core.model import Command, Fleet, Replica, Run, WeightVersion

_log = log.get(__name__)

RETRY_SECONDS = 1.0
SERVING_STATES = ("STARTING", "ACTIVE", "SUSPECT", "CORDONED")


class _Work:
    """Where there is work, as of one pass."""

    def __init__(self, fleet: Fleet) -> None:
        self.runs: set[str] = set()
        """With trajectories that wait or run."""
        self.leased: set[tuple[str, str]] = set()
        """Replica and run of those that run."""
        for item in fleet.trajectories.values():
            if item.state == "LEASED":
                self.leased.add((item.replica, item.run))
            elif item.state != "QUEUED":
                continue
            self.runs.add(item.run)


class Weights:
    """Drives weight updates of rollout replicas."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._retry_at: dict[str, float] = {}

    def advance(self, change: Change) -> None:
        """Tells every engine that should serve something else to prepare it."""
        work: _Work | None = None
        loading = {c.subject for c in commands.open_commands(self._ledger) if c.kind in ("load.prepare", "load.switch")}
        for replica in change.fleet.live_replicas():
            if replica.role != "ROLLOUT" or not replica.granted or replica.state not in SERVING_STATES:
                continue
            if replica.name in loading or change.at < self._retry_at.get(replica.name, 0.0):
                continue
            work = work or _Work(change.fleet)
            wanted = self.wanted(change, replica, work)
            if wanted is None or self.serves(replica, wanted):
                if replica.state == "SUSPECT" and wanted is not None:
                    change.move(REPLICA, replica, "clear", "LOADED", "serves what it should")
                continue
            session = change.fleet.sessions.get(replica.owner_session)
            if session is None or session.state != "ALIVE":
                continue
            self._retry_at[replica.name] = change.at + RETRY_SECONDS
            self._send(change, replica, wanted, wire.LOAD_PHASE_PREPARE)

    @staticmethod
    def serves(replica: Replica, version: WeightVersion) -> bool:
        """True if the replica serves exactly this version."""
        return (replica.serving_run, replica.serving_lineage, replica.serving_number) == (
            version.run, version.lineage, version.number,
        )  # fmt: skip

    def wanted(self, change: Change, replica: Replica, work: _Work) -> WeightVersion | None:
        """The version that the replica should serve now; None if there is nothing to serve."""
        run = self._run_for(change, replica, work)
        return None if run is None else newest_usable(change, run)

    @staticmethod
    def _run_for(change: Change, replica: Replica, work: _Work) -> Run | None:
        fleet = change.fleet
        if (replica.name, replica.serving_run) in work.leased:
            return fleet.runs[replica.serving_run]
        candidates = [
            r
            for r in fleet.runs.values()
            if r.state == "ACTIVE"
            and (not replica.runs or r.name in replica.runs)
            and (r.name in work.runs or not r.exhausted)
        ]
        if not candidates:
            return None
        # work at hand goes before a run that only might get some; then priority, then the older run
        return min(candidates, key=lambda r: (r.name not in work.runs, -r.priority, r.create_time, r.name))

    def _send(
        self, change: Change, replica: Replica, version: WeightVersion, phase: "wire.LoadPhase.ValueType"
    ) -> None:
        session = change.fleet.sessions[replica.owner_session]
        replica.target_run, replica.target_lineage, replica.target_number = version.run, version.lineage, version.number
        replica.weight_state = "PREPARING" if phase == wire.LOAD_PHASE_PREPARE else "PREPARED"
        change.put(replica)
        commands.load_weights(change, session, replica, version, change.fleet.runs[version.run].model, phase)

    def on_result(
        self, change: Change, command: Command, succeeded: bool, weights: wire.EngineWeights, text: str
    ) -> None:
        """An engine answered PREPARE or SWITCH."""
        replica = change.fleet.replicas.get(command.subject)
        if replica is None or replica.generation != command.generation:
            return
        run = change.fleet.runs.get(replica.target_run)
        version = None
        if run is not None:
            name = batches.version_name(run, run.trainable_policy, replica.target_lineage, replica.target_number)
            version = change.fleet.versions.get(name)
        if not succeeded or version is None:
            replica.weight_state, replica.target_number = "FAILED", -1
            change.put(replica)
            change.record("REPLICA", replica.name, replica.state, replica.state, "LOAD_FAILED", text)
            return
        if command.kind == "load.prepare":
            session = change.fleet.sessions.get(replica.owner_session)
            if session is not None and session.state in ("ALIVE", "RECOVERING"):
                self._send(change, replica, version, wire.LOAD_PHASE_SWITCH)
            return
        if version.checksum and weights.checksum != version.checksum:
            replica.weight_state, replica.target_number = "FAILED", -1
            change.put(replica)
            change.record(
                "REPLICA", replica.name, replica.state, replica.state, "CHECKSUM",
                f"acknowledged checksum {weights.checksum[:12]!r}, expected {version.checksum[:12]!r}",
            )  # fmt: skip
            return
        replica.serving_run, replica.serving_lineage, replica.serving_number = (
            version.run,
            version.lineage,
            version.number,
        )
        replica.serving_checksum, replica.cache_salt = weights.checksum, weights.cache_salt
        replica.weight_state, replica.target_number = "LOADED", -1
        change.put(replica)
        change.record(
            "REPLICA", replica.name, replica.state, replica.state, "WEIGHTS_LOADED",
            f"serves {version.run} {version.lineage}-{version.number}", {"number": version.number}, [version.name],
        )  # fmt: skip

    def on_silent(self, change: Change, command: Command) -> None:
        """No answer in time: the engine is excluded until it answers again."""
        replica = change.fleet.replicas.get(command.subject)
        if replica is None or replica.generation != command.generation:
            return
        replica.weight_state, replica.target_number = "SUSPECT", -1
        change.put(replica)
        if replica.state == "ACTIVE":
            change.move(REPLICA, replica, "suspect", "WEIGHTS_SILENT", f"did not answer {command.kind} in time")


def newest_usable(change: Change, run: Run) -> WeightVersion | None:
    """The pinned version of an EVAL run, else the newest PUBLISHED one of the open lineage."""
    if run.pinned_number >= 0:
        name = batches.version_name(run, run.trainable_policy, run.pinned_lineage, run.pinned_number)
        return change.fleet.versions.get(name)
    for number in range(run.head, -1, -1):
        version = change.fleet.versions.get(batches.version_name(run, run.trainable_policy, run.lineage, number))
        if version is not None and version.state == "PUBLISHED":
            return version
    return None
