"""A scheduler with a table of rates plans whole layouts: replicas of several accelerators, given up and made together."""

from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from services.common import wire
from services.common.errors import ConfigError
from services.scheduler import rates
from services.scheduler.bootstrap import Scheduler
from services.scheduler.core.rates import EngineKind, EngineRates, TrainerKind, TrainerRates
from services.scheduler.rates import RateTable
from tests.support.robots import Cluster, NodeRobot, RolloutRobot, TrainerRobot, accelerator, rid

N0, N1 = "nodes/n0", "nodes/n1"
TABLE = RateTable(
    "of the test",
    {
        EngineKind("b", 1): EngineRates(1e-5, 1e-6, 1e-9, 100_000.0, max_running=8),
        EngineKind("a", 2): EngineRates(1e-5, 1e-6, 1e-9, 200_000.0, max_running=16),
    },
    # whatever b is corrected to by its steps, which take as long as this machine happens to need, three replicas are faster
    {TrainerKind("b", 2): TrainerRates(0.005), TrainerKind("a", 3): TrainerRates(0.0005)},
)
ONE = {"max_moves_per_window": 1}
AT_ONCE = {"interval_s": 0.05, "cooldown_s": 0.0, "confirmations": 1, "min_steps": 1}
SIX = [accelerator(i, N0) for i in range(6)]


@asynccontextmanager
async def started(folder: Path, **changes: object):
    rates.write(folder / "rates.yaml", TABLE)
    planner = AT_ONCE | {"rates": str(folder / "rates.yaml")} | changes.pop("planner", {})
    cluster = Cluster(folder, planner=planner, **changes)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()


class Robots:
    """Six accelerators of type a, of which three TP2 engines or two trainers can be made; on a second node of type b a
    trainer of two and two TP1 engines.
    """

    def __init__(self, cluster: Cluster, spares: int) -> None:
        self.cluster, address, self.steps = cluster, cluster.address, 0
        hybrid = dict.fromkeys(range(6), wire.POOL_HYBRID)
        core = dict.fromkeys((0, 1), wire.POOL_CORE_TRAINING) | dict.fromkeys((2, 3), wire.POOL_CORE_ROLLOUT)
        self.nodes = [NodeRobot(address, hybrid, N0, "a"), NodeRobot(address, core, N1, "b")]
        self.trainer = TrainerRobot(address, "trainer-b", [0, 1], N1)
        self.spares = [TrainerRobot(address, f"trainer-a{i}", list(range(6)), N0) for i in range(spares)]
        self.wide = [RolloutRobot(address, f"rollout-a{i}", list(range(6)), N0) for i in range(3)]
        self.narrow = [RolloutRobot(address, f"rollout-b{i}", [2, 3], N1) for i in range(2)]

    @property
    def all(self):
        return [*self.nodes, self.trainer, *self.spares, *self.wide, *self.narrow]

    async def trains(self, steps: int, trainer: TrainerRobot | None = None) -> None:
        """So many steps, with a report of each engine before each."""
        trainer = trainer or self.trainer
        for step in range(self.steps + 1, self.steps + steps + 1):
            self.steps = step
            await self.cluster.submit("runs/r", 4)
            for replica in list(self.cluster.state.live_replicas()):
                robot = next(r for r in self.all if r.session.worker == replica.worker)
                if replica.role == "ROLLOUT":
                    robot.session.set_load(load(replica, step))
            manifest = (await self.cluster.take(trainer, step)).manifest
            await self.cluster.publish(trainer, await self.cluster.commit(trainer, manifest))


def load(replica, step: int) -> wire.Load:
    engine = wire.EngineLoad(
        replica=replica.name, generation=replica.generation, running=4, kv_capacity_tokens=100_000, kv_used_tokens=28,
        seconds_per_token=2e-5, generated_tokens=16 * step,
    )  # fmt: skip
    return wire.Load(rollout=wire.RolloutLoad(engines=[engine]))


@asynccontextmanager
async def two_nodes(cluster: Cluster, spares: int = 2):
    robots = Robots(cluster, spares)
    async with AsyncExitStack() as stack:
        for robot in robots.all:
            await stack.enter_async_context(robot)
        await cluster.until(lambda: shapes(cluster) == BEGIN and robots.trainer.members())
        await cluster.create_run("r", group_size=4, batch=wire.BatchSize(groups=4))
        yield robots


BEGIN = {("ROLLOUT", 2): 3, ("ROLLOUT", 1): 2, ("TRAINER", 2): 1}
MOVED = {("TRAINER", 3): 2, ("ROLLOUT", 1): 2, ("TRAINER", 2): 1}


