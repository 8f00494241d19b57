"""The live queue decides what the reference decides on the same content, whatever happened before."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from services.scheduler.core import cmlfq
from services.scheduler.core.cmlfq import Assign, EngineView, QueuedTrajectory, QueueSettings, RunningTrajectory
from services.scheduler.core.livequeue import AMPLE, LiveQueue

RUNS = ("r", "s")
ENGINES = [f"e{i}" for i in range(6)]


@dataclass
class Row:
    """One trajectory as a plain record; queued if `engine` is empty."""

    name: str
    run: str
    group: str
    number: int
    priority: int
    level: int
    tokens: int
    generated: int
    since: float
    p50: float
    p90: float
    engine: str = ""
    base: int = 0
    lease_level: int = 0
    tool: bool = False
    pending: bool = False
    target: str = ""
    last: str = ""
    moves: int = 0
    reserved: float = 0.0
    told: float = 0.0
    """p50 that the live queue was last told."""


@dataclass
class Model:
    """The content as one would write it down, and the view that the reference is shown."""

    engines: dict[str, EngineView] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)

    def view(self, now):
        queued = [
            QueuedTrajectory(
                r.name, r.run, r.group, r.number, r.priority, r.level, r.since, r.tokens, r.generated, r.p50, r.p90, r.last,
            )
            for r in self.rows.values() if not r.engine
        ]  # fmt: skip
        running = [
            RunningTrajectory(
                r.name, r.run, r.engine, r.level, r.since, r.generated, r.generated - r.base, r.tool, r.p50, r.p90,
                r.tokens, r.pending, r.number, r.moves, r.target if r.pending else "", r.reserved,
            )
            for r in self.rows.values() if r.engine
        ]  # fmt: skip
        counts = {n: sum(r.engine == n for r in self.rows.values()) for n in self.engines}
        engines = [replace(e, running=counts[n]) for n, e in self.engines.items()]
        return cmlfq.QueueView(now, queued, running, engines)


# on a grid of quarters every sum is exact: sums of floats in another order could differ in the last bit
QUARTERS = st.integers(0, 2_400).map(lambda n: n / 4)
PLACES = st.builds(
    EngineView, name=st.sampled_from(ENGINES), run=st.sampled_from(RUNS), level=st.integers(0, 2),
    concurrency_cap=st.sampled_from([0, 1, 2, 4]), running=st.just(0), kv_capacity_tokens=st.sampled_from([0, 0, 512, 4_096]),
    kv_used_tokens=st.sampled_from([0, 100, 500, 511]),
    seconds_per_token=st.sampled_from([None, 0.0625, 0.03125, 0.015625]),
    prefill_tokens_per_second=st.sampled_from([None, 256.0, 4_096.0]), admitting=st.sampled_from([True, True, False]),
    seconds_per_sequence=st.sampled_from([None, 0.0, 0.015625, 0.0078125]), measured_load=st.sampled_from([0.0, 0.5, 1.0, 2.25, 4.0]),
    reported_at=st.integers(0, 2),
)  # fmt: skip
RULES = st.builds(
    QueueSettings, quantum_tokens=st.sampled_from([(), (48,), (48, 96)]), max_wait_s=st.sampled_from([2.0, 8.0]),
    max_moves=st.sampled_from([0, 1, 4, 50]), hysteresis=st.sampled_from([0.0, 0.25]), min_lease_s=st.sampled_from([0.0, 2.0]),
    min_remaining=st.sampled_from([0.0, 24.0]), max_moves_each=st.sampled_from([1, 3]),
    kv_growth=st.sampled_from([0.0, 0.5, 1.0]),
)  # fmt: skip


class Twins(RuleBasedStateMachine):
    """Drives the live queue and a plain model with the same events; `same` compares what they decide."""

    def __init__(self):
        super().__init__()
        self.model, self.now, self.serial = Model(), 100.0, 0
        self.rules = QueueSettings(quantum_tokens=(48, 96), max_wait_s=8.0)
        self.live = self.fresh()

    def fresh(self):
        return LiveQueue(self.rules, self.told)

    def told(self, name):
        r = self.model.rows[name]
        r.told = r.p50
        return r.p50, r.p90

    def pick(self, index, leased=None, pending=None):
        rows = [
            r for r in self.model.rows.values()
            if leased in (None, bool(r.engine)) and pending in (None, r.pending)
        ]  # fmt: skip
        return rows[index % len(rows)] if rows else None

    @initialize(rules=RULES)
    def choose_rules(self, rules):
        self.rules = rules
        self.live = self.fresh()

    # ---- engines

    @rule(place=PLACES)
    def engine(self, place):
        self.tell_engine(place)

    def tell_engine(self, place):
        """What it says of the KV cache counts once: what left since is not there again if it is told again."""
        self.live.engine(place)
        before = self.model.engines.get(place.name)
        if before and before.reported_at == place.reported_at:
            place = replace(place, kv_used_tokens=before.kv_used_tokens)
        self.model.engines[place.name] = place

    def left(self, r):
        """It holds no KV cache any more where it was leased."""
        place = self.model.engines.get(r.engine)
        if place and not r.tool:
            used = max(0, place.kv_used_tokens - r.tokens)
            self.model.engines[r.engine] = replace(place, kv_used_tokens=used)

    @rule(
        index=st.integers(0, 5),
        used=st.sampled_from([0, 300, 500, 512, 4_000]),
        rate=st.sampled_from([None, 0.0625, 0.0078125]),
        new=st.booleans(),
    )
    def load(self, index, used, rate, new):
        if self.model.engines:
            before = self.model.engines[sorted(self.model.engines)[index % len(self.model.engines)]]
            at = before.reported_at + new
            self.tell_engine(replace(before, kv_used_tokens=used, seconds_per_token=rate, reported_at=at))

    @rule(name=st.sampled_from(ENGINES))
    def drop(self, name):
        if self.model.engines.pop(name, None):
            self.live.drop_engine(name)

    # ---- trajectories

    def tell_queued(self, r):
        self.live.queued(
            r.name, run=r.run, group=r.group, admission_number=r.number, priority=r.priority, level=r.level,
            waiting_since=r.since, tokens=r.tokens, generated=r.generated, last_engine=r.last,
            moves=r.moves,
        )  # fmt: skip

    @rule(
        run=st.sampled_from(RUNS), number=st.integers(0, 3), priority=st.integers(0, 1), level=st.integers(0, 2),
        tokens=st.integers(1, 600), back=st.integers(0, 20), p50=QUARTERS, more=QUARTERS, count=st.integers(1, 4),
        last=st.sampled_from(["", *ENGINES]),
    )  # fmt: skip
    def queue(self, run, number, priority, level, tokens, back, p50, more, count, last):
        for _ in range(count):
            self.serial += 1
            r = Row(
                f"t{self.serial}", run, f"{run}{number}", number, priority, level, tokens, 0, self.now - back, p50, p50 + more, last=last,
            )  # fmt: skip
            self.model.rows[r.name] = r
            self.tell_queued(r)

    @rule(index=st.integers(0, 50), level=st.integers(0, 2))
    def queue_again(self, index, level):
        r = self.pick(index, leased=True)
        if r is None:
            return
        self.left(r)
        r.last, r.moves = r.target or r.engine, r.moves + r.pending
        r.engine, r.pending, r.target, r.tool, r.since, r.reserved = "", False, "", False, self.now, 0.0
        r.level = level
        self.tell_queued(r)

    @rule(index=st.integers(0, 50), engine=st.sampled_from(ENGINES), base=st.integers(0, 100), back=st.integers(0, 10))
    def lease_by_hand(self, index, engine, base, back):
        r = self.pick(index, leased=False)
        if r is not None:
            self.lease(r, engine, r.level, min(base, r.generated), self.now - back)

    def lease(self, r, engine, level, base, since):
        r.engine, r.level, r.lease_level, r.since, r.base = engine, level, level, since, base
        r.reserved = self.reservation(r, r.p50)
        self.live.leased(r.name, engine=engine, level=level, since=since, base=base)

    def reservation(self, r, p50):
        place = self.model.engines.get(r.engine)
        return r.tokens + self.rules.kv_growth * p50 if place and place.kv_capacity_tokens else 0.0

    def turned(self, r, **changes):
        """Its reservation is made anew, with a fresh estimate if its engine's cache is not ample, or at first."""
        place = self.model.engines.get(r.engine)
        kept = sum(max(o.tokens, o.reserved) for o in self.model.rows.values() if o.engine == r.engine)
        fresh = not r.reserved or kept > AMPLE * (place.kv_capacity_tokens if place else 0)
        for name, value in changes.items():
            setattr(r, name, value)
        r.reserved = self.reservation(r, r.p50 if fresh else r.told)
        self.live.turned(r.name, generated=r.generated, tokens=r.tokens, in_tool_wait=r.tool)

    @rule(index=st.integers(0, 50), more=st.integers(0, 80), tool=st.booleans(), p50=QUARTERS)
    def turn(self, index, more, tool, p50):
        r = self.pick(index, leased=True)
        if r is not None:
            generated, tokens = r.generated + more, r.tokens + more + 3
            self.turned(r, generated=generated, tokens=tokens, tool=tool, p50=p50, p90=2 * p50)

    @rule(index=st.integers(0, 50), less=st.integers(1, 80))
    def shrink(self, index, less):
        r = self.pick(index, leased=True)
        if r is not None:
            self.turned(r, tokens=max(1, r.tokens - less))

    @rule(index=st.integers(0, 50), level=st.integers(0, 2), to=st.sampled_from(["", *ENGINES]))
    def preempt_by_hand(self, index, level, to):
        r = self.pick(index, leased=True)
        if r is not None:
            self.preempt(r, level, to)

    def preempt(self, r, level, target):
        r.level, r.target, r.pending = level, target, True
        self.live.preempting(r.name, level=level, target=target)

    @rule(index=st.integers(0, 50))
    def go_on(self, index):
        r = self.pick(index, leased=True, pending=True)
        if r is not None:
            r.pending, r.target, r.level = False, "", r.lease_level
            self.live.going_on(r.name)

    @rule(index=st.integers(0, 50))
    def end(self, index):
        r = self.pick(index)
        if r is not None:
            self.left(r)
            del self.model.rows[r.name]
            self.live.ended(r.name)

    @rule(run=st.sampled_from(RUNS), number=st.integers(0, 3), share=st.sampled_from([0.5, 1.25, 2.0]))
    def group_learns(self, run, number, share):
        for r in self.model.rows.values():
            if r.group == f"{run}{number}":
                r.p50, r.p90 = round(share * r.p50), round(2 * share * r.p50) + 8
        self.live.group_learnt(f"{run}{number}")

    @rule(halves=st.integers(1, 20))
    def time_passes(self, halves):
        self.now += halves / 2

    # ---- decisions

    @rule(share=st.sampled_from([1, 1, 1, 2, 3]))
    def decide_and_do(self, share):
        self.carry_out(share)

    def carry_out(self, share):
        """Decides, and does every `share`-th of what was decided."""
        actions = self.same()
        for action in actions[::share]:
            r = self.model.rows[action.trajectory]
            if isinstance(action, Assign):
                self.lease(r, action.engine, action.level, r.generated, self.now)
            else:
                self.preempt(r, action.level, action.target_engine)
        return actions

    def same(self):
        wanted = cmlfq.decide(self.model.view(self.now), self.rules)
        assert self.live.decide(self.now) == wanted
        return wanted

    @invariant()
    def nothing_is_left_behind(self):
        assert len(self.live) == len(self.model.rows)
        if not self.model.rows and not self.model.engines:
            assert not self.live._runs
            assert not self.live._engines
            assert not self.live._groups


