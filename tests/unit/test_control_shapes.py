"""Which accelerators serve together, by the table of rates and by what was before; what a planner may make of a fleet."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import wire
from services.common.clock import ManualClock
from services.scheduler.config import SchedulerConfig
from services.scheduler.control.fleetview import fleet_view, makeable, unrated
from services.scheduler.control.ledger import Ledger
from services.scheduler.control.observe import Observe
from services.scheduler.control.shapes import Shapes, free_worker, last_shapes, worker_for
from services.scheduler.core.model import (
    Accelerator,
    Fleet,
    Node,
    Reassignment,
    Replica,
    Session,
    Source,
    Target,
    Worker,
)
from services.scheduler.core.rates import EngineKind, TrainerKind
from services.scheduler.rates import RateTable
from tests.support.fleets import engine_rates, trainer_rates

TABLE = RateTable("of the test", engine_rates(degrees=(2, 4)), trainer_rates(sizes=(3,)))
CAPS = {"concurrency_caps": {"CORE_ROLLOUT": 5}, "levels": {"HYBRID": 7}}


class World:
    """Two nodes of four accelerators of type a, and workers of each role that were started with a node's."""

    def __init__(self, table=TABLE, **config):
        self.fleet = Fleet()
        self.ledger = Ledger(self.fleet, None, ManualClock(), SchedulerConfig.model_validate(config))
        self.observe, self.shapes = Observe(self.ledger), Shapes(self.ledger.config, table)
        self.names = [f"nodes/n{n}/accelerators/{i}" for n in range(2) for i in range(4)]
        for name in self.names:
            self.fleet.accelerators[name] = Accelerator(name, "a")
        for n in range(2):
            self.worker(f"node-{n}", "NODE")
            self.fleet.nodes[f"nodes/n{n}"] = Node(f"nodes/n{n}", agent_session=f"workers/node-{n}/sessions/1")
            for role in ("ROLLOUT", "TRAINER"):
                for i in range(2):
                    self.worker(f"{role.lower()}-{n}{i}", role, self.names[4 * n : 4 * n + 4])
        self.change = self.ledger.change("test")

    def worker(self, name, kind, accelerators=()):
        name = f"workers/{name}"
        self.fleet.workers[name] = Worker(name, kind, 1, accelerators=tuple(accelerators))
        self.fleet.sessions[f"{name}/sessions/1"] = Session(f"{name}/sessions/1", name, 1)

    def on(self, *numbers):
        return tuple(self.names[n] for n in numbers)

    def replica(self, name, role, numbers, worker="", state="ACTIVE"):
        made = Replica(name, 1, role, self.on(*numbers), f"workers/{worker}", state)
        self.fleet.replicas[name] = made
        for a in made.accelerators:
            self.fleet.accelerators[a].replicas = (name,)
            self.fleet.accelerators[a].role = role
        return made

    def was(self, state, sources=(), targets=()):
        """A hand-over: sources by replica, targets as numbers of accelerators."""
        name = f"reassignments/{len(self.fleet.reassignments)}"
        made = [Target("", "ROLLOUT", self.on(*t), "workers/w") for t in targets]
        self.fleet.reassignments[name] = Reassignment(name, state, [Source(s, 1) for s in sources], made)

    def idle(self, busy=()):
        found = self.shapes.idle(self.fleet, self.on(*busy))
        return [(role[0], *(self.names.index(a) for a in accelerators)) for role, accelerators in found]


async def test_what_has_served_nothing_begins_with_the_smallest_replicas_of_its_node_type_and_pool():
    world = World()
    assert world.idle() == [("R", 0, 1), ("R", 2, 3), ("R", 4, 5), ("R", 6, 7)]
    assert world.idle(busy=(1, 4)) == [("R", 0, 2), ("R", 5, 6)], "one of each node is left over"
    for number in range(4):
        world.fleet.accelerators[world.names[number]].pool = "CORE_TRAINING"
    assert world.idle(busy=(4, 5, 6, 7)) == [("T", 0, 1, 2)]
    for number, changes in {4: {"pool": "CORE_ROLLOUT"}, 5: {"type": "b"}, 6: {"role": "TRAINER"}}.items():
        for field, value in changes.items():
            setattr(world.fleet.accelerators[world.names[number]], field, value)
    assert world.idle(busy=(0, 1, 2, 3)) == [], "all four are different; the table knows nothing of type b"
    world.fleet.accelerators[world.names[7]].pool = "CORE_ROLLOUT"
    assert world.idle(busy=(0, 1, 2, 3)) == [("R", 4, 7)]


