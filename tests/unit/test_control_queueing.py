"""What the scheduler tells its live queue: preemptions that come to nothing, load reports, and the room that is kept."""

import pytest

from services.common import wire
from services.common.clock import ManualClock
from services.scheduler.config import SchedulerConfig
from services.scheduler.control import commands
from services.scheduler.control.decisions import Decisions
from services.scheduler.control.ledger import Ledger
from services.scheduler.control.observe import Observe
from services.scheduler.control.queueing import Queueing
from services.scheduler.core import cmlfq
from services.scheduler.core.model import Fleet, Group, Replica, Run, Session, Trajectory
from tests.support.queue_check import Reservations, same_queue


class World:
    """A fleet of engines in memory, without a store."""

    def __init__(self, levels, cap=8):
        self.clock = ManualClock()
        self.fleet = Fleet()
        self.fleet.runs["runs/r"] = Run("runs/r", "TRAIN", b"")
        self.fleet.groups["g"] = Group("g", "runs/r", 0, b"")
        self.ledger = Ledger(self.fleet, None, self.clock, SchedulerConfig())
        self.observe = Observe(self.ledger)
        self.queueing = Queueing(self.ledger, self.observe, Decisions())
        self.queueing.reservations = Reservations(self.queueing)
        for name, level in levels.items():
            session = self.fleet.sessions[f"s-{name}"] = Session(f"s-{name}", f"w-{name}", 1)
            self.fleet.replicas[name] = Replica(
                name, 1, "ROLLOUT", (), session.worker, "ACTIVE", session.name, level=level, concurrency_cap=cap,
                serving_run="runs/r", serving_lineage=1, serving_number=0,
            )  # fmt: skip

    def change(self):
        return self.ledger.change("test")

    def report(self, engine, **figures):
        """A worker's load report, a second after the last."""
        self.clock.advance(1.0)
        load = wire.Load(rollout=wire.RolloutLoad(engines=[wire.EngineLoad(replica=engine, **figures)]))
        self.observe.load(self.fleet.sessions[f"s-{engine}"], load)

    def queue(self, name, prompt=10):
        item = Trajectory(name, "runs/r", "g", 0, 0, prompt_tokens=prompt, queued_at=self.clock.now)
        self.fleet.trajectories[name] = item
        self.change().put(item)
        return item

    def decide(self):
        """One pass, compared with the reference."""
        change = self.change()
        self.queueing.follow(change)
        same_queue(self.queueing, change)
        self.queueing.decide(change)

    def follow(self):
        """What the live queue holds once it knows everything."""
        change = self.change()
        self.queueing.follow(change)
        same_queue(self.queueing, change)
        return self.queueing.live.view(change.at)


@pytest.mark.parametrize("told", [True, False])
async def test_a_move_that_expired_leads_nowhere_and_an_operators_preemption_after_it_neither(told):
    world = World({"slow": 0, "fast": 1})
    world.fleet.replicas["fast"].state = "STARTING"
    world.report("slow", running=1, seconds_per_token=0.02)
    item = world.queue("t")
    world.decide()
    assert item.replica == "slow"
    world.fleet.replicas["fast"].state = "ACTIVE"
    world.report("fast", running=1, seconds_per_token=0.002)
    world.clock.advance(3.0)
    item.generated_tokens, item.turns_done = 60, 1
    world.change().put(item)
    world.decide()
    assert (item.prefer, item.level) == ("fast", 1), "it is to move, past its quantum"

    if told:
        (row,) = world.follow().running
        assert (row.preempt_pending, row.target, row.level) == (True, "fast", 1)
    world.clock.advance(world.ledger.config.handover.command_s + 1.0)
    commands.expire(world.change())
    (row,) = world.follow().running
    assert (row.preempt_pending, row.target, row.level) == (False, "", 0)
    assert (item.prefer, item.level) == ("", 0)

    commands.preempt(world.change(), item, cause="operator", at_turn_end=False, code="OPERATOR", text="")
    (row,) = world.follow().running
    assert (row.preempt_pending, row.target, row.level) == (True, "", 0)


async def test_an_engines_speed_and_the_load_it_was_measured_at_keep_together():
    world = World({"e": 0})
    for running in (32, 32, 32, 8, 0):
        world.report("e", running=running, seconds_per_token=0.01 + 0.001 * max(1, running))
        rate = world.observe.engines["e"]
        assert rate.seconds_per_token == pytest.approx(0.01 + 0.001 * rate.measured_load), running
    assert rate.measured_load == pytest.approx(0.8 * (0.8 * 32 + 0.2 * 8) + 0.2)
    (view,) = world.queueing._engines(world.change())
    assert (view.seconds_per_token, view.measured_load) == (rate.seconds_per_token, rate.measured_load)
    slope = rate.speed.slope_at(view.measured_load, view.seconds_per_token)
    assert slope > 0
    assert view.seconds_per_sequence == slope

    world.report("e", running=0, seconds_per_token=0.0)
    (idle,) = world.queueing._engines(world.change())
    assert (idle.seconds_per_token, idle.measured_load) == (view.seconds_per_token, view.measured_load)
    assert idle.reported_at > view.reported_at
    world.follow()


async def test_kv_room_is_kept_for_what_leases_are_expected_to_generate_and_told_by_reports():
    world = World({"e": 0})
    world.report("e", running=1, seconds_per_token=0.02, kv_capacity_tokens=2_000)
    items = [world.queue(f"t{i}", prompt=200) for i in range(6)]
    world.decide()
    leased = [t for t in items if t.state == "LEASED"]
    assert 1 < len(leased) < len(items)
    rows = world.follow().running
    assert all(r.reserved == r.tokens + 0.5 * r.estimate_p50 for r in rows), "half is what it takes on average"
    assert sum(r.reserved for r in rows) <= 0.95 * 2_000
    for turn in range(1, 4):
        for item in leased:
            item.generated_tokens, item.turns_done = 40 * turn, turn
            world.change().put(item)
        world.report("e", running=len(leased), seconds_per_token=0.02, kv_capacity_tokens=2_000, kv_used_tokens=900)
        world.decide()
    assert all(t.state == "LEASED" for t in leased)


async def test_a_report_that_says_the_same_of_the_kv_cache_is_a_new_report():
    world = World({"e": 0})
    items = [world.queue(f"t{i}", prompt=300) for i in range(4)]
    world.decide()
    assert all(t.state == "LEASED" for t in items)
    for stopped in (1, 2):
        world.report("e", running=4, seconds_per_token=0.02, kv_capacity_tokens=1_000, kv_used_tokens=990)
        world.decide()
        asked = {c.subject for c in commands.open_commands(world.ledger, kind="preempt")}
        assert len(asked) == 1, "one makes room"
        (name,) = asked
        (command,) = commands.open_commands(world.ledger, kind="preempt")
        command.state = "SUCCEEDED"
        world.fleet.trajectories[name].state = "SCORED"
        world.change().put(world.fleet.trajectories[name])
        view = world.follow()
        assert view.engines[0].kv_used_tokens == 990 - 300, "what left since"
        assert len(view.running) == 4 - stopped
        assert cmlfq.decide(view, world.queueing._settings) == []
