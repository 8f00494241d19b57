"""What is written is read back, field by field; the schema has a column for each and knows the lifecycles' states."""

from dataclasses import fields, replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core import lifecycle, model
from services.scheduler.store import schema
from services.scheduler.store.mapping import Mapping
from services.scheduler.store.store import Store
from services.scheduler.store.unit import MAPPINGS
from services.scheduler.store.writer import Writer
from tests.store import entities

REFERENCES = {
    name: f"{noun}/x"
    for noun, names in {"runs": ["run"], "trajectories": ["trajectory"], "manifests": ["manifest"]}.items()
    for name in names
}
"""Fields that must name something that exists."""


async def parents(writer: Writer) -> None:
    """What any generated entity may refer to."""
    await writer.submit(
        entities.sealed(
            model.Run("runs/x", "TRAIN", b""),
            model.Trajectory("trajectories/x", "runs/x", "", 0, 0),
            model.Manifest("manifests/x", "runs/x", "", 1, 1, 0),
        )
    )


def rooted(mapping: Mapping[Any], entity: Any) -> Any:
    """The entity with references that hold."""
    known = {key.parent.name for key in mapping.table.foreign_keys}
    return replace(entity, **{name: REFERENCES[name] for name in known})


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda m: m.cls.__name__)
async def test_roundtrip(mapping: Mapping[Any], store: Store, writer: Writer) -> None:
    await parents(writer)
    drawn: list[Any] = []

    @settings(max_examples=20, deadline=None, database=None)
    @given(st.lists(entities.instances(mapping.cls, mapping.names), min_size=1, max_size=3))
    def draw(batch: list[Any]) -> None:
        drawn.extend(rooted(mapping, entity) for entity in batch)

    draw()
    latest = {mapping.key_of(mapping.to_row(entity)): entity for entity in drawn}
    unique = _without_clashes(mapping, latest)
    unit = entities.Unit()
    for entity in unique.values():
        _put(unit, entity)
    unit.seal()
    await writer.submit(unit)
    with store.reading() as connection:
        found = mapping.read(connection, mapping.select())
    read = {mapping.key_of(mapping.to_row(entity)): entity for entity in found}
    assert {key: read[key] for key in unique} == unique
    assert len(unique) > 10


def _put(unit: entities.Unit, entity: Any) -> None:
    if isinstance(entity, model.Event):
        unit.event(entity)
    elif isinstance(entity, model.Answer):
        unit.answer(entity)
    elif isinstance(entity, get_args(model.Entity)):
        unit.put(entity)
    else:
        unit.consume(*(getattr(entity, f.name) for f in fields(entity)))


def _without_clashes(mapping: Mapping[Any], found: dict[Any, Any]) -> dict[Any, Any]:
    """Leaves one of those that share a second unique key."""
    for constraint in mapping.table.constraints:
        if isinstance(constraint, schema.sa.UniqueConstraint):
            names = [column.name for column in constraint.columns]
            by_other = {tuple(getattr(e, name) for name in names): key for key, e in found.items()}
            found = {key: found[key] for key in by_other.values()}
    return found


async def test_second_put_replaces_what_may_change(store: Store, writer: Writer) -> None:
    for entity in entities.world():
        await writer.submit(entities.sealed(entity))
    changed = entities.world()
    trajectory = next(e for e in changed if isinstance(e, model.Trajectory))
    trajectory.state, trajectory.reward, trajectory.failures = "TRAINED", -0.5, {}
    group = next(e for e in changed if isinstance(e, model.Group))
    group.members = [*group.members, "runs/a/trajectories/0-2"]
    await writer.submit(entities.sealed(trajectory, group))
    assert await store.trajectory(trajectory.name) == trajectory
    assert await store.get_entity("GROUP", group.name) == group


async def test_what_a_caller_may_send_never_stops_a_commit(store: Store, writer: Writer) -> None:
    worker = model.Worker("workers/x", "ROLLOUT", endpoint="a\0b", reason_text="\0")
    await writer.submit(entities.sealed(worker))
    found = await store.get_entity("WORKER", "workers/x")
    assert isinstance(found, model.Worker)
    assert (found.endpoint, found.reason_text) == ("a\N{REPLACEMENT CHARACTER}b", "\N{REPLACEMENT CHARACTER}")


def test_each_field_has_a_column() -> None:
    for mapping in MAPPINGS:
        columns = {column.name for column in mapping.table.columns} - {"serial"}
        assert columns == set(mapping.names), mapping.cls.__name__
    assert {m.table for m in MAPPINGS} | {schema.LEADER} == set(schema.METADATA.tables.values())


def test_each_entity_has_a_table() -> None:
    kept = {m.cls for m in MAPPINGS}
    assert set(get_args(model.Entity)) | {model.Event, model.Answer} < kept


def test_monotonic_times_are_not_kept() -> None:
    names = {m.cls: set(m.names) for m in MAPPINGS}
    lost = {"queued_at", "leased_at", "progress_at", "lease_revision"}
    assert {f.name for f in fields(model.Trajectory)} - names[model.Trajectory] == lost
    assert "expires_at" not in names[model.Session]


@pytest.mark.parametrize(
    ("condition", "table", "live"),
    [
        (schema.LIVE_TRAJECTORY, lifecycle.TRAJECTORY, True),
        (schema.ENDED_TRAJECTORY, lifecycle.TRAJECTORY, False),
        (schema.LIVE_GROUP, lifecycle.GROUP, True),
        (schema.LIVE_COMMAND, lifecycle.COMMAND, True),
        (schema.LIVE_REPLICA, lifecycle.REPLICA, True),
        (schema.LIVE_REASSIGNMENT, lifecycle.REASSIGNMENT, True),
        (schema.LIVE_MANIFEST, lifecycle.MANIFEST, True),
    ],
    ids=["trajectory", "ended trajectory", "group", "command", "replica", "reassignment", "manifest"],
)
def test_conditions_follow_the_lifecycles(condition: str, table: lifecycle.Lifecycle, live: bool) -> None:
    engine = schema.sa.create_engine("sqlite://")
    with engine.connect() as connection:
        states = " UNION ALL ".join(f"SELECT '{state}' AS state" for state in sorted(table.states))
        found = connection.execute(schema.sa.text(f"SELECT state FROM ({states}) WHERE {condition}")).scalars()
        assert set(found) == (table.states - table.terminal if live else table.terminal)
    engine.dispose()