async def test_without_a_table_every_accelerator_is_by_itself():
    world = World(None)
    world.was("SUCCEEDED", targets=[(0, 1)])
    world.replica("r", "ROLLOUT", (2, 3))
    world.fleet.accelerators[world.names[4]].pool = "CORE_TRAINING"
    world.fleet.accelerators[world.names[5]].role = "TRAINER"
    assert world.idle(busy=(7,)) == [("R", 0), ("R", 1), ("T", 4), ("T", 5), ("R", 6)]


async def test_what_was_made_together_comes_back_together():
    world = World()
    world.was("SUCCEEDED", targets=[(1, 2)])
    assert world.idle(busy=(4, 5, 6, 7)) == [("R", 1, 2), ("R", 0, 3)]
    world.replica("other", "ROLLOUT", (2,))
    assert world.idle(busy=(4, 5, 6, 7)) == [("R", 0, 3)], "it waits for the one beside it"
    world.fleet.replicas.clear()
    world.fleet.accelerators[world.names[1]].role = "TRAINER"
    assert world.idle(busy=(3, 4, 5, 6, 7)) == [], "they are to serve different sides"


async def test_after_a_failure_it_is_what_was_given_up_that_comes_back():
    for state in ("ROLLING_BACK", "ROLLED_BACK", "FAILED"):
        world = World()
        world.replica("r", "ROLLOUT", (2, 3), state="RELEASED")
        world.was("SUCCEEDED", targets=[(0, 1, 2, 3)])
        world.was(state, sources=["r"], targets=[(0, 1, 2, 3)])
        assert ("R", 2, 3) in world.idle()
    world = World()
    world.was("ROLLED_BACK", targets=[(0, 1, 2, 3)])
    assert world.idle(busy=(4, 5, 6, 7)) == [("R", 0, 1, 2, 3)], "it was to be, and nothing was given up for it"


async def test_what_a_plan_left_idle_stays_idle():
    world = World()
    world.replica("r", "ROLLOUT", (0, 1, 2, 3), state="RELEASED")
    world.was("SUCCEEDED", sources=["r"], targets=[(0, 1)])
    assert world.idle(busy=(4, 5, 6, 7)) == [("R", 0, 1)]
    assert last_shapes(world.fleet)[world.names[2]] == ()


async def test_where_the_hand_over_is_forgotten_the_newest_replica_says_what_belonged_together():
    world = World()
    world.replica("r", "ROLLOUT", (0, 1), state="RELEASED")
    world.replica("s", "ROLLOUT", (1, 2), state="RELEASED")
    assert ("R", 1, 2) in world.idle()
    world.was("SUCCEEDED", targets=[(2, 3)])
    assert ("R", 2, 3) in world.idle()


PARTS = st.lists(st.integers(0, 3), max_size=4, unique=True).map(tuple)
HISTORY = st.tuples(st.sampled_from(["SUCCEEDED", "ROLLED_BACK", "GRANTING"]), st.lists(PARTS, max_size=2), PARTS)


@given(st.lists(HISTORY, max_size=6), st.lists(st.sampled_from(["", "TRAINER", "ROLLOUT"]), min_size=4, max_size=4))
def test_whatever_happened_no_accelerator_is_given_out_twice(history, roles):
    async def body():
        world = World()
        for number, (state, sources, target) in enumerate(history):
            for at, numbers in enumerate(sources):
                world.replica(f"r{number}-{at}", "ROLLOUT", numbers, state="RELEASED")
            world.was(state, sources=[f"r{number}-{at}" for at in range(len(sources))], targets=[target])
        for name, role in zip(world.names, roles, strict=False):
            world.fleet.accelerators[name].role = role
        found = world.idle(busy=(4,))
        numbers = [n for _, *group in found for n in group]
        assert len(set(numbers)) == len(numbers)
        assert 4 not in numbers
        wanted = {n: (roles[n] or "ROLLOUT")[0] if n < 4 else "R" for n in range(8)}
        assert all(wanted[n] == role for role, *group in found for n in group)
        assert all(world.shapes.rates.has({"R": "ROLLOUT", "T": "TRAINER"}[r], "a", len(g)) for r, *g in found)

    asyncio.run(body())


