"""The multi-level queue: laws that hold for every view, and what it does in the situations it was made for."""

import math
import random
from dataclasses import replace

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

RULES = QueueSettings(quantum_tokens=(48, 1_000_000))


def engine(name="e0", **changes):
    base = {
        "run": "r", "level": 0, "concurrency_cap": 4, "running": 0, "kv_capacity_tokens": 0, "kv_used_tokens": 0,
        "seconds_per_token": 0.02, "prefill_tokens_per_second": 1_000.0, "admitting": True,
    }  # fmt: skip
    return EngineView(name=name, **(base | changes))


def queued(name="q0", **changes):
    base = {
        "run": "r", "group": "g", "admission_number": 0, "priority": 0, "level": 0, "waiting_since": 100.0,
        "tokens": 10, "generated": 0, "estimate_p50": 50.0, "estimate_p90": 100.0, "last_engine": "",
    }  # fmt: skip
    return QueuedTrajectory(name=name, **(base | changes))


def running(name="t0", **changes):
    base = {
        "run": "r", "engine": "e0", "level": 0, "since": 50.0, "generated": 60, "quantum_used": 60,
        "in_tool_wait": False, "estimate_p50": 200.0, "estimate_p90": 400.0, "tokens": 80, "preempt_pending": False,
    }  # fmt: skip
    return RunningTrajectory(name=name, **(base | changes))


def look(engines, waiting=(), leased=(), now=101.0, rules=RULES):
    """A decision, with each engine's running count as the leases say."""
    counted = [replace(e, running=max(e.running, sum(t.engine == e.name for t in leased))) for e in engines]
    return decide(QueueView(now, tuple(waiting), tuple(leased), tuple(counted)), rules)


def assigned(actions):
    return {a.trajectory: a.engine for a in actions if isinstance(a, Assign)}


def preempted(actions):
    return [a for a in actions if isinstance(a, Preempt)]


# ---- laws

RUNS = st.sampled_from(["r", "s"])
NAMES = st.sampled_from([f"e{i}" for i in range(5)])
ENGINES = st.lists(
    st.builds(
        EngineView, name=NAMES, run=RUNS, level=st.integers(0, 2), concurrency_cap=st.integers(1, 6),
        running=st.just(0), kv_capacity_tokens=st.sampled_from([0, 400, 5_000]), kv_used_tokens=st.integers(0, 400),
        seconds_per_token=st.one_of(st.none(), st.floats(0.001, 0.1)),
        prefill_tokens_per_second=st.one_of(st.none(), st.floats(10, 10_000)), admitting=st.booleans(),
    ),
    unique_by=lambda e: e.name, max_size=5,
)  # fmt: skip
QUEUED = st.lists(
    st.builds(
        QueuedTrajectory, name=st.sampled_from([f"q{i}" for i in range(20)]), run=RUNS, group=st.just("g"),
        admission_number=st.integers(0, 5), priority=st.integers(0, 1), level=st.integers(0, 2),
        waiting_since=st.floats(0, 100), tokens=st.integers(1, 300), generated=st.integers(0, 200),
        estimate_p50=st.floats(0, 500), estimate_p90=st.floats(0, 900), last_engine=st.one_of(st.just(""), NAMES),
    ),
    unique_by=lambda t: t.name, max_size=20,
)  # fmt: skip
RUNNING = st.lists(
    st.builds(
        RunningTrajectory, name=st.sampled_from([f"t{i}" for i in range(20)]), run=RUNS, engine=NAMES,
        level=st.integers(0, 2), since=st.floats(0, 100), generated=st.integers(0, 500),
        quantum_used=st.integers(0, 300), in_tool_wait=st.booleans(), estimate_p50=st.floats(0, 500),
        estimate_p90=st.floats(0, 900), tokens=st.integers(1, 300), preempt_pending=st.booleans(),
        admission_number=st.integers(0, 5), moves=st.integers(0, 4), target=st.one_of(st.just(""), NAMES),
    ),
    unique_by=lambda t: t.name, max_size=20,
)  # fmt: skip


