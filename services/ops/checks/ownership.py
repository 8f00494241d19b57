"""P1: a replica never has two owners, generations only rise, nothing is granted before its release is confirmed.

Judged from events alone. A replica owns its accelerators from its grant (STARTING) until RELEASED, which the scheduler
records only after the node agent's confirmation. RETIRED is not RELEASED: nobody proved that its memory is free.
"""

import re

from services.ops.archive import Archive, Event
from services.ops.checks.finding import Finding

FREE = frozenset({"PLANNED", "RELEASED"})
"""States of a replica that owns nothing."""
GENERATION = re.compile(r"-(\d+)$")


def check(archive: Archive) -> Finding:
    """Walks the events once, keeping who owns each accelerator."""
    finding = Finding({"grants_checked": 0})
    placed: dict[str, tuple[str, ...]] = {}
    owner: dict[str, str] = {}
    newest: dict[str, int] = {}
    released: set[str] = set()
    for event in archive.events:
        if event.kind == "REASSIGNMENT":
            _sources_released(archive, event, released, finding)
        if event.kind != "REPLICA":
            continue
        if not event.from_state:
            placed[event.name] = event.related
            _generation_rises(archive, event, newest, finding)
        for accelerator in placed.get(event.name, ()):
            holder = owner.get(accelerator)
            if event.to_state not in FREE:
                if holder not in (None, event.name):
                    finding.add(
                        "P1.two_owners", accelerator,
                        f"{event.name} became {event.to_state} at revision {event.at[0]}; {holder} was not released",
                    )  # fmt: skip
                if holder != event.name:
                    finding.count("grants_checked")
                owner[accelerator] = event.name
            elif event.to_state == "RELEASED" and holder == event.name:
                del owner[accelerator]
        if event.to_state == "RELEASED":
            released.add(event.name)
    return finding


def _generation_rises(archive: Archive, event: Event, newest: dict[str, int], finding: Finding) -> None:
    replica = archive.replicas.get(event.name)
    match = GENERATION.search(event.name)
    generation = replica.generation if replica is not None else int(match.group(1)) if match else 0
    for accelerator in event.related:
        if generation <= newest.get(accelerator, 0):
            finding.add(
                "P1.generation_fell", accelerator,
                f"{event.name} has generation {generation}; {newest[accelerator]} was granted there before",
            )  # fmt: skip
        newest[accelerator] = max(generation, newest.get(accelerator, 0))


def _sources_released(archive: Archive, event: Event, released: set[str], finding: Finding) -> None:
    if event.to_state != "GRANTING" or event.from_state == "GRANTING":
        return
    reassignment = next((r for r in archive.reassignments if r.name == event.name), None)
    if reassignment is None:
        finding.add("P1.unknown_reassignment", event.name, "events name it, the record of reassignments does not")
        return
    for source in reassignment.sources:
        if source.replica not in released:
            finding.add(
                "P1.granted_before_release", event.name,
                f"targets were granted at revision {event.at[0]}, but {source.replica} had not been confirmed released",
            )  # fmt: skip
