"""Whether to change the layout of the fleet, to which one, and by which moves.

The best layout is searched for at the lengths expected in the middle of the horizon (`drift`). It is moved to if

    gain (tokens per second more, over the horizon, drift included)  >  cost x (1 + hysteresis)
    cost = for each move: (hand-over + start) seconds x what its accelerators contribute now
           + computing again the sequences that its engines held
           + a pause of the trainers where their group changes

and the relative gain is at least `min_gain`, with evidence, confirmations, cool-down and rate as in `pacing`. A change
is a sequence of moves, each safe while it is under way (`placement`); a sequence longer than the window allows is begun
if its first part pays by itself, and so is one of which only a part is safe. A layout towards which no move is safe is
passed over for the next best, and the reason is told.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.scheduler.core.costmodel import DEFAULT_HANDOVER_S, NEVER_S
from services.scheduler.core.demand import Demand
from services.scheduler.core.drift import MAX_DRIFT
from services.scheduler.core.layouts import Best, Job, Judge, Judged, search
from services.scheduler.core.pacing import Pace, PlannerSettings, PlannerState, blocked
from services.scheduler.core.placement import Limits, Move, Safety, Steps, order, place
from services.scheduler.core.planner import REGROUP_S
from services.scheduler.core.rates import EngineKind, EngineRates, TrainerKind, TrainerRates
from services.scheduler.core.reason import Reason
from services.scheduler.core.topology import Fleet, FleetLayout, Kind

ALTERNATIVES = 8
"""Layouts shown beside the chosen, the present and the best homogeneous one."""
TIE = 0.01
"""Relative difference in seconds that is none. Predictions err by more, but what is given up here is lost if they are
right.
"""
LONGER = MAX_DRIFT
"""Factor of lengths at which layouts are compared that are equal at the expected lengths."""
CANDIDATES = 4
"""Best layouts for which safe moves are looked for."""


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a plan rests on."""

    fleet: Fleet
    demand: Demand
    engines: Mapping[EngineKind, EngineRates]
    """Of every kind that may be chosen and every kind there is; corrected (`rates.EngineBook`)."""
    trainers: Mapping[TrainerKind, TrainerRates]
    pace: Pace
    drift: float = 0.0
    """Of the log of the mean length, a step."""
    imbalance: float = 1.0
    steps_left: float = math.inf
    handover_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a hand-over by role that the accelerators come to, as observed."""


@dataclass(frozen=True, slots=True)
class Considered:
    """A layout that was considered."""

    label: str
    judged: Judged
    reason: Reason


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """One hand-over, in its place in the sequence."""

    move: Move
    layout: FleetLayout
    """After it."""
    cost_tokens: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class Relayout:
    """The layout that is best by the model, what else was considered, and the moves to make now, in turn."""

    chosen: Considered
    present: Considered
    alternatives: tuple[Considered, ...]
    moves: tuple[PlannedMove, ...]
    gain_tokens: float
    cost_tokens: float
    horizon_s: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class _Horizon:
    """Jobs at the beginning, the middle and the end of it."""

    seconds: float
    jobs: tuple[Job, Job, Job]

    def rates(self, layouts: Sequence[FleetLayout]) -> list[float]:
        """Mean tokens per second of each over the horizon, by Simpson's rule."""
        found = [0.0] * len(layouts)
        for job, weight in zip(self.jobs, (1 / 6, 4 / 6, 1 / 6), strict=True):
            seconds = Judge(job).seconds(layouts)
            for at, layout in enumerate(layouts):
                if seconds[layout] < NEVER_S:
                    found[at] += weight * job.demand.tokens / seconds[layout]
        return found


