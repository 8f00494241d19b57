"""Places of replicas, and moves to them that are safe one after the other."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.placement import Limits, Progress, Safety, after, order, place
from services.scheduler.core.rates import EngineKind, TrainerKind
from services.scheduler.core.topology import Accelerator, Fleet, Replica, layout_of
from tests.support.fleets import accelerators, engine_rates, fleet, trainer_rates

GB = 1e9
ONE, TWO, FOUR = (EngineKind("a", n) for n in (1, 2, 4))
PAIR, QUAD = TrainerKind("a", 2), TrainerKind("a", 4)


def safety(min_training=1, min_rollout=1, longest=10_000.0, asleep=0.0, trainer_asleep=0.0):
    return Safety(
        Limits(min_training, min_rollout, longest), engine_rates(asleep_bytes=asleep),
        trainer_rates(asleep_bytes=trainer_asleep),
    )  # fmt: skip


def size(kind):
    return kind.tp if isinstance(kind, EngineKind) else kind.accelerators


def test_what_is_wanted_and_there_stays_where_it_is():
    here = fleet(trainers=(4,), engines=(1, 1, 2))
    assert place(here, here.present) == ()
    (move,) = place(here, layout_of({QUAD: 1, ONE: 4}))
    assert move.sources == ("r2",)
    assert [t.kind for t in move.targets] == [ONE, ONE]


def test_four_engines_of_a_node_become_one():
    here = fleet(trainers=(4,), engines=(1, 1, 1, 1))
    (move,) = place(here, layout_of({QUAD: 1, FOUR: 1}))
    assert move.sources == ("r0", "r1", "r2", "r3")
    assert [t.kind for t in move.targets] == [FOUR]


def test_a_move_is_the_smallest_set_that_can_be_handed_over():
    here = fleet(engines=(1,) * 8)
    moves = place(here, layout_of({TWO: 4}))
    assert [len(m.sources) for m in moves] == [2, 2, 2, 2]


def test_a_tensor_parallel_group_does_not_leave_its_domain():
    split = [Accelerator(f"x{i}", "a", "n", f"d{i // 2}") for i in range(4)]
    assert place(Fleet(tuple(split)), layout_of({FOUR: 1})) is None
    (left, right) = place(Fleet(tuple(split)), layout_of({TWO: 2}))
    assert [left.targets[0].accelerators, right.targets[0].accelerators] == [("x0", "x1"), ("x2", "x3")]


def test_a_training_replica_may_span_nodes_but_not_types():
    here = Fleet((*accelerators(2, 2), *accelerators(1, 2, type_="b", prefix="m")))
    (move,) = place(here, layout_of({QUAD: 1}))
    assert move.targets[0].accelerators == ("n0/0", "n0/1", "n1/0", "n1/1")
    assert place(here, layout_of({TrainerKind("a", 6): 1})) is None


def test_engines_take_core_rollout_first_and_trainers_core_training():
    here = fleet(nodes=2, pools=("CORE_TRAINING", "CORE_TRAINING", "HYBRID", "HYBRID", "HYBRID", "HYBRID",
                                 "CORE_ROLLOUT", "CORE_ROLLOUT"))  # fmt: skip
    moves = place(here, layout_of({PAIR: 1, TWO: 1}))
    made = {t.role: t.accelerators for m in moves for t in m.targets}
    assert made == {"TRAINER": ("n0/0", "n0/1"), "ROLLOUT": ("n1/2", "n1/3")}


def test_what_lies_in_the_way_is_laid_out_anew():
    """Two engines that stay occupy both domains; only by moving one of them is there room for a wide one."""
    names = [a.name for a in accelerators()]
    here = Fleet(tuple(accelerators()), (Replica("r0", "ROLLOUT", (names[0],)), Replica("r1", "ROLLOUT", (names[4],))))
    moves = place(here, layout_of({FOUR: 1, ONE: 2}))
    assert moves is not None
    after_ = here
    for move in moves:
        after_ = after(after_, move, safety())
    assert after_.present == layout_of({FOUR: 1, ONE: 2})


SIZES = st.lists(st.sampled_from([1, 1, 2, 4]), max_size=6)
KINDS = st.dictionaries(st.sampled_from([ONE, TWO, FOUR, PAIR, QUAD]), st.integers(0, 4))
FLEETS = st.tuples(
    st.lists(st.sampled_from([2, 4]), max_size=2), SIZES, st.booleans(),
    st.lists(st.sampled_from(["HYBRID", "HYBRID", "CORE_ROLLOUT"]), max_size=3),
)  # fmt: skip


def fleet_of(drawn, **changes):
    """Trainers at the front, engines from the back; what does not fit, or breaks a pool, is left out."""
    trainers, engines, some_fixed, pools = drawn
    all_of_them = accelerators(3, 4, pools=("HYBRID",) * 9 + tuple(pools))
    free, replicas = [a.name for a in all_of_them], []
    for number, width in enumerate(trainers):
        replicas.append(Replica(f"t{number}", "TRAINER", tuple(free[:width]), movable=not (some_fixed and number == 0)))
        free = free[width:]
    for number, width in enumerate(engines):
        node = next((n for n in ("n2", "n1", "n0") if sum(f.startswith(n) for f in free) >= width), None)
        if node is not None:
            used = [f for f in free if f.startswith(node)][:width]
            replicas.append(Replica(f"e{number}", "ROLLOUT", tuple(used), movable=not (some_fixed and number == 0)))
            free = [f for f in free if f not in used]
    return Fleet(tuple(all_of_them), tuple(replicas), **changes)


@settings(max_examples=150, deadline=None)
@given(FLEETS, KINDS)
def test_moves_lead_to_the_layout_and_use_every_accelerator_once(drawn, wanted):
    here, target = fleet_of(drawn), layout_of(wanted)
    moves = place(here, target)
    if moves is None:
        return
    assert len({name for m in moves for name in m.sources}) == sum(len(m.sources) for m in moves)
    there = here
    for move in moves:
        freed = {name for s in move.sources for name in here.replica[s].accelerators}
        idle = {a.name for a in there.accelerators} - {n for r in there.replicas for n in r.accelerators}
        for new in move.targets:
            used = [here.by_name[name] for name in new.accelerators]
            assert set(new.accelerators) <= freed | idle
            assert len(used) == size(new.kind)
            assert {a.type for a in used} == {new.kind.type}
            if new.role == "ROLLOUT":
                assert len({(a.node, a.domain) for a in used}) == 1
                assert all(a.pool != "CORE_TRAINING" for a in used)
            else:
                assert all(a.pool != "CORE_ROLLOUT" for a in used)
        assert all(here.replica[s].movable for s in move.sources)
        there = after(there, move, safety())  # raises if an accelerator has two replicas
    assert there.present == target


@settings(max_examples=100, deadline=None)
@given(FLEETS, KINDS, st.integers(0, 4), st.integers(0, 4), st.floats(0, 60), st.floats(10, 100))
def test_every_move_of_a_sequence_is_safe_while_it_is_under_way(drawn, wanted, min_training, min_rollout, asleep, host):
    here, target = fleet_of(drawn, host_free_bytes={"n0": host * GB, "n1": host * GB}), layout_of(wanted)
    rules = safety(min_training, min_rollout, 10_000.0, asleep * GB, asleep * GB)
    moves = place(here, target)
    if not moves:
        return
    found = order(here, moves, rules, lambda layout: float(layout.rollout))
    assert len(found.moves) == len(found.layouts)
    if found.unsafe is None:
        assert Counter(found.moves) == Counter(moves)
        assert found.layouts[-1] == target
    there = here
    for move, layout in zip(found.moves, found.layouts, strict=True):
        sources = [there.replica[name] for name in move.sources]
        staying = [r for r in there.replicas if r.name not in move.sources]
        for role, floor in (("TRAINER", min_training), ("ROLLOUT", min_rollout)):
            if any(r.role == role for r in sources):
                assert sum(len(r.accelerators) for r in staying if r.role == role) >= floor
        there = after(there, move, rules)
        assert there.present == layout
        assert all(free >= 0.0 for free in there.host_free_bytes.values())


def test_floors_hold_while_moves_are_under_way():
    """Two trainers become one of twice the size: in between there is none."""
    here = fleet(trainers=(2, 2), engines=(4,))
    moves = place(here, layout_of({QUAD: 1, FOUR: 1}))
    found = order(here, moves, safety(min_training=2), lambda _: 0.0)
    assert found.unsafe is not None
    assert found.unsafe.code == "FLOOR"
    assert "0 training accelerators would be left during the hand-over; the floor is 2" in found.unsafe.text
    assert order(here, moves, safety(min_training=0), lambda _: 0.0).unsafe is None


def test_floors_decide_the_order():
    """An engine gives way to a trainer only after another engine has come."""
    names = [a.name for a in accelerators()]
    here = Fleet(
        tuple(accelerators()),
        (Replica("t0", "TRAINER", tuple(names[:2])), Replica("r0", "ROLLOUT", tuple(names[2:4]))),
    )
    to_training = place(here, layout_of({PAIR: 2}))
    assert order(here, to_training, safety(), lambda _: 0.0).unsafe is not None
    both = place(here, layout_of({QUAD: 1, FOUR: 1}))
    found = order(here, both, safety(min_training=0), lambda layout: -float(layout.rollout))
    assert found.unsafe is None
    assert found.layouts[0] == layout_of({PAIR: 1, TWO: 1, FOUR: 1}), "worth less, and the only one that is safe"


def test_some_engine_that_stays_holds_the_longest_context():
    here = fleet(engines=(4, 1, 1, 1, 1))
    moves = place(here, layout_of({TWO: 2, ONE: 4}))
    assert order(here, moves, safety(longest=100_000.0), lambda _: 0.0).unsafe is None
    found = order(here, moves, safety(longest=200_000.0), lambda _: 0.0)
    assert found.unsafe is not None
    assert found.unsafe.code == "KV_MEMORY"


def test_case_46_an_engine_that_would_sleep_in_full_host_memory_is_not_moved():
    """vLLM's sleep level 1 keeps the weights in host memory: 30 GB into 20 GB free is an out-of-memory kill."""
    here = fleet(trainers=(2,), engines=(2, 2, 2), host_free={"n0": 15 * GB, "n1": 20 * GB})
    (move,) = place(here, layout_of({PAIR: 2, TWO: 2}))
    assert here.by_name[here.replica[move.sources[0]].accelerators[0]].node == "n1"
    why = Progress(here, safety(asleep=30 * GB)).unsafe(move)
    assert why is not None
    assert why.code == "HOST_MEMORY"
    assert "30.0 GB would go to sleep in the host memory of n1, which has 20.0 GB free" in why.text
    assert order(here, (move,), safety(asleep=30 * GB), lambda _: 0.0).moves == ()
    assert order(here, (move,), safety(asleep=15 * GB), lambda _: 0.0).moves == (move,)