class Busy(Twins):
    """The same, deciding after each event: what is remembered from decision to decision is used as often as can be."""

    @invariant()
    def decided_at_once(self):
        self.decide_and_do(1)


def walk(seed, steps, machine):
    """A long random course of the same events, mostly as a fleet's would be; counts what was decided, by reason."""
    rng, decided = random.Random(seed), Counter()
    m = machine()
    quantum = rng.choice([(48,), (48, 96), (20, 1_000)])
    m.choose_rules(
        QueueSettings(
            quantum_tokens=quantum, max_wait_s=rng.choice([2.0, 8.0, 1_000.0]), max_moves=rng.choice([0, 1, 4, 50]),
            min_lease_s=rng.choice([0.0, 2.0]), max_moves_each=rng.choice([1, 3, 100]),
            hysteresis=rng.choice([0.0, 0.25]), kv_growth=rng.choice([0.0, 0.5, 1.0]),
        )
    )  # fmt: skip
    runs, roomy, crowd = rng.choice([RUNS, RUNS[:1]]), rng.choice([0, 0.5, 1]), rng.choice([8, 20, 60])

    def place(name):
        return EngineView(
            name, rng.choice(runs), rng.choice([0, 0, 1, 2]), rng.choice([1, 2, 4, 8]), 0,
            0 if rng.random() < roomy else rng.choice([512, 2_048, 8_192]), rng.choice([0, 0, 100, 500, 2_010]),
            rng.choice([0.125, 0.03125, 0.015625, 0.0625, None]), rng.choice([None, 256.0, 4_096.0]), rng.random() < 0.9,
            rng.choice([None, 0.0, 0.015625, 0.0078125]), rng.choice([0.0, 0.5, 1.0, 2.25, 4.0]), rng.randrange(3),
        )  # fmt: skip

    def quarters(most):
        return rng.randrange(4 * most) / 4

    for name in ENGINES:
        m.engine(place(name))
    for _ in range(steps):
        i, kind = rng.randrange(10_000), rng.random()
        if kind < 0.2 and len(m.model.rows) < crowd:
            m.queue(
                rng.choice(runs), rng.randrange(4), rng.randrange(2), rng.randrange(2), rng.randint(1, 300),
                rng.choice([0, 0, 5, 20]), quarters(300), quarters(100), rng.randint(1, 4),
                rng.choice(["", *ENGINES]),
            )  # fmt: skip
        elif kind < 0.4:
            m.turn(i, rng.randrange(40), rng.random() < 0.5, quarters(400))
        elif kind < 0.47:
            m.time_passes(rng.randint(1, 6))
        elif kind < 0.57:
            r = m.pick(i, leased=True, pending=True)
            if r is not None:
                m.queue_again(list(m.model.rows.values()).index(r), r.level) if rng.random() < 0.8 else m.go_on(i)
        elif kind < 0.63:
            m.end(i)
        elif kind < 0.66:
            m.group_learns(rng.choice(runs), rng.randrange(4), rng.choice([0.5, 0.75, 1.25, 2.0]))
        elif kind < 0.70:
            m.load(
                i,
                rng.choice([0, 300, 500, 511, 2_000, 8_000]),
                rng.choice([None, 0.0625, 0.0625, 0.0078125]),
                rng.random() < 0.8,
            )
        elif kind < 0.71:
            m.engine(place(rng.choice(ENGINES)))
        elif kind < 0.715:
            m.drop(rng.choice(ENGINES))
        elif kind < 0.73:
            rng.choice([m.lease_by_hand, lambda n, e, *_: m.preempt_by_hand(n, 1, e)])(i, rng.choice(ENGINES), 0, 0)
        elif kind < 0.74:
            m.shrink(i, rng.randint(1, 80))
        if kind > 0.7 or machine is Busy:
            decided.update(a.reason.code for a in m.carry_out(rng.choice([1, 1, 1, 1, 2])))
    return decided