@settings(max_examples=120)
@given(ENGINES, QUEUED, RUNNING, st.integers(0, 6), st.randoms(use_true_random=False))
def test_laws_of_every_decision(engines, waiting, leased, max_moves, rng):
    leased = [t for t in leased if t.engine in {e.name for e in engines}]
    rules = QueueSettings(quantum_tokens=(48, 200), max_moves=max_moves)
    counted = [replace(e, running=sum(t.engine == e.name for t in leased)) for e in engines]
    actions = decide(QueueView(120.0, tuple(waiting), tuple(leased), tuple(counted)), rules)

    names = [a.trajectory for a in actions]
    assert len(names) == len(set(names)), "at most one action for each trajectory"
    assert len(preempted(actions)) <= max_moves
    by_name = {e.name: e for e in counted}
    waiting_by_name = {t.name: t for t in waiting}
    leased_by_name = {t.name: t for t in leased}
    given_to = dict.fromkeys(by_name, 0)
    for name, place in assigned(actions).items():
        item, target = waiting_by_name[name], by_name[place]
        assert target.admitting
        assert target.run == item.run
        given_to[place] += 1
    for place, count in given_to.items():
        free = by_name[place].concurrency_cap - by_name[place].running
        assert count <= max(0, free), "never more than the cap"
    for action in preempted(actions):
        item = leased_by_name[action.trajectory]
        assert not item.preempt_pending
        assert action.engine == item.engine
        assert action.level >= item.level or action.reason.code == "REHOME"
        if action.target_engine:
            target = by_name[action.target_engine]
            assert action.target_engine != item.engine
            assert target.admitting
            assert target.run == item.run
            moved = sum(p.target_engine == target.name for p in preempted(actions))
            assert target.running + given_to[target.name] + moved <= target.concurrency_cap
    assert all(a.reason.code and a.reason.text for a in actions)

    shuffled = [list(waiting), list(leased), list(counted)]
    for rows in shuffled:
        rng.shuffle(rows)
    again = decide(QueueView(120.0, *(tuple(rows) for rows in shuffled)), rules)
    assert again == actions, "the order of the view does not matter"


@given(ENGINES, QUEUED)
def test_nothing_eligible_waits_while_an_engine_is_free(engines, waiting):
    engines = [replace(e, kv_capacity_tokens=0) for e in engines]
    rules = QueueSettings(quantum_tokens=())  # without a quantum nothing is promoted: each queues in its own level
    placed = assigned(look(engines, waiting, rules=rules))
    for item in waiting:
        if item.name in placed:
            continue
        for place in engines:
            if not place.admitting or place.run != item.run:
                continue
            used = sum(p == place.name for p in placed.values())
            kept = place.level > item.level and place.concurrency_cap > 1 and 101.0 - item.waiting_since <= 20.0
            reserve = math.ceil(place.concurrency_cap * rules.reserve_share) if kept else 0
            assert used >= place.concurrency_cap - reserve, (item, place)


# ---- placement


def test_case_64_ties_do_not_always_go_to_the_first_engine():
    rng = random.Random(64)
    engines = [engine(f"e{i}") for i in range(4)]
    counts = dict.fromkeys((e.name for e in engines), 0)
    for i in range(200):
        name = f"runs/r/trajectories/{i}-{rng.randrange(8)}"
        counts[assigned(look(engines, [queued(name, admission_number=i)]))[name]] += 1
    assert all(30 <= n <= 70 for n in counts.values()), counts


def test_the_least_loaded_engine_is_chosen_by_its_share_not_its_count():
    engines = [engine("big", concurrency_cap=16, running=4), engine("small", concurrency_cap=4, running=3)]
    assert assigned(look(engines, [queued()])) == {"q0": "big"}