def shapes(cluster: Cluster) -> dict[tuple[str, int], int]:
    """Active replicas by role and accelerators."""
    active = [r for r in cluster.state.live_replicas() if r.state == "ACTIVE"]
    return dict(Counter((r.role, len(r.accelerators)) for r in active))


def planned(cluster: Cluster):
    return [r for r in cluster.state.reassignments.values() if r.cause == "planner"]


async def propose(cluster: Cluster) -> wire.Plan:
    return (await cluster.admin.ProposePlan(wire.ProposePlanRequest(request_id=rid()), timeout=5)).plan


async def test_three_engines_become_two_trainers_in_one_move(tmp_path: Path):
    async with started(tmp_path, planner=ONE) as cluster, two_nodes(cluster) as robots:
        began = {r.name for r in cluster.state.live_replicas() if len(r.accelerators) == 2 and r.role == "ROLLOUT"}
        await robots.trains(2)
        await cluster.until(lambda: planned(cluster) and planned(cluster)[0].state == "SUCCEEDED")
        (item,) = planned(cluster)
        assert {s.replica for s in item.sources} == began
        assert all(s.confirmed for s in item.sources)
        assert sorted(a for t in item.targets for a in t.accelerators) == SIX
        assert [(t.role, len(t.accelerators)) for t in item.targets] == [("TRAINER", 3)] * 2
        assert len({t.worker for t in item.targets}) == 2
        assert shapes(cluster) == MOVED
        made = [cluster.state.replicas[t.replica] for t in item.targets]
        assert {(r.tp, r.dp_shard) for r in made} == {(1, 3)}
        await cluster.until(lambda: len(robots.trainer.roster.members) == 3)
        assert item.predicted_gain > 0

        stored = wire.Plan.FromString(cluster.state.plans[item.plan].record)
        assert stored.profile == "of the test"
        assert [m.reassignment for m in stored.moves] == [item.name]
        kinds = {(r.role, r.accelerator_type, r.accelerators, r.count) for r in stored.chosen.replicas}
        assert kinds == {(wire.ROLE_TRAINER, "a", 3, 2), (wire.ROLE_ROLLOUT, "b", 1, 2)}
        assert all(r.concurrency_cap > 0 for r in stored.chosen.replicas if r.role == wire.ROLE_ROLLOUT)
        assert stored.alternatives[0].label == "present"
        assert all(a.reason.text for a in stored.alternatives)
        explained = await cluster.admin.Explain(wire.ExplainRequest(name=SIX[0]), timeout=5)
        assert any(d.reason.code == "GAIN" for d in explained.decisions)


async def test_the_next_move_follows_and_what_a_plan_leaves_idle_stays_idle(tmp_path: Path):
    async with started(tmp_path) as cluster, two_nodes(cluster) as robots:
        await robots.trains(1)
        await cluster.until(lambda: planned(cluster) and planned(cluster)[0].state == "SUCCEEDED")
        assert shapes(cluster) == MOVED
        (spare, _) = robots.spares
        await cluster.until(spare.members)
        await robots.trains(1, spare)
        await cluster.until(lambda: len(planned(cluster)) == 2 and planned(cluster)[1].state == "SUCCEEDED")
        assert not planned(cluster)[1].targets
        rest = {("TRAINER", 3): 2, ("ROLLOUT", 1): 2}
        assert shapes(cluster) == rest
        await robots.trains(2, spare)
        assert shapes(cluster) == rest
        assert len(planned(cluster)) == 2
        assert (await propose(cluster)).reason.code == "BALANCED"
        explained = await cluster.admin.Explain(wire.ExplainRequest(name=accelerator(0, N1)), timeout=5)
        assert "a plan left it idle" in explained.summary


async def test_engines_have_the_level_and_the_cap_of_their_degree(tmp_path: Path):
    async with started(tmp_path, planner={"enabled": False}) as cluster, two_nodes(cluster):
        engines = [r for r in cluster.state.live_replicas() if r.role == "ROLLOUT"]
        assert {(r.tp, r.level, r.concurrency_cap) for r in engines} == {(1, 0, 8), (2, 1, 16)}
        assert len({r.worker for r in engines}) == 5, "a worker holds one replica"