@pytest.mark.parametrize("machine", [Twins, Busy])
def test_long_random_courses_are_decided_as_the_reference_would(machine):
    seeds = range(120)
    decided = sum((walk(seed, 300, machine) for seed in seeds), Counter())
    for code in ("AGED", "PREFERRED", "LEAST_LOADED", "KV_PRESSURE", "STARVING", "QUANTUM", "REHOME"):
        assert decided[code] > 20, decided


@pytest.mark.parametrize("machine", [Twins, Busy])
def test_every_decision_is_that_of_the_reference(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=120, stateful_step_count=60, deadline=None))


def one_engine(slots=1, **changes):
    """A live queue with one engine, and the names whose estimates were asked for."""
    asked = []

    def estimate(name):
        asked.append(name)
        return 50.0, 100.0

    live = LiveQueue(QueueSettings(quantum_tokens=(48,)), estimate)
    base = EngineView("e0", "r", 0, slots, 0, 0, 0, 0.02, 1_000.0, True)
    live.engine(replace(base, **changes))
    return live, asked


def wait(live, name, at=0.0, **changes):
    base = {"run": "r", "group": "g", "admission_number": 0, "priority": 0, "level": 0, "tokens": 10, "generated": 0}
    live.queued(name, waiting_since=at, **(base | changes))


