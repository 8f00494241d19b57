"""Units are written whole or not at all, in order, together where they wait, and only by who leads."""

import asyncio
import threading

import pytest
import sqlalchemy as sa

from services.common import failpoints
from services.scheduler.core.model import Group, Run, Session, Trajectory, WeightVersion
from services.scheduler.store.engine import open_store
from services.scheduler.store.leadership import Deposed
from services.scheduler.store.store import Store
from services.scheduler.store.unit import Unit
from services.scheduler.store.writer import Writer, WriterClosed, WriterOverloaded
from tests.store import entities

RUN = Run("runs/a", "TRAIN", b"")


class Gate:
    """Holds the writer's thread in front of its commit until it is opened; a signal instead of a sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        monkeypatch.setattr(failpoints, "hit", self._hit)

    def _hit(self, name: str) -> None:
        if name == "store.before_commit":
            self.reached.set()
            assert self.opened.wait(30)


def failing_unit() -> Unit:
    """Writes a run and then breaks a rule of the database: a trajectory of a run that does not exist."""
    return entities.sealed(Run("runs/half", "TRAIN", b""), Trajectory("t", "runs/missing", "", 0, 0))


async def test_answered_means_committed(store: Store, writer: Writer) -> None:
    await writer.submit(entities.sealed(RUN, entities.event(1), revision=1, next_generation=7))
    fleet = store.load()
    assert (fleet.term, fleet.revision, fleet.next_generation) == (1, 1, 7)
    assert fleet.runs == {"runs/a": RUN}
    assert await store.events(0, 10) == [entities.event(1)]


async def test_failing_middle_leaves_nothing_of_the_unit(store: Store, writer: Writer) -> None:
    await writer.submit(entities.sealed(RUN, revision=1))
    failed = writer.submit(failing_unit())
    with pytest.raises(sa.exc.IntegrityError):
        await failed
    fleet = store.load()
    assert set(fleet.runs) == {"runs/a"}
    assert fleet.revision == 1


async def test_after_a_failure_nothing_is_written(store: Store, writer: Writer) -> None:
    await asyncio.wait([writer.submit(failing_unit())])
    later = [writer.submit(entities.sealed(Run(f"runs/{i}", "TRAIN", b""))) for i in range(3)]
    errors = await asyncio.gather(*later, return_exceptions=True)
    assert {id(error) for error in errors} == {id(writer.error)}
    assert isinstance(writer.error, sa.exc.IntegrityError)
    assert store.load().runs == {}


async def test_units_behind_a_failing_one_fail_too(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    first = writer.submit(entities.sealed(RUN))
    assert await asyncio.to_thread(gate.reached.wait, 30)
    behind = [writer.submit(failing_unit()), writer.submit(entities.sealed(Run("runs/b", "TRAIN", b"")))]
    gate.opened.set()
    await first
    results = await asyncio.gather(*behind, return_exceptions=True)
    assert all(isinstance(result, sa.exc.IntegrityError) for result in results)
    assert set(store.load().runs) == {"runs/a"}


async def test_waiting_units_share_one_commit(store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    first = writer.submit(entities.sealed(RUN, revision=1))
    assert await asyncio.to_thread(gate.reached.wait, 30)
    waiting = [
        writer.submit(entities.sealed(Trajectory(f"t/{i}", "runs/a", "", 0, i), revision=2 + i)) for i in range(200)
    ]
    gate.opened.set()
    await asyncio.gather(first, *waiting)
    assert (writer.commits, writer.units) == (2, 201)
    assert len(store.load().trajectories) == 200
    assert store.load().revision == 201


async def test_batches_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    writer = Writer(store, store.term, max_batch_units=10)
    first = writer.submit(entities.sealed(RUN))
    assert await asyncio.to_thread(gate.reached.wait, 30)
    waiting = [writer.submit(entities.sealed(Trajectory(f"t/{i}", "runs/a", "", 0, i))) for i in range(25)]
    gate.opened.set()
    await asyncio.gather(first, *waiting)
    assert writer.commits == 4
    writer.close()


async def test_concurrent_submitters_need_fewer_commits_than_units(store: Store, writer: Writer) -> None:
    await writer.submit(entities.sealed(RUN))

    async def submitter(number: int) -> None:
        for i in range(10):
            await writer.submit(entities.sealed(Trajectory(f"t/{number}/{i}", "runs/a", "", 0, i)))

    await asyncio.gather(*(submitter(number) for number in range(30)))
    assert writer.units == 301
    assert writer.commits < 301 // 3
    assert len(store.load().trajectories) == 300


async def test_the_last_values_count_within_a_batch(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    trajectory = Trajectory("t", "runs/a", "", 0, 0)
    futures = [writer.submit(entities.sealed(RUN))]
    assert await asyncio.to_thread(gate.reached.wait, 30)
    for tokens in range(5):
        trajectory.generated_tokens = tokens
        futures.append(writer.submit(entities.sealed(trajectory)))
    gate.opened.set()
    await asyncio.gather(*futures)
    assert store.load().trajectories["t"].generated_tokens == 4


async def test_a_unit_has_the_values_of_its_seal(store: Store, writer: Writer) -> None:
    run = Run("runs/a", "TRAIN", b"")
    group = Group("runs/a/groups/0", "runs/a", 0, b"")
    unit = Unit()
    unit.put(run)
    unit.put(group)
    run.head = 1  # the same handler goes on
    unit.put(run)
    unit.seal()
    run.head = 2  # the next handler's change
    group.members.append("runs/a/trajectories/0-0")
    await writer.submit(unit)
    fleet = store.load()
    assert fleet.runs["runs/a"].head == 1
    assert fleet.groups[group.name].members == []


async def test_deleted_rows_are_gone_and_may_come_back(store: Store, writer: Writer) -> None:
    session = Session("workers/a/sessions/1", "workers/a", 1)
    other = Session("workers/a/sessions/2", "workers/a", 2)
    await writer.submit(entities.sealed(session, other))
    unit = Unit()
    unit.delete(session)
    unit.seal()
    assert not unit.empty
    await writer.submit(unit)
    assert set(store.load().sessions) == {other.name}
    await writer.submit(entities.sealed(session))
    assert set(store.load().sessions) == {session.name, other.name}


def consuming(*names: str, lineage: int = 1, policy: str = "", mark: str = "runs/a") -> Unit:
    """A step's commit: the run, marked by its model, and the entries of trajectories into version 1."""
    unit = Unit()
    unit.put(Run("runs/a", "TRAIN", b"", model=mark))
    for name in names:
        unit.consume("runs/a", policy, lineage, name, 1, entities.MANIFEST)
    unit.seal()
    return unit


