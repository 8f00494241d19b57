"""The multi-level queue as a live object: events in, decisions out, with work for what changed alone.

It decides what cmlfq.decide would on the same content (a test drives both), and is quick because of what a decision
leaves behind: after one whose actions were carried out, no waiting trajectory fits anywhere and no leased one gains by
a move. Until then only these can change that, and only for what they touch:

    room on an engine (a lease or a move ended, its KV cache or its rates changed)    the queue; who would move there
    a trajectory queued, or waiting too long                                          the queue
    a turn, or a lease old enough to move                                             this one's own moves
    an engine slower or fuller than before                                            moves away from it
    the last one placed: the drain phase begins                                       all moves of the run

So a turn of one that has nowhere to go decides nothing. What waits lies in lanes (one a level, one for those that
waited too long) of buckets of equal rank; a lane is passed over at once if no engine has a slot for its level, or if
the least KV room that one of it needs is more than any engine has.

Estimates are asked for when a decision needs them and held until the trajectory's own next event or `group_learnt`. A
turn asks for one itself only where more than AMPLE of the engine's KV cache is kept for what is leased there: what is
kept for this one follows from it. Elsewhere what it was last expected to generate will do.
One writer; no clock: `now` never falls. An action that is not carried out is decided again.
"""

import heapq
import math

import numpy as np

from services.scheduler.core.cmlfq import EngineView, QueuedTrajectory, QueueView, RunningTrajectory, hashed, pace
from services.scheduler.core.livestate import Engine, Item, Run
from services.scheduler.core.moving import Moving
from services.scheduler.core.placing import Placing
from services.scheduler.core.verdicts import Assign, Preempt

RATE_STEP = 0.04
"""Measured rates waver; a change below this share is none."""
AMPLE = 0.5
"""Share of a KV cache that may be spoken for before every turn there asks for an estimate: until then room would be
misjudged only if estimates were too low by half on the whole."""


def _close(new: float | None, old: float | None) -> bool:
    if new is None or old is None:
        return new is old
    return abs(new - old) <= RATE_STEP * old


def _same_speed(view: EngineView, engine: Engine) -> bool:
    """The new measurement is about the one before, and on its curve."""
    expected = engine.seconds_per_token
    if expected is not None:
        expected = pace(expected, engine.seconds_per_sequence, view.measured_load - engine.measured_load)
    return (
        _close(view.seconds_per_token, engine.seconds_per_token)
        and _close(view.seconds_per_token, expected)
        and _close(view.seconds_per_sequence, engine.seconds_per_sequence)
        and _close(view.prefill_tokens_per_second, engine.prefill)
    )


