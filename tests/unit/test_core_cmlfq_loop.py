"""The multi-level queue over time: decisions carried out again and again on a small simulated fleet."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.cmlfq import (
    Assign,
    EngineView,
    Preempt,
    QueuedTrajectory,
    QueueSettings,
    QueueView,
    RunningTrajectory,
    decide,
)


@dataclass(slots=True)
class Item:
    """A trajectory: what it needs, and where it is."""

    name: str
    number: int
    prompt: int
    needs: int
    """Tokens to generate in all."""
    arrives: float = 0.0
    priority: int = 0
    level: int = 0
    made: float = 0.0
    at_lease: float = 0.0
    since: float = 0.0
    """Queued or leased since."""
    engine: str = ""
    last: str = ""
    pending_until: float = 0.0
    target: str = ""
    moves: int = 0
    started: float | None = None
    ended: float | None = None

    @property
    def tokens(self) -> int:
        return self.prompt + int(self.made)


@dataclass(slots=True)
class Engine:
    """One replica: a token of each of n sequences costs seconds_per_token x (1 + slowdown x (n - 1))."""

    name: str
    level: int = 0
    cap: int = 4
    seconds_per_token: float = 0.02
    slowdown: float = 0.3
    kv: int = 0


@dataclass(slots=True)
class Fleet:
    """Runs items on engines, one decision a tick, and asserts what holds for each decision."""

    engines: list[Engine]
    items: list[Item]
    rules: QueueSettings = field(default_factory=QueueSettings)
    tick: float = 0.5
    preempt_takes: float = 0.5
    guess: Callable[[Item], float] = lambda item: item.needs - item.made
    now: float = 0.0
    decisions: list[Assign | Preempt] = field(default_factory=list)

    def on(self, engine: str) -> list[Item]:
        return [i for i in self.items if i.engine == engine]

    def per_token(self, engine: Engine) -> float:
        return engine.seconds_per_token * (1 + engine.slowdown * max(0, len(self.on(engine.name)) - 1))

    def advance(self) -> None:
        self.now += self.tick
        for engine in self.engines:
            rate = self.tick / self.per_token(engine)
            for item in self.on(engine.name):
                item.made += rate
                if item.made >= item.needs:
                    item.made, item.ended, item.engine, item.target = item.needs, self.now, "", ""
                elif item.pending_until and item.pending_until <= self.now:
                    item.last, item.engine, item.target = item.target, "", ""
                    item.since, item.pending_until, item.moves = self.now, 0.0, item.moves + 1

    def view(self) -> QueueView:
        here = [i for i in self.items if i.arrives <= self.now and i.ended is None]
        return QueueView(
            self.now,
            [
                QueuedTrajectory(
                    name=i.name, run="r", group="g", admission_number=i.number, priority=i.priority, level=i.level,
                    waiting_since=max(i.since, i.arrives), tokens=i.tokens, generated=int(i.made),
                    estimate_p50=self.guess(i), estimate_p90=2 * self.guess(i), last_engine=i.last,
                )
                for i in here if not i.engine
            ],
            [
                RunningTrajectory(
                    name=i.name, run="r", engine=i.engine, level=i.level, since=i.since, generated=int(i.made),
                    quantum_used=int(i.made - i.at_lease), in_tool_wait=False, estimate_p50=self.guess(i),
                    estimate_p90=2 * self.guess(i), tokens=i.tokens, preempt_pending=bool(i.pending_until),
                    admission_number=i.number, moves=i.moves, target=i.target,
                )
                for i in here if i.engine
            ],
            [
                EngineView(
                    name=e.name, run="r", level=e.level, concurrency_cap=e.cap, running=len(self.on(e.name)),
                    kv_capacity_tokens=e.kv, kv_used_tokens=sum(i.tokens for i in self.on(e.name)) if e.kv else 0,
                    seconds_per_token=self.per_token(e), prefill_tokens_per_second=1_000.0, admitting=True,
                )
                for e in self.engines
            ],
        )  # fmt: skip

    def step(self) -> None:
        self.advance()
        by_name = {i.name: i for i in self.items}
        actions = decide(self.view(), self.rules)
        assert len({a.trajectory for a in actions}) == len(actions), "two actions for one"
        assert sum(isinstance(a, Preempt) for a in actions) <= self.rules.max_moves
        for action in actions:
            item = by_name[action.trajectory]
            if isinstance(action, Assign):
                assert not item.engine
                item.engine, item.level, item.since, item.at_lease = action.engine, action.level, self.now, item.made
                item.started = self.now if item.started is None else item.started
            else:
                assert not item.pending_until, "a preempt that is pending was asked for again"
                item.level, item.target = action.level, action.target_engine
                item.pending_until = self.now + self.preempt_takes
        for engine in self.engines:
            assert len(self.on(engine.name)) <= engine.cap, "an engine has more than its cap"
        self.decisions += actions

    def run(self, until: float) -> None:
        while self.now < until and any(i.ended is None for i in self.items):
            self.step()


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_everyone_is_served_in_the_end(seed):
    """Random fleets, lengths, priorities and (wrong) estimates: all end, and no one moves more often than allowed."""
    rng = random.Random(seed)
    engines = [
        Engine(
            f"e{i}", level=rng.choice([0, 0, 1]), cap=rng.randint(1, 4), seconds_per_token=rng.uniform(0.01, 0.05),
            kv=rng.choice([0, 0, 1_500]),
        )
        for i in range(rng.randint(1, 4))
    ]  # fmt: skip
    items = [
        Item(
            f"t{i}", i, prompt=rng.randint(5, 200), needs=int(min(1_000, rng.lognormvariate(4, 1)) + 1),
            arrives=rng.uniform(0, 30), priority=rng.choice([0, 0, 0, 5]),
        )
        for i in range(rng.randint(1, 24))
    ]  # fmt: skip
    wrong = {i.name: rng.uniform(0.3, 3) for i in items}
    rules = QueueSettings(quantum_tokens=(48,), max_wait_s=rng.choice([1.0, 20.0]), max_moves=rng.randint(1, 4))
    fleet = Fleet(
        engines, items, rules, preempt_takes=rng.choice([0.5, 3.0]), guess=lambda i: wrong[i.name] * (i.needs - i.made)
    )
    fleet.run(2_000.0)
    assert all(i.ended is not None for i in items), (seed, [i for i in items if i.ended is None])
    asked = [a for a in fleet.decisions if isinstance(a, Preempt) and a.reason.code in ("QUANTUM", "REHOME")]
    for item in items:
        assert sum(a.trajectory == item.name for a in asked) <= rules.max_moves_each, seed


def test_a_long_context_is_not_kept_out_by_a_stream_of_short_ones():
    # slots are free all the time; what it needs is more of the KV cache than is ever free at once
    engines = [Engine(f"e{i}", cap=16, kv=1_000) for i in range(2)]
    large = Item("large", 0, prompt=700, needs=100)
    small = [Item(f"s{i}", i + 1, prompt=100, needs=60, arrives=i * 0.2) for i in range(500)]
    fleet = Fleet(engines, [*small, large], QueueSettings(max_wait_s=10.0))
    large.arrives = 5.0
    while fleet.now < 60.0:
        fleet.step()
    assert large.started is not None, "it never found room"
    assert large.started <= 25.0
    ended = sum(i.ended is not None for i in small)
    assert ended >= 0.7 * sum(i.arrives < 55.0 for i in small), "the others go on meanwhile"


def test_what_no_engine_can_hold_blocks_nobody():
    engines = [Engine("e0", cap=4, kv=1_000)]
    items = [Item("huge", 0, prompt=5_000, needs=10), *(Item(f"s{i}", i + 1, prompt=50, needs=50) for i in range(20))]
    fleet = Fleet(engines, items, QueueSettings(max_wait_s=1.0))
    fleet.run(100.0)
    assert [i.name for i in items if i.ended is None] == ["huge"]


def test_kv_pressure_waits_for_those_it_has_stopped():
    """A preemption takes 3 s here: until then the cache stays full, and the next decisions must not stop the rest."""
    items = [Item(f"t{i}", i, prompt=150, needs=1_000, engine="e0") for i in range(6)]
    fleet = Fleet([Engine("e0", cap=8, seconds_per_token=0.2, kv=905)], items, preempt_takes=3.0)
    for _ in range(4):
        fleet.step()
    stopped = [a.trajectory for a in fleet.decisions if isinstance(a, Preempt)]
    assert len(stopped) == 1, stopped
    assert fleet.decisions[0].reason.code == "KV_PRESSURE"


# ---- single decisions: ties, places, what a move needs


def engine(name, **changes):
    base = {
        "run": "r", "level": 0, "concurrency_cap": 4, "running": 0, "kv_capacity_tokens": 0, "kv_used_tokens": 0,
        "seconds_per_token": 0.02, "prefill_tokens_per_second": 1_000.0, "admitting": True,
    }  # fmt: skip
    return EngineView(name=name, **(base | changes))


def lease(name, place, **changes):
    base = {
        "run": "r", "level": 0, "since": 0.0, "generated": 60, "quantum_used": 60, "in_tool_wait": False,
        "estimate_p50": 200.0, "estimate_p90": 400.0, "tokens": 80, "preempt_pending": False,
    }  # fmt: skip
    return RunningTrajectory(name=name, engine=place, **(base | changes))


@pytest.mark.parametrize(
    "others",
    [{"level": 1}, {"run": "other"}, {"admitting": False}, {"running": 3}],
    ids=["another-level", "another-run", "not-admitting", "busy"],
)
@pytest.mark.parametrize("seed", range(3))
def test_case_64_ties_are_spread_evenly_whatever_else_is_there(others, seed):
    # the others stand between and around the four idle ones in the order of names
    rng = random.Random(seed)
    names = [f"replicas/{i}" for i in range(10)]
    idle = sorted(rng.sample(names, 4))
    engines = [engine(n) if n in idle else engine(n, **others) for n in names]
    counts = dict.fromkeys(idle, 0)
    for i in range(200):
        item = QueuedTrajectory(
            f"runs/r/trajectories/{rng.getrandbits(64):x}", "r", "g", i, 0, 0, 0.0, 10, 0, 50.0, 90.0, ""
        )
        (action,) = decide(QueueView(1.0, [item], [], engines), QueueSettings())
        counts[action.engine] += 1
    assert all(30 <= n <= 70 for n in counts.values()), (seed, counts)


@pytest.mark.parametrize("source_cap", [0, 1])
def test_an_engine_without_places_is_passed_over(source_cap):
    closed, open_ = engine("e0", concurrency_cap=0), engine("e1", concurrency_cap=source_cap, running=1)
    leases = [lease("t0", "e1", quantum_used=0)]
    assert decide(QueueView(100.0, [], leases, [closed, open_]), QueueSettings()) == []


FLOATS = st.floats(0.0, 600.0)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.001, 0.1), st.integers(1, 4)), min_size=2, max_size=4),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 120), FLOATS, st.integers(1, 400), st.booleans()),
        min_size=1, max_size=10,
    ),
    st.floats(0.0, 2.0),
)  # fmt: skip
def test_every_move_gains_more_than_it_costs(rates, leases, hysteresis):
    rules = QueueSettings(quantum_tokens=(48, 90), hysteresis=hysteresis)
    rows = [
        lease(f"t{i}", f"e{place % len(rates)}", quantum_used=used, estimate_p50=left, tokens=tokens, in_tool_wait=wait)
        for i, (place, used, left, tokens, wait) in enumerate(leases)
    ]
    engines = {
        f"e{i}": engine(
            f"e{i}", level=level, seconds_per_token=rate, concurrency_cap=cap * 3,
            running=sum(r.engine == f"e{i}" for r in rows),
        )
        for i, (level, rate, cap) in enumerate(rates)
    }  # fmt: skip
    by_name = {r.name: r for r in rows}
    for action in decide(QueueView(100.0, [], rows, list(engines.values())), rules):
        assert isinstance(action, Preempt)
        item, here, there = by_name[action.trajectory], engines[action.engine], engines[action.target_engine]
        gain = item.estimate_p50 * (here.seconds_per_token - there.seconds_per_token)
        cost = rules.handover_s + item.tokens / there.prefill_tokens_per_second
        assert gain > cost * (1 + hysteresis)
        spent = item.quantum_used >= (48, 90)[item.level]
        assert action.reason.code == ("QUANTUM" if spent else "REHOME")
        assert action.at_turn_end is not item.in_tool_wait
        assert item.estimate_p50 >= (rules.min_remaining if spent else 2 * rules.min_remaining)


def test_case_65_the_tail_goes_to_idle_faster_engines_within_the_bound_of_moves():
    def fleet(hysteresis):
        items = [Item(f"t{i}", i, prompt=50, needs=900, engine="e0") for i in range(4)]
        engines = [
            Engine("e0", cap=8, seconds_per_token=0.02),
            *(Engine(f"f{i}", level=1, cap=2, seconds_per_token=0.01) for i in range(2)),
        ]
        return Fleet(engines, items, QueueSettings(quantum_tokens=(10_000,), hysteresis=hysteresis))

    stuck, free = fleet(1e9), fleet(0.25)
    stuck.run(200.0)
    free.run(200.0)
    assert not any(i.moves for i in stuck.items)
    assert max(i.ended for i in free.items) < 0.6 * max(i.ended for i in stuck.items)
    assert sum(i.moves for i in free.items) <= 4
