"""What one handler changed: written to the database in one transaction or not at all."""

from typing import Any

from services.scheduler.core import model
from services.scheduler.store import (
    accelerators,
    commands,
    events,
    manifests,
    plans,
    replicas,
    runs,
    trajectories,
    workers,
)
from services.scheduler.store.manifests import Consumption
from services.scheduler.store.mapping import Key, Mapping, Row

MAPPINGS: tuple[Mapping[Any], ...] = (
    workers.WORKERS,
    workers.SESSIONS,
    accelerators.NODES,
    accelerators.ACCELERATORS,
    replicas.REPLICAS,
    replicas.REASSIGNMENTS,
    commands.COMMANDS,
    runs.RUNS,
    runs.LINEAGES,
    runs.VERSIONS,
    trajectories.GROUPS,
    trajectories.TRAJECTORIES,
    trajectories.ATTEMPTS,
    trajectories.SEQUENCES,
    trajectories.SEGMENTS,
    trajectories.TURNS,
    manifests.MANIFESTS,
    manifests.CONSUMPTIONS,
    plans.PLANS,
    events.EVENTS,
    events.ANSWERS,
)
"""In the order of writing: what is referred to comes first."""

BY_CLASS: dict[type[Any], Mapping[Any]] = {mapping.cls: mapping for mapping in MAPPINGS}

Rows = dict[Mapping[Any], dict[Key, Row | None]]
"""By table and key, so that the last values count; None deletes the row."""
Records = dict[Mapping[Any], list[Row]]
"""By table, for rows that are written once: a repetition is left to the database to refuse."""


class Unit:
    """Collects entities while a handler changes them; `seal` takes the values that will be written."""

    __slots__ = ("_deleted", "_entities", "_once", "next_generation", "records", "revision", "rows", "sealed")

    def __init__(self) -> None:
        self.revision = 0
        self.next_generation = 0
        self.sealed = False
        self.rows: Rows = {}
        self.records: Records = {}
        self._entities: dict[int, model.Entity] = {}
        self._deleted: dict[int, model.Entity] = {}
        self._once: list[model.Event | model.Answer | Consumption] = []

    def put(self, entity: model.Entity) -> None:
        """Marks an entity as new or changed. The same object again changes nothing: its last values count."""
        self._open()
        self._deleted.pop(id(entity), None)
        self._entities[id(entity)] = entity

    def delete(self, entity: model.Session | model.Command | model.Node | model.Accelerator) -> None:
        """Removes a row. Only for what nobody asks for any more, and for hardware that has left."""
        self._open()
        self._entities.pop(id(entity), None)
        self._deleted[id(entity)] = entity

    def event(self, event: model.Event) -> None:
        """Adds an event to the record."""
        self._open()
        self._once.append(event)

    def answer(self, answer: model.Answer) -> None:
        """Keeps an answer for repetitions of its request."""
        self._open()
        self._once.append(answer)

    def consume(self, run: str, policy: str, lineage: int, trajectory: str, number: int, manifest: str) -> None:
        """Puts a trajectory into a version. A second time in the same lineage fails the whole transaction."""
        self._open()
        self._once.append(Consumption(run, policy, lineage, trajectory, number, manifest))

    def counters(self, *, revision: int, next_generation: int) -> None:
        """The fleet's counters after this unit. They alone do not make a unit worth writing."""
        self._open()
        self.revision, self.next_generation = revision, next_generation

    @property
    def empty(self) -> bool:
        """True if nothing was put, deleted, recorded, kept or consumed."""
        return not (self._entities or self._deleted or self._once or self.rows or self.records)

    def seal(self) -> None:
        """Takes the values to write; what changes afterwards belongs to another unit."""
        self._open()
        for entity in self._entities.values():
            self._add(entity)
        for record in self._once:
            self._add(record)
        for entity in self._deleted.values():
            mapping = BY_CLASS[type(entity)]
            self.rows.setdefault(mapping, {})[mapping.key_of(mapping.to_row(entity))] = None
        self._entities, self._deleted, self._once = {}, {}, []
        self.sealed = True

    def _add(self, record: Any) -> None:
        mapping = BY_CLASS[type(record)]
        row = mapping.to_row(record)
        if mapping.once:
            self.records.setdefault(mapping, []).append(row)
        else:
            self.rows.setdefault(mapping, {})[mapping.key_of(row)] = row

    def _open(self) -> None:
        if self.sealed:
            raise RuntimeError("this unit is sealed; put later changes into a new one")
