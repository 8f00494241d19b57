"""Which single accelerators train and which generate: all splits of the hybrid ones, judged by observed rates alone.

For fleets whose replicas are one accelerator each and for which no profile is known; `relayout.plan` plans split,
tensor parallelism and replicas jointly from a profile. The choice is made among every number of hybrid accelerators
given to training (their levels as configured), so the present layout and the best homogeneous one are always among the
alternatives.

A move is proposed only if

    gain (tokens per second more x horizon)  >  cost x (1 + hysteresis)      horizon: at most what is left of the run
    cost = hand-over seconds x what the moving accelerator contributes + a pause of the trainers

and only after enough steps were seen, outside the cool-down, within the moves that the window allows, above the
floors, and if the same direction won `confirmations` evaluations in a row: noise around the balance moves nothing. One
accelerator moves at a time; the next evaluation sees what that did.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.core.costmodel import NEVER_S, CostModel, Layout, Prediction
from services.scheduler.core.pacing import Pace, PlannerSettings, PlannerState, blocked
from services.scheduler.core.reason import Reason

MAX_ALTERNATIVES = 15
"""Layouts shown beside the chosen and the present one."""

REGROUP_S = 1.0
"""Pause of all trainers when their group re-forms, seconds."""


@dataclass(frozen=True, slots=True)
class AcceleratorView:
    """One accelerator as the planner sees it. `level` is what it would be as a rollout replica."""

    name: str
    pool: str
    role: str
    movable: bool
    level: int
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanInput:
    """All that a plan rests on."""

    now: float
    accelerators: Sequence[AcceleratorView]
    max_versions: int
    steps_seen: int
    steps_since_move: int
    last_moves: tuple[float, ...] = ()
    """Times of the moves within the window."""
    busy: bool = False
    """A hand-over is under way."""
    steps_left: float = math.inf
    """Training steps until the run's tasks are used up: a move has no longer than these to pay."""


