"""What was acknowledged survives the death of the process that wrote it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest
import sqlalchemy as sa

from services.common import failpoints
from services.scheduler.core.model import Run, Trajectory
from services.scheduler.store import database
from services.scheduler.store.engine import open_store
from services.scheduler.store.writer import Writer
from tests.store import entities

UNITS_AT_ONCE = 32
"""Units that the writing process has under way at any time."""


async def write_for_ever(url: str, first: int) -> None:
    """Writes units numbered from `first` and prints each number once its unit is acknowledged. Run in a child."""
    store = open_store(url)
    writer = Writer(store, store.acquire_term())
    numbers = iter(range(first, first + 1_000_000))
    run = Run("runs/a", "TRAIN", b"")

    async def one_after_another() -> None:
        for number in numbers:
            name = f"t/{number}"
            unit = entities.sealed(
                run,
                Trajectory(name, "runs/a", "", 0, number),
                entities.Segment(name, 1, 0, 0, 4, 4, "a", b""),
                entities.Segment(name, 1, 0, 4, 4, 4, "b", b""),
                entities.event(number, name=name),
                revision=number,
            )
            await writer.submit(unit)
            os.write(1, b"%d\n" % number)

    await asyncio.gather(*(one_after_another() for _ in range(UNITS_AT_ONCE)))


def start(url: str, first: int, **environment: str) -> subprocess.Popen[str]:
    """The writing process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.store.test_store_crash", url, str(first)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def acknowledged(process: subprocess.Popen[str], kill_after: int) -> set[int]:
    """Kills the process when it has acknowledged `kill_after` units; returns all that it acknowledged."""
    assert process.stdout is not None
    numbers: set[int] = set()
    for line in process.stdout:
        numbers.add(int(line))
        if len(numbers) == kill_after:
            process.kill()
    assert process.wait(30) == -signal.SIGKILL
    return numbers


def check_whole(url: str, expected: set[int]) -> set[int]:
    """Checks that all expected units are there, and that each one that is there is whole; returns these."""
    store = open_store(url)
    store.acquire_term()
    fleet = store.load()
    with store.reading() as connection:
        recorded = {int(n.removeprefix("t/")) for n in connection.execute(sa.text("SELECT name FROM events")).scalars()}
    store.close()
    found = {trajectory.admission_number for trajectory in fleet.trajectories.values()}
    assert expected <= found, f"lost: {sorted(expected - found)}"
    assert recorded == found
    assert all(len(fleet.segments[f"t/{number}", 1]) == 2 for number in found)
    assert fleet.revision in found
    return found


def test_killed_writer_loses_nothing_acknowledged(database_url: str) -> None:
    expected: set[int] = set()
    for kill_after in (1, 40, 250):
        first = max(check_whole(database_url, expected)) + 1 if expected else 1
        expected |= acknowledged(start(database_url, first), kill_after)
    found = check_whole(database_url, expected)
    assert len(found - expected) <= 3 * UNITS_AT_ONCE, "units were written that nobody waited for"


@pytest.mark.parametrize(("point", "committed"), [("store.before_commit", False), ("store.after_commit", True)])
def test_death_around_the_commit(point: str, committed: bool, database_url: str) -> None:
    """Before it nothing is there; after it all is, though nobody was told."""
    assert acknowledged(start(database_url, 1, LIBRA_FAILPOINTS=f"{point}=kill"), kill_after=0) == set()
    store = open_store(database_url)
    fleet = store.load()
    store.close()
    assert bool(fleet.trajectories) is committed
    assert all(len(fleet.segments[name, 1]) == 2 for name in fleet.trajectories)


@pytest.mark.postgres
async def test_frozen_leader_does_not_keep_its_term(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stops in the middle of a commit is cut off by the database, and what it was writing is undone."""
    monkeypatch.setattr(database, "STALLED_SECONDS", 1)
    frozen, thawed = threading.Event(), threading.Event()

    def stop(name: str) -> None:
        if name == "store.before_commit":
            frozen.set()
            assert thawed.wait(60)

    old = open_store(postgres_url)
    writer = Writer(old, old.acquire_term())
    monkeypatch.setattr(failpoints, "hit", stop)
    future = writer.submit(entities.sealed(Run("runs/old", "TRAIN", b"")))
    assert await asyncio.to_thread(frozen.wait, 30)
    new = open_store(postgres_url)
    assert await asyncio.to_thread(new.acquire_term) == 2
    thawed.set()
    with pytest.raises(sa.exc.DBAPIError):
        await future
    assert new.load().runs == {}
    new.close()
    old.close()


if __name__ == "__main__":
    asyncio.run(write_for_ever(sys.argv[1], int(sys.argv[2])))
