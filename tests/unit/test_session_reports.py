"""What one report carries: never more of any part than the contract allows, and nothing left behind."""

import asyncio

import pytest

from services.common import session, wire
from services.common.session import FleetSession


class Handler:
    """Takes nothing in."""

    async def on_desired(self, desired: wire.Desired) -> None:
        pass

    async def on_command(self, command: wire.Command) -> wire.CommandResult:
        return wire.CommandResult()

    async def on_session_lost(self, reason: str) -> None:
        pass


def parts(name: str, count: int) -> wire.Delta:
    delta = wire.Delta()
    for _ in range(count):
        getattr(delta, name).add()
    return delta


@pytest.mark.parametrize(("name", "each"), [("ends", 1), ("progress", 2), ("observations", 3), ("incidents", 1)])
async def test_a_report_keeps_to_the_contracts_bounds(name, each):
    mine = FleetSession("127.0.0.1:1", "w", wire.WORKER_KIND_ROLLOUT, handler=Handler())
    most, count = wire.DELTA_LIMITS[name], 700
    loop = asyncio.get_running_loop()
    mine._queue = [(parts(name, each), loop.create_future()) for _ in range(count)]
    sent = answered = 0
    while mine._queue:
        request, futures = mine._next_report()
        assert 0 < len(getattr(request.delta, name)) <= most
        sent, answered = sent + len(getattr(request.delta, name)), answered + len(futures)
    assert (sent, answered) == (count * each, count)
    await mine.stop()


async def test_items_beyond_a_report_wait_for_the_next_and_are_not_in_its_digest():
    mine = FleetSession("127.0.0.1:1", "w", wire.WORKER_KIND_ROLLOUT, handler=Handler())
    for n in range(1_500):
        mine.put_item(f"runs/r/trajectories/{n}-0", 1, "LEASED")
    seen = 0
    for expected in (1_024, 476):
        request, _ = mine._next_report()
        assert len(request.delta.changed) == expected
        seen += sum(session.item_digest(i.name, i.fence, i.state) for i in request.delta.changed)
        assert request.digest == seen % (1 << 64)
    await mine.stop()