def test_it_goes_back_to_its_engine_unless_that_is_full():
    engines = [engine("e0", concurrency_cap=8, running=5), engine("e1", concurrency_cap=8)]
    assert assigned(look(engines, [queued(last_engine="e0")])) == {"q0": "e0"}
    assert assigned(look([replace(engines[0], running=8), engines[1]], [queued(last_engine="e0")])) == {"q0": "e1"}


def test_an_engine_that_does_not_admit_gets_nothing():
    assert look([engine(admitting=False)], [queued()]) == []


def test_within_a_level_groups_come_in_admission_order_and_the_longest_member_first():
    waiting = [
        queued("late", admission_number=2),
        queued("short", admission_number=1, estimate_p50=10.0),
        queued("long", admission_number=1, estimate_p50=90.0),
        queued("urgent", admission_number=3, priority=1),
    ]
    actions = look([engine(concurrency_cap=3)], waiting)
    assert [a.trajectory for a in actions] == ["urgent", "long", "short"]


def test_an_engine_of_its_own_level_is_preferred_and_spill_leaves_a_reserve():
    engines = [engine("slow", concurrency_cap=2), engine("fast", level=1, concurrency_cap=4)]
    waiting = [queued(f"q{i}", admission_number=i) for i in range(8)]
    placed = assigned(look(engines, waiting))
    assert list(placed.values()).count("slow") == 2
    assert list(placed.values()).count("fast") == 3
    demoted = assigned(look(engines, [*waiting, queued("d", level=1, admission_number=9)]))
    assert demoted["d"] == "fast"


def test_work_goes_where_it_is_expected_to_finish_soonest():
    slow = engine("slow", seconds_per_token=0.08, seconds_per_sequence=0.0, concurrency_cap=16)
    quick = replace(slow, name="quick", seconds_per_token=0.02, running=8)
    assert assigned(look([slow, quick], [queued()])) == {"q0": "quick"}, "a quarter of the speed, though it is empty"
    # each further one costs 0.01 s a token there: from the seventh on it is slower than the other
    busy = replace(quick, seconds_per_sequence=0.01, measured_load=8, running=14)
    assert assigned(look([slow, busy], [queued()])) == {"q0": "slow"}


def test_its_own_level_is_preferred_unless_much_slower():
    fast = engine("fast", level=1, seconds_per_token=0.018)
    assert assigned(look([engine("e0"), fast], [queued()])) == {"q0": "e0"}
    assert assigned(look([engine("e0"), replace(fast, seconds_per_token=0.01)], [queued()])) == {"q0": "fast"}


def test_an_engine_of_unknown_speed_gets_work_whatever_its_level():
    unknown = engine("new", level=2, seconds_per_token=None, prefill_tokens_per_second=None)
    assert assigned(look([engine("e0", running=1), unknown], [queued()])) == {"q0": "new"}


def test_the_prefix_that_may_be_found_counts_as_the_prefill_that_it_saves():
    engines = [engine("e0", running=2), engine("e1", seconds_per_token=0.015)]
    assert assigned(look(engines, [queued(tokens=2_000, last_engine="e0")])) == {"q0": "e0"}


def test_room_is_kept_for_what_leased_ones_are_expected_to_generate():
    tight = engine(kv_capacity_tokens=1_000)
    lease = running(tokens=300, quantum_used=0)
    assert assigned(look([tight], [queued(tokens=150)], [lease])) == {"q0": "e0"}
    assert assigned(look([tight], [queued(tokens=150)], [replace(lease, reserved=800.0)])) == {}


def test_kv_room_counts_what_is_leased_and_what_will_grow():
    tight = engine(kv_capacity_tokens=1_000, kv_used_tokens=0)
    lease = running(tokens=700, quantum_used=0)
    assert assigned(look([tight], [queued(tokens=150, estimate_p50=50.0)], [lease])) == {"q0": "e0"}
    assert assigned(look([tight], [queued(tokens=150, estimate_p50=150.0)], [lease])) == {}
    # alone it may have the whole engine, or it would wait for ever
    assert assigned(look([tight], [queued(tokens=900, estimate_p50=500.0)])) == {"q0": "e0"}


