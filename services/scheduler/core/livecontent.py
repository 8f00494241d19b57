"""The live queue's content: trajectories, engines and runs, what room there is, and marks of what may have changed."""

import itertools
import math
from collections.abc import Callable

import numpy as np

from services.scheduler.core.cmlfq import QueueSettings
from services.scheduler.core.livestate import Engine, Item, Run
from services.scheduler.core.movers import Floats

Estimates = Callable[[str], tuple[float, float]]
"""p50 and p90 of the tokens that a trajectory will still generate."""

SLACK = 1e-6
"""Tokens by which a quick look at KV room errs on the side of looking closer: sums of floats follow their order."""


class Content:
    """What the parts of the live queue share."""

    def __init__(self, settings: QueueSettings, estimate: Estimates) -> None:
        self._settings = settings
        self._estimate = estimate
        self._items: dict[str, Item] = {}
        self._engines: dict[str, Engine] = {}
        self._runs: dict[str, Run] = {}
        self._groups: dict[str, dict[str, Item]] = {}
        self._rates: Floats = np.full(16, np.nan)
        self._free_indices = list(range(15, -1, -1))
        self._serial = itertools.count()
        self._ageing: list[tuple[float, int, Item]] = []
        self._ripening: list[tuple[float, int, Item]] = []
        self._hot: dict[str, Engine] = {}
        """Engines whose KV cache is above the pressure mark."""
        self._starving: dict[str, Run] = {}
        self._to_assign: dict[str, Run] = {}
        self._to_move: dict[str, Run] = {}
        self._known_free: dict[str, float] = {}
        """KV tokens free on engines, in the pass over a run's queue that is being made."""
        self._given: dict[str, Engine] = {}
        """Engines that the decision being made has given something."""

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def reserved(self, name: str) -> float:
        """KV tokens that the lease of a trajectory keeps room for."""
        return self._items[name].reserved

    def _engine(self, name: str) -> Engine:
        engine = self._engines.get(name)
        if engine is None:
            if not self._free_indices:
                size = len(self._rates)
                self._rates = np.concatenate((self._rates, np.full(size, np.nan)))
                self._free_indices = list(range(2 * size - 1, size - 1, -1))
            engine = self._engines[name] = Engine(name, self._free_indices.pop())
        return engine

    def _resize(self, engine: Engine) -> None:
        """Its load or its cap changed."""
        engine.load = len(engine.running) + len(engine.incoming)
        run = engine.run
        if run is not None:
            run.bounds = None
            if engine.roomy:
                run.roomy[engine.name] = engine
            else:
                run.roomy.pop(engine.name, None)

    def _freed(self, engine: Engine) -> None:
        """A slot of it came free. If it had one before, only its share and its speed are new, or its KV room."""
        run, closed = engine.run, engine.run is not None and engine.name not in engine.run.roomy
        self._resize(engine)
        if run is None or not engine.roomy:
            return
        if closed or engine.tight:
            self._room(engine)
        else:
            if run.waiting:
                self._to_assign[run.name] = run
            if not run.unplaced:
                run.emptied[engine.name] = engine
                self._to_move[run.name] = run
            if engine.seconds_per_sequence:
                self._may_take(engine)  # faster by one less

    def _room(self, engine: Engine) -> None:
        """It may have room that it had not."""
        run = engine.run
        if run is not None and engine.name in run.roomy:
            engine.tight = False
            if run.waiting:
                self._to_assign[run.name] = run
            self._may_take(engine)

    def _may_take(self, engine: Engine | None) -> None:
        run = engine.run if engine is not None else None
        if engine is not None and run is not None and engine.name in run.roomy:
            run.targets[engine.name] = engine
            self._to_move[run.name] = run

    def _may_give(self, engine: Engine, *, slower: bool) -> None:
        """What it holds may be better off elsewhere: its rates changed, or (not `slower`) it is fuller."""
        for run in {t.run for t in engine.running.values()} if engine.foreign else [engine.run]:
            if run is not None and (slower or not run.unplaced):
                (run.sources if slower else run.fuller)[engine.name] = engine
                self._to_move[run.name] = run

    def _ready(self, item: Item) -> bool:
        return item.ripe and not item.preempt_pending and item.moves < self._settings.max_moves_each

    def _ask(self, item: Item) -> None:
        item.estimate_p50, item.estimate_p90 = self._estimate(item.name)
        item.known = True

    def _kv(self, engine: Engine) -> float:
        if not engine.fresh:
            engine.kv = 0.0
            for name in sorted(engine.incoming):  # sums of floats follow their order
                item = engine.incoming[name]
                if not item.known:
                    self._ask(item)
                engine.kv += item.tokens + item.estimate_p50
            engine.fresh = True
        return engine.kv

    def _free(self, place: Engine) -> float:
        """KV tokens that one may need to fit, or a little more."""
        if not place.kv_capacity or place.load == 0:
            return math.inf
        used = max(place.kv_used, place.charged) + self._kv(place)
        return place.kv_capacity * self._settings.kv_watermark - used + SLACK

    def _fits(self, place: Engine, item: Item, spare: int = 0) -> bool:
        if place.held or place.load >= place.cap - spare:
            return False
        if not place.kv_capacity:
            return True
        if place.load == 0:
            fits = item.tokens <= place.kv_capacity
            place.tight = place.tight or not fits
            return fits
        used = max(place.kv_used, place.charged) + self._kv(place)
        fits = used + item.tokens + item.estimate_p50 <= place.kv_capacity * self._settings.kv_watermark
        place.tight = place.tight or not fits
        return fits

    def _take(self, place: Engine, item: Item) -> None:
        """A slot and KV tokens, until the decision is over."""
        kv = self._kv(place)
        place.load += 1
        place.kv = kv + (item.tokens + item.estimate_p50)
        self._given[place.name] = place
        if place.run is not None:
            place.run.bounds = None