async def test_a_shape_that_the_table_has_no_more_is_forgotten():
    world = World()
    world.was("SUCCEEDED", targets=[(0,)])
    assert world.idle(busy=(4, 5, 6, 7)) == [("R", 0, 1), ("R", 2, 3)]


async def test_what_stood_together_is_forgotten_where_a_node_came_back_with_others():
    world = World()
    world.was("SUCCEEDED", targets=[(0, 1, 2, 3)])
    assert world.idle(busy=(4, 5, 6, 7)) == [("R", 0, 1, 2, 3)]
    for field, value in (("type", "b"), ("pool", "CORE_TRAINING")):
        kept = getattr(world.fleet.accelerators[world.names[3]], field)
        setattr(world.fleet.accelerators[world.names[3]], field, value)
        assert world.idle(busy=(4, 5, 6, 7)) == [("R", 0, 1)], "one has become another"
        setattr(world.fleet.accelerators[world.names[3]], field, kept)
    del world.fleet.accelerators[world.names[3]]
    assert world.idle(busy=(4, 5, 6, 7)) == [("R", 0, 1)], "one is gone"


async def test_a_thousand_idle_accelerators_are_told_apart_at_once():
    world = World()
    for n in range(2, 256):
        for i in range(4):
            name = f"nodes/n{n}/accelerators/{i}"
            world.fleet.accelerators[name] = Accelerator(name, "a")
    calls = []
    world.fleet.reassignments = Counting(calls)
    assert len(world.shapes.idle(world.fleet, ())) == 512
    assert len(calls) == 1, "hand-overs are looked through once, not once for each"


