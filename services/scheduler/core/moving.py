"""The live queue's preemptions: for starving work, for KV room, and moves that gain."""

import heapq
import math
from collections.abc import Iterator, Mapping

import numpy as np

from services.scheduler.core import verdicts
from services.scheduler.core.cmlfq import LOOK_AT
from services.scheduler.core.livecontent import Content
from services.scheduler.core.livestate import Bounds, Engine, Item, Run
from services.scheduler.core.verdicts import Preempt


class Moving(Content):
    """Decides what stops."""

    def _ways_made(self, now: float, stopped: dict[str, Item]) -> list[Preempt]:
        """For each run whose head waited too long: one past its quantum is stopped, unless a place comes free."""
        found: list[tuple[tuple[object, ...], Preempt]] = []
        for run in self._starving.values():
            item = run.head
            if item is None or not self._may_make_way(run, now):
                continue
            victim = self._victim(run, now)
            if victim is not None:
                if not item.known:
                    self._ask(item)
                stopped[victim.name] = victim
                rank = (item.waiting_since, -item.priority, item.admission_number, -item.estimate_p50, item.name)
                found.append((rank, verdicts.make_way(victim, item, now)))
        found.sort(key=lambda f: f[0])
        return [preempt for _, preempt in found]

    def _may_make_way(self, run: Run, now: float) -> bool:
        """No one is asked to already, and one may be that was not when last looked."""
        return not run.pending and not (run.no_victim and not now - run.young_since > self._settings.max_wait_s)

    def _victim(self, run: Run, now: float) -> Item | None:
        best: Item | None = None
        run.no_victim, run.young_since = True, math.inf
        for one in run.spent.values():
            place = one.place
            if place is None or place.run is None or not place.admitting:
                continue
            if not now - one.since > self._settings.max_wait_s:
                run.young_since = min(run.young_since, one.since)
            elif best is None or (one.quantum_used, one.name) > (best.quantum_used, best.name):
                best = one
        run.no_victim = best is None
        return best

    def _pressed(self, most: int, stopped: dict[str, Item]) -> list[Preempt]:
        """The youngest of each engine whose KV cache is nearly full."""
        found: list[Preempt] = []
        for name in sorted(self._hot):
            engine = self._hot[name]
            already = [t for t in engine.running.values() if t.name in stopped] if stopped else []
            going = engine.going + sum(t.tokens for t in already)
            share = (engine.kv_used - going) / engine.kv_capacity
            count = len(engine.running) - engine.pending - len(already)
            if share <= self._settings.kv_pressure or count < 2:
                continue
            mine = (t for t in engine.running.values() if not t.preempt_pending and t.name not in stopped)
            victim = max(mine, key=lambda t: (t.admission_number, -t.generated, t.name))
            found.append(verdicts.relieve(victim, share, count))
            stopped[victim.name] = victim
            if len(found) == most:
                break
        return found

    def _moves(self, most: int, stopped: dict[str, Item]) -> list[Preempt]:
        found: list[tuple[float, str, Run, Preempt]] = []
        again: dict[str, Run] = {}
        for run in self._to_move.values():
            if run.moving or run.all_movers or self._someone_gains(run, stopped):
                mine = self._movable(run, LOOK_AT * self._settings.max_moves, stopped)
                found += [(gain, preempt.trajectory, run, preempt) for gain, preempt in mine]
            run.moving.clear()
            run.all_movers = False
            for marks in (run.movers, run.targets, run.emptied, run.sources, run.fuller):
                marks.clear()
        self._to_move.clear()
        for item in stopped.values():  # they were passed over, and may move if nobody stops them
            item.run.movers[item.name] = item
            again[item.run.name] = item.run
        found.sort(key=lambda f: (-f[0], f[1]))
        for place, (_, name, run, preempt) in enumerate(found):
            run.moving[name] = preempt.target_engine
            run.all_movers = run.all_movers or place >= most
            again[run.name] = run
        self._to_move = again
        return [preempt for _, _, _, preempt in found[:most]]

    def _bounds(self, run: Run) -> Bounds:
        """What a quick look at moves needs of the run's engines."""
        if run.bounds is None:
            run.bounds = Bounds.of(run)
        return run.bounds

    def _someone_gains(self, run: Run, stopped: dict[str, Item]) -> bool:
        """True if a move may have become possible: looks at what changed since there was none."""
        bounds, draining = self._bounds(run), not run.unplaced
        if not bounds.places:
            return False
        for item in run.movers.values():
            source = item.place
            if source is None or not self._may_go(item, source, draining, stopped):
                continue
            best = bounds.best_from(source, draining)
            if best is not None and self._hopes(item, source, best):
                if any(self._leads(source, t, draining) and self._pays(item, source, t) for t in bounds.places):
                    return True
        changed = [e for e in bounds.places if e.name in run.targets] if run.targets else []
        if draining and run.emptied:
            mixed = any(e.foreign for e in self._engines.values())
            everyone = (self._engines if mixed else run.engines).values()
            fullest = max((e.load / e.cap if e.cap else math.inf for e in everyone), default=0.0)
            changed += [e for e in bounds.places if e.name in run.emptied and (e.load + 1) / e.cap < 0.5 * fullest]
        sources = [s for s in run.sources.values() if s.running]
        if draining:
            sources += [s for s in run.fuller.values() if bounds.emptiest < 0.5 * s.share()]
        if not changed and not sources:
            return False
        there = Bounds(changed)
        rates = {s.index: b for s in self._engines.values() if (b := there.best_from(s, draining))}
        rates.update((s.index, b) for s in sources if (b := bounds.best_from(s, draining)))
        moved = {s.name for s in sources}
        return any(
            self._leads(item.place, t, draining) and self._pays(item, item.place, t)
            for item in self._hopeful(run, rates, changed if not sources else bounds.places, draining)
            if item.place is not None and item.name not in stopped
            for t in (bounds.places if item.place.name in moved else changed)
        )

    def _movable(self, run: Run, most: int, stopped: dict[str, Item]) -> list[tuple[float, Preempt]]:
        """Moves of a run, the longest remaining first, with gain less cost; as if nothing were known from before."""
        draining = not run.unplaced
        bounds = self._bounds(run)
        best_from = {s.index: b for s in self._engines.values() if (b := bounds.best_from(s, draining))}
        hopeful = (((-i.estimate_p50, i.name), i) for i in self._hopeful(run, best_from, bounds.places, draining))
        late: list[tuple[tuple[float, str], Item]] = []
        """Of engines that were given something meanwhile."""
        following = next(hopeful, None)
        opened = set(best_from)
        found: list[tuple[float, Preempt]] = []
        while (following is not None or late) and len(found) < most:
            if following is None or (late and late[0] < following):
                rank, item = heapq.heappop(late)
            else:
                (rank, item), following = following, next(hopeful, None)
            source = item.place
            assert source is not None
            if not self._may_go(item, source, draining, stopped):
                continue
            best: tuple[float, float, Engine] | None = None
            for target in self._bounds(run).places:
                if not self._leads(source, target, draining) or not self._pays(item, source, target):
                    continue
                gain, cost = self._worth(item, source, target)
                if best is None or gain - cost > best[0] - best[1]:
                    best = (gain, cost, target)
            if best is None:
                continue
            gain, cost, target = best
            self._take(target, item)
            found.append((gain - cost, verdicts.move(item, target, item.spent, gain, cost)))
            if draining and target.index not in opened and self._bounds(run).best_from(target, draining):
                # fuller by what it was given, it may now give to others itself
                opened.add(target.index)
                for other in target.running.values():
                    if other.run is run and self._may_go(other, target, draining, stopped):
                        if not other.known:
                            self._ask(other)
                        if (later := (-other.estimate_p50, other.name)) > rank:
                            heapq.heappush(late, (later, other))
        return found

    def _hopeful(
        self, run: Run, best: Mapping[int, tuple[float, float]], targets: list[Engine], draining: bool
    ) -> Iterator[Item]:
        """Those for whom a move to one of the targets may pay, the longest remaining first, as far as a quick look at
        the best rates from where they are (by index) and at the most KV room tells.
        """
        if not best:
            return iter(())
        rates, prefills = np.full(len(self._rates), np.nan), np.full(len(self._rates), np.nan)
        for index, pair in best.items():
            rates[index], prefills[index] = pair
        table = run.table
        for stale in (table.stale_spent, table.stale) if draining else (table.stale_spent,):
            for item in stale.values():
                if not item.known:
                    self._ask(item)
                table.write(item)
            stale.clear()
        room = max(self._free(t) for t in targets)
        found, tight = table.hopeful(self._rates, rates, prefills, room, draining, self._settings)
        for target in targets if tight else ():
            target.tight = True
        return found

    def _hopes(self, item: Item, source: Engine, best: tuple[float, float]) -> bool:
        """A move may pay, were the fastest engine also the one with the fastest prefill."""
        if not item.known:
            self._ask(item)
        gain = item.estimate_p50 * ((source.seconds_per_token or 0.0) - best[0])
        return gain > (self._settings.handover_s + item.tokens / best[1]) * (1 + self._settings.hysteresis)

    def _may_go(self, item: Item, source: Engine, draining: bool, stopped: dict[str, Item]) -> bool:
        if not self._ready(item) or source.seconds_per_token is None or item.name in stopped:
            return False
        return item.spent or draining

    @staticmethod
    def _leads(source: Engine, target: Engine, draining: bool) -> bool:
        """A move from one to the other is thinkable: to a higher level, or in the drain phase to a much faster engine
        or to much less load.
        """
        here, there = source.seconds_per_token, target.seconds_per_token
        if here is None or there is None or source is target or source.run is None:
            return False
        if target.level > source.level:
            return True
        if not draining:
            return False
        faster = target.seconds_per_sequence is not None and target.joined < 0.5 * here
        return faster or (target.load + 1) / target.cap < 0.5 * source.load / max(1, source.cap)

    def _worth(self, item: Item, source: Engine, target: Engine) -> tuple[float, float]:
        """Seconds gained and seconds that the move costs."""
        gain = item.estimate_p50 * ((source.seconds_per_token or 0.0) - target.joined)
        return gain, self._settings.handover_s + (item.tokens / target.prefill if target.prefill else 0.0)

    def _pays(self, item: Item, source: Engine, target: Engine) -> bool:
        if not item.known:
            self._ask(item)
        least = self._settings.min_remaining if item.spent else 2 * self._settings.min_remaining
        if item.estimate_p50 < least or not self._fits(target, item):
            return False
        gain, cost = self._worth(item, source, target)
        return gain > cost * (1 + self._settings.hysteresis)
