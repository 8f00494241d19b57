"""What a planner of the control plane answers with, whichever it is."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.common import wire
from services.scheduler.control.ledger import Change
from services.scheduler.control.observe import Step
from services.scheduler.core.model import Reassignment, Replica, Target
from services.scheduler.core.pacing import Pace, PlannerSettings, PlannerState
from services.scheduler.core.reason import Reason


@dataclass(frozen=True, slots=True)
class Start:
    """One hand-over that can start now."""

    sources: tuple[Replica, ...]
    targets: tuple[Target, ...]
    move: int
    """Its place in the plan's moves, from 0."""
    gain_rate: float
    """Trained tokens per second expected more."""
    reason: Reason


@dataclass(frozen=True, slots=True)
class Proposal:
    """An evaluation: the best layout by the model, why it is moved to or not, and what to start of it."""

    reason: Reason
    label: str
    """Of the best layout, to tell whether it is another than before."""
    present: str
    best: str
    """The layouts in words."""
    step_s: float
    """Seconds of a step as it is, by the model; 0 if it cannot say."""
    start: Start | None
    plan: wire.Plan
    """Layouts, moves, reason and profile; without a name, times and what follows from carrying it out."""


class Planner(Protocol):
    """One of the planners, with what it has learnt."""

    @property
    def shifted(self) -> bool:
        """The load has just changed abruptly."""
        ...

    def basis(self, change: Change) -> Hashable:
        """What an evaluation rests on, but for the pace of moves: while that is the same, it need not be repeated."""
        ...

    def feed(self, change: Change, fresh: Sequence[Step], *, settled: bool, expected_s: float) -> None:
        """What happened since the last pass; `fresh`: steps that were committed. `settled`: the last move is over.
        `expected_s`: seconds of a step as the last evaluation had it, 0 if it had none.
        """
        ...

    def propose(
        self, change: Change, pace: Pace, steps_left: float, settings: PlannerSettings, state: PlannerState
    ) -> Proposal:
        """Evaluates what is now; changes nothing but `state`."""
        ...

    def handed_over(self, item: Reassignment) -> None:
        """A move of the planner has succeeded."""
        ...


def reason(item: Reason) -> wire.Reason:
    """In the contract's form."""
    return wire.Reason(code=item.code, text=item.text[:1024], numbers=dict(item.numbers))


def training_run(change: Change) -> str | None:
    """The run that trains."""
    for run in change.fleet.runs.values():
        if run.kind == "TRAIN" and run.state == "ACTIVE":
            return run.name
    return None