def test_promotion_needs_surely_little_to_remain():
    engines = [engine("slow"), engine("fast", level=1)]
    short, long = queued("s", level=1, estimate_p90=20.0), queued("l", level=1, estimate_p90=200.0)
    actions = {a.trajectory: a for a in look(engines, [short, long])}
    assert (actions["s"].level, actions["s"].engine) == (0, "slow")
    assert "up from level 1" in actions["s"].reason.text
    assert (actions["l"].level, actions["l"].engine) == (1, "fast")


# ---- moves


def test_past_its_quantum_it_moves_to_a_faster_level_when_that_pays():
    engines = [engine("e0"), engine("fast", level=1, seconds_per_token=0.01)]
    (action,) = look(engines, [], [running()])
    assert (action.target_engine, action.level, action.at_turn_end) == ("fast", 1, True)
    assert action.reason.code == "QUANTUM"
    assert action.reason.numbers["gain_s"] > action.reason.numbers["cost_s"] * 1.25


def test_in_a_tool_wait_it_moves_at_once():
    engines = [engine("e0"), engine("fast", level=1, seconds_per_token=0.01)]
    (action,) = look(engines, [], [running(in_tool_wait=True)])
    assert not action.at_turn_end


def test_a_move_that_does_not_pay_is_not_made():
    fast = engine("fast", level=1, seconds_per_token=0.01)
    slow_prefill = replace(fast, prefill_tokens_per_second=20.0)
    for there, lease in (
        (slow_prefill, running()),
        (replace(fast, seconds_per_token=0.019), running()),
        (replace(fast, seconds_per_token=None), running()),
        (replace(fast, run="other"), running()),
        (replace(fast, running=4), running()),
        (fast, running(estimate_p50=10.0)),
        (fast, running(since=100.5)),
        (fast, running(moves=3)),
        (fast, running(preempt_pending=True)),
    ):
        assert look([engine("e0"), there], [], [lease]) == [], (there, lease)


def test_a_place_is_kept_for_a_move_under_way():
    engines = [engine("e0"), engine("fast", level=1, seconds_per_token=0.01, concurrency_cap=1)]
    under_way = running("t0", preempt_pending=True, target="fast")
    assert preempted(look(engines, [], [under_way, running("t1")])) == []
    assert assigned(look(engines, [queued(level=1)], [under_way])) == {"q0": "e0"}


def test_what_is_on_its_way_slows_its_target_and_attracts_no_more():
    slow = engine("slow", concurrency_cap=16)
    fast = engine(
        "fast", level=1, concurrency_cap=16, seconds_per_token=0.005, seconds_per_sequence=0.002, measured_load=1
    )
    here = [running(f"t{i}", engine="slow") for i in range(4)]
    rules = replace(RULES, max_moves=4)
    assert {p.target_engine for p in preempted(look([slow, fast], leased=here, rules=rules))} == {"fast"}
    moving = [running(f"m{i}", engine="slow", preempt_pending=True, target="fast") for i in range(8)]
    assert look([slow, fast], leased=here + moving, rules=rules) == [], "0.021 s a token there, 0.02 s here"
    elsewhere = [replace(m, target="") for m in moving]
    assert preempted(look([slow, fast], leased=here + elsewhere, rules=rules)), "that they are many does not keep it"


def test_one_free_place_takes_the_one_with_most_to_gain():
    engines = [engine("e0"), engine("fast", level=1, seconds_per_token=0.01, concurrency_cap=1)]
    leases = [running(f"t{i}", estimate_p50=100.0 * (i + 1)) for i in range(4)]
    assert [p.trajectory for p in preempted(look(engines, [], leases))] == ["t3"]


