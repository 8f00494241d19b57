"""What a policy sees and what it may answer. One file a policy beside this one.

A policy sees trajectories' pasts (`Trajectory`) and engines' loads (`EngineState`), never an episode. What one knows
beyond that, it says in `foresight`, and the cluster hands it over with `reveal`: the clairvoyant bound and the one-shot
predictor alone do.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from services.simulator.engine import EngineState
from services.simulator.layout import ClusterSpec, Layout, Mode
from services.simulator.results import StepResult
from services.simulator.trajectory import NOWHERE, Trajectory

Foresight = Literal["none", "noisy", "exact"]


@dataclass(frozen=True, slots=True)
class Assign:
    """A queued trajectory goes to an engine."""

    trajectory: Trajectory
    engine: int


@dataclass(frozen=True, slots=True)
class Move:
    """One that has an engine goes to another one, or back to the queue (NOWHERE): now, or when its turn ends."""

    trajectory: Trajectory
    engine: int
    at_turn_end: bool = True


class View:
    """The cluster as a policy sees it. `live`: admitted and not ended; `queued`: those of them without an engine that
    are not in a tool call, in the order of queueing; `steps`: the training steps so far.
    """

    __slots__ = ("engines", "layout", "live", "now", "queued", "steps", "version")

    def __init__(self, layout: Layout) -> None:
        self.now = 0.0
        self.version = 0
        self.layout = layout
        self.engines: list[EngineState] = []
        """By index; those that are gone stay, not `alive`."""
        self.live: dict[int, Trajectory] = {}
        self.queued: dict[int, Trajectory] = {}
        self.steps: list[StepResult] = []

    def admitting(self) -> list[EngineState]:
        """Engines that take new work."""
        return [engine for engine in self.engines if engine.admitting]


class Policy:
    """The simplest policy, which others refine: a given layout, least loaded engine, sticky, nothing ever moves."""

    name = "least-loaded"
    mode = Mode.ASYNC
    foresight: Foresight = "none"
    overprovision = 1.0
    """COLOCATED: groups admitted for each one that a step takes; the last to end are aborted and deferred."""
    decide_every_s: float | None = None

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def start(self, spec: ClusterSpec) -> Layout:
        """The layout to begin with. Called once, before all else."""
        del spec
        return self._layout

    def reveal(self, oracle: Callable[[Trajectory], float]) -> None:
        """Tokens that a trajectory still generates, exactly or, drawn once each, as `foresight` has it."""

    def max_running(self, engine: EngineState) -> int:
        """Most sequences in a decoding step of an engine."""
        return engine.max_running

    def place(self, view: View, trajectory: Trajectory) -> int:
        """Engine of one that has none: at admission, or after it was lost. NOWHERE = it waits in the queue."""
        del trajectory
        return least_loaded(view.engines)

    def resume(self, view: View, trajectory: Trajectory) -> int:
        """Engine of one whose tool returned; by default the one it has."""
        return trajectory.engine if view.engines[trajectory.engine].admitting else self.place(view, trajectory)

    def admit(self, view: View) -> Iterable[Assign | Move]:
        """Called when something is queued and room may have come free."""
        del view
        return ()

    def decide(self, view: View) -> Sequence[Assign | Move]:
        """Called every `decide_every_s`, with tokens up to date."""
        del view
        return ()

    def plan(self, view: View) -> Layout | None:
        """Called after each step; None = as it is."""
        del view
        return None

    def on_call(self, trajectory: Trajectory) -> None:
        """A turn ended in a tool call: its tokens are up to date."""

    def on_turn(self, trajectory: Trajectory, tool: str, outcome: str, observation: int) -> None:
        """A tool returned so many tokens."""

    def on_end(self, trajectory: Trajectory) -> None:
        """An episode ended by itself."""

    def on_step(self, consumed: Sequence[Trajectory], seconds: float) -> None:
        """A training step over these took so long; `plan` follows."""


def least_loaded(engines: Sequence[EngineState]) -> int:
    """The admitting engine with the fewest trajectories for each of its accelerators; NOWHERE if none admits."""
    best, least = NOWHERE, float("inf")
    for engine in engines:
        if engine.admitting:
            load = engine.assigned / engine.tp
            if load < least:
                best, least = engine.index, load
    return best
