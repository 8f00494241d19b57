"""The scheduler's figures in a small fleet: right while it works, and right after a restart."""

import asyncio

import pytest

from services.common import wire
from services.common.errors import ConfigError
from services.scheduler import figures
from tests.support.expositions import now, samples, scrape, value
from tests.support.robots import Cluster, accelerator, rid, small_fleet


@pytest.fixture
async def measured(tmp_path):
    running = Cluster(tmp_path, planner={"enabled": False}, metrics_listen="127.0.0.1:0")
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def two_levels(tmp_path):
    running = Cluster(
        tmp_path, planner={"enabled": False}, metrics_listen="127.0.0.1:0", levels={accelerator(2): 1},
        concurrency_caps={accelerator(1): 1, accelerator(2): 1},
    )  # fmt: skip
    await running.start()
    yield running
    await running.stop()


def look(cluster):
    return now(cluster.scheduler.metrics.exposition)


async def step(cluster, trainer, number):
    await cluster.submit("runs/r", 2)
    manifest = (await cluster.take(trainer, number)).manifest
    await cluster.publish(trainer, await cluster.commit(trainer, manifest))
    await cluster.until(
        lambda: {r.serving_number for r in cluster.state.live_replicas() if r.role == "ROLLOUT"} == {number}
    )


async def test_two_steps_in_numbers(measured):
    cluster = measured
    async with small_fleet(cluster) as (_, trainer, *_rest):
        await cluster.create_run("r", group_size=2, batch=wire.BatchSize(groups=2))
        await step(cluster, trainer, 1)
        await step(cluster, trainer, 2)
        seen = look(cluster)
        for pool, role in (("core_training", "trainer"), ("core_rollout", "rollout"), ("hybrid", "rollout")):
            assert value(seen, "libra_accelerators", pool=pool, role=role, state="active") == 1
        assert value(seen, "libra_accelerators", pool="hybrid", role="trainer", state="active") == 0
        assert value(seen, "libra_accelerator_role", accelerator="n0/2", pool="hybrid", role="rollout") == 1
        assert value(seen, "libra_trajectories_ended_total", run="r", state="trained") == 8
        assert value(seen, "libra_generated_tokens_total", run="r") == 8 * 4
        assert value(seen, "libra_trained_tokens_total", run="r") == 8 * 4
        assert value(seen, "libra_steps_total", run="r") == 2
        assert value(seen, "libra_policy_version", run="r") == 2
        assert value(seen, "libra_reward_mean", run="r") == 1
        assert value(seen, "libra_step_staleness_versions", run="r") == 0
        assert value(seen, "libra_staleness_bound_versions", run="r") == 2
        assert value(seen, "libra_sessions", kind="rollout", state="alive") == 2
        assert value(seen, "libra_sessions", kind="trainer", state="alive") == 2
        assert value(seen, "libra_sessions", kind="node", state="alive") == 1
        assert value(seen, "libra_commands_open") == 0
        assert value(seen, "libra_term") == 1
        assert value(seen, "libra_commit_seconds_count") > 0
        assert value(seen, "libra_cycle_seconds_count") > 0
        assert value(seen, "libra_reassignments_total", to="rollout", outcome="succeeded", cause="bootstrap") == 2
        events = await cluster.admin.ListEvents(wire.ListEventsRequest(page_size=1000), timeout=5)
        counted = sum(v for (name, _), v in look(cluster).items() if name == "libra_events_total")
        assert counted == len(events.events)
        assert not events.next_page_token


async def test_what_waits_and_runs_by_state_and_level(two_levels):
    cluster = two_levels
    async with small_fleet(cluster) as (_, _trainer, core, hybrid, _spare):

        async def wait(lease):
            await asyncio.Event().wait()

        core.play = hybrid.play = wait
        await cluster.create_run("r", group_size=2)
        empty = look(cluster)
        for level in ("0", "1"):
            assert value(empty, "libra_queue_trajectories", level=level, state="queued") == 0
        await cluster.submit("runs/r", 4)
        await cluster.until(lambda: cluster.states().get("LEASED"))
        seen, states = look(cluster), cluster.states()
        for state in ("queued", "leased", "scored", "ready", "batched"):
            assert value(seen, "libra_trajectories", run="r", state=state) == states.get(state.upper(), 0)
        for label, state in (("queued", "QUEUED"), ("running", "LEASED")):
            for level in (0, 1):
                there = sum((t.state, t.level) == (state, level) for t in cluster.state.trajectories.values())
                assert value(seen, "libra_queue_trajectories", level=str(level), state=label) == there