def test_a_turn_that_can_change_nothing_asks_for_no_estimate():
    live, asked = one_engine()
    for i in range(50):
        wait(live, f"q{i}", admission_number=i)
    (action,) = live.decide(0.0)
    live.leased(action.trajectory, engine=action.engine, level=0, since=0.0)
    asked.clear()
    for n in range(1, 40):
        live.turned(action.trajectory, generated=10 * n, tokens=10 + 10 * n, in_tool_wait=True)
        assert live.decide(n * 0.5) == []
    assert asked == []


def test_a_turn_on_an_engine_with_a_bounded_cache_asks_once_more_than_half_of_it_is_kept():
    live, asked = one_engine(2, kv_capacity_tokens=1_000)
    wait(live, "a", tokens=100)
    (action,) = live.decide(0.0)
    live.leased(action.trajectory, engine=action.engine, level=0, since=0.0)
    assert asked.count("a") == 1, "the place was chosen by it"
    for tokens in (200, 300, 480):
        live.turned("a", generated=tokens, tokens=tokens, in_tool_wait=False)
    assert asked.count("a") == 1, "480 and half of 50 to come are known of when the next turn is reported"
    for tokens in (485, 490):
        live.turned("a", generated=tokens, tokens=tokens, in_tool_wait=False)
    assert asked.count("a") == 3


