"""Plans of whole layouts in the contract's form."""

import itertools
import math
from collections.abc import Mapping, Sequence

from services.common import wire
from services.scheduler.control import proposals
from services.scheduler.core.costmodel import NEVER_S
from services.scheduler.core.layouts import Job, Judge, Judged, Level
from services.scheduler.core.placement import NewReplica
from services.scheduler.core.reason import Reason
from services.scheduler.core.relayout import PlannedMove, Relayout, Situation
from services.scheduler.core.topology import FleetLayout
from services.scheduler.rates import RateTable

MAX_ALTERNATIVES = 16
MAX_MOVES = 256


def plan(
    found: Relayout, gained: Sequence[float], table: RateTable, generations: Mapping[str, int],
    refused: Mapping[int, Reason], error: float | None,
) -> wire.Plan:  # fmt: skip
    """Layouts and moves. `gained`: tokens by each move (`gains`); `generations` by replica; `refused`: moves that
    cannot start now, by their place, and why; `error`: median relative error of predicted step times.
    """
    message = wire.Plan(
        chosen=_judged(found.chosen.judged, table, error), reason=proposals.reason(found.reason), profile=table.profile
    )
    shown = [a for a in (found.present, *found.alternatives) if a.judged.layout != found.chosen.judged.layout]
    labels = dict.fromkeys(a.label for a in shown)
    for other in [next(a for a in shown if a.label == label) for label in labels][:MAX_ALTERNATIVES]:
        message.alternatives.add(
            label=other.label, layout=_judged(other.judged, table, error), reason=proposals.reason(other.reason)
        )
    for planned, gain in list(zip(found.moves, gained, strict=True))[:MAX_MOVES]:
        message.moves.append(_move(planned, gain, table, generations))
    for number, why in sorted(refused.items()):
        message.refused.add(move=number, reason=proposals.reason(why))
    return message


def unplanned(present: FleetLayout, table: RateTable, why: Reason) -> wire.Plan:
    """The layout that there is, without any prediction."""
    return wire.Plan(chosen=_layout(present, table, 0.0, ()), reason=proposals.reason(why), profile=table.profile)


def gains(given: Situation, found: Relayout) -> list[float]:
    """Tokens that each move brings: its part of the plan's gain, by what it adds at the lengths of now."""
    if len(found.moves) < 2:
        return [found.gain_tokens for _ in found.moves]
    layouts = [given.fleet.present, *(m.layout for m in found.moves)]
    seconds = Judge(Job(given.demand, given.engines, given.trainers, given.imbalance)).seconds(layouts)
    rates = [0.0 if seconds[at] >= NEVER_S else 1.0 / seconds[at] for at in layouts]
    total = rates[-1] - rates[0]
    if total <= 0.0:  # it pays by the drift that is expected alone
        return [found.gain_tokens / len(found.moves) for _ in found.moves]
    return [found.gain_tokens * (there - here) / total for here, there in itertools.pairwise(rates)]


def _judged(judged: Judged, table: RateTable, error: float | None) -> wire.Layout:
    predicted = judged.prediction
    message = _layout(judged.layout, table, judged.micro_batch_tokens, judged.levels)
    message.prediction.CopyFrom(
        wire.Prediction(
            trained_tokens_per_second=predicted.trained_tokens_per_second, rollout_seconds=predicted.rollout_seconds,
            tail_seconds=predicted.tail_seconds, train_seconds=predicted.train_seconds,
            recent_error=-1.0 if error is None else error,
        )
    )  # fmt: skip
    return message


def _layout(layout: FleetLayout, table: RateTable, budget: float, levels: Sequence[Level]) -> wire.Layout:
    message = wire.Layout()
    for trainer, count in layout.trainers:
        message.replicas.add(
            role=wire.ROLE_TRAINER, shape=wire.Shape(tp=1, dp_shard=trainer.accelerators),
            accelerators=trainer.accelerators, count=count, accelerator_type=trainer.type,
            micro_batch_tokens=int(budget) if math.isfinite(budget) else 0,
        )  # fmt: skip
    caps = {level.kind: level.use.concurrency_cap for level in levels}
    for engine, count in layout.engines:
        message.replicas.add(
            role=wire.ROLE_ROLLOUT, shape=wire.Shape(tp=engine.tp, dp_shard=1), accelerators=engine.tp, count=count,
            accelerator_type=engine.type, level=table.level(engine.tp), concurrency_cap=caps.get(engine, 0),
        )  # fmt: skip
    return message


def _move(planned: PlannedMove, gain: float, table: RateTable, generations: Mapping[str, int]) -> wire.Move:
    move = planned.move
    return wire.Move(
        sources=[wire.ReassignmentSource(replica=r, generation=generations.get(r, 0)) for r in move.sources],
        targets=[wire.ReassignmentTarget(spec=_spec(t, table)) for t in move.targets],
        gain_tokens=gain, cost_tokens=planned.cost_tokens, reason=proposals.reason(planned.reason),
    )  # fmt: skip


def _spec(target: NewReplica, table: RateTable) -> wire.ReplicaSpec:
    width = len(target.accelerators)
    engine = target.role == "ROLLOUT"
    return wire.ReplicaSpec(
        role=wire.Role.Value(f"ROLE_{target.role}"), accelerators=target.accelerators,
        shape=wire.Shape(tp=width if engine else 1, dp_shard=1 if engine else width),
        level=table.level(width) if engine else 0,
    )  # fmt: skip