async def test_a_dry_run_shows_the_moves_and_makes_none(tmp_path: Path):
    async with started(tmp_path, planner=ONE | {"enabled": False}) as cluster, two_nodes(cluster) as robots:
        first = await propose(cluster)
        assert (first.reason.code, len(first.moves)) == ("NO_EVIDENCE", 0)
        assert sum(r.accelerators * r.count for r in first.chosen.replicas) == 10
        await robots.trains(2)
        before = sorted((r.name, r.state, r.generation) for r in cluster.state.live_replicas())
        plan = await propose(cluster)
        assert (plan.reason.code, plan.state) == ("GAIN", wire.PLAN_STATE_PROPOSED)
        (move,) = plan.moves
        assert (len(move.sources), len(move.targets)) == (3, 2)
        assert not move.reassignment
        assert move.gain_tokens > move.cost_tokens > 0
        assert sorted((r.name, r.state, r.generation) for r in cluster.state.live_replicas()) == before
        assert not planned(cluster)


async def test_a_dry_run_is_no_confirmation_and_takes_none_away(tmp_path: Path):
    async with started(tmp_path, planner=ONE | {"confirmations": 2}) as cluster, two_nodes(cluster) as robots:
        decisions = cluster.scheduler.cycle.decisions
        await robots.trains(1)
        await cluster.until(lambda: decisions.of(SIX[0])[-1].code == "CONFIRMING")
        assert (await propose(cluster)).reason.code == "GAIN"
        assert not planned(cluster)
        await robots.trains(1)
        await cluster.until(lambda: planned(cluster) and planned(cluster)[0].state == "SUCCEEDED")


async def test_a_move_of_which_one_target_fails_is_rolled_back_to_the_same_replicas(tmp_path: Path):
    async with started(tmp_path, planner=ONE) as cluster, two_nodes(cluster) as robots:
        began = {r.name: r.accelerators for r in cluster.state.live_replicas()}

        async def refuses(command: wire.Command) -> wire.CommandResult:
            if command.handover.step.kind == wire.HANDOVER_KIND_GRANT:
                why = wire.Reason(code="NO_MEMORY", text="the test said so")
                return wire.CommandResult(state=wire.COMMAND_STATE_FAILED, reason=why)
            return wire.CommandResult()

        robots.spares[1].on_command = refuses
        await robots.trains(2)
        await cluster.until(lambda: planned(cluster) and planned(cluster)[0].state == "ROLLED_BACK", 20)
        assert shapes(cluster) == BEGIN
        now = {r.name: r.accelerators for r in cluster.state.live_replicas()}
        assert sorted(now.values()) == sorted(began.values())
        assert not {n for n, a in now.items() if set(a) <= set(SIX)} & set(began), "under new generations"


async def test_a_move_goes_on_over_a_restart_of_the_scheduler(tmp_path: Path):
    async with started(tmp_path, planner=ONE) as cluster, two_nodes(cluster) as robots:
        robots.nodes[0].confirms = False
        await robots.trains(2)
        await cluster.until(lambda: planned(cluster) and planned(cluster)[0].state == "RELEASING")
        await cluster.restart()
        (item,) = planned(cluster)
        robots.nodes[0].confirms = True
        await cluster.until(lambda: item.state == "SUCCEEDED", 20)
        assert shapes(cluster) == MOVED
        # what was learnt is gone, and without it nothing is planned
        plan = await propose(cluster)
        assert (plan.reason.code, len(plan.moves)) == ("NO_EVIDENCE", 0)
        kinds = {(r.role, r.accelerators, r.count) for r in plan.chosen.replicas}
        assert kinds == {(wire.ROLE_TRAINER, 3, 2), (wire.ROLE_TRAINER, 2, 1), (wire.ROLE_ROLLOUT, 1, 2)}


async def test_a_lost_engine_comes_back_on_the_accelerators_that_it_had(tmp_path: Path):
    quick = {"ttl": 1.0, "margin": 0.2, "report_interval": 0.1}
    async with started(tmp_path, planner={"enabled": False}, leases=quick) as cluster, two_nodes(cluster) as robots:
        lost = next(r for r in cluster.state.live_replicas() if r.worker == "workers/rollout-a1")
        await robots.wide[1].kill()
        await cluster.until(lambda: lost.state == "RELEASED")
        await cluster.restart()
        async with RolloutRobot(cluster.address, "rollout-a1", list(range(6)), N0):
            await cluster.until(lambda: shapes(cluster) == BEGIN)
            back = next(r for r in cluster.state.live_replicas() if set(r.accelerators) & set(lost.accelerators))
            assert (back.accelerators, back.tp) == (lost.accelerators, 2)
            assert back.generation > lost.generation