async def test_preemptions_and_hand_overs_are_counted_by_who_asked(measured):
    cluster = measured
    async with small_fleet(cluster) as (_, _trainer, core, hybrid, _spare):

        async def play(robot, lease):
            if not lease.turns:
                part = robot.turn(lease, finish=0, interruption=wire.INTERRUPTION_PREEMPTED)
                await robot.report(wire.Delta(progress=[part]))
                await asyncio.Event().wait()
            rest = robot.turn(lease, first=7, prompt=0, index=0, part=1)
            await robot.report(wire.Delta(progress=[rest, rest]))  # said twice, counted once
            await robot.end(lease, reward=1.0)

        core.play = lambda lease: play(core, lease)
        hybrid.play = lambda lease: play(hybrid, lease)
        await cluster.create_run("r", group_size=2)
        await cluster.submit("runs/r", 1)
        await cluster.until(lambda: sum(t.generated_tokens == 4 for t in cluster.state.trajectories.values()) == 2)
        before = look(cluster)
        assert value(before, "libra_preemptions_total", cause="operator") == 0
        name = next(iter(cluster.state.trajectories))
        await cluster.admin.Preempt(wire.PreemptRequest(request_id=rid(), trajectories=[name]), timeout=5)
        await cluster.until(lambda: cluster.state.trajectories[name].state == "SCORED")
        seen = look(cluster)
        assert value(seen, "libra_preemptions_total", cause="operator") == 1
        assert value(seen, "libra_preemptions_total", cause="handover") == 0
        assert value(seen, "libra_generated_tokens_total", run="r") == 3 * 4
        moved = await cluster.reassign_to_trainer(2)
        await cluster.until(lambda: cluster.state.reassignments[moved.name].state == "SUCCEEDED")
        await cluster.scheduler.cycle.ledger.barrier()
        seen = look(cluster)
        assert value(seen, "libra_reassignments_total", to="trainer", outcome="succeeded", cause="operator") == 1
        # the core trainer's first grant is one too
        assert value(seen, "libra_reassignment_seconds_count", to="trainer", outcome="succeeded") == 2
        assert value(seen, "libra_accelerators", pool="hybrid", role="trainer", state="active") == 1
        assert value(seen, "libra_accelerators", pool="hybrid", role="rollout", state="active") == 0
        assert value(seen, "libra_accelerator_role", accelerator="n0/2", pool="hybrid", role="trainer") == 1
        assert value(seen, "libra_accelerator_role", accelerator="n0/2", pool="hybrid", role="rollout") is None


async def test_gauges_are_right_at_once_after_a_restart(measured):
    cluster = measured
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):

        async def half(robot, lease):
            await robot.report(wire.Delta(progress=[robot.turn(lease)]))
            await robot.end(lease, reward=float(lease.trajectory.endswith("-0")))

        core.play = lambda lease: half(core, lease)
        hybrid.play = lambda lease: half(hybrid, lease)
        await cluster.create_run("r", group_size=2, batch=wire.BatchSize(groups=2))
        await step(cluster, trainer, 1)
        await cluster.submit("runs/r", 1)
        await cluster.until(lambda: cluster.states().get("READY") == 2)
        before = look(cluster)
        assert value(before, "libra_reward_mean", run="r") == 0.5
    await cluster.restart()
    after = samples(await scrape(cluster.scheduler.metrics.exposition.address))
    for name in (
        "libra_reward_mean", "libra_policy_version", "libra_step_staleness_versions", "libra_staleness_bound_versions",
        "libra_accelerators", "libra_accelerator_role",
    ):  # fmt: skip
        assert {k: v for k, v in after.items() if k[0] == name} == {k: v for k, v in before.items() if k[0] == name}
    assert value(after, "libra_trajectories", run="r", state="ready") == 2
    assert value(after, "libra_term") == 2
    assert value(after, "libra_steps_total", run="r") == 0
    sessions = sum(
        v for (name, labels), v in after.items() if name == "libra_sessions" and ("state", "recovering") in labels
    )
    assert sessions == 5


async def test_a_run_is_shown_until_a_while_after_its_end_and_its_counts_go(measured, monkeypatch):
    cluster = measured
    async with small_fleet(cluster) as (_, trainer, *_rest):
        await cluster.create_run("r", tasks=['{"n": 1}'], group_size=2, batch=wire.BatchSize(groups=1))
        manifest = (await cluster.take(trainer, 1)).manifest
        await cluster.commit(trainer, manifest)
        await cluster.until(lambda: cluster.state.runs["runs/r"].state == "FINISHED")
        assert value(look(cluster), "libra_steps_total", run="r") == 1
        monkeypatch.setattr(figures, "SHOWN_SECONDS", -1.0)
        seen = look(cluster)
        assert not [name for name, labels in seen if ("run", "r") in labels]
        assert not cluster.scheduler.cycle.ledger.generated
        assert not cluster.scheduler.metrics._ended


async def test_a_taken_port_ends_the_start_with_the_reason(measured, tmp_path):
    taken = measured.scheduler.metrics.exposition.address
    (tmp_path / "second").mkdir()
    second = Cluster(tmp_path / "second", metrics_listen=taken)
    with pytest.raises(ConfigError, match=f"metrics_listen: cannot listen on {taken}"):
        await second.scheduler.start()
    await second.scheduler.stop()
