"""`libra` without one of its mechanisms each, beside itself: what a mechanism brings is what is missing without it.

Each is the production code with other settings, other evidence, or one decision replaced by the simplest that does the
same; what cannot be set is overridden here and not in the production code.
"""

from dataclasses import dataclass, replace

from services.scheduler.core.cmlfq import EngineView
from services.scheduler.core.livequeue import LiveQueue
from services.scheduler.core.livestate import Engine, Item
from services.simulator.layout import Layout
from services.simulator.policies.base import View
from services.simulator.policies.libra import SETTINGS, Libra

GUESS_TOKENS = 4_000.0
"""What `ConstantEstimate` takes to remain, whatever was generated: about a mean episode of the workloads here."""


class Unplanned(Libra):
    """The layout that it begins with, half and half of the smallest degree, stays."""

    name = "no-planner"

    def __init__(self, layout: Layout | None = None) -> None:
        super().__init__(layout, plans=False)


class Settled(Libra):
    """What has an engine keeps it, but for what engines themselves stop: no preemption and no move."""

    name = "no-moves"

    def __init__(self, layout: Layout | None = None) -> None:
        super().__init__(layout, replace(SETTINGS, max_moves=0))


class LeastLoaded(Libra):
    """Placed on the engine with the fewest trajectories for each accelerator, whatever its speed and level."""

    name = "least-loaded-placement"

    def __init__(self, layout: Layout | None = None) -> None:
        super().__init__(layout)
        self.live: _LeastLoadedQueue = _LeastLoadedQueue(SETTINGS, self._estimate)

    def _loads(self, view: View) -> None:
        self.live.widths = {str(e.index): e.tp for e in view.engines}
        super()._loads(view)


class _LeastLoadedQueue(LiveQueue):
    widths: dict[str, int]
    """Accelerators of each engine."""

    def _choose(self, item: Item, aged: bool, places: list[Engine], level: int = 0) -> Engine | None:
        del aged, level
        if not item.known:
            self._ask(item)
        able = [place for place in places if self._fits(place, item)]
        return min(able, key=lambda e: (e.load / self.widths[e.name], e.name), default=None)


class Unreserved(Libra):
    """KV room is kept for what leased trajectories have, not for what they are expected to generate."""

    name = "no-kv-reservation"

    def __init__(self, layout: Layout | None = None) -> None:
        super().__init__(layout, replace(SETTINGS, kv_growth=0.0))


class FullyReserved(Libra):
    """KV room is kept for all that leased trajectories are expected to generate."""

    name = "full-kv-reservation"

    def __init__(self, layout: Layout | None = None) -> None:
        super().__init__(layout, replace(SETTINGS, kv_growth=1.0))


class Uncapped(Libra):
    """The queue knows of no KV cache: engines get all there is, and wait, evict and stop as they do by themselves."""

    name = "uncapped"

    def __init__(self, layout: Layout | None = None) -> None:
        super().__init__(layout)
        self.live = _UncappedQueue(SETTINGS, self._estimate)


class _UncappedQueue(LiveQueue):
    def engine(self, view: EngineView) -> None:
        super().engine(replace(view, kv_capacity_tokens=0))


class ConstantEstimate(Libra):
    """Every trajectory is taken to have GUESS_TOKENS left, with certainty."""

    name = "constant-estimate"

    def _estimate(self, name: str) -> tuple[float, float]:
        del name
        return GUESS_TOKENS, GUESS_TOKENS


class OutcomeBlind(Libra):
    """It is told that every call went well."""

    name = "outcome-blind"

    def __init__(self, layout: Layout | None = None) -> None:
        super().__init__(layout, outcomes=False)


@dataclass(frozen=True, slots=True)
class Ablated:
    """A variant, and in words what it does instead."""

    policy: type[Libra]
    instead: str


PLANNER = Ablated(Unplanned, "half of the accelerators train, engines of the smallest degree, throughout")
RESERVED = Ablated(FullyReserved, "KV room is kept for contexts and all of their growth, not for half of it")
OUTCOMES = Ablated(OutcomeBlind, "every call is taken to have gone well")
QUEUE: tuple[Ablated, ...] = (
    Ablated(Settled, "nothing is preempted or moved"),
    Ablated(LeastLoaded, "placed on the engine with the fewest trajectories for each accelerator"),
    Ablated(Unreserved, "KV room is kept for contexts as they are, not for their growth"),
    Ablated(Uncapped, "engines are given whatever there is, without regard to KV caches"),
    Ablated(ConstantEstimate, f"{GUESS_TOKENS:,.0f} tokens are taken to remain, always"),
    OUTCOMES,
)
"""Mechanisms of estimator, queue and admission, which work on any layout."""