def test_kv_pressure_stops_the_youngest_but_never_the_last():
    full = engine(kv_capacity_tokens=1_000, kv_used_tokens=990)
    leases = [running(f"t{i}", admission_number=i, quantum_used=0, estimate_p50=0.0) for i in range(3)]
    (action,) = look([full], [], leases)
    assert (action.trajectory, action.reason.code, action.at_turn_end) == ("t2", "KV_PRESSURE", False)
    assert look([full], [], leases[:1]) == []


# ---- nothing starves


def test_one_that_waited_too_long_goes_first_and_anywhere():
    engines = [engine("slow", running=4), engine("fast", level=1, concurrency_cap=4, running=3)]
    waiting = [queued("new", priority=5, waiting_since=100.0), queued("old", waiting_since=50.0)]
    actions = look(engines, waiting)
    assert assigned(actions) == {"old": "fast"}
    assert actions[0].reason.code == "AGED"


def test_where_all_is_full_one_past_its_quantum_gives_way_and_only_one():
    leases = [running(f"t{i}", quantum_used=60 + i, estimate_p50=0.0) for i in range(4)]
    (action,) = look([engine()], [queued(waiting_since=10.0)], leases)
    assert (action.trajectory, action.reason.code) == ("t3", "STARVING")
    leases[3] = replace(leases[3], preempt_pending=True)
    assert look([engine()], [queued(waiting_since=10.0)], leases) == []


def test_nothing_starves_under_a_stream_of_more_urgent_work():
    """One engine of two places, urgent arrivals faster than it serves: the patient one still gets its turn."""
    rng = random.Random(2)
    rules = QueueSettings(quantum_tokens=(48, 1_000_000), max_wait_s=20.0)
    waiting, leases, ends, started, serial = [queued("patient", waiting_since=0.0)], [], {}, {}, 0
    for tick in range(600):
        now = tick * 0.5
        serial += 1
        waiting.append(queued(f"u{serial}", priority=9, waiting_since=now, admission_number=serial))
        leases = [t for t in leases if ends[t.name] > now]
        for action in look([engine(concurrency_cap=2)], waiting, leases, now, rules):
            if isinstance(action, Assign):
                started[action.trajectory] = now
                waiting = [t for t in waiting if t.name != action.trajectory]
                leases.append(running(action.trajectory, since=now, quantum_used=0))
                ends[action.trajectory] = now + rng.uniform(1, 6)
    assert started["patient"] <= 20.0 + 6.5
    # aged ones come in order of waiting, so that each of them has its turn too
    order = [started[f"u{i}"] for i in range(1, serial + 1) if f"u{i}" in started and started[f"u{i}"] > 40]
    assert order == sorted(order)


def test_an_endless_one_does_not_hold_its_place_for_ever():
    waiting, lease = [queued("patient", waiting_since=0.0)], running("endless", since=0.0)
    now, place = 0.0, engine(concurrency_cap=1)
    while waiting and now < 100:
        now += 1.0
        actions = look([place], waiting, [lease] if lease else [], now)
        if preempted(actions):
            lease = None
            waiting.append(queued("endless", waiting_since=now, generated=500))
        elif assigned(actions):
            assert assigned(actions) == {"patient": "e0"}
            return
    raise AssertionError("it waited for 100 s behind an endless one")


# ---- the tail