async def test_without_a_worker_to_hold_it_nothing_of_a_plan_starts_and_it_says_why(tmp_path: Path):
    async with started(tmp_path) as cluster, two_nodes(cluster, spares=1) as robots:
        await robots.trains(3)
        plan = await propose(cluster)
        assert plan.reason.code == "NO_WORKER"
        assert "no live TRAINER worker" in plan.reason.text
        # the slow trainer could be spared once there are others, not before
        assert [(r.move, r.reason.code) for r in plan.refused] == [(0, "NO_WORKER"), (1, "FLOOR")]
        assert not planned(cluster)
        assert shapes(cluster) == BEGIN


async def test_without_rates_single_accelerators_are_planned(tmp_path: Path):
    cluster = Cluster(tmp_path, planner={"enabled": False})
    await cluster.start()
    try:
        async with two_nodes_of_singles(cluster):
            plan = await propose(cluster)
        assert plan.profile == "online"
        assert {r.accelerators for r in plan.chosen.replicas if r.count} == {1}
    finally:
        await cluster.stop()


@asynccontextmanager
async def two_nodes_of_singles(cluster: Cluster):
    pools = {0: wire.POOL_CORE_TRAINING, 1: wire.POOL_CORE_ROLLOUT, 2: wire.POOL_HYBRID}
    async with (
        NodeRobot(cluster.address, pools, N0, "a"),
        TrainerRobot(cluster.address, "trainer", [0], N0),
        RolloutRobot(cluster.address, "rollout", [1, 2], N0),
    ):
        await cluster.until(lambda: shapes(cluster) == {("TRAINER", 1): 1, ("ROLLOUT", 1): 2})
        yield


async def test_a_file_of_rates_that_is_wrong_stops_the_start_in_words(tmp_path: Path):
    (tmp_path / "rates.yaml").write_text("engines: []\n")
    config = Cluster(tmp_path, planner={"rates": str(tmp_path / "rates.yaml")}).config
    with pytest.raises(ConfigError, match=r"rates.yaml:1: 'engines'.*\n.*'trainers' is missing"):
        await Scheduler(config).start()


async def test_reports_and_steps_are_evidence(tmp_path: Path):
    heard = Heard()
    async with started(tmp_path, planner={"enabled": False}) as cluster, two_nodes(cluster) as robots:
        cluster.scheduler.cycle.observe.listeners.append(heard)
        for robot in (*robots.wide, *robots.narrow):
            robot.play = lambda lease, robot=robot: with_a_tool(robot, lease)
        planner = cluster.scheduler.cycle.planning.planner
        await cluster.until(lambda: planner.evidence)
        evidence = planner.evidence
        before = evidence.trainers.rates(TrainerKind("b", 2)).token_s
        await robots.trains(1)
        (step,) = heard.steps
        assert [(t.prompt_tokens, t.generated_tokens, t.context_tokens, t.tool_seconds) for t in step[0]] == [
            (3, 8, 16, 2.5)
        ] * 16
        assert 0 < step[1] < 60
        await cluster.until(lambda: heard.engines == {(2, 4, 28), (1, 4, 28)})
        assert evidence.steps == 1
        assert evidence.demand().sequences == 16
        assert evidence.demand().longest_context == 16
        assert evidence.trainers.rates(TrainerKind("b", 2)).token_s != before
        assert evidence.engines.evidence(EngineKind("a", 2)) > 0
        assert evidence.engines.evidence(EngineKind("b", 1)) > 0


class Heard:
    """What an observer's listener is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[object, float]] = []
        self.engines: set[tuple[int, int, int]] = set()

    def decoded(self, replica, engine) -> None:
        self.engines.add((len(replica.accelerators), engine.running, engine.kv_used_tokens))

    def consumed(self, manifest, trajectories, seconds) -> None:
        self.steps.append((trajectories, seconds))


async def with_a_tool(robot: RolloutRobot, lease: wire.TrajectoryLease) -> None:
    """Two turns of four tokens; between them a call of 2.5 s that returns five tokens."""
    first = robot.turn(lease, finish=wire.FINISH_REASON_TOOL_CALL)
    first.turns[0].tool_calls.add(call_id="c", tool="t", outcome=wire.TOOL_OUTCOME_OK, latency=wire.duration(2.5))
    await robot.report(wire.Delta(progress=[first]))
    await robot.report(wire.Delta(progress=[robot.turn(lease, prompt=5, first=7, index=1)]))
    await robot.end(lease, reward=1.0)
