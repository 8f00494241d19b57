"""P2 and the order of events: every admitted trajectory has one state and, once its run is over, a terminal one.

Events are ordered and unique, and each starts in the state in which the one before it ended: an event that was lost,
doubled or made up breaks the chain.
"""

from services.common import wire
from services.ops.archive import TERMINAL_STATES, Archive, last_by_name, trajectory_state
from services.ops.checks.finding import Finding

CHAINED = frozenset({"REPLICA", "REASSIGNMENT", "COMMAND", "RUN", "GROUP", "TRAJECTORY", "MANIFEST", "WEIGHT_VERSION"})
OVER = (wire.RUN_STATE_FINISHED, wire.RUN_STATE_CANCELLED)


def check(archive: Archive) -> Finding:
    """Both the event log by itself and the final record against it."""
    finding = Finding({"events": len(archive.events), "trajectories": len(archive.trajectories)})
    _events(archive, finding)
    _trajectories(archive, finding)
    return finding


def _events(archive: Archive, finding: Finding) -> None:
    before = (-1, -1)
    state: dict[tuple[str, str], str] = {}
    for event in archive.events:
        if event.at <= before:
            finding.add("events.order", event.name, f"event {event.at} comes after {before}; expected rising numbers")
        before = event.at
        if event.kind not in CHAINED:
            continue
        key = (event.kind, event.name)
        expected = state.get(key, "")
        if event.from_state != expected:
            finding.add(
                "events.chain", event.name,
                f"event {event.at} starts from {event.from_state or 'nothing'}, the last one ended in "
                f"{expected or 'nothing'}: an event is missing or made up",
            )  # fmt: skip
        state[key] = event.to_state


def _trajectories(archive: Archive, finding: Finding) -> None:
    exported = {t.name: t for t in archive.trajectories}
    if len(exported) != len(archive.trajectories):
        finding.add("P2.two_records", "trajectories", f"{len(archive.trajectories) - len(exported)} are recorded twice")
    runs = {name.partition("/trajectories/")[0] for name in exported}
    for name, event in last_by_name(archive.events, "TRAJECTORY").items():
        run = name.partition("/trajectories/")[0]
        trajectory = exported.get(name)
        if trajectory is None:
            if run in runs:
                finding.add("P2.lost", name, f"admitted, last seen {event.to_state}, absent from the final record")
        elif trajectory_state(trajectory) != event.to_state:
            finding.add(
                "P2.state_differs", name,
                f"the record says {trajectory_state(trajectory)}, the last event {event.to_state}",
            )  # fmt: skip
    for name, trajectory in exported.items():
        owner = archive.runs.get(name.partition("/trajectories/")[0])
        over = owner is not None and owner.state in OVER
        if over and trajectory_state(trajectory) not in TERMINAL_STATES:
            finding.add("P2.not_terminal", name, f"its run is over, it is still {trajectory_state(trajectory)}")