def drain(rehome):
    """Four long sessions on one of four engines, each token costing 10 ms times the engine's sessions: makespan, moves."""
    left = {f"t{i}": 1_000.0 for i in range(4)}
    where, since, moves = dict.fromkeys(left, "e0"), dict.fromkeys(left, 0.0), dict.fromkeys(left, 0)
    now, step = 0.0, 0.5
    rules = QueueSettings(quantum_tokens=(1_000_000,))
    while left and now < 200:
        now += step
        load = {f"e{i}": sum(where[t] == f"e{i}" for t in left) for i in range(4)}
        for name in list(left):
            left[name] -= step / (0.01 * load[where[name]])
            if left[name] <= 0:
                del left[name]
        if not rehome:
            continue
        engines = [
            engine(f"e{i}", seconds_per_token=0.01 * max(1, sum(where[t] == f"e{i}" for t in left))) for i in range(4)
        ]
        leases = [
            running(
                n,
                engine=where[n],
                since=since[n],
                quantum_used=0,
                estimate_p50=v,
                tokens=1_000 - int(v),
                moves=moves[n],
            )
            for n, v in left.items()
        ]
        for action in preempted(look(engines, [], leases, now, rules)):
            moves[action.trajectory] += 1
            where[action.trajectory], since[action.trajectory] = action.target_engine, now
            left[action.trajectory] += 0.5 / 0.01  # half a second of re-prefill and hand-over
    return now, sum(moves.values())


def test_case_65_the_tail_is_re_homed_and_not_too_often():
    stuck, none = drain(rehome=False)
    spread, moves = drain(rehome=True)
    assert none == 0
    assert spread < 0.6 * stuck
    assert 1 <= moves <= 4


def test_the_tail_leaves_an_engine_that_is_much_slower_at_equal_load():
    slow = engine("slow", seconds_per_token=0.08, seconds_per_sequence=0.001, running=2)
    quick = engine("quick", seconds_per_sequence=0.001, running=2)
    leases = [running(f"t{i}", engine="slow", quantum_used=0, estimate_p50=500.0) for i in range(2)]
    others = [running(f"u{i}", engine="quick", quantum_used=0, estimate_p50=500.0) for i in range(2)]
    moves = preempted(look([slow, quick], [], leases + others))
    assert {(m.trajectory, m.target_engine, m.reason.code) for m in moves} == {
        ("t0", "quick", "REHOME"), ("t1", "quick", "REHOME"),
    }  # fmt: skip
    # with one more it would be no faster than half, or nobody knows
    for curve in (0.021, None):
        there = replace(quick, seconds_per_sequence=curve)
        assert preempted(look([slow, there], [], leases + others)) == []


def test_a_balanced_tail_stays_where_it_is():
    engines = [engine(f"e{i}", seconds_per_token=0.01 + 0.002 * i) for i in range(4)]
    leases = [running(f"t{i}", engine=f"e{i % 4}", quantum_used=0, estimate_p50=500.0) for i in range(8)]
    assert look(engines, [], leases) == []


# ---- between runs


def test_a_run_whose_work_waits_does_not_end_anothers_drain_phase():
    leases = [running(f"t{i}", engine="e0", quantum_used=0, estimate_p50=500.0) for i in range(4)]
    engines = [engine("e0"), engine("e1", seconds_per_token=0.01), engine("full", run="s", running=4)]
    moves = preempted(look(engines, [queued(run="s")], leases))
    assert {(m.target_engine, m.reason.code) for m in moves} == {("e1", "REHOME")}


def test_each_run_has_one_stopped_for_its_starving_work_and_kv_pressure_does_not_put_that_off():
    engines = [engine("e0"), engine("e1", run="s")]
    engines += [engine(f"hot{i}", run="h", kv_capacity_tokens=100, kv_used_tokens=100) for i in range(4)]
    leases = [running(f"r{i}", engine="e0", quantum_used=60 + i, estimate_p50=0.0) for i in range(4)]
    leases += [running(f"s{i}", run="s", engine="e1", quantum_used=60 + i, estimate_p50=0.0) for i in range(4)]
    leases += [running(f"h{i}", run="h", engine=f"hot{i // 2}", quantum_used=0, tokens=1) for i in range(8)]
    waiting = [queued("a", waiting_since=10.0), queued("b", run="s", waiting_since=20.0)]
    stopped = preempted(look(engines, waiting, leases))
    assert [(p.trajectory, p.reason.code) for p in stopped[:2]] == [("r3", "STARVING"), ("s3", "STARVING")]
    assert [p.reason.code for p in stopped[2:]] == ["KV_PRESSURE"] * 2
