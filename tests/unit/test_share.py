"""A duty-cycle share meters the compute thread alone, against its own clocks."""

import threading
import time

import pytest

from services.common import share
from services.common.share import BURST_SECONDS, CpuShare


class Clocks:
    """CPU and wall seconds, by hand; stands in for the module `time`."""

    def __init__(self) -> None:
        self.cpu, self.wall = 100.0, 500.0
        self.slept: list[float] = []

    def thread_time(self) -> float:
        return self.cpu

    def monotonic(self) -> float:
        return self.wall

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.wall += seconds

    def work(self, cpu: float, wall: float = 0.0) -> None:
        self.cpu += cpu
        self.wall += wall or cpu


@pytest.fixture(name="clocks")
def _clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(share, "time", clocks)
    return clocks


@pytest.mark.parametrize("part", [0.1, 0.35, 0.9])
def test_cpu_time_over_wall_time_is_the_share(clocks: Clocks, part: float) -> None:
    mine = CpuShare(part)
    mine.pay()
    cpu, wall = clocks.cpu, clocks.wall
    for _ in range(50):
        clocks.work(0.02)
        mine.pay()
    assert (clocks.cpu - cpu) / (clocks.wall - wall) == pytest.approx(part, rel=0.01)
    assert mine.slept_seconds == pytest.approx(sum(clocks.slept))


def test_waiting_for_a_busy_machine_is_not_charged(clocks: Clocks) -> None:
    mine = CpuShare(0.5)
    mine.pay()
    clocks.work(0.1, wall=0.2)  # the machine gave half a core: the share is kept without a sleep
    assert mine.owed() == pytest.approx(0.0)


def test_credit_of_an_idle_time_is_bounded(clocks: Clocks) -> None:
    mine = CpuShare(0.5)
    mine.pay()
    clocks.wall += 60.0
    mine.pay()
    clocks.work(1.0)
    assert mine.owed() == pytest.approx(1.0 - BURST_SECONDS)


@pytest.mark.parametrize("part", [0.0, 1.0, 2.0])
def test_no_share_never_sleeps(clocks: Clocks, part: float) -> None:
    mine = CpuShare(part)
    clocks.work(5.0)
    mine.pay()
    assert not clocks.slept


def test_other_threads_work_is_free_and_a_new_thread_begins_anew() -> None:
    mine = CpuShare(0.01)
    mine.pay()

    def burn() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    helper = threading.Thread(target=burn)
    helper.start()
    helper.join()
    assert mine.owed() < 1.0, "50 ms of a helper at a share of 1 % would be 5 s"
    found = []
    other = threading.Thread(target=lambda: found.append(mine.owed()))
    other.start()
    other.join()
    assert found == [0.0]
