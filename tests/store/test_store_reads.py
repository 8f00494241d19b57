"""Reads of what is committed: one by name, and pages that join without gap."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from services.common import failpoints
from services.scheduler.core.model import Command, Group, Plan, Reassignment, Run, Trajectory
from services.scheduler.store import store as module
from services.scheduler.store.store import Store
from services.scheduler.store.writer import Writer
from tests.store import entities

RUN = Run("runs/a", "TRAIN", b"")


async def names(read: Callable[[str], Awaitable[list[object]]]) -> list[str]:
    """Names over all pages of a read that takes `after`."""
    found: list[str] = []
    while page := await read(found[-1] if found else ""):
        found += [item.name for item in page]
        assert len(found) < 1_000
    return found


@pytest.fixture
async def admitted(writer: Writer) -> list[Trajectory]:
    """Three groups of four trajectories, in admission order; names sort otherwise."""
    trajectories = [
        Trajectory(
            f"runs/a/trajectories/{group}-{sample}", "runs/a", f"runs/a/groups/{group}", sample, group,
            state=["QUEUED", "TRAINED", "VOID", "TRAINED"][sample],
        )
        for group in (2, 9, 10)
        for sample in range(4)
    ]  # fmt: skip
    other = Trajectory("runs/b/trajectories/2-0", "runs/b", "runs/b/groups/2", 0, 2, state="TRAINED")
    await writer.submit(entities.sealed(RUN, Run("runs/b", "TRAIN", b""), other, *reversed(trajectories)))
    return trajectories


@pytest.mark.parametrize("size", [1, 5, 100])
async def test_trajectories_in_admission_order(size: int, store: Store, admitted: list[Trajectory]) -> None:
    assert await names(lambda after: store.trajectories(run="runs/a", after=after, limit=size)) == [
        t.name for t in admitted
    ]
    group = [t.name for t in admitted if t.admission_number == 9]
    assert await names(lambda after: store.trajectories(group="runs/a/groups/9", after=after, limit=size)) == group
    ended = [t.name for t in admitted if t.state in ("TRAINED", "VOID")]
    states = ("TRAINED", "VOID")
    assert await names(lambda after: store.trajectories(run="runs/a", states=states, after=after, limit=size)) == ended


async def test_terminal_counts(store: Store, admitted: list[Trajectory]) -> None:
    assert await store.terminal_counts("runs/a") == {"TRAINED": 6, "VOID": 3}
    assert await store.terminal_counts("runs/none") == {}


async def test_one_by_name(store: Store, writer: Writer) -> None:
    world = entities.world()
    await writer.submit(entities.sealed(*world))
    named = {type(e): e for e in world if hasattr(e, "name")}
    found = {
        type(e): e for kind in module.KINDS for e in [await store.get_entity(kind, named[module.KINDS[kind].cls].name)]
    }
    assert found == named
    assert await store.get_entity("RUN", "runs/none") is None
    assert await store.trajectory(entities.LOST) == next(e for e in world if getattr(e, "name", "") == entities.LOST)
    assert await store.manifest("runs/a/manifests/none") is None
    manifest = await store.manifest(entities.MANIFEST)
    assert manifest is not None
    assert manifest.members == entities.MEMBERS


async def test_what_is_registered_of_an_attempt(store: Store, writer: Writer) -> None:
    await writer.submit(entities.sealed(*entities.world()))
    name = entities.MEMBERS[0]
    assert [a.number for a in await store.attempts(name)] == [1, 2]
    assert [s.index for s in await store.sequences(name, 2)] == [0, 1]
    assert [s.record for s in await store.segments(name, 2)] == [b"sb", b"sa", b"sc"]
    assert [t.record for t in await store.turns(name, 2)] == [b"t1", b"t0"]
    assert await store.segments(name, 1) == []


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_entities_by_name(size: int, store: Store, writer: Writer) -> None:
    # upper before lower case and "-" before "/" before digits: bytes, not a language's order
    ordered = ["runs/A", "runs/a", "runs/a-b", "runs/a/groups/1", "runs/a/groups/10", "runs/a0", "runs/ab", "runs/é"]
    groups = [Group(n, "runs/x", i, b"", state="OPEN" if i % 2 else "DONE") for i, n in enumerate(ordered)]
    await writer.submit(entities.sealed(Run("runs/x", "TRAIN", b""), *groups))
    assert sorted(ordered) == ordered

    async def listed(prefix: str = "", states: tuple[str, ...] = ()) -> list[str]:
        return await names(lambda after: store.list_entities("GROUP", prefix, states, after, size))

    assert await listed() == ordered
    assert await listed("runs/a") == ["runs/a", "runs/a/groups/1", "runs/a/groups/10"]
    assert await listed("runs/a/") == ["runs/a/groups/1", "runs/a/groups/10"]
    assert await listed("runs/a/groups/1") == ["runs/a/groups/1"]
    assert await listed(states=("OPEN",)) == ordered[1::2]
    assert await listed("runs/a", ("OPEN",)) == ["runs/a", "runs/a/groups/1"]
    # the place may be one that does not exist (any more)
    assert [g.name for g in await store.list_entities("GROUP", after="runs/a5", limit=2)] == ["runs/ab", "runs/é"]


async def test_states_of_kinds_without_state(store: Store, writer: Writer) -> None:
    await writer.submit(entities.sealed(*entities.world()))
    assert await store.list_entities("NODE", states=("OK",)) == []
    assert [w.name for w in await store.list_entities("WORKER", states=("OK",))] == ["workers/r1"]
    assert await store.list_entities("WORKER", states=("LOST",)) == []


@pytest.mark.parametrize("size", [1, 2, 100])
async def test_newest_first(size: int, store: Store, writer: Writer) -> None:
    times = [3.0, 1.0, 2.0, 2.0]
    commands = [
        Command(f"commands/{i}", "s", f"workers/{i % 2}", "preempt", f"t/{i}", b"", i, create_time=t)
        for i, t in enumerate(times)
    ]
    plans = [Plan(f"plans/{i}", "PROPOSED", b"", t) for i, t in enumerate(times)]
    moves = [
        Reassignment(f"reassignments/{i}", state="FAILED" if i else "PENDING", create_time=t)
        for i, t in enumerate(times)
    ]
    await writer.submit(entities.sealed(*commands, *plans, *moves))
    order = ["0", "3", "2", "1"]
    found = await names(lambda after: store.commands(after=after, limit=size))
    assert found == [f"commands/{i}" for i in order]
    assert await names(lambda after: store.plans(after=after, limit=size)) == [f"plans/{i}" for i in order]
    found = await names(lambda after: store.reassignments(after=after, limit=size))
    assert found == [f"reassignments/{i}" for i in order]
    found = await names(lambda after: store.reassignments(states=("FAILED",), after=after, limit=size))
    assert found == [f"reassignments/{i}" for i in order[1:]]
    found = await names(lambda after: store.commands(worker="workers/1", after=after, limit=size))
    assert found == ["commands/3", "commands/1"]
    assert [c.name for c in await store.commands(subject="t/2", limit=size)] == ["commands/2"]


async def test_a_page_after_something_deleted_is_the_last(store: Store, writer: Writer) -> None:
    await writer.submit(entities.sealed(Plan("plans/1", "PROPOSED", b"", 1.0)))
    assert await store.plans(after="plans/gone") == []


async def test_manifests_by_step(store: Store, writer: Writer) -> None:
    steps = [10, 9, 2]
    manifests = [
        entities.Manifest(f"runs/a/manifests/{s}-1", "runs/a", "", s, 1, s - 1, state="COVERED") for s in steps
    ]
    await writer.submit(entities.sealed(RUN, *manifests))
    found = await names(lambda after: store.manifests("runs/a", after=after, limit=2))
    assert found == [f"runs/a/manifests/{s}-1" for s in sorted(steps)]


async def test_reads_see_only_what_is_committed_and_do_not_wait(
    store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, opened = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == "store.before_commit":
            reached.set()
            assert opened.wait(30)

    monkeypatch.setattr(failpoints, "hit", hold)
    future = writer.submit(entities.sealed(RUN))
    assert await asyncio.to_thread(reached.wait, 30)
    assert await store.get_entity("RUN", "runs/a") is None
    opened.set()
    await future
    assert await store.get_entity("RUN", "runs/a") == RUN


async def test_a_snapshot_does_not_change(store: Store, writer: Writer) -> None:
    with store.reading() as connection:
        count = "SELECT count(*) FROM runs"
        assert connection.exec_driver_sql(count).scalar() == 0
        await writer.submit(entities.sealed(RUN))
        assert connection.exec_driver_sql(count).scalar() == 0
    with store.reading() as connection:
        assert connection.exec_driver_sql(count).scalar() == 1
