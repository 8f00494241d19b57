"""Nodes come and go: one that leaves in order takes its accelerators with it, one that dies does not."""

from tests.support.robots import NodeRobot, accelerator, small_fleet


async def leave(robot) -> None:
    """Ends a worker as SIGTERM does: its session is closed, not left to expire."""
    await robot.session.stop(abandon=True)


async def test_a_node_that_leaves_in_order_is_forgotten_and_can_come_back(cluster):
    async with small_fleet(cluster) as (node, trainer, core, hybrid, spare):
        assert not await node.session.leave(0.5)  # its workers hold replicas
        for robot in (core, hybrid, spare, trainer):
            await leave(robot)
        assert await node.session.leave(10.0)
        await cluster.until(lambda: not cluster.state.nodes)
        assert not list(cluster.state.live_replicas())
        assert not cluster.state.accelerators
        await cluster.restart()
        assert not cluster.state.accelerators
        async with NodeRobot(cluster.address, {0: 3}):
            await cluster.until(lambda: set(cluster.state.accelerators) == {accelerator(0)})


async def test_an_accelerator_that_is_not_proven_free_stays(cluster):
    async with small_fleet(cluster) as (node, trainer, core, hybrid, spare):
        node.confirms = False
        await leave(core)
        await cluster.until(lambda: cluster.state.replica_on(accelerator(1)).state == "UNCONFIRMED")
        await leave(node)
        await cluster.until(lambda: cluster.state.sessions["workers/node-n0/sessions/1"].state == "CLOSED")
        for _ in range(3):
            await cluster.scheduler.cycle.ledger.wait_change(0.1)
        assert accelerator(1) in cluster.state.accelerators
        assert cluster.state.replica_on(accelerator(1)).state == "UNCONFIRMED"


async def test_a_node_whose_agent_died_keeps_its_accelerators(impatient):
    cluster = impatient
    async with small_fleet(cluster) as (node, *_):
        await node.kill()
        await cluster.until(lambda: cluster.state.sessions["workers/node-n0/sessions/1"].state == "EXPIRED")
        assert set(cluster.state.accelerators) == {accelerator(i) for i in (0, 1, 2)}
