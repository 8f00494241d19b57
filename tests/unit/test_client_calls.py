"""The client against a servicer that fails on purpose."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from services.client import BlockingClient, LibraClient, LibraError, run_name
from services.common import wire
from services.common.rpc.server import serve


class Flaky(wire.TrajectoryServiceServicer):
    """Answers what the test put into `script`; remembers the requests."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.deadlines: list[float] = []
        self.failures: list[LibraError] = []
        self.streams: list[list[wire.WatchBatch | LibraError]] = []

    async def SubmitGroups(self, request: wire.SubmitGroupsRequest, context: object) -> wire.SubmitGroupsResponse:
        self.seen.append(request)
        self.deadlines.append(context.time_remaining())
        if self.failures:
            raise self.failures.pop(0)
        groups = [f"{request.run}/groups/{i}" for i in range(len(request.tasks))]
        return wire.SubmitGroupsResponse(stamp=wire.Stamp(term=1, revision=5), groups=groups)

    async def ListTrajectories(self, request: wire.ListTrajectoriesRequest, context: object) -> object:
        self.seen.append(request)
        start = int(request.page_token or 0)
        names = [wire.Trajectory(name=f"{request.parent}/trajectories/{i}") for i in range(start, min(start + 2, 5))]
        return wire.ListTrajectoriesResponse(
            stamp=wire.Stamp(revision=9), trajectories=names, next_page_token=str(start + 2) if start + 2 < 5 else ""
        )

    async def WatchRun(self, request: wire.WatchRunRequest, context: object) -> AsyncIterator[wire.WatchRunResponse]:
        self.seen.append(request.options.start_revision)
        for item in self.streams.pop(0) if self.streams else []:
            if isinstance(item, LibraError):
                raise item
            yield wire.WatchRunResponse(batch=item)
        if not self.streams:
            await asyncio.Event().wait()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Flaky, str]]:
    flaky = Flaky()
    add = wire.add_TrajectoryServiceServicer_to_server
    server = await serve([(add, flaky)], "127.0.0.1:0", service_names=[])
    try:
        yield flaky, server.address
    finally:
        await server.stop(0)


def away() -> LibraError:
    return LibraError("UNAVAILABLE", "not leading", grpc.StatusCode.UNAVAILABLE)


def events(*revisions: int, bookmark: int = 0, continued: bool = False, term: int = 1) -> wire.WatchBatch:
    found = [wire.Event(revision=r, index=i) for i, r in enumerate(revisions)]
    return wire.WatchBatch(events=found, bookmark=bookmark, continued=continued, term=term)


async def test_a_mutation_is_tried_again_under_the_same_request_id_and_with_a_deadline() -> None:
    async with serving() as (flaky, address), LibraClient(address, timeout_s=7.0) as client:
        flaky.failures = [away(), away()]
        answer = await client.submit_groups("a", [{"id": "x", "question": "1+1=?"}])
        assert answer.groups == ("runs/a/groups/0",)
        assert answer.revision == 5
        assert len(flaky.seen) == 3
        assert len({r.request_id for r in flaky.seen}) == 1
        assert all(0 < d < 7.5 for d in flaky.deadlines)
        task = flaky.seen[0].tasks[0]
        assert (task.id, task.json) == ("x", '{"id":"x","question":"1+1=?"}')
        await client.submit_groups("a", [wire.Task(json="{}")])
        assert flaky.seen[-1].request_id != flaky.seen[0].request_id


async def test_a_refusal_is_not_tried_again_and_keeps_its_reason() -> None:
    async with serving() as (flaky, address), LibraClient(address) as client:
        flaky.failures = [LibraError("CAPACITY", "quota is used up", retry_after_s="2")]
        with pytest.raises(LibraError) as refusal:
            await client.submit_groups("a", [{}])
        assert (refusal.value.reason, refusal.value.message) == ("CAPACITY", "quota is used up")
        assert len(flaky.seen) == 1


async def test_a_scheduler_that_is_away_is_named_with_its_address() -> None:
    async with LibraClient("127.0.0.1:1", retry_for_s=0.2) as client:
        with pytest.raises(LibraError, match=r"no scheduler answers at 127.0.0.1:1") as failure:
            await client.get_run("a")
        assert failure.value.reason == "UNAVAILABLE"


async def test_lists_read_all_pages_or_as_many_as_asked_for() -> None:
    async with serving() as (flaky, address), LibraClient(address) as client:
        assert len(await client.list_trajectories("a")) == 5
        assert len(flaky.seen) == 3
        assert [t.name for t in await client.list_trajectories("a", limit=3)] == [
            f"runs/a/trajectories/{i}" for i in range(3)
        ]


async def test_case_p7_a_watch_resumes_behind_its_bookmark_and_shows_whole_revisions_once() -> None:
    async with serving() as (flaky, address), LibraClient(address) as client:
        flaky.streams = [
            [
                events(4, bookmark=4),
                events(5, bookmark=4, continued=True),
                away(),
            ],  # breaks in the middle of revision 5
            [events(5, bookmark=4, continued=True), events(5, 6, bookmark=6), events(bookmark=9)],
            [events(12, bookmark=12)],
        ]
        seen = []
        async with asyncio.timeout(10):
            async for event in client.watch_run("a", start_revision=4):
                seen.append(event.revision)
                if event.revision == 12:
                    break
        assert seen == [4, 5, 5, 6, 12]
        assert flaky.seen == [4, 5, 10]


async def test_what_a_deposed_leader_says_in_a_watch_has_no_effect() -> None:
    async with serving() as (flaky, address), LibraClient(address) as client:
        flaky.streams = [
            [events(1, bookmark=1, term=3)], [events(2, bookmark=2, term=2)], [events(3, bookmark=3, term=3)]
        ]  # fmt: skip
        seen = []
        async with asyncio.timeout(10):
            async for event in client.watch_run("a"):
                seen.append(event.revision)
                if event.revision == 3:
                    break
        assert seen == [1, 3]


async def test_a_compacted_watch_says_so() -> None:
    async with serving() as (flaky, address), LibraClient(address) as client:
        flaky.streams = [[LibraError("COMPACTED", "gone", compacted_revision="7")]]
        with pytest.raises(LibraError) as failure:
            async for _ in client.watch_run("a", start_revision=1):
                pass
        assert failure.value.metadata == {"compacted_revision": "7"}


async def test_the_blocking_client_does_the_same_without_an_event_loop() -> None:
    async with serving() as (flaky, address):
        flaky.streams = [[events(1, bookmark=1), events(2, bookmark=2)]]

        def work() -> tuple[int, list[int]]:
            with BlockingClient(address) as client:
                seen = []
                for event in client.watch_run("a", start_revision=1):
                    seen.append(event.revision)
                    if event.revision == 2:
                        break
                return len(client.list_trajectories("a")), seen

        assert await asyncio.to_thread(work) == (5, [1, 2])


def test_run_names() -> None:
    assert run_name("a") == "runs/a"
    assert run_name("runs/a/groups/b") == "runs/a/groups/b"