def plan(given: Situation, settings: PlannerSettings, state: PlannerState) -> Relayout:
    """Searches, judges and proposes; `state` counts confirmations. ValueError if a replica's kind has no rates."""
    _check(given)
    here = given.fleet.present
    horizon = _horizon(given, settings)
    job = horizon.jobs[1]
    best = _robust(search(given.fleet, job, alternatives=ALTERNATIVES, seeds=(here,), tie=TIE), given.fleet, job)
    present = Judge(job).judged(here)
    why_not = blocked(given.pace, settings, ready=True)
    if best.chosen is None:
        text = "no layout of this fleet keeps its floors and holds the longest sequence"
        return _stay(present, None, best, horizon, why_not or Reason("NO_LAYOUT", text))
    if why_not is not None:
        return _stay(present, best.chosen, best, horizon, why_not)
    found = _proposal(given, settings, best, present, horizon)
    if isinstance(found, Reason):
        state.reset()
        return _stay(present, best.chosen, best, horizon, found)
    if not state.confirmed(_direction(here, found.chosen.judged.layout), _needed(given, settings)):
        text = f"{found.reason.text}; seen {state.wins} of {settings.confirmations} times"
        return replace(found, moves=(), reason=Reason("CONFIRMING", text, found.reason.numbers))
    return found


def _robust(best: Best, fleet: Fleet, job: Job) -> Best:
    """Of layouts that are as good as the best within TIE the one with the fewest kinds of engines, since what moves
    between kinds costs more than is predicted; then the one that is best if lengths turn out LONGER: policies tend to
    write more as they learn, and a cache that is too small costs more than one that is too large.
    """
    if best.chosen is None:
        return best
    longer = Judge(replace(job, demand=job.demand.scaled(LONGER))).seconds(best.near)

    def key(layout: FleetLayout) -> tuple[object, ...]:
        return len(layout.engines), longer[layout], layout.trainers, layout.engines

    able = (f for f in sorted(best.near, key=key) if place(fleet, f) is not None)
    found = next(able, best.chosen.layout)
    chosen = best.chosen if found == best.chosen.layout else Judge(job).judged(found)
    others = tuple(j for j in (best.chosen, *best.others) if j.layout != chosen.layout)
    return replace(best, chosen=chosen, others=others[:ALTERNATIVES])


def _check(given: Situation) -> None:
    known = {*given.engines, *given.trainers}
    for replica in given.fleet.replicas:
        kind = given.fleet.kind(replica)
        if kind not in known:
            raise ValueError(
                f"replica {replica.name!r} is of kind {kind}, which has no rates; add it to the profile's table"
            )


def _horizon(given: Situation, settings: PlannerSettings) -> _Horizon:
    """At most what is left of the run; drift is bounded, since it does not go on for ever."""
    job = Job(
        given.demand, given.engines, given.trainers, given.imbalance, settings.min_trainers, settings.min_rollouts
    )
    step_s = Judge(job).seconds([given.fleet.present])[given.fleet.present]
    seconds = min(settings.horizon_s, given.steps_left * step_s)
    steps = seconds / step_s
    most = math.log(MAX_DRIFT)
    grown = [math.exp(min(most, max(-most, given.drift * steps * share))) for share in (0.5, 1.0)]
    middle, end = (replace(job, demand=given.demand.scaled(factor)) for factor in grown)
    return _Horizon(seconds, (job, middle, end))


def _proposal(
    given: Situation, settings: PlannerSettings, best: Best, present: Judged, horizon: _Horizon
) -> Relayout | Reason:
    """The best layout that can be reached safely and pays; or why there is none."""
    here, first = given.fleet.present, best.chosen
    assert first is not None
    unsafe: Reason | None = None
    for candidate in [c for c in (first, *best.others) if c.layout != here][:CANDIDATES]:
        if _relative(candidate, present) < settings.min_gain:
            break
        found = _sequence(given, settings, candidate, horizon)
        if isinstance(found, Reason):
            unsafe = unsafe or found
            continue
        weighed = _weighed(given, settings, best, present, horizon, (candidate, found))
        if isinstance(weighed, Reason) and found.unsafe is not None:
            unsafe = unsafe or found.unsafe  # the part that is safe does not pay by itself
            continue
        return weighed
    if unsafe is not None:
        return Reason(unsafe.code, f"{first.layout.words()} would be better, but {unsafe.text}", unsafe.numbers)
    return _balanced(present, first)