def test_estimates_are_held_until_the_own_event_or_a_siblings_end():
    live, asked = one_engine()
    for name in ("a", "b"):
        wait(live, name)
    live.decide(0.0)
    live.decide(1.0)
    assert sorted(asked) == ["a", "b"]
    live.group_learnt("g")
    live.decide(2.0)
    assert sorted(asked) == ["a", "a", "b", "b"]


def test_a_rate_that_wavers_is_the_same_rate():
    live, _ = one_engine()
    live.engine(EngineView("e0", "r", 0, 1, 0, 0, 0, 0.0203, 1_000.0, True))
    assert live.view(0.0).engines[0].seconds_per_token == 0.02
    live.engine(EngineView("e0", "r", 0, 1, 0, 0, 0, 0.022, 1_000.0, True))
    assert live.view(0.0).engines[0].seconds_per_token == 0.022


def test_events_that_do_not_fit_the_state_are_errors():
    live, _ = one_engine()
    wait(live, "a")
    with pytest.raises(KeyError):
        live.leased("nobody", engine="e0", level=0, since=0.0)
    for wrong in (
        lambda: live.turned("a", generated=1, tokens=1, in_tool_wait=False),
        lambda: live.preempting("a", level=0),
        lambda: live.going_on("a"),
        lambda: wait(live, "a", run="other"),
    ):
        with pytest.raises(ValueError, match="a "):
            wrong()
    live.leased("a", engine="e0", level=0, since=0.0)
    with pytest.raises(ValueError, match="does not wait"):
        live.leased("a", engine="e0", level=0, since=0.0)
    live.ended("a")
    live.drop_engine("e0")
    with pytest.raises(KeyError):
        live.drop_engine("e0")


def test_one_report_of_a_full_cache_stops_only_as_many_as_it_takes():
    live, _ = one_engine(8, kv_capacity_tokens=1_000, kv_used_tokens=0)
    for i in range(8):
        wait(live, f"t{i}", admission_number=i, tokens=123)
        live.leased(f"t{i}", engine="e0", level=0, since=0.0)
    full = EngineView("e0", "r", 0, 8, 8, 1_000, 984, 0.02, 1_000.0, True, reported_at=1.0)
    live.engine(full)
    (stop,) = live.decide(1.0)
    assert (stop.trajectory, stop.reason.code) == ("t7", "KV_PRESSURE")
    live.preempting("t7", level=0)
    wait(live, "t7", at=1.0, admission_number=7, tokens=123)
    assert live.decide(1.0) == []
    live.engine(full)
    assert live.decide(1.1) == [], "the same report again says nothing new"
    live.engine(replace(full, reported_at=2.0))
    assert [a.trajectory for a in live.decide(2.0)] == ["t6"]