async def test_no_trajectory_is_trained_twice_in_a_lineage(store: Store, writer: Writer) -> None:
    await writer.submit(entities.sealed(*entities.world()))
    await writer.submit(consuming(*entities.MEMBERS, mark="first"))
    again = writer.submit(consuming(entities.LOST, entities.MEMBERS[1], mark="second"))
    with pytest.raises(sa.exc.IntegrityError):
        await again
    assert store.load().runs["runs/a"].model == "first"
    assert await store.consumptions("runs/a", entities.LOST) == []
    assert [c.number for c in await store.consumptions("runs/a", entities.MEMBERS[1])] == [1]


async def test_no_trajectory_is_trained_twice_in_one_batch(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await writer.submit(entities.sealed(*entities.world()))
    gate = Gate(monkeypatch)
    first = writer.submit(entities.sealed(RUN))
    assert await asyncio.to_thread(gate.reached.wait, 30)
    twice = [writer.submit(consuming(entities.MEMBERS[0])) for _ in range(2)]
    gate.opened.set()
    await first
    results = await asyncio.gather(*twice, return_exceptions=True)
    assert all(isinstance(result, sa.exc.IntegrityError) for result in results)
    assert await store.consumptions("runs/a", entities.MEMBERS[0]) == []


async def test_each_lineage_and_policy_trains_for_itself(store: Store, writer: Writer) -> None:
    await writer.submit(entities.sealed(*entities.world()))
    await writer.submit(consuming(entities.MEMBERS[0]))
    await writer.submit(consuming(entities.MEMBERS[0], lineage=2))
    await writer.submit(consuming(entities.MEMBERS[0], policy="critic"))
    found = await store.consumptions("runs/a", entities.MEMBERS[0])
    assert [(c.policy, c.lineage) for c in found] == [("", 1), ("", 2), ("critic", 1)]


@pytest.mark.parametrize(
    "entity",
    [
        WeightVersion("another name", "runs/a", "", 1, 1),
        next(e for e in entities.world() if isinstance(e, entities.Segment)),
        entities.event(1),
        Trajectory("t", "runs/missing", "", 0, 0),
    ],
    ids=["a version number", "a segment's position", "an event's place", "a run that is not there"],
)
async def test_refused(entity: object, store: Store, writer: Writer) -> None:
    await writer.submit(entities.sealed(*entities.world(), entities.event(1)))
    with pytest.raises(sa.exc.IntegrityError):
        await writer.submit(entities.sealed(entity, Run("runs/b", "TRAIN", b"")))
    assert "runs/b" not in store.load().runs


async def test_deposed_leader_writes_nothing(store: Store, writer: Writer) -> None:
    await writer.submit(entities.sealed(RUN))
    newer = store.acquire_term()
    assert newer == 2
    with pytest.raises(Deposed, match="term 1 is over, the database says 2"):
        await writer.submit(entities.sealed(Run("runs/b", "TRAIN", b"")))
    assert set(store.load().runs) == {"runs/a"}
    successor = Writer(store, newer)
    await successor.submit(entities.sealed(Run("runs/c", "TRAIN", b"")))
    successor.close()
    assert set(store.load().runs) == {"runs/a", "runs/c"}


async def test_a_term_does_not_begin_inside_a_commit(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    inside = writer.submit(entities.sealed(RUN))
    assert await asyncio.to_thread(gate.reached.wait, 30)
    taking_over = asyncio.create_task(asyncio.to_thread(store.acquire_term))
    done, _ = await asyncio.wait([taking_over], timeout=0.2)
    assert not done, "a new leader could have read the state before the old one's commit"
    gate.opened.set()
    await inside
    assert await taking_over == 2
    assert set(store.load().runs) == {"runs/a"}
    with pytest.raises(Deposed):
        await writer.submit(entities.sealed(RUN))


async def test_deposed_leader_prunes_nothing(store: Store, writer: Writer) -> None:
    for revision in range(1, 4):
        await writer.submit(entities.sealed(entities.event(revision), revision=revision))
    store.term, before = 0, store.term
    with pytest.raises(Deposed):
        await store.prune(0.0, max_events=1)
    store.term = before
    assert len(await store.events(0, 10)) == 3


async def test_close_writes_what_waits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    writer = Writer(store, store.term)
    futures = [writer.submit(entities.sealed(RUN))]
    assert await asyncio.to_thread(gate.reached.wait, 30)
    futures += [writer.submit(entities.sealed(Run(f"runs/{i}", "TRAIN", b""))) for i in range(5)]
    closing = asyncio.create_task(asyncio.to_thread(writer.close))
    gate.opened.set()
    await closing
    await asyncio.gather(*futures)
    assert len(store.load().runs) == 6
    with pytest.raises(WriterClosed):
        await writer.submit(entities.sealed(RUN))


async def test_the_queue_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    writer = Writer(store, store.term, max_queued_units=3)
    first = writer.submit(entities.sealed(RUN))
    assert await asyncio.to_thread(gate.reached.wait, 30)
    futures = [writer.submit(entities.sealed(Run(f"runs/{i}", "TRAIN", b""))) for i in range(5)]
    gate.opened.set()
    await first
    results = await asyncio.gather(*futures, return_exceptions=True)
    assert all(isinstance(result, WriterOverloaded) for result in results)
    assert set(store.load().runs) == {"runs/a"}
    writer.close()


@pytest.mark.parametrize(("point", "written"), [("store.before_commit", False), ("store.after_commit", True)])
async def test_failpoints(point: str, written: bool, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_POINTS", {point: ["error", 1]})
    writer = Writer(store, store.term)
    with pytest.raises(failpoints.FailpointError):
        await writer.submit(entities.sealed(RUN))
    assert bool(store.load().runs) is written
    writer.close()


async def test_only_sealed_units_are_taken(writer: Writer) -> None:
    unit = Unit()
    with pytest.raises(RuntimeError, match="seal"):
        writer.submit(unit)
    unit.seal()
    with pytest.raises(RuntimeError, match="sealed"):
        unit.put(RUN)


def test_a_unit_with_counters_only_is_empty() -> None:
    unit = Unit()
    unit.counters(revision=3, next_generation=4)
    assert unit.empty
    unit.event(entities.event(3))
    assert not unit.empty
    unit.seal()
    assert not unit.empty


async def test_terms_rise_over_restarts(database_url: str) -> None:
    for term in (1, 2, 3):
        store = open_store(database_url)
        assert store.acquire_term() == term
        assert store.load().term == term
        store.close()