def _sequence(given: Situation, settings: PlannerSettings, candidate: Judged, horizon: _Horizon) -> Steps | Reason:
    """Safe moves towards a layout, as many as there are and the window allows; or why there are none."""
    job = horizon.jobs[1]
    limits = Limits(settings.min_trainers, settings.min_rollouts, job.demand.longest_context)
    judge = Judge(job)
    moves = place(given.fleet, candidate.layout)
    if not moves:
        return Reason("NO_PLACE", f"{candidate.layout.words()} has no place in the fleet as it is")

    def worth(layout: FleetLayout) -> float:
        return -judge.seconds([layout])[layout]

    steps = order(given.fleet, moves, Safety(limits, given.engines, given.trainers), worth)
    allowed = given.pace.allowance(settings)
    if steps.unsafe is not None and not steps.moves:
        return steps.unsafe
    return Steps(steps.moves[:allowed], steps.layouts[:allowed], steps.unsafe)


def _weighed(
    given: Situation, settings: PlannerSettings, best: Best, present: Judged, horizon: _Horizon,
    candidate: tuple[Judged, Steps],
) -> Relayout | Reason:  # fmt: skip
    """Gain against cost of these moves."""
    chosen, (moves, layouts) = candidate[0], (candidate[1].moves, candidate[1].layouts)
    rates = horizon.rates([given.fleet.present, layouts[-1]])
    costs = [_cost(given, m, rates[0]) for m in moves]
    gain, cost = (rates[-1] - rates[0]) * horizon.seconds, sum(costs)
    numbers = {
        "gain_tokens": gain, "cost_tokens": cost, "tokens_per_s": rates[0], "predicted_tokens_per_s": rates[-1],
        "horizon_s": horizon.seconds, "moves": float(len(moves)),
    }  # fmt: skip
    text = (
        f"{given.fleet.present.words()} gives {rates[0]:.0f} tokens/s over the next {horizon.seconds:.0f} s; "
        f"{layouts[-1].words()} would give {rates[-1]:.0f}: {gain:.0f} tokens more for {cost:.0f} that "
        f"{len(moves)} moves cost"
    )
    if candidate[1].unsafe is not None:
        text += f"; then {candidate[1].unsafe.text}"
    if gain <= cost * (1 + settings.hysteresis) or rates[-1] < rates[0] * (1 + settings.min_gain):
        return Reason("BALANCED", f"{text}; not worth it", numbers)
    planned = tuple(
        PlannedMove(move, layout, c, Reason("GAIN", _move_words(move), {"cost_tokens": c}))
        for move, layout, c in zip(moves, layouts, costs, strict=True)
    )
    stay = _stay(present, chosen, best, horizon, Reason("GAIN", text, numbers))
    return replace(stay, moves=planned, gain_tokens=gain, cost_tokens=cost)


def _cost(given: Situation, move: Move, rate: float) -> float:
    """Tokens that are not trained meanwhile: the share of each role that moves, for as long as it takes."""
    sources = [given.fleet.replica[name] for name in move.sources]
    here = given.fleet.present
    moving = {role: sum(len(r.accelerators) for r in sources if r.role == role) for role in ("TRAINER", "ROLLOUT")}
    share = max(moving["TRAINER"] / max(1, here.training), moving["ROLLOUT"] / max(1, here.rollout))
    seconds = max(
        (given.handover_s.get(t.role, DEFAULT_HANDOVER_S) + _start_s(given, t.kind) for t in move.targets), default=0.0
    )
    trains = moving["TRAINER"] or any(t.role == "TRAINER" for t in move.targets)
    again_s = _again_s(given, moving["ROLLOUT"] / max(1, here.rollout))
    return rate * (share * seconds + again_s + (REGROUP_S if trains else 0.0))