def test_case_46_memory_is_counted_over_the_whole_sequence():
    """Each engine of 12 GB fits by itself, both do not; what wakes gives its memory back only after it was needed."""
    here = fleet(trainers=(2, 2), engines=(2, 2), host_free={"n1": 20 * GB})
    moves = place(here, layout_of({PAIR: 4}))
    found = order(here, moves, safety(min_rollout=0, asleep=12 * GB), lambda _: 0.0)
    assert len(moves) == 2
    assert len(found.moves) == 1
    assert found.unsafe is not None
    assert found.unsafe.code == "HOST_MEMORY"


def test_case_46_what_wakes_gives_its_host_memory_back():
    here = fleet(engines=(2, 2), trainers=(2, 2), host_free={"n0": 1 * GB, "n1": 20 * GB})
    there = after(here, place(here, layout_of({PAIR: 3, TWO: 1}))[0], safety(asleep=12 * GB))
    assert there.host_free_bytes["n1"] == pytest.approx(8 * GB)
    back = after(there, place(there, layout_of({PAIR: 2, TWO: 2}))[0], safety(asleep=12 * GB, trainer_asleep=0.0))
    assert back.host_free_bytes["n1"] == pytest.approx(20 * GB)


def test_an_engine_that_only_changes_its_degree_does_not_sleep():
    here = fleet(trainers=(4,), engines=(1, 1, 2), host_free={"n1": 1 * GB})
    moves = place(here, layout_of({QUAD: 1, TWO: 2}))
    assert order(here, moves, safety(asleep=12 * GB), lambda _: 0.0).unsafe is None


@pytest.mark.parametrize(
    ("accelerators_", "replicas", "message"),
    [
        ([Accelerator("x", "a", "n")], [Replica("r", "ROLLOUT", ("y",))], "no accelerator of the fleet"),
        ([Accelerator("x", "a", "n")] * 2, [], "more than once"),
        ([Accelerator("x", "a", "n")], [Replica("r", "ROLLOUT", ("x",)), Replica("s", "TRAINER", ("x",))], "more than"),
        ([Accelerator("x", "a", "n", pool="SPARE")], [], "pool 'SPARE'"),
        ([Accelerator("x", "a", "n"), Accelerator("y", "b", "n")], [Replica("r", "TRAINER", ("x", "y"))], "one type"),
    ],
)
def test_a_fleet_that_contradicts_itself_is_refused(accelerators_, replicas, message):
    with pytest.raises(ValueError, match=message):
        Fleet(tuple(accelerators_), tuple(replicas))
