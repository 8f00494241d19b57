"""Whatever is planned, its record names the same accelerators, none of them twice, and the figures that it rests on."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common import wire
from services.scheduler.control import planrecords
from services.scheduler.core import relayout
from services.scheduler.core.pacing import PlannerState
from services.scheduler.core.reason import Reason
from services.scheduler.rates import RateTable
from tests.support.fleets import AT_ONCE, DEMANDS, PENALTIES, SLOW, engine_rates, fleet, situation, trainer_rates

WIDTHS = st.lists(st.sampled_from([1, 1, 2, 4]), min_size=1, max_size=5)
TRAINERS = st.lists(st.sampled_from([2, 4]), max_size=2)


def there_is(trainers, engines):
    """Three nodes of four; replicas that would cross the end of a node are left out."""
    kept = {"trainers": [], "engines": []}
    at = 0
    for name, widths in (("trainers", trainers), ("engines", engines)):
        for width in widths:
            if at % 4 + width <= 4 and at + width <= 12:
                kept[name].append(width)
                at += width
    return fleet(**kept, nodes=3)


def recorded(given_, found, table):
    generations = {name: number for number, name in enumerate(sorted({s for m in found.moves for s in m.move.sources}))}
    message = planrecords.plan(
        found,
        planrecords.gains(given_, found),
        table,
        generations,
        {0: Reason("NO_WORKER", "why")} if found.moves else {},
        0.1,
    )
    return generations, wire.Plan.FromString(message.SerializeToString())


@settings(max_examples=60, deadline=None)
@given(TRAINERS, WIDTHS, DEMANDS, PENALTIES, SLOW)
def test_records_name_the_accelerators_of_the_plan(trainers, engines, work, penalty, heavy):
    here = there_is(trainers, engines)
    rates = engine_rates(penalty=penalty), trainer_rates(slow=heavy)
    table = RateTable("of the test", *rates)
    given_ = situation(here, demand=work, engines=rates[0], trainers=rates[1])
    found = relayout.plan(given_, AT_ONCE, PlannerState())
    generations, plan = recorded(given_, found, table)
    # moves
    assert len(plan.moves) == len(found.moves)
    used = []
    for move, planned in zip(plan.moves, found.moves, strict=True):
        assert {s.replica: s.generation for s in move.sources} == {s: generations[s] for s in planned.move.sources}
        back = [(wire.Role.Name(t.spec.role), tuple(t.spec.accelerators)) for t in move.targets]
        assert back == [(f"ROLE_{t.role}", t.accelerators) for t in planned.move.targets]
        for spec in (t.spec for t in move.targets):
            assert spec.shape.tp * spec.shape.dp_shard == len(spec.accelerators)
            assert spec.level == (table.level(spec.shape.tp) if spec.role == wire.ROLE_ROLLOUT else 0)
        given_up = [a for s in planned.move.sources for a in here.replica[s].accelerators]
        made = [a for t in move.targets for a in t.spec.accelerators]
        assert len(set(made)) == len(made)
        assert set(made) <= set(given_up) | {a.name for a in here.free}
        used += [*{*given_up, *made}]
    assert len(set(used)) == len(used), "an accelerator is moved twice"
    # layouts
    for shown, layout in ((plan.chosen, found.chosen.judged.layout), *alternatives(plan, found)):
        counts = {(r.role, r.accelerator_type, r.accelerators): r.count for r in shown.replicas}
        assert len(counts) == len(shown.replicas)
        assert counts == {
            **{(wire.ROLE_TRAINER, k.type, k.accelerators): n for k, n in layout.trainers},
            **{(wire.ROLE_ROLLOUT, k.type, k.tp): n for k, n in layout.engines},
        }
    assert len(plan.alternatives) <= planrecords.MAX_ALTERNATIVES
    present = [a.label for a in plan.alternatives].count("present")
    assert present == (found.chosen.judged.layout != found.present.judged.layout)
    # figures: what the moves gain adds up to the plan's gain
    if found.moves:
        total = sum(m.gain_tokens for m in plan.moves)
        assert abs(total - found.gain_tokens) <= 1e-6 * max(1.0, abs(found.gain_tokens))
        assert [(r.move, r.reason.code) for r in plan.refused] == [(0, "NO_WORKER")]


def alternatives(plan, found):
    known = {c.label: c.judged.layout for c in (found.present, *found.alternatives)}
    return [(a.layout, known[a.label]) for a in plan.alternatives]


def test_a_layout_without_a_prediction_is_the_one_that_is_there():
    table = RateTable("of the test", engine_rates(), trainer_rates())
    here = fleet(trainers=(2,), engines=(1, 1, 2), nodes=2)
    plan = planrecords.unplanned(here.present, table, Reason("NO_EVIDENCE", "nothing yet"))
    assert not plan.chosen.HasField("prediction")
    assert [(r.accelerators, r.count, r.level) for r in plan.chosen.replicas] == [(2, 1, 0), (1, 2, 0), (2, 1, 1)]
    assert (plan.reason.code, plan.profile) == ("NO_EVIDENCE", "of the test")
