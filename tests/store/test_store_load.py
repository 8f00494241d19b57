"""A scheduler that starts finds the state that the last one had committed, without what is over."""

from dataclasses import replace

from services.scheduler.core.model import Command, Fleet, Group, Manifest, Reassignment, Replica, Run, Trajectory
from services.scheduler.store import replicas
from services.scheduler.store.engine import open_store
from services.scheduler.store.store import Store
from services.scheduler.store.writer import Writer
from tests.store import entities


async def test_load_equals_what_was_written(database_url: str) -> None:
    store = open_store(database_url)
    writer = Writer(store, store.acquire_term())
    expected = Fleet(revision=4, next_generation=9, term=2)
    for entity in entities.world():
        entities.add(expected, entity)
        await writer.submit(entities.sealed(entity, revision=4, next_generation=9))
    writer.close()
    store.close()
    again = open_store(database_url)
    again.acquire_term()
    found = again.load()
    again.close()
    assert found == expected
    # equality of dicts ignores order, on which decisions may depend
    for table in ("sessions", "groups", "trajectories", "versions", "segments", "turns"):
        assert list(getattr(found, table)) == list(getattr(expected, table))


async def test_monotonic_times_start_anew(store: Store, writer: Writer) -> None:
    await writer.submit(
        entities.sealed(
            Run("runs/a", "TRAIN", b""), Trajectory("t", "runs/a", "", 0, 0, queued_at=5.0, lease_revision=3)
        )
    )
    found = store.load().trajectories["t"]
    assert (found.queued_at, found.lease_revision) == (0.0, 0)


async def test_what_is_over_stays_behind(store: Store, writer: Writer) -> None:
    run = Run("runs/a", "TRAIN", b"")
    done = Group("runs/a/groups/0", "runs/a", 0, b"", state="DONE", members=["t/0"])
    trained = Trajectory("t/0", "runs/a", done.name, 0, 0, state="TRAINED", manifest="runs/a/manifests/1")
    covered = Manifest(
        "runs/a/manifests/1", "runs/a", "", 1, 1, 0, state="COVERED", groups=[done.name], members=["t/0"]
    )
    ended = Command("commands/0", "s", "w", "preempt", "t/0", b"", 1, state="SUCCEEDED")
    cancelled = Trajectory("t/1", "runs/a", "", 0, 1, state="CANCELLED")
    segment = entities.Segment("t/0", 1, 0, 0, 1, 1, "a", b"")
    await writer.submit(entities.sealed(run, done, trained, covered, ended, cancelled, segment))
    assert store.load() == Fleet(term=1, runs={run.name: run})


async def test_the_redo_log_is_loaded_without_its_members(store: Store, writer: Writer) -> None:
    """A committed step that no checkpoint covers may have to be trained again; its content is read when asked for."""
    world = entities.world()
    for entity in world:
        if isinstance(entity, Group) and entity.name == entities.GROUP:
            entity.state = "DONE"
        elif isinstance(entity, Manifest):
            entity.state = "COMMITTED"
        elif isinstance(entity, Trajectory) and entity.name in entities.MEMBERS:
            entity.state = "TRAINED"
    await writer.submit(entities.sealed(*world))
    fleet = store.load()
    assert [m.state for m in fleet.manifests.values()] == ["COMMITTED"]
    assert entities.GROUP not in fleet.groups
    for name in entities.MEMBERS:
        assert name not in fleet.trajectories
        assert len(await store.segments(name, 2)) == 3


async def test_ended_replicas_are_loaded_while_recent_or_named(store: Store, writer: Writer) -> None:
    old = Replica("replicas/old", 1, "ROLLOUT", (), "workers/a", state="RELEASED", update_time=1.0)
    named = replace(old, name="replicas/named", generation=2)
    live = replace(old, name="replicas/live", generation=3, state="ACTIVE")
    moving = Reassignment("reassignments/0", sources=[replicas_source(named.name)], create_time=1.0)
    newer = [replace(old, name=f"replicas/{i}", generation=10 + i, update_time=2.0 + i) for i in range(replicas.RECENT)]
    finished = [
        Reassignment(f"reassignments/{i:04}", state="FAILED", create_time=2.0 + i)
        for i in range(1, replicas.RECENT + 2)
    ]
    await writer.submit(entities.sealed(old, named, live, moving, *newer, *finished))
    fleet = store.load()
    assert set(fleet.replicas) == {r.name for r in (named, live, *newer)}
    assert set(fleet.reassignments) == {moving.name} | {r.name for r in finished[1:]}


def replicas_source(name: str) -> entities.Source:
    """A source of a reassignment."""
    return entities.Source(name, 2)


async def test_more_names_than_fit_in_one_query(store: Store, writer: Writer) -> None:
    run = Run("runs/a", "TRAIN", b"")
    groups = [Group(f"runs/a/groups/{i}", "runs/a", i, b"") for i in range(1_200)]
    members = [Trajectory(f"t/{i}", "runs/a", g.name, 0, i, state="VOID") for i, g in enumerate(groups)]
    sequences = [entities.Sequence(m.name, 1, 0) for m in members]
    await writer.submit(entities.sealed(run, *groups, *members, *sequences))
    fleet = store.load()
    assert list(fleet.groups) == [g.name for g in groups]
    assert list(fleet.trajectories) == [m.name for m in members]
    assert len(fleet.sequences) == 1_200
