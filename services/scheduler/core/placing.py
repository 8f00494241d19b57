"""The live queue's leases: passes over what waits, as far as any engine can take anything."""

import math
import sys
from collections.abc import Iterable

from services.scheduler.core import verdicts
from services.scheduler.core.cmlfq import reserved
from services.scheduler.core.livecontent import Content
from services.scheduler.core.livestate import Engine, Item, Lane, Run
from services.scheduler.core.verdicts import Assign


class Placing(Content):
    """Decides leases."""

    def _assigns(self, now: float) -> list[Assign]:
        found: list[tuple[tuple[object, ...], Assign]] = []
        for run in self._to_assign.values():
            self._place_all(run, now, found)
        self._to_assign.clear()
        for run in self._runs.values() if found else ():
            if run.proposed:
                self._to_assign[run.name] = run  # until each lease has come
        found.sort(key=lambda f: f[0])
        return [assign for _, assign in found]

    def _place_all(self, run: Run, now: float, found: list[tuple[tuple[object, ...], Assign]]) -> None:
        """One pass over the run's queue in its order, as far as any engine can take anything."""
        for item in run.proposed.values():  # decided before, and not leased
            self._may_take(self._engines.get(item.proposed))
            item.proposed = ""
            if item.lane is not None:
                item.lane.renew(item)
        run.proposed.clear()
        before, kept, head = run.unplaced, run.kept, run.head
        run.kept = run.head = None
        if kept is not None:
            kept.held = False
        self._known_free.clear()
        if run.waiting:
            places = list(run.roomy.values())
            if run.aged.count:
                self._place_aged(run, places, now, found)
            if places:
                self._place_levels(run, places, now, found)
        run.unplaced = run.waiting > len(run.proposed)
        if before and not run.unplaced:
            run.all_movers = True
            self._to_move[run.name] = run
        if run.unplaced:
            for place in run.roomy.values():
                place.tight = place.tight or place.kv_capacity > 0
        if kept is not None and kept is not run.kept:
            self._may_take(kept)
        if run.head is not None:
            run.no_victim = run.no_victim and run.head is head
            self._starving[run.name] = run
        else:
            self._starving.pop(run.name, None)

    def _place_aged(
        self, run: Run, places: list[Engine], now: float, found: list[tuple[tuple[object, ...], Assign]]
    ) -> None:
        """Those that waited too long; the first that finds no place is `head`, and one engine is kept for it."""
        lane = run.aged
        reach = self._reach(places, lane)
        for key in lane.keys:
            if reach < 0 and run.head is not None and (run.kept is not None or not run.engines):
                return
            for item in self._in_order(lane.buckets[key].values(), reach if run.kept is not None else math.inf):
                place = self._choose(item, True, places) if reach >= 0 else None
                if place is not None:
                    self._give(item, place, self._level(item), True, places, now, found)
                    reach = self._reach(places, lane)
                    continue
                run.head = run.head or item
                if run.kept is None and (keep := self._kept_for(item)) is not None:
                    run.kept, keep.held = keep, True
                    if keep in places:
                        places.remove(keep)
                        reach = self._reach(places, lane)

    def _place_levels(
        self, run: Run, places: list[Engine], now: float, found: list[tuple[tuple[object, ...], Assign]]
    ) -> None:
        """The others, by rank over all levels that any engine has a slot for."""
        at = {level: 0 for level, lane in run.lanes.items() if lane.count}
        reaches = {level: self._reach(places, run.lanes[level], level) for level in at}
        while True:
            at = {n: i for n, i in at.items() if reaches[n] >= 0 and i < len(run.lanes[n].keys)}
            if not at:
                return
            key = min(run.lanes[level].keys[i] for level, i in at.items())
            bucket: list[Item] = []
            reach = max(reaches[level] for level in at)
            for level, i in at.items():
                lane = run.lanes[level]
                if lane.keys[i] == key:
                    bucket += lane.buckets[key].values()
                    at[level] = i + 1
            for item in self._in_order(bucket, reach):
                level = self._level(item)
                place = self._choose(item, False, places, level)
                if place is not None:
                    self._give(item, place, level, False, places, now, found)
                    reaches = {n: self._reach(places, run.lanes[n], n) for n in at}
                    if max(reaches.values()) < 0:
                        return

    def _in_order(self, bucket: Iterable[Item], reach: float) -> list[Item]:
        """Those of a bucket that may need no more than `reach`, the longest remaining first."""
        some = [i for i in bucket if i.tokens + (i.estimate_p50 if i.known else 0.0) <= reach and not i.proposed]
        if len(some) > 1:
            for item in some:
                if not item.known:
                    self._ask(item)
            some.sort(key=lambda i: (-i.estimate_p50, i.name))
        return some

    def _reach(self, places: list[Engine], lane: Lane, level: int | None = None) -> float:
        """KV tokens that one of the lane may need to fit somewhere; -1 if none fits. `level` None: waited too long."""
        most = -1.0
        for place in places:
            spare = 0 if level is None else reserved(place.level, place.cap, level, False, self._settings)
            if place.load >= place.cap - spare:
                continue
            free = self._known_free.get(place.name)
            if free is None:
                free = self._known_free[place.name] = self._free(place)
            if free > 0.25 * place.kv_capacity:  # so much that looking at each costs less than bounding it
                return math.inf if lane.count else -1.0
            most = max(most, free)
        return most if most >= 0 and lane.least(most) <= most else -1.0

    def _give(
        self,
        item: Item,
        place: Engine,
        level: int,
        aged: bool,
        places: list[Engine],
        now: float,
        found: list[tuple[tuple[object, ...], Assign]],
    ) -> None:
        self._take(place, item)
        self._known_free.pop(place.name, None)
        if place.load >= place.cap:
            places.remove(place)
        item.proposed = place.name
        item.run.proposed[item.name] = item
        self._may_give(place, slower=False)
        since = item.waiting_since if aged else 0.0
        rank = (not aged, since, -item.priority, item.admission_number, -item.estimate_p50, item.name)
        found.append((rank, verdicts.lease(item, place, level, place.load, now, aged)))

    def _level(self, item: Item) -> int:
        last = self._engines.get(item.last_engine)
        if last is not None and last.run is item.run and last.level == item.level:
            if last.admitting and not last.load > 0.9 * last.cap:
                return item.level
        below = item.level - 1
        quanta = self._settings.quantum_tokens
        if 0 <= below < len(quanta):
            if not item.known:
                self._ask(item)
            if item.estimate_p90 <= 0.5 * quanta[below]:
                return below
        return item.level

    def _choose(self, item: Item, aged: bool, places: list[Engine], level: int = 0) -> Engine | None:
        if not item.known:
            self._ask(item)
        able: list[tuple[Engine, bool, float | None]] = []
        soonest, last = math.inf, item.last_engine
        for place in places:
            spare = reserved(place.level, place.cap, level, aged, self._settings) if place.level > level else 0
            if not self._fits(place, item, spare):
                continue
            again = place.name == last and not place.load > 0.9 * place.cap
            finish = self._finish(item, place, again)
            able.append((place, again, finish))
            if finish is not None and finish < soonest:
                soonest = finish
        late = soonest * (1 + self._settings.hysteresis) if soonest < math.inf else math.inf
        best: tuple[bool, int, bool, float] | None = None
        equals: list[Engine] = []
        for place, again, known in able:
            finish = soonest if known is None else known
            distance = 0 if aged or (known is None and soonest < math.inf) else abs(place.level - level)
            key = (finish > late, distance, not again, place.load / place.cap)
            if best is None or key < best:
                best, equals = key, [place]
            elif key == best:
                equals.append(place)
        if not equals:
            return None
        equals.sort(key=lambda e: e.name)
        return equals[item.hashed % len(equals)]

    @staticmethod
    def _finish(item: Item, place: Engine, again: bool) -> float | None:
        if place.seconds_per_token is None:
            return None
        decode = item.estimate_p50 * place.joined
        return decode + item.tokens / place.prefill if place.prefill and not again else decode

    def _kept_for(self, item: Item) -> Engine | None:
        run = item.run
        if run.keepers is None:
            some = [e for e in run.engines.values() if e.admitting and e.cap > 0]
            least = min((e.kv_capacity for e in some if e.kv_capacity), default=sys.maxsize)
            run.keepers = (sorted(e.name for e in some), least)
        able, least = run.keepers
        if item.tokens > least:
            able = [n for n in able if self._engines[n].holds(item.tokens)]
        return self._engines[able[item.hashed % len(able)]] if able else None