@dataclass(frozen=True, slots=True)
class MoveProposal:
    """One accelerator to change sides."""

    accelerator: str
    from_role: str
    to_role: str
    gain_rate: float
    """Trained tokens per second expected more."""
    gain_tokens: float
    cost_tokens: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class Alternative:
    """A layout that was considered."""

    label: str
    layout: Layout
    prediction: Prediction
    reason: Reason


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The layout that is best by the model, what else was considered, and the moves to make now."""

    chosen: Alternative
    present: Alternative
    alternatives: tuple[Alternative, ...]
    moves: tuple[MoveProposal, ...]
    reason: Reason


def plan(given: PlanInput, model: CostModel, settings: PlannerSettings, state: PlannerState) -> PlanResult:
    """Judges all splits and proposes at most one move; `state` counts confirmations."""
    present = layout_of(given.accelerators)
    candidates = _candidates(given.accelerators, settings)
    judged = [_judge(layout, present, model, given.max_versions) for layout in candidates]
    here = next((a for a in judged if a.layout == present), None) or _judge(present, present, model, given.max_versions)
    best = max(judged, key=lambda a: (a.prediction.trained_tokens_per_second, a.layout == present, -a.layout.trainers))
    uniform = _homogeneous(given, model, settings)
    considered = sorted(judged, key=lambda a: -a.prediction.trained_tokens_per_second)
    others = tuple(a for a in considered if a is not best)[: MAX_ALTERNATIVES - len(uniform)] + uniform
    why_not = _blocked(given, model, settings)
    move = None if why_not or best.layout == present else _move(given, here, model, settings)
    if move is None:
        if not why_not:
            state.reset()
        reason = why_not or Reason(
            "BALANCED",
            f"{_words(present)} is within the cost of a move of the best ({_words(best.layout)})",
            {"present": here.prediction.trained_tokens_per_second, "best": best.prediction.trained_tokens_per_second},
        )
        return PlanResult(best, here, others, (), reason)
    if not state.confirmed(move.to_role, settings.confirmations):
        text = f"{move.reason.text}; seen {state.wins} of {settings.confirmations} times"
        return PlanResult(best, here, others, (), Reason("CONFIRMING", text, move.reason.numbers))
    return PlanResult(best, here, others, (move,), move.reason)


def layout_of(accelerators: Sequence[AcceleratorView]) -> Layout:
    """The layout that the accelerators serve now."""
    levels: dict[int, int] = {}
    for item in accelerators:
        if item.role == "ROLLOUT":
            levels[item.level] = levels.get(item.level, 0) + 1
    trainers = sum(a.role == "TRAINER" for a in accelerators)
    return Layout(trainers, tuple(sorted(levels.items())))


def _candidates(accelerators: Sequence[AcceleratorView], settings: PlannerSettings) -> list[Layout]:
    fixed = [a for a in accelerators if a.pool != "HYBRID" or not a.movable]
    hybrids = sorted((a for a in accelerators if a.pool == "HYBRID" and a.movable), key=lambda a: (a.level, a.name))
    found = []
    for count in range(len(hybrids) + 1):
        moved = [
            AcceleratorView(a.name, a.pool, "TRAINER" if i < count else "ROLLOUT", a.movable, a.level)
            for i, a in enumerate(hybrids)
        ]
        layout = layout_of([*fixed, *moved])
        if layout.trainers >= settings.min_trainers and layout.rollout_count >= settings.min_rollouts:
            found.append(layout)
    return found or [layout_of(accelerators)]


def _homogeneous(given: PlanInput, model: CostModel, settings: PlannerSettings) -> tuple[Alternative, ...]:
    """The best split if all rollout replicas were of one level, for comparison; empty if no split is possible."""
    movable = sum(a.pool == "HYBRID" and a.movable for a in given.accelerators)
    fixed = layout_of([a for a in given.accelerators if a.pool != "HYBRID" or not a.movable])
    found = []
    for level in sorted({a.level for a in given.accelerators if a.pool != "CORE_TRAINING"}):
        for count in range(movable + 1):
            trainers, rollouts = fixed.trainers + count, fixed.rollout_count + movable - count
            if trainers >= settings.min_trainers and rollouts >= settings.min_rollouts:
                layout = Layout(trainers, ((level, rollouts),))
                found.append((model.predict(layout, given.max_versions), layout))
    if not found:
        return ()
    prediction, layout = max(found, key=lambda f: (f[0].trained_tokens_per_second, -f[1].trainers))
    text = (
        f"{_words(layout)}, every rollout replica of level {layout.rollouts[0][0] if layout.rollouts else 0}: "
        f"{prediction.trained_tokens_per_second:.0f} tokens/s; levels follow the configuration"
    )
    numbers = {"tokens_per_s": prediction.trained_tokens_per_second}
    return (Alternative("homogeneous-best", layout, prediction, Reason("LEVELS_CONFIGURED", text, numbers)),)


def _judge(layout: Layout, present: Layout, model: CostModel, max_versions: int) -> Alternative:
    prediction = model.predict(layout, max_versions)
    bound = _bound(prediction)
    rate = prediction.trained_tokens_per_second
    text = f"{_words(layout)}: {rate:.0f} tokens/s, bound by {bound} ({_times(prediction)})"
    numbers = {
        "tokens_per_s": prediction.trained_tokens_per_second,
        "rollout_s": prediction.rollout_seconds,
        "train_s": prediction.train_seconds,
        "tail_s": prediction.tail_seconds,
    }
    label = "present" if layout == present else f"{layout.trainers}-{layout.rollout_count}"
    return Alternative(label, layout, prediction, Reason("ALTERNATIVE", text, numbers))


def _bound(prediction: Prediction) -> str:
    """What takes longest: rollout, training, or the longest trajectory, which the staleness bound lets span steps."""
    parallel = max(prediction.rollout_seconds, prediction.train_seconds)
    if prediction.step_seconds > max(parallel, 1e-9):
        return "tail"
    return "rollout" if prediction.rollout_seconds >= prediction.train_seconds else "training"


def _times(prediction: Prediction) -> str:
    rollout, train = (
        "never" if seconds >= NEVER_S else f"{seconds:.2f} s"
        for seconds in (prediction.rollout_seconds, prediction.train_seconds)
    )
    return f"rollout {rollout}, training {train} a step, longest trajectory {prediction.tail_seconds:.1f} s"


def _words(layout: Layout) -> str:
    return f"{layout.trainers} training / {layout.rollout_count} rollout"


def _blocked(given: PlanInput, model: CostModel, settings: PlannerSettings) -> Reason | None:
    """Why nothing may move now, if so."""
    pace = Pace(given.now, given.steps_seen, given.steps_since_move, given.last_moves, given.busy)
    return blocked(pace, settings, ready=model.ready)


def _move(given: PlanInput, here: Alternative, model: CostModel, settings: PlannerSettings) -> MoveProposal | None:
    """The best single move, if its gain exceeds its cost by the hysteresis."""
    found: list[MoveProposal] = []
    rate = here.prediction.trained_tokens_per_second
    horizon = min(settings.horizon_s, given.steps_left * here.prediction.step_seconds)
    tried: set[tuple[str, int]] = set()
    for item in sorted(given.accelerators, key=lambda a: (a.since, a.name)):
        if item.pool != "HYBRID" or not item.movable or item.role not in ("ROLLOUT", "TRAINER"):
            continue
        if (item.role, item.level) in tried:
            continue  # the same layout: of equal ones, the one that has served longest moves
        tried.add((item.role, item.level))
        to_role = "TRAINER" if item.role == "ROLLOUT" else "ROLLOUT"
        after = [
            AcceleratorView(a.name, a.pool, to_role if a.name == item.name else a.role, a.movable, a.level, a.since)
            for a in given.accelerators
        ]
        layout = layout_of(after)
        if layout.trainers < settings.min_trainers or layout.rollout_count < settings.min_rollouts:
            continue
        new = model.predict(layout, given.max_versions)
        gain_rate = new.trained_tokens_per_second - rate
        share = 1.0 / max(1, here.layout.trainers if item.role == "TRAINER" else here.layout.rollout_count)
        seconds = model.handover(to_role)
        cost = seconds * rate * share + REGROUP_S * rate
        gain = gain_rate * horizon
        if gain <= cost * (1 + settings.hysteresis) or gain_rate <= rate * settings.hysteresis:
            continue
        text = (
            f"{_words(here.layout)} gives {rate:.0f} tokens/s ({_times(here.prediction)}); {_words(layout)} would "
            f"give {new.trained_tokens_per_second:.0f}: {gain:.0f} tokens more in {horizon:.0f} s for "
            f"{cost:.0f}"
        )
        numbers = {
            "gain_tokens": gain,
            "cost_tokens": cost,
            "tokens_per_s": rate,
            "predicted_tokens_per_s": new.trained_tokens_per_second,
            "horizon_s": horizon,
        }
        found.append(MoveProposal(item.name, item.role, to_role, gain_rate, gain, cost, Reason("GAIN", text, numbers)))
    return max(found, key=lambda m: m.gain_tokens - m.cost_tokens) if found else None
