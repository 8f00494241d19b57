"""Groups, their trajectories, and what is registered of each attempt: sequences, segments, turns."""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Any, TypeVar

import sqlalchemy as sa

from services.scheduler.core.model import Attempt, Fleet, Group, Segment, Sequence, Trajectory, Turn
from services.scheduler.store import schema
from services.scheduler.store.mapping import Mapping
from services.scheduler.store.paging import page

E = TypeVar("E")

GROUPS = Mapping(Group, schema.GROUPS, fixed="run admission_number task task_line create_time")
TRAJECTORIES = Mapping(
    Trajectory,
    schema.TRAJECTORIES,
    fixed="run group sample admission_number create_time",
    unsaved=("lease_revision",),
)
ATTEMPTS = Mapping(Attempt, schema.ATTEMPTS, "trajectory number")
SEQUENCES = Mapping(Sequence, schema.SEQUENCES, "trajectory attempt index")
SEGMENTS = Mapping(Segment, schema.SEGMENTS, "trajectory attempt sequence first_position", once=True)
TURNS = Mapping(Turn, schema.TURNS, "trajectory attempt index part")

NAMES_AT_ONCE = 500
"""Names in one IN list."""


def load(connection: sa.Connection, fleet: Fleet) -> None:
    """Groups that are not done or belong to a TAKEN manifest, all their trajectories, and what belongs to those.

    The content of committed manifests, the redo log, is read from the database when a trainer asks for it.
    Trajectories without a group are loaded while they are not ended. `fleet.manifests` must be there.
    """
    g, t = schema.GROUPS.c, schema.TRAJECTORIES.c
    rows = GROUPS.read(connection, GROUPS.select().where(sa.text(schema.LIVE_GROUP)))
    known = {row.name for row in rows}
    needed = sorted({name for m in fleet.manifests.values() if m.state == "TAKEN" for name in m.groups} - known)
    for names in _chunks(needed):
        rows += GROUPS.read(connection, GROUPS.select().where(g.name.in_(names)))
    rows.sort(key=lambda row: (row.run, row.admission_number, row.name))
    fleet.groups = {row.name: row for row in rows}

    live = TRAJECTORIES.read(connection, TRAJECTORIES.select().where(sa.text(schema.LIVE_TRAJECTORY)))
    found = {row.name: row for row in live}
    for names in _chunks(sorted(fleet.groups)):
        found.update(
            (x.name, x) for x in TRAJECTORIES.read(connection, TRAJECTORIES.select().where(t.group.in_(names)))
        )
    ordered = sorted(found.values(), key=lambda x: (x.run, x.admission_number, x.sample, x.name))
    fleet.trajectories = {row.name: row for row in ordered}

    for names in _chunks(list(fleet.trajectories)):
        fleet.attempts.update(((a.trajectory, a.number), a) for a in _of(connection, ATTEMPTS, names, "number"))
        for sequence in _of(connection, SEQUENCES, names, "serial"):
            fleet.sequences.setdefault((sequence.trajectory, sequence.attempt), []).append(sequence)
        for segment in _of(connection, SEGMENTS, names, "serial"):
            fleet.segments.setdefault((segment.trajectory, segment.attempt), []).append(segment)
        for turn in _of(connection, TURNS, names, "serial"):
            fleet.turns.setdefault((turn.trajectory, turn.attempt), []).append(turn)


def _chunks(names: list[str]) -> Iterator[list[str]]:
    return (names[i : i + NAMES_AT_ONCE] for i in range(0, len(names), NAMES_AT_ONCE))


def _of(connection: sa.Connection, mapping: Mapping[E], trajectories: list[str], order: str) -> list[E]:
    column: sa.Column[Any] = mapping.table.c["trajectory"]
    return mapping.read(connection, mapping.select().where(column.in_(trajectories)).order_by(mapping.table.c[order]))


def registered(connection: sa.Connection, mapping: Mapping[E], trajectory: str, attempt: int) -> list[E]:
    """Sequences, segments or turns of an attempt, in the order of registration."""
    t = mapping.table.c
    query = mapping.select().where(t["trajectory"] == trajectory, t["attempt"] == attempt)
    return mapping.read(connection, query.order_by(t["serial"]))


def attempts(connection: sa.Connection, trajectory: str) -> list[Attempt]:
    """Attempts of a trajectory, first one first."""
    t = schema.ATTEMPTS.c
    return ATTEMPTS.read(connection, ATTEMPTS.select().where(t.trajectory == trajectory).order_by(t.number))


def in_admission_order(
    connection: sa.Connection, run: str, group: str, states: Many[str], *, after: str, limit: int
) -> list[Trajectory]:
    """A page of the trajectories of a run or a group."""
    t = schema.TRAJECTORIES.c
    conditions = [t.group == group] if group else [t.run == run]
    if states:
        conditions.append(t.state.in_(states))
    order = "admission_number", "sample", "name"
    return page(connection, TRAJECTORIES, conditions, order, after=after, limit=limit)


def terminal_counts(connection: sa.Connection, run: str) -> dict[str, int]:
    """How many trajectories of a run ended in each state."""
    t = schema.TRAJECTORIES.c
    query = sa.select(t.state, sa.func.count()).where(t.run == run, sa.text(schema.ENDED_TRAJECTORY))
    return dict(connection.execute(query.group_by(t.state)).all())