class Counting(dict):
    """Notes when its values are asked for."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def values(self):
        self.calls.append(1)
        return super().values()


async def test_targets_have_the_level_of_their_degree_and_the_cap_of_the_table_or_the_smaller_one_of_the_configuration():
    world = World(RateTable("", engine_rates(degrees=(1, 2, 4), max_running=64), trainer_rates()), **CAPS)
    world.fleet.accelerators[world.names[4]].pool = "CORE_ROLLOUT"

    def target(role, *numbers):
        made = world.shapes.target(world.fleet, role, world.on(*numbers), "workers/w")
        return made.level, made.concurrency_cap

    assert [target("ROLLOUT", *numbers) for numbers in ((0,), (0, 1), (0, 1, 2, 3), (4,))] == [
        (0, 64), (1, 64), (2, 64), (0, 5),
    ]  # fmt: skip
    plain = World(None, **CAPS)
    assert plain.shapes.target(plain.fleet, "ROLLOUT", plain.on(0), "w").level == 7
    assert plain.shapes.target(plain.fleet, "ROLLOUT", plain.on(0), "w").concurrency_cap == 32


async def test_a_worker_holds_one_replica_at_a_time():
    world = World()
    world.replica("r", "ROLLOUT", (0, 1), "rollout-00")

    def names(freed=(), taken=()):
        found = free_worker(
            world.change, "ROLLOUT", world.on(2, 3), {f"workers/{w}" for w in freed}, {f"workers/{w}" for w in taken}
        )
        return found.worker.removeprefix("workers/") if found else None

    assert names() == "rollout-01"
    assert names(freed=["rollout-00"]) == "rollout-01", "who holds nothing before who has to let go"
    assert names(taken=["rollout-01"]) is None
    assert names(freed=["rollout-00"], taken=["rollout-01"]) == "rollout-00"
    world.worker("rollout-narrow", "ROLLOUT", world.on(2, 3))
    assert names() == "rollout-narrow", "the wide ones are kept for wide replicas"
    world.was("DRAINING", targets=[(0, 1)])
    world.fleet.reassignments["reassignments/0"].targets[0].worker = "workers/rollout-narrow"
    assert names() == "rollout-01", "it is spoken for"
    assert worker_for(world.change, "ROLLOUT", world.on(2, 3)).worker == "workers/rollout-00", "without a table: any"


def view(world):
    return fleet_view(world.change, world.observe)


async def test_the_planner_sees_the_sides_that_live_workers_could_take():
    world = World()
    world.replica("t", "TRAINER", (0, 1, 2), "trainer-00")
    world.replica("r", "ROLLOUT", (4, 5), "rollout-10")
    seen = view(world)
    assert {a.pool for a in seen.accelerators} == {"HYBRID"}
    assert len(seen.accelerators) == 8
    assert {a.node for a in seen.accelerators} == {"nodes/n0", "nodes/n1"}
    assert {r.name for r in seen.replicas if r.movable} == {"t", "r"}
    world.fleet.replicas["t"].reassignment = "reassignments/1"
    assert {r.name for r in view(world).replicas if r.movable} == {"r"}
    world.fleet.replicas["t"].reassignment = ""
    for name in ("trainer-10", "trainer-11"):
        world.fleet.sessions[f"workers/{name}/sessions/1"].state = "EXPIRED"
    pools = {a.name: a.pool for a in view(world).accelerators}
    assert {pools[n] for n in world.on(4, 5, 6, 7)} == {"CORE_ROLLOUT"}
    assert {pools[n] for n in world.on(0, 1, 2, 3)} == {"HYBRID"}
    world.fleet.accelerators[world.names[4]].pool = "CORE_TRAINING"
    assert not {r.name for r in view(world).replicas if r.movable} & {"r"}
    world.fleet.accelerators[world.names[6]].pool = "CORE_TRAINING"
    assert world.names[6] not in view(world).by_name, "nobody could take it"


@pytest.mark.parametrize("state", ["STARTING", "DRAINING", "RELEASING", "UNCONFIRMED", "QUARANTINED"])
async def test_what_is_on_its_way_or_lost_is_left_out(state):
    world = World()
    world.replica("r", "ROLLOUT", (0, 1), "rollout-00", state)
    seen = view(world)
    assert seen.replicas == ()
    assert not set(world.on(0, 1)) & set(seen.by_name)


async def test_what_an_operator_holds_stays_where_it_is():
    world = World()
    world.replica("r", "ROLLOUT", (0, 1), "rollout-00", "CORDONED")
    world.replica("s", "ROLLOUT", (4, 5), "rollout-10")
    world.fleet.nodes["nodes/n1"].cordoned = True
    seen = view(world)
    assert [(r.name, r.movable) for r in seen.replicas] == [("r", False), ("s", False)]
    assert {a.name for a in seen.free} == set(world.on(2, 3))


async def test_kinds_are_those_that_a_live_worker_could_hold_within_a_node():
    world = World()
    table = RateTable("", engine_rates(degrees=(2, 4, 8)), trainer_rates(sizes=(3, 6)))
    seen = view(world)
    kinds = {EngineKind("a", 2), EngineKind("a", 4), TrainerKind("a", 3)}
    assert makeable(world.change, seen, table) == kinds
    world.worker("both", "TRAINER", world.names)
    assert makeable(world.change, seen, table) == kinds, "six are on two nodes"
    for worker in world.fleet.workers.values():
        worker.cordoned = worker.kind == "ROLLOUT"
    assert makeable(world.change, seen, table) == {TrainerKind("a", 3)}
    world.replica("r", "ROLLOUT", (0, 1), "rollout-00")
    assert makeable(world.change, view(world), table) == {TrainerKind("a", 3), EngineKind("a", 2)}


async def test_a_replica_that_the_table_lacks_is_found():
    world = World()
    world.replica("t", "TRAINER", (0, 1, 2), "trainer-00")
    assert unrated(view(world), TABLE) is None
    world.replica("r", "ROLLOUT", (4,), "rollout-10")
    assert unrated(view(world), TABLE).name == "r"


async def test_host_memory_is_what_the_nodes_told():
    world = World()
    assert view(world).host_free_bytes == {}
    node = wire.Node(name="nodes/n1", host_memory_free_bytes=10**9)
    world.observe.loads["workers/node-1"] = wire.Load(node=wire.NodeLoad(node=node))
    assert view(world).host_free_bytes == {"nodes/n1": 1e9}