class LiveQueue(Placing, Moving):
    """The live content. Events of trajectories that are not known, or not in the state that an event needs, are errors
    (KeyError, ValueError): the caller's picture is not this one's.
    """

    def engine(self, view: EngineView) -> None:
        """It appears or changes. What is leased to it is counted here, not taken from the view."""
        engine = self._engine(view.name)
        before = engine.run.name if engine.run is not None else ""
        same = (view.run, view.level, view.concurrency_cap, view.kv_capacity_tokens, view.admitting)
        if before and same == (before, engine.level, engine.cap, engine.kv_capacity, engine.admitting):
            self._loads(engine, view)
            return
        former = engine.run
        if former is not None:
            self._leave(engine)
        engine.run = run = self._run(view.run)
        run.engines[view.name] = engine
        engine.level, engine.cap, engine.admitting = view.level, view.concurrency_cap, view.admitting
        engine.kv_capacity = view.kv_capacity_tokens
        engine.foreign = sum(t.run is not run for t in engine.running.values())
        self._loads(engine, view)
        self._resize(engine)
        self._all(before, view.run)
        if former is not None:
            self._forget_run(former)

    def drop_engine(self, name: str) -> None:
        """It is gone. What is leased to it stays so until told otherwise."""
        engine = self._engines[name]
        if engine.run is None:
            raise ValueError(f"engine {name} is not there")
        run = engine.run
        self._leave(engine)
        engine.run, engine.seconds_per_token, engine.kv_used, engine.foreign = None, None, 0, len(engine.running)
        engine.reported_at = -math.inf
        self._rates[engine.index] = np.nan
        self._hot.pop(name, None)
        self._all(run.name)
        self._forget_engine(engine)
        self._forget_run(run)

    def _leave(self, engine: Engine) -> None:
        assert engine.run is not None
        del engine.run.engines[engine.name]
        if engine.run.kept is engine:
            engine.run.kept, engine.held = None, False
        engine.run.roomy.pop(engine.name, None)
        engine.run.bounds = None

    def _all(self, *runs: str) -> None:
        """After a change of what engines are: all of these runs, and of others with work there, is open again."""
        for run in self._runs.values():
            run.keepers = None
            if run.name in runs or any(t.place is not None and t.place.run is not run for t in run.table):
                run.all_movers, run.no_victim = True, False
                self._to_assign[run.name] = self._to_move[run.name] = run

    def _loads(self, engine: Engine, view: EngineView) -> None:
        """Its measurements. A rate within RATE_STEP of the one decided with counts as the same."""
        eased = False
        if view.reported_at != engine.reported_at:
            eased = view.kv_used_tokens < engine.kv_used
            engine.kv_used, engine.reported_at = view.kv_used_tokens, view.reported_at
        self._heat(engine)
        if not _same_speed(view, engine):
            engine.seconds_per_token, engine.prefill = view.seconds_per_token, view.prefill_tokens_per_second
            engine.seconds_per_sequence, engine.measured_load = view.seconds_per_sequence, view.measured_load
            self._rates[engine.index] = np.nan if engine.seconds_per_token is None else engine.seconds_per_token
            if engine.run is not None:
                engine.run.bounds = None
            self._may_take(engine)
            self._may_give(engine, slower=True)
        if eased and engine.tight:
            self._room(engine)

    def _heat(self, engine: Engine) -> None:
        if engine.kv_capacity and engine.kv_used / engine.kv_capacity > self._settings.kv_pressure:
            self._hot[engine.name] = engine
        else:
            self._hot.pop(engine.name, None)

    def _run(self, name: str) -> Run:
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = Run(name)
        return run

    def _forget_engine(self, engine: Engine) -> None:
        if engine.forgettable:
            del self._engines[engine.name]
            self._free_indices.append(engine.index)

    def _forget_run(self, run: Run) -> None:
        if run.items or run.engines:
            return
        for runs in (self._runs, self._starving, self._to_assign, self._to_move):
            runs.pop(run.name, None)

    # ---- trajectories

    def queued(
        self,
        name: str,
        *,
        run: str,
        group: str,
        admission_number: int,
        priority: int,
        level: int,
        waiting_since: float,
        tokens: int,
        generated: int,
        last_engine: str = "",
        moves: int = 0,
    ) -> None:
        """It waits: new, or back from a lease with what it generated."""
        item = self._items.get(name)
        if item is None:
            mine = self._run(run)
            mine.items += 1
            item = Item(name, mine, group, admission_number, priority, level, tokens, generated, hashed(name))
            self._items[name] = item
            self._groups.setdefault(group, {})[name] = item
        elif item.run.name != run:
            raise ValueError(f"{name} belongs to {item.run.name}, not to {run}")
        else:
            self._detach(item)
        item.admission_number, item.priority, item.level = admission_number, priority, level
        item.tokens, item.generated, item.known = tokens, generated, False
        item.waiting_since, item.last_engine, item.moves = waiting_since, last_engine, moves
        mine = item.run
        mine.waiting += 1
        mine.lane(level).add(item, (-priority, admission_number))
        heapq.heappush(self._ageing, (waiting_since, next(self._serial), item))
        self._to_assign[mine.name] = mine

    def leased(self, name: str, *, engine: str, level: int, since: float, base: int | None = None) -> None:
        """It runs there since then; `base` is what it had generated when the lease began (all, by default)."""
        item = self._items[name]
        if item.lane is None:
            raise ValueError(f"{name} does not wait")
        run, place = item.run, self._engine(engine)
        as_decided = item.proposed == engine
        self._unqueue(item, quietly=as_decided)
        item.place, item.level, item.lease_level, item.since = place, level, level, since
        item.base = item.generated if base is None else base
        item.in_tool_wait = item.preempt_pending = item.ripe = False
        self._set_quantum(item)
        if item.spent:
            run.spent[name] = item
            run.no_victim = False
        run.table.add(item, place.index)
        place.running[name] = item
        place.foreign += place.run is not run
        item.reserved = self._reservation(item, place)
        place.tokens += item.tokens
        place.charged += item.charge
        self._resize(place)
        heapq.heappush(self._ripening, (since, next(self._serial), item))
        self._may_give(place, slower=False)
        if place.kv_capacity and as_decided:
            self._room(place)  # a decision counts what it will grow by, a lease what it has

    def turned(self, name: str, *, generated: int, tokens: int, in_tool_wait: bool) -> None:
        """Its holder reported a turn, or part of one: what it has now."""
        item = self._items[name]
        place = item.place
        if place is None:
            raise ValueError(f"{name} is not leased")
        run, before, more = item.run, item.charge, tokens - item.tokens
        item.tokens, item.generated, item.in_tool_wait, item.known = tokens, generated, in_tool_wait, False
        if place.kv_capacity or item.reserved:
            item.reserved = self._reservation(item, place)
        grown = item.charge - before
        place.tokens += more
        place.charged += grown
        if item.preempt_pending:
            place.going += more
            if item.target:
                self._moved_need(item)
        elif item.spent != (generated - item.base >= item.quantum):
            self._requantum(item)
        if item.spent:
            run.table.stale_spent[name] = item
        else:
            run.table.stale[name] = item
        if (item.spent or not run.unplaced) and item.ripe and run.roomy:
            run.movers[name] = item
            self._to_move[run.name] = run
        if more < 0 or grown < 0:
            self._room(place)

    def preempting(self, name: str, *, level: int, target: str = "") -> None:
        """It was asked to stop, to queue in `level` with `target` in mind; it runs until it is queued again."""
        item = self._items[name]
        if item.place is None:
            raise ValueError(f"{name} is not leased")
        if item.preempt_pending:
            self._not_pending(item)
        run = item.run
        item.level, item.target, item.preempt_pending = level, target, True
        item.place.pending += 1
        item.place.going += item.tokens
        run.pending += 1
        run.spent.pop(name, None)
        if run.moving.get(name) == target:
            del run.moving[name]
        if target:
            there = self._engine(target)
            there.incoming[name] = item
            there.fresh = False
            self._resize(there)
            self._may_give(there, slower=False)
        self._requantum(item)

    def going_on(self, name: str) -> None:
        """The preemption came to nothing: it goes on where it is, in the level that it was leased in."""
        item = self._items[name]
        if item.place is None or not item.preempt_pending:
            raise ValueError(f"{name} was not asked to stop")
        self._not_pending(item)
        item.level = item.lease_level
        item.run.no_victim = False
        self._requantum(item)
        self._may_move(item)

    def ended(self, name: str) -> None:
        """It is over, or not this queue's any more."""
        item = self._items.pop(name)
        run, group = item.run, self._groups[item.group]
        self._detach(item)
        del group[name]
        if not group:
            del self._groups[item.group]
        run.items -= 1
        self._forget_run(run)

    def group_learnt(self, group: str) -> None:
        """A member ended by itself: what is to be expected of the others changed, though they did not."""
        for item in self._groups.get(group, {}).values():
            if not item.known:
                continue
            item.known = False
            if item.lane is not None:
                self._renew(item)
                continue
            item.run.table.touch(item)
            self._may_move(item)
            if item.preempt_pending and item.target:
                self._moved_need(item)

    # ---- parts of events

    def _reservation(self, item: Item, place: Engine) -> float:
        """KV tokens that its lease keeps room for from now on: what it has, and `kv_growth` of what it is expected to
        generate. Expected when it was last asked about, where at most AMPLE of the cache is kept for anyone.
        """
        if place.run is None or not place.kv_capacity:
            return 0.0
        scarce = place.charged > AMPLE * place.kv_capacity
        if not item.known and (scarce or not item.reserved):
            self._ask(item)
        return item.tokens + self._settings.kv_growth * item.estimate_p50

    def _detach(self, item: Item) -> None:
        """Out of the lane or off the engine that it is on."""
        if item.lane is not None:
            self._unqueue(item, quietly=False)
            return
        place, run = item.place, item.run
        assert place is not None
        if item.preempt_pending:
            self._not_pending(item)
        run.spent.pop(item.name, None)
        run.movers.pop(item.name, None)
        if run.moving.pop(item.name, None) is not None:
            run.all_movers = True
            self._to_move[run.name] = run
        run.table.drop(item)
        item.place = None
        del place.running[item.name]
        place.foreign -= place.run is not run
        if not item.in_tool_wait and place.run is not None:
            place.kv_used = max(0, place.kv_used - item.tokens)
            self._heat(place)
        place.tokens -= item.tokens
        place.charged -= item.charge
        item.reserved = 0.0
        self._freed(place)
        self._forget_engine(place)

    def _unqueue(self, item: Item, *, quietly: bool) -> None:
        run = item.run
        assert item.lane is not None
        item.lane.drop(item)
        run.waiting -= 1
        run.proposed.pop(item.name, None)
        if item.proposed and not quietly:
            self._may_take(self._engines.get(item.proposed))
        item.proposed = ""
        if not quietly or run.head is item:
            self._to_assign[run.name] = run

    def _renew(self, item: Item) -> None:
        assert item.lane is not None
        item.lane.renew(item)
        self._to_assign[item.run.name] = item.run

    def _not_pending(self, item: Item) -> None:
        assert item.place is not None
        item.preempt_pending = False
        item.place.pending -= 1
        item.place.going -= item.tokens
        item.run.pending -= 1
        item.run.no_victim = False
        there = self._engines.get(item.target) if item.target else None
        item.target = ""
        if there is not None:
            del there.incoming[item.name]
            there.fresh = False
            self._freed(there)
            self._forget_engine(there)

    def _moved_need(self, item: Item) -> None:
        """One on its way needs another amount of room where it goes."""
        there = self._engines[item.target]
        there.fresh = False
        self._room(there)

    def _requantum(self, item: Item) -> None:
        """After a change of level, of tokens, or of a pending preemption: is it past its quantum, may it move?"""
        run = item.run
        self._set_quantum(item)
        if item.spent and not item.preempt_pending:
            if item.name not in run.spent:
                run.spent[item.name] = item
                run.no_victim = False
        else:
            run.spent.pop(item.name, None)
        run.table.mark(item, self._ready(item))

    def _set_quantum(self, item: Item) -> None:
        quanta = self._settings.quantum_tokens
        item.quantum = quanta[item.level] if item.level < len(quanta) else math.inf
        item.spent = item.quantum_used >= item.quantum

    def _may_move(self, item: Item) -> None:
        run = item.run
        if item.ripe and run.roomy:
            run.movers[item.name] = item
            self._to_move[run.name] = run

    # ---- the decision

    def decide(self, now: float) -> list[Assign | Preempt]:
        """Leases for what waits and preemptions of what runs, as cmlfq.decide would have them."""
        settings = self._settings
        if (self._ageing and now - self._ageing[0][0] > settings.max_wait_s) or (
            self._ripening and not now - self._ripening[0][0] < settings.min_lease_s
        ):
            self._pass_time(now)
        if not (self._to_assign or self._to_move or self._hot):
            if not any(self._may_make_way(run, now) for run in self._starving.values()):
                return []
        assigns = self._assigns(now) if self._to_assign else []
        preempts: list[Preempt] = []
        most = settings.max_moves
        if most:
            stopped: dict[str, Item] = {}
            if self._starving:
                preempts += self._ways_made(now, stopped)
            if self._hot and len(preempts) < most:
                preempts += self._pressed(most - len(preempts), stopped)
            if self._to_move and len(preempts) < most:
                preempts += self._moves(most - len(preempts), stopped)
        for engine in self._given.values():
            self._resize(engine)
            engine.fresh = False
        self._given.clear()
        return [*assigns, *preempts[:most]]

    def _pass_time(self, now: float) -> None:
        """What only time changes: who waited too long, whose lease is old enough to move."""
        ageing, ripening = self._ageing, self._ripening
        while ageing and now - ageing[0][0] > self._settings.max_wait_s:
            since, _, item = heapq.heappop(ageing)
            run = item.run
            if item.lane is None or item.waiting_since != since or item.lane is run.aged:
                continue
            item.lane.drop(item)
            run.aged.add(item, (since, -item.priority, item.admission_number))
            if run.roomy or run.head is None or run.head.lane is None or run.kept is None or item.key <= run.head.key:
                self._to_assign[run.name] = run
        while ripening and not now - ripening[0][0] < self._settings.min_lease_s:
            since, _, item = heapq.heappop(ripening)
            if item.place is None or item.since != since or item.ripe:
                continue
            item.ripe = True
            item.run.table.mark(item, self._ready(item))
            self._may_move(item)

    # ---- the whole content

    def view(self, now: float) -> QueueView:
        """The same content for cmlfq.decide. Asks for every estimate that is not known."""
        queued, running = [], []
        for i in self._items.values():
            if not i.known:
                self._ask(i)
            if i.lane is not None:
                queued.append(
                    QueuedTrajectory(
                        i.name, i.run.name, i.group, i.admission_number, i.priority, i.level, i.waiting_since, i.tokens,
                        i.generated, i.estimate_p50, i.estimate_p90, i.last_engine,
                    )
                )  # fmt: skip
            else:
                running.append(
                    RunningTrajectory(
                        i.name, i.run.name, i.engine, i.level, i.since, i.generated, i.quantum_used, i.in_tool_wait,
                        i.estimate_p50, i.estimate_p90, i.tokens, i.preempt_pending, i.admission_number, i.moves,
                        i.target, i.reserved,
                    )
                )  # fmt: skip
        engines = [
            EngineView(
                e.name, e.run.name, e.level, e.cap, len(e.running), e.kv_capacity, e.kv_used, e.seconds_per_token,
                e.prefill, e.admitting, e.seconds_per_sequence, e.measured_load,
                e.reported_at,
            )
            for e in self._engines.values() if e.run is not None
        ]  # fmt: skip
        return QueueView(now, queued, running, engines)
