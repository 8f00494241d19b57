"""The client against a real scheduler with fake workers."""

import asyncio
from pathlib import Path

import pytest

from services.client import LibraClient, LibraError
from services.common import wire
from tests.support.robots import Cluster, small_fleet


async def test_create_submit_watch_preempt_and_wait(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    await cluster.start()
    try:
        async with small_fleet(cluster) as (_, _, core, hybrid, _), LibraClient(cluster.address) as client:
            held = asyncio.Event()
            first_leases: set[str] = set()

            async def play(worker, lease) -> None:
                if lease.trajectory not in first_leases:
                    first_leases.add(lease.trajectory)
                    await held.wait()
                await worker.one_turn(lease)

            core.play = lambda lease: play(core, lease)
            hybrid.play = lambda lease: play(hybrid, lease)
            run = await client.create_run(
                "a", wire.Run(kind=wire.RUN_KIND_EVAL, policies=[wire.Policy(model="m")], group_size=1)
            )
            assert run.seed
            submitted = await client.submit_groups("a", [{"n": 1}, {"n": 2}])
            assert len(submitted.groups) == 2
            ends: dict[str, list[str]] = {}
            async with asyncio.timeout(20):
                events = client.watch_run(
                    "a", start_revision=submitted.revision + 1, kinds=[wire.RESOURCE_KIND_TRAJECTORY]
                )
                preempted = ""
                async for event in events:
                    if event.from_state == event.to_state:
                        continue
                    ends.setdefault(event.name, []).append(event.to_state)
                    if event.to_state == "LEASED" and not preempted:
                        preempted = event.name
                        # the worker must have its lease before it can be told to give it back
                        await cluster.until(lambda: {**core.leases, **hybrid.leases}.get(preempted))  # noqa: B023
                        assert (await client.preempt([preempted]))[0].startswith("commands/")
                    if preempted and ends[preempted].count("LEASED") == 2:
                        held.set()
                    if sum(s[-1] == "DELIVERED" for s in ends.values()) == 2:
                        break
            assert ends[preempted] == ["LEASED", "QUEUED", "LEASED", "SCORED", "DELIVERED"]
            found = await client.list_trajectories("a", full=True)
            assert [t.state for t in found] == [wire.TRAJECTORY_STATE_DELIVERED] * 2
            assert (await client.explain(found[0].name)).summary
            nodes = await client.list_resources(wire.RESOURCE_KIND_ACCELERATOR)
            assert len(nodes.resources) == 3
            assert (await client.propose_plan()).name.startswith("plans/")
            assert await client.list_events(limit=3)
    finally:
        await cluster.stop()


async def test_pause_resume_cancel_and_what_does_not_exist(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    await cluster.start()
    try:
        async with LibraClient(cluster.address) as client:
            await client.create_run("a", wire.Run(policies=[wire.Policy(model="m")], group_size=2))
            await client.submit_groups("a", [{}])
            assert (await client.pause_run("a", note="test")).state == wire.RUN_STATE_PAUSED
            assert (await client.resume_run("a")).state == wire.RUN_STATE_ACTIVE
            names = [t.name for t in await client.list_trajectories("a")]
            answer = await client.cancel(names)
            assert sorted(answer.cancelled) == sorted(names)
            with pytest.raises(LibraError) as refusal:
                await client.get_run("b")
            assert refusal.value.reason == "NOT_FOUND"
            with pytest.raises(LibraError) as refusal:
                await client.wait_run("a", 0.3)
            assert refusal.value.reason == "DEADLINE_EXCEEDED"
            assert (await client.create_run("v", wire.Run(policies=[wire.Policy(model="m")]), validate_only=True)).name
            with pytest.raises(LibraError):
                await client.get_run("v")
    finally:
        await cluster.stop()
