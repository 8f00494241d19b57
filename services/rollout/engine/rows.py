"""Which KV row belongs to which seat: running ones first, then those kept for a later turn, then free ones.

The running rows are always 0 .. running-1, so that a decode step reads the cache through one slice, without a copy;
paid for by moving a row when a sequence ends, once in its life. Seats do not move: they index all other state.
"""

from collections import OrderedDict
from collections.abc import Callable

Move = Callable[[int, int, int], None]
"""move(source row, target row, seat): copies the cache of `seat` between rows."""


class Rows:
    """Row order of `count` seats; `move` is told of each copy that must be made."""

    def __init__(self, count: int, move: Move) -> None:
        self.count = count
        self.running = 0
        self.seat_at = list(range(count))
        self.row_of = list(range(count))
        self.kept: OrderedDict[str, int] = OrderedDict()
        """Prefix key -> seat, least recently kept first; these seats have the rows after the running ones."""
        self._move = move

    @property
    def free(self) -> int:
        """Seats that are neither running nor kept."""
        return self.count - self.running - len(self.kept)

    def take(self) -> int:
        """Starts a new seat: evicts the least recently kept one if no seat is free."""
        if self.free == 0:
            self.drop(next(iter(self.kept)))
        seat = self.seat_at[self.running + len(self.kept)]
        self._to_running(seat)
        return seat

    def take_kept(self, key: str) -> int:
        """Starts a kept seat again, its cache intact."""
        seat = self.kept.pop(key)
        # the seat stands among len(kept) + 1 rows; bring it to the first of them
        self._exchange(self.row_of[seat], self.running, keep_second=bool(self.kept))
        self.running += 1
        return seat

    def end(self, seat: int, key: str = "") -> None:
        """Ends a running seat; with a key its cache is kept (an older one of the same key is dropped)."""
        if key and key in self.kept:
            self.drop(key)
        last = self.running - 1
        self._exchange(self.row_of[seat], last, keep_first=bool(key))
        self.running = last
        if key:
            self.kept[key] = seat
        elif self.kept:
            # the freed row lies before the kept ones: put the last kept one there
            self._exchange(last, last + len(self.kept), keep_first=False)

    def drop(self, key: str) -> None:
        """Frees a kept seat."""
        seat = self.kept.pop(key)
        self._exchange(self.row_of[seat], self.running + len(self.kept), keep_first=False)

    def drop_all(self) -> None:
        """Frees all kept seats."""
        self.kept.clear()

    def _to_running(self, seat: int) -> None:
        """Brings a free seat, the first one after the kept ones, to the end of the running ones."""
        self._exchange(self.row_of[seat], self.running, keep_first=False)
        self.running += 1

    def _exchange(self, first: int, second: int, *, keep_first: bool = True, keep_second: bool = True) -> None:
        """Swaps two rows; caches that nobody needs any more are not copied."""
        if first == second:
            return
        a, b = self.seat_at[first], self.seat_at[second]
        if keep_first and keep_second:
            self._move(first, -1, a)
            self._move(second, first, b)
            self._move(-1, second, a)
        elif keep_first:
            self._move(first, second, a)
        elif keep_second:
            self._move(second, first, b)
        self.seat_at[first], self.seat_at[second] = b, a
        self.row_of[a], self.row_of[b] = second, first
