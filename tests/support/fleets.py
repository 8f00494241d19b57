"""Small fleets, rates and demands for tests of the planner, and every layout that a fleet allows, one by one."""

import itertools

import numpy as np
from hypothesis import strategies as st

from services.scheduler.core.demand import Demand
from services.scheduler.core.layouts import Job
from services.scheduler.core.pacing import Pace, PlannerSettings
from services.scheduler.core.rates import EngineKind, EngineRates, TrainerKind, TrainerRates
from services.scheduler.core.relayout import Situation
from services.scheduler.core.topology import Accelerator, Fleet, FleetLayout, Replica, layout_of

AT_ONCE = PlannerSettings(horizon_s=3_600.0, confirmations=1, max_moves_per_window=1_000, cooldown_s=0.0)


def demand(mean=2_000.0, spread=4.0, groups=8, samples=8, **changes):
    """Five classes around a mean; tool outputs as long as what was generated."""
    lengths = tuple(mean * f for f in (1 / spread, 0.5, 1.0, 2.0, spread))
    base = {
        "shares": (0.2, 0.25, 0.3, 0.2, 0.05), "contexts": tuple(500.0 + 2 * g for g in lengths),
        "tool_seconds": tuple(g / 100 for g in lengths), "prompt_tokens": 500.0, "groups": groups, "samples": samples,
    }  # fmt: skip
    return Demand(lengths=lengths, **(base | changes))


def engine_rates(type_="a", degrees=(1, 2, 4), slow=1.0, penalty=0.3, kv=150_000.0, **changes):
    """tp engines decode tp ** (1 - penalty) times as fast, and hold a little more than tp times as much."""
    return {
        EngineKind(type_, tp): EngineRates(
            0.02 * slow / tp ** (1 - penalty), 5e-5 * slow, 1e-7 * slow / tp, kv * tp**1.2, prefill_s=1e-4 * slow / tp,
            **({"start_s": 2.0} | changes),
        )
        for tp in degrees
    }  # fmt: skip


def trainer_rates(type_="a", sizes=(2, 4), slow=1.0, budget=100_000.0, **changes):
    """Replicas whose time is all arithmetic but for half a second."""
    return {
        TrainerKind(type_, n): TrainerRates(
            2e-3 * slow / n, fixed_s=0.5, reduce_s=0.5, micro_batch_tokens=budget, **changes
        )
        for n in sizes
    }


def accelerators(nodes=2, size=4, type_="a", pools=(), prefix="n"):
    """`pools`: of the first ones, in order; the others are hybrid."""
    made = []
    for i in range(nodes * size):
        pool = pools[i] if i < len(pools) else "HYBRID"
        made.append(Accelerator(f"{prefix}{i // size}/{i % size}", type_, f"{prefix}{i // size}", pool=pool))
    return made


def fleet(trainers=(), engines=(), nodes=2, size=4, pools=(), host_free=None, **changes):
    """Replicas of these sizes on accelerators in order: trainers first, then engines."""
    all_of_them = accelerators(nodes, size, pools=pools)
    names, at, replicas = [a.name for a in all_of_them], 0, []
    for role, sizes in (("TRAINER", trainers), ("ROLLOUT", engines)):
        for number, width in enumerate(sizes):
            name = f"{role[0].lower()}{number}"
            replicas.append(Replica(name, role, tuple(names[at : at + width]), **changes))
            at += width
    return Fleet(tuple(all_of_them), tuple(replicas), host_free or {})


def job(given=None, **changes):
    """One type, degrees 1, 2, 4, trainers of 2 and 4."""
    base = {"demand": given or demand(), "engines": engine_rates(), "trainers": trainer_rates()}
    return Job(**(base | changes))


def situation(where, **changes):
    """After many steps, with nothing in the way."""
    base = {
        "demand": demand(), "engines": engine_rates(), "trainers": trainer_rates(), "pace": Pace(1_000.0, 50, 50),
    }  # fmt: skip
    return Situation(fleet=where, **(base | changes))


def every_layout(where: Fleet, kinds) -> list[FleetLayout]:
    """All numbers of all kinds that the accelerators of a type could hold, whatever their pools and nodes."""
    room = {t: sum(a.type == t for a in where.accelerators) for t in where.types}
    most = [room[k.type] // (k.tp if isinstance(k, EngineKind) else k.accelerators) for k in kinds]
    found = []
    for numbers in itertools.product(*(range(n + 1) for n in most)):
        layout = layout_of(dict(zip(kinds, numbers, strict=True)))
        used = dict.fromkeys(where.types, 0)
        for kind, number in (*layout.trainers, *layout.engines):
            used[kind.type] += number * (kind.tp if isinstance(kind, EngineKind) else kind.accelerators)
        if all(used[t] <= room[t] for t in where.types):
            found.append(layout)
    return found


DEMANDS = st.builds(
    demand,
    mean=st.floats(200.0, 6_000.0), spread=st.floats(2.5, 6.0), groups=st.integers(1, 12), samples=st.integers(1, 12),
    max_versions=st.integers(0, 3), recompute=st.booleans(),
)  # fmt: skip
PENALTIES = st.floats(0.0, 0.8)
SLOW = st.floats(0.05, 20.0)


def numbers_of_tokens(rng, mean, count):
    """Log-normal lengths of a mean."""
    return np.exp(rng.normal(np.log(mean) - 0.32, 0.8, count))
