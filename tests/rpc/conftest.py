from pathlib import Path

import pytest

from services.scheduler.control.queueing import Queueing
from tests.support.queue_check import Reservations, same_queue
from tests.support.robots import Cluster


@pytest.fixture(autouse=True)
def the_live_queue_is_what_a_rebuild_gives(monkeypatch):
    """Each pass of each scheduler in these tests compares its live queue with one built from the fleet."""
    begin, decide, wrong = Queueing.__init__, Queueing.decide, []

    def begun(queueing, *args):
        begin(queueing, *args)
        queueing.reservations = Reservations(queueing)

    def checked(queueing, change):
        queueing.follow(change)
        try:
            same_queue(queueing, change)
        except AssertionError as error:
            wrong.append(error)
            raise
        decide(queueing, change)

    monkeypatch.setattr(Queueing, "__init__", begun)
    monkeypatch.setattr(Queueing, "decide", checked)
    yield
    assert not wrong, wrong[0]


@pytest.fixture
async def cluster(tmp_path: Path):
    running = Cluster(tmp_path, planner={"enabled": False})
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def impatient(tmp_path: Path):
    """Short leases, for tests of what happens when they run out."""
    running = Cluster(
        tmp_path,
        planner={"enabled": False},
        leases={"ttl": 1.0, "margin": 0.2, "report_interval": 0.1, "trajectory_stall": 2.0},
        handover={"command_s": 1.0, "total_s": 3.0, "confirm_retry_s": 0.05, "quarantine_s": 1.0},
    )
    await running.start()
    yield running
    await running.stop()