def _again_s(given: Situation, share: float) -> float:
    """Seconds in which engines compute again what a share of them held: sequences in flight, half grown on average."""
    demand = given.demand
    held = share * (demand.max_versions + 1) * demand.trained_tokens / 2
    times = [(given.engines[k].prefill_s, n) for k, n in given.fleet.present.engines]
    rate = sum(n / s for s, n in times if s > 0)
    return held / rate if rate > 0 else 0.0


def _start_s(given: Situation, kind: Kind) -> float:
    return given.trainers[kind].start_s if isinstance(kind, TrainerKind) else given.engines[kind].start_s


def _needed(given: Situation, settings: PlannerSettings) -> int:
    """Confirmations; a shift is evidence enough."""
    return 1 if given.pace.shifted else settings.confirmations


def _direction(here: FleetLayout, there: FleetLayout) -> str:
    if there.training != here.training:
        return "TRAINER" if there.training > here.training else "ROLLOUT"
    return "SHAPE"


def _relative(candidate: Judged, present: Judged) -> float:
    rate = present.prediction.trained_tokens_per_second
    return math.inf if rate <= 0 else candidate.prediction.trained_tokens_per_second / rate - 1.0


def _balanced(present: Judged, best: Judged) -> Reason:
    rates = [j.prediction.trained_tokens_per_second for j in (present, best)]
    text = f"{present.layout.words()} gives {rates[0]:.0f} tokens/s, the best ({best.layout.words()}) {rates[1]:.0f}"
    return Reason("BALANCED", text, {"present": rates[0], "best": rates[1]})


def _stay(present: Judged, chosen: Judged | None, best: Best, horizon: _Horizon, reason: Reason) -> Relayout:
    """Nothing moves."""
    shown = _considered("present", present, chosen)
    top = shown if chosen is None or chosen.layout == present.layout else _considered("best", chosen, None)
    others = [_considered("present", present, chosen)] if top is not shown else []
    if best.homogeneous is not None:
        others.append(_considered("homogeneous-best", best.homogeneous, chosen))
    seen = {present.layout, *(() if chosen is None else (chosen.layout,))}
    found = () if best.chosen is None else (best.chosen, *best.others)
    for number, judged in enumerate((j for j in found if j.layout not in seen), 1):
        others.append(_considered(f"alternative-{number}", judged, chosen))
    return Relayout(top, shown, tuple(others), (), 0.0, 0.0, horizon.seconds, reason)


def _considered(label: str, judged: Judged, chosen: Judged | None) -> Considered:
    prediction = judged.prediction
    rate, train_s = prediction.trained_tokens_per_second, prediction.train_seconds
    train = "never" if train_s >= NEVER_S else f"{train_s:.1f} s"
    rollout = "never" if prediction.rollout_seconds >= NEVER_S else f"{prediction.rollout_seconds:.1f} s"
    text = f"{judged.layout.words()}: {rate:.0f} tokens/s, bound by {judged.bound} (rollout {rollout}, training {train}"
    text += f", tail {prediction.tail_seconds:.1f} s)"
    if chosen is not None and chosen.layout != judged.layout:
        behind = 1.0 - rate / max(chosen.prediction.trained_tokens_per_second, 1e-9)
        text += f"; {behind:.1%} behind the best"
    numbers = {
        "tokens_per_s": rate, "rollout_s": prediction.rollout_seconds, "train_s": train_s,
        "tail_s": prediction.tail_seconds,
    }  # fmt: skip
    return Considered(label, judged, Reason("ALTERNATIVE", text, numbers))


def _move_words(move: Move) -> str:
    made = ", ".join(
        f"{'trainer' if t.role == 'TRAINER' else 'engine'} on {'+'.join(t.accelerators)}" for t in move.targets
    )
    return f"{', '.join(move.sources) or 'idle accelerators'} -> {made or 'idle'}"
