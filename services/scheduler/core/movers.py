"""What is leased of one run as columns, so that one look tells who would gain by moving to an engine."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from services.scheduler.core.cmlfq import QueueSettings

if TYPE_CHECKING:
    from services.scheduler.core.livestate import Item

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

FIRST_ROWS = 64
PORTION = 64


class Table:
    """Rows of leased trajectories. `stale` ones have an estimate or a token count that their row lacks."""

    def __init__(self) -> None:
        self.items: list[Item | None] = []
        self._free: list[int] = []
        self._p50: Floats = np.zeros(FIRST_ROWS)
        self._tokens: Floats = np.zeros(FIRST_ROWS)
        self._source: NDArray[np.intp] = np.zeros(FIRST_ROWS, dtype=np.intp)
        self._ready: Bools = np.zeros(FIRST_ROWS, dtype=np.bool_)
        self._spent: Bools = np.zeros(FIRST_ROWS, dtype=np.bool_)
        self.stale: dict[str, Item] = {}
        self.stale_spent: dict[str, Item] = {}

    def __iter__(self) -> "Iterator[Item]":
        return (item for item in self.items if item is not None)

    def add(self, item: "Item", source: int) -> None:
        """A lease began."""
        if self._free:
            row = self._free.pop()
            self.items[row] = item
        else:
            row = len(self.items)
            self.items.append(item)
            if row >= len(self._p50):
                self._grow()
        item.row = row
        self._source[row] = source
        self._ready[row] = False
        self._spent[row] = item.spent
        self.touch(item)

    def drop(self, item: "Item") -> None:
        """A lease ended."""
        self.items[item.row] = None
        self._ready[item.row] = False
        self._free.append(item.row)
        self.stale.pop(item.name, None)
        self.stale_spent.pop(item.name, None)
        item.row = -1

    def touch(self, item: "Item") -> None:
        """Its tokens or its estimate changed."""
        if item.spent:
            self.stale_spent[item.name] = item
        else:
            self.stale[item.name] = item

    def mark(self, item: "Item", ready: bool) -> None:
        """Whether it may move now, and whether it is past its quantum."""
        self._ready[item.row] = ready
        self._spent[item.row] = item.spent
        if item.spent and self.stale.pop(item.name, None) is not None:
            self.stale_spent[item.name] = item

    def write(self, item: "Item") -> None:
        """Brings its row up to date; its estimate is known."""
        self._p50[item.row] = item.estimate_p50
        self._tokens[item.row] = item.tokens

    def hopeful(
        self,
        rates: Floats,
        best: Floats,
        prefill: Floats,
        room: float,
        draining: bool,
        settings: QueueSettings,
    ) -> "tuple[Iterator[Item], bool]":
        """Those for whom a move may pay, the longest remaining first, and whether KV room kept others out. `rates` are
        seconds per token by index of the engine that they are on, `best` and `prefill` the best that they could find
        from there (NaN: none); the arithmetic is that of cmlfq.decide, so none that gains there is left out here.
        """
        rows = len(self.items)
        may = self._ready[:rows] if draining else self._ready[:rows] & self._spent[:rows]
        some = np.flatnonzero(may)
        source, p50, tokens = self._source[some], self._p50[some], self._tokens[some]
        gain = p50 * (rates[source] - best[source])  # NaN compares as false
        cost = settings.handover_s + tokens / prefill[source]
        least = settings.min_remaining * (2.0 - self._spent[some])
        pays = (p50 >= least) & (gain > cost * (1 + settings.hysteresis))
        fits = tokens + p50 <= room
        tight = bool((pays & ~fits).any())
        chosen = pays & fits
        return self._ranked(some[chosen], p50[chosen]), tight

    def _ranked(self, rows: NDArray[np.intp], p50: Floats) -> "Iterator[Item]":
        """In order, made in portions: seldom more than the first few are wanted."""
        while len(rows):
            first = np.ones(len(rows), dtype=np.bool_)
            if len(rows) > PORTION:
                first = p50 >= np.partition(p50, len(p50) - PORTION)[len(p50) - PORTION]
            portion = [item for row in rows[first].tolist() if (item := self.items[row]) is not None]
            yield from sorted(portion, key=lambda i: (-i.estimate_p50, i.name))
            rows, p50 = rows[~first], p50[~first]

    def _grow(self) -> None:
        for name in ("_p50", "_tokens", "_source", "_ready", "_spent"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.zeros_like(old))))
