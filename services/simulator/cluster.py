"""The discrete-event simulation: a virtual clock, engines, tools, trainers, and a policy that decides.

Events at one time are handled in the order in which they were put; nothing depends on hashes or on the machine, so a
seed gives the same bytes. After each event the engines that it touched settle once: admit, and set their next event.

A weight update reaches all engines while they generate; each pauses for the transfer and, with `recompute`, computes
its KV caches again. In SPLIT mode it waits for the batch to end.
"""

import heapq
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from services.common.errors import ConfigError
from services.simulator import handover
from services.simulator.batches import Group, Pending, Stream
from services.simulator.engine import NEVER, Engine, EngineState
from services.simulator.layout import ClusterSpec, Layout, Mode, check, place, replicas_of
from services.simulator.policies.base import Assign, Move, Policy, View
from services.simulator.results import RunResult, StepResult, Usage
from services.simulator.trajectory import NOWHERE, Sequence, Trajectory
from services.simulator.workload import Episode, Workload

NOISE = 0.7
"""Standard deviation of the log of a one-shot prediction: half of all are off by more than a factor of 1.6."""
MAX_IDLE = 1_000
"""Decisions in a row that answer nothing while nothing else is to happen: it is stuck."""


class Cluster:
    """One run. `Cluster(...).run()` once."""

    def __init__(self, spec: ClusterSpec, workload: Workload, policy: Policy, *, seed: int, steps: int) -> None:
        self.spec = spec
        self.policy = policy
        self.now = 0.0
        self._seed = seed
        self._steps = steps
        self._mode = policy.mode
        # where something is trained, prompts do not run out: the last steps are like the others
        self._stream = Stream(workload, seed, steps if self._mode is Mode.ROLLOUT else None)
        self._events: list[tuple[float, int, Callable[[Any, Any], None], Any, Any]] = []
        self._count = 0
        layout = policy.start(spec)
        check(layout, spec, self._mode)
        self.view = View(layout)
        self.engines: list[Engine] = []
        self._scheduled: list[float] = []
        self._touched: dict[int, None] = {}
        self._room = False
        self._sequences: dict[int, Sequence] = {}
        self._groups: dict[str, Group] = {}
        self.pending = Pending()
        self._admitted = 0
        self._batches = 0
        self._steps_done: list[StepResult] = []
        self._trainer = handover.Trainer(layout.training)
        self._update_due = False
        self._wasted = self._moves = self._moved = 0
        self._relayouts = self._refused = self._placed_late = 0
        self._failed_at: dict[int, float] = {}
        self._done = False
        self._idle = 0
        self._noise: dict[int, float] = {}

    def run(self) -> RunResult:
        """Runs all steps. Raises RuntimeError if nothing can go on before they are done."""
        self._begin()
        events = self._events
        while not self._done:
            if not events:
                raise RuntimeError(self._stuck())
            self.now, _, handler, first, second = heapq.heappop(events)
            self.view.now = self.now
            handler(first, second)
            if self._touched:
                self._settle()
        return self.result()

    def result(self) -> RunResult:
        """What has happened so far."""
        return RunResult(
            policy=self.policy.name,
            seed=self._seed,
            steps=tuple(self._steps_done),
            wasted=self._wasted,
            moves=self._moves,
            preemptions=sum(e.preemptions for e in self.engines),
            relayouts=self._relayouts,
            refused=self._refused,
            placed_late=self._placed_late,
        )

    # ---- beginning

    def _begin(self) -> None:
        layout = self.view.layout
        nodes = place(layout.engines, (), self.spec)
        if nodes is None:
            raise ConfigError(f"layout {layout.words()}: its engines do not fit into nodes of {self.spec.node_size}")
        for tp, node in zip(layout.engines, nodes, strict=True):
            self._add_engine(tp, node, 0.0)
        if self.policy.foresight != "none":
            self.policy.reveal(self._remaining if self.policy.foresight == "exact" else self._predicted)
        for failure in self.spec.failures:
            self._at(failure.at_s, self._fail, failure, None)
        if self.policy.decide_every_s is not None:
            self._at(self.policy.decide_every_s, self._decide, None, None)
        self._admit_batches()
        self._settle()

    def _add_engine(self, tp: int, node: int, ready: float) -> None:
        index = len(self.engines)
        state = EngineState(index, tp, node, self.spec.times.kv_tokens(tp), self.spec.max_running)
        state.max_running = self.policy.max_running(state)
        state.version = self.view.version
        engine = Engine(state, self.spec.times, self.now)
        self.engines.append(engine)
        self._scheduled.append(NEVER)
        self.view.engines.append(state)
        if ready > self.now:
            self._at(ready, self._engine_ready, index, None)
        else:
            state.admitting = True

    def _engine_ready(self, index: int, _: None) -> None:
        engine = self.engines[index]
        if not engine.state.alive:
            return
        self._give_weights([engine])
        engine.state.admitting = True
        self._room = True
        for trajectory in list(self.view.queued.values()):
            self._place(self._sequences[trajectory.index])

    # ---- the clock

    def _at(self, time: float, handler: Callable[[Any, Any], None], first: Any, second: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, handler, first, second))

    def _touch(self, index: int) -> Engine:
        """The engine, brought to now; it settles after this event."""
        engine = self.engines[index]
        if index not in self._touched:
            engine.advance(self.now)
            self._touched[index] = None
        return engine

    def _settle(self) -> None:
        if self._room and self.view.queued:
            self._room = False
            self._carry_out(self.policy.admit(self.view))
        scheduled, events = self._scheduled, self._events
        for index in self._touched:
            engine = self.engines[index]
            engine.settle()
            due = engine.next_event
            if due != scheduled[index]:
                scheduled[index] = due
                if due != NEVER:
                    self._count += 1
                    heapq.heappush(events, (due, self._count, self._engine_due, index, due))
        self._touched.clear()

    def _engine_due(self, index: int, due: float) -> None:
        if due != self._scheduled[index]:
            return  # set anew since
        self._scheduled[index] = NEVER
        engine = self._touch(index)
        for sequence in engine.finished():
            self._turn_ended(sequence, engine)

    # ---- one trajectory

    def _admit(self, episodes: Iterable[Episode], batch: int) -> Group:
        members = list(episodes)
        group = Group(members[0].group, self._admitted, batch, open=len(members))
        self._groups[group.name] = group
        for episode in members:
            seen = Trajectory(self._admitted, episode, batch, self.now)
            self._check_length(episode)
            self._admitted += 1
            sequence = Sequence(seen, episode)
            group.members.append(sequence)
            self._sequences[seen.index] = sequence
            self.view.live[seen.index] = seen
        self.pending.add(group)
        return group

    def _check_length(self, episode: Episode) -> None:
        """A policy may send it to any engine, and alone on one it must fit."""
        least = min((e.state for e in self.engines if e.state.alive), key=lambda e: e.kv_capacity, default=None)
        if least is not None and episode.tokens > least.kv_capacity:
            raise ConfigError(
                f"episode {episode.id} grows to {episode.tokens} tokens; the KV cache of engine {least.index} "
                f"(TP{least.tp}) holds {least.kv_capacity}; expected every engine to hold the longest episode: "
                f"use engines of a higher degree, or leave the episode out"
            )

    def _place(self, sequence: Sequence) -> None:
        """An engine for one that has none and is ready, or the queue."""
        seen = sequence.seen
        index = self.policy.place(self.view, seen)
        if index != NOWHERE:
            self._assign(sequence, index)
        elif seen.index not in self.view.queued:
            self.view.queued[seen.index] = seen
            self._room = True

    def _assign(self, sequence: Sequence, index: int) -> None:
        seen = sequence.seen
        self.view.queued.pop(seen.index, None)
        self._settle_home(seen, index)
        self._touch(index).submit(sequence)

    def _settle_home(self, seen: Trajectory, index: int) -> None:
        if seen.engine != NOWHERE:
            self.engines[seen.engine].state.assigned -= 1
            self._room = True
        seen.engine = index
        seen.since = self.now
        if index != NOWHERE:
            self.engines[index].state.assigned += 1
            if self.now >= self._failed_at.get(index, NEVER) + self.spec.detect_s:
                self._placed_late += 1

    def _turn_ended(self, sequence: Sequence, engine: Engine) -> None:
        seen, turn = sequence.seen, sequence.current
        seen.turns += 1
        sequence.turn += 1
        if sequence.turn == len(sequence.episode.turns):
            self._ended(sequence, engine)
            return
        sequence.left = sequence.current.generated
        sequence.kept = 0
        sequence.ready = False
        seen.in_tool = True
        self.policy.on_call(seen)
        self._at(self.now + turn.latency_s, self._returned, sequence, None)
        if sequence.pending is not None:
            target, sequence.pending = sequence.pending, None
            self._move(sequence, target)

    def _returned(self, sequence: Sequence, _: None) -> None:
        """The tool's output is there."""
        seen, turn = sequence.seen, sequence.episode.turns[sequence.turn - 1]
        if seen.index not in self._sequences:
            return  # aborted
        sequence.ready = True
        seen.in_tool = False
        seen.tool_s += turn.latency_s
        seen.context += turn.observation
        seen.tool, seen.outcome = turn.tool, turn.outcome
        self.policy.on_turn(seen, turn.tool, turn.outcome, turn.observation)
        if seen.engine == NOWHERE:
            self._place(sequence)
            return
        index = self.policy.resume(self.view, seen)
        if index != seen.engine:
            self._move(sequence, index)
        elif sequence.copied_at > self.now:
            self._at(sequence.copied_at, self._arrived, sequence, sequence.copied_at)
        else:
            self._touch(index).submit(sequence)

    def _ended(self, sequence: Sequence, engine: Engine) -> None:
        engine.drop(sequence)
        seen = sequence.seen
        self._settle_home(seen, NOWHERE)
        del self._sequences[seen.index], self.view.live[seen.index]
        self.policy.on_end(seen)
        if self.pending.ended(self._groups[seen.group]):
            self._group_complete()

    # ---- moving

    def _move(self, sequence: Sequence, target: int) -> None:
        """From its engine to another (NOWHERE: the queue), with the cheaper of copying and computing its KV cache."""
        seen, source = sequence.seen, sequence.seen.engine
        if target == source or (target != NOWHERE and not self.engines[target].state.admitting):
            return  # it was asked for when the target still served
        engine = self._touch(source)
        held = engine.take(sequence)
        self._hand_in(sequence)
        sequence.pending = None
        sequence.copied_at = 0.0
        self._settle_home(seen, target)
        seen.moves += 1
        self._moves += 1
        self._moved += seen.context
        if target == NOWHERE:
            if sequence.ready:
                self._place(sequence)
            return
        there = self._touch(target)
        copying = self.spec.times.kv_move_s(held, same_node=there.state.node == engine.state.node) if held else 0.0
        copies = held > 0 and engine.state.alive and copying < self.spec.times.prefill_s(there.state.tp, held, 0.0)
        if copies and there.deposit(sequence, held):
            sequence.copied_at = self.now + copying
        if not sequence.ready:
            return
        if sequence.copied_at > self.now:
            self._at(sequence.copied_at, self._arrived, sequence, sequence.copied_at)
        else:
            there.submit(sequence)

    def _arrived(self, sequence: Sequence, copied_at: float) -> None:
        """The copy of the KV cache is there, unless it was sent elsewhere since."""
        if sequence.copied_at == copied_at and sequence.seen.index in self._sequences:
            self._touch(sequence.seen.engine).submit(sequence)

    def _decide(self, _: None, __: None) -> None:
        assert self.policy.decide_every_s is not None
        self._at(self.now + self.policy.decide_every_s, self._decide, None, None)
        for engine in self.engines:
            if engine.state.alive:
                self._touch(engine.state.index).present()
        actions = self.policy.decide(self.view)
        self._idle = self._idle + 1 if not actions and len(self._events) == 1 else 0
        if self._idle > MAX_IDLE:
            raise RuntimeError(self._stuck())
        self._carry_out(actions)

    def _carry_out(self, actions: Iterable[Assign | Move]) -> None:
        for action in actions:
            sequence = self._sequences[action.trajectory.index]
            if isinstance(action, Assign):
                self._assign(sequence, action.engine)
            else:
                self._ask_to_move(sequence, action)

    def _ask_to_move(self, sequence: Sequence, action: Move) -> None:
        if sequence.seen.engine in (NOWHERE, action.engine):
            return
        if action.at_turn_end and sequence.ready:
            sequence.pending = action.engine
        else:
            self._move(sequence, action.engine)

    # ---- batches and training

    def _admit_batches(self) -> None:
        """Admits every batch that may be, and gives its trajectories engines or the queue."""
        admitted: list[Sequence] = []
        while self._may_admit():
            count = self._stream.batch_groups
            extra = round(count * (self.policy.overprovision - 1.0))
            chosen = self._stream.take_deferred(count) if extra else []
            chosen = chosen or self._stream.take(count + extra)
            if not chosen:
                break
            for episodes in chosen:
                admitted += self._admit(episodes, self._batches).members
            self._batches += 1
        for sequence in admitted:
            self._place(sequence)

    def _may_admit(self) -> bool:
        if self._mode is Mode.ASYNC:
            return self._batches <= self.view.version + self.spec.staleness
        rolled_out = all(not g.open for g in self.pending.groups)
        if self._mode is Mode.SPLIT:
            return rolled_out and self._batches <= self.view.version + 1
        return rolled_out and self._batches == len(self._steps_done)

    def _group_complete(self) -> None:
        if self._mode is Mode.ROLLOUT:
            self._rollout_step()
            return
        if self._mode is Mode.SPLIT and self._may_admit():
            self._next_split()
        self._train()

    def _rollout_step(self) -> None:
        if any(g.open for g in self.pending.groups):
            return
        groups = list(self.pending.groups)
        self._record(groups, self.now)
        self.pending.consume(groups)
        if len(self._steps_done) == self._steps:
            self._done = True
            return
        self._admit_batches()

    def _train(self) -> None:
        """Starts a training step if the trainers are free and its batch is complete."""
        if self._trainer.busy or self._done:
            return
        staleness = {Mode.ASYNC: self.spec.staleness, Mode.SPLIT: 1}.get(self._mode)
        groups = self.pending.batch(self._stream.batch_groups, self.view.version, staleness)
        if groups is None:
            return
        ready = self._trainer.ready_at
        if ready > self.now:
            self._at(ready, lambda _a, _b: self._train(), None, None)
            return
        assert self.spec.training is not None
        pause = 0.0
        held = self._trainer.accelerators
        if self._mode is Mode.COLOCATED:
            self._abort_open()
            held = self.spec.accelerators
            pause = max(self.spec.times.sleep_s(e.state.tp) for e in self.engines) + self._trainers_copy_s()
        tokens = [m.seen.context for g in groups for m in g.members]
        count, each = replicas_of(self.spec.training, held)
        seconds = self.spec.training.step_s(count, each, tokens)
        self._trainer.begin(seconds, count * each)
        self.pending.consume(groups)
        self._at(self.now + pause + seconds, self._committed, groups, seconds)

    def _trainers_copy_s(self) -> float:
        """COLOCATED: trainers' state from the hosts, or back."""
        assert self.spec.training is not None
        return self.spec.training.offload_s(*replicas_of(self.spec.training, self.spec.accelerators))

    def _abort_open(self) -> None:
        """The groups that the round was not waiting for start again, in a round of their own."""
        left = [g for g in self.pending.groups if g.open]
        for group in left:
            for member in group.members:
                seen = member.seen
                if seen.engine != NOWHERE:
                    engine = self._touch(seen.engine)
                    engine.take(member)
                    engine.drop(member)
                    self._settle_home(seen, NOWHERE)
                self._wasted += seen.generated
                self.view.queued.pop(seen.index, None)
                self._sequences.pop(seen.index, None)
                self.view.live.pop(seen.index, None)
            self._stream.deferred.append([m.episode for m in group.members])
        self.pending.consume(left)

    def _committed(self, groups: list[Group], seconds: float) -> None:
        """A training step has ended: the next version is out."""
        self._trainer.end()
        self._record(groups, self.now - seconds)
        if len(self._steps_done) == self._steps:
            self._done = True
            return
        self.view.version += 1
        for group in groups:
            self._groups.pop(group.name, None)
        self.policy.on_step([m.seen for g in groups for m in g.members], seconds)
        wanted = self.policy.plan(self.view)
        if wanted is not None and wanted != self.view.layout:
            self._relayout(wanted)
        if self._mode is Mode.COLOCATED:
            wake = max(self.spec.times.wake_s(e.state.tp) for e in self.engines)
            self._at(self.now + self._trainers_copy_s() + wake, lambda _a, _b: self._next_round(), None, None)
            return
        if self._mode is Mode.SPLIT:
            self._update_due = True
            self._next_split()
        else:
            self._update_weights()
            self._admit_batches()
        self._train()

    def _next_round(self) -> None:
        self._update_weights()
        self._admit_batches()

    def _next_split(self) -> None:
        """SPLIT: once the batch is generated and the version is out, all engines get it and the next batch begins."""
        if not self._may_admit():
            return
        if self._update_due:
            self._update_due = False
            self._update_weights()
        self._admit_batches()

    def _update_weights(self) -> None:
        """Of all engines that serve; those that start get them when they are awake."""
        seconds = self._give_weights([e for e in self.engines if e.state.admitting and not e.frozen])
        self._trainer.wait_until(self.now + seconds)

    def _give_weights(self, engines: list[Engine]) -> float:
        """Seconds that they pause for it."""
        trainers = self.spec.accelerators if self._mode is Mode.COLOCATED else self._trainer.accelerators
        seconds = self.spec.times.weight_update_s(trainers, sum(e.state.tp for e in engines))
        for engine in engines:
            self._touch(engine.state.index).update(self.view.version, seconds, recompute=self.spec.recompute)
        return seconds

    def _record(self, groups: list[Group], took_at: float) -> None:
        members = [m for g in groups for m in g.members]
        versions = [g.version() for g in groups]
        self._steps_done.append(
            StepResult(
                step=len(self._steps_done),
                took_at=took_at,
                ended_at=self.now,
                tokens=sum(m.total for m in members),
                sequences=len(members),
                staleness=self.view.version - min(versions) if self._mode is not Mode.ROLLOUT else 0,
                layout=self.view.layout.words(),
                usage=self.usage(),
            )
        )
        self.view.steps = self._steps_done

    def usage(self) -> Usage:
        """Accelerator-seconds and tokens so far."""
        busy = held = 0.0
        generated = 0
        for engine in self.engines:
            engine.advance(self.now)
            busy += engine.busy_s * engine.state.tp
            held += (min(self.now, engine.stopped_at) - engine.started_at) * engine.state.tp
            generated += engine.generated
        trainer_busy, trainer_held = self._trainer.seconds(
            self.now, self.spec.accelerators if self._mode is Mode.COLOCATED else None
        )
        return Usage(busy, held, trainer_busy, trainer_held, generated, self._moved)

    # ---- layout and failures

    def _relayout(self, wanted: Layout) -> None:
        change = handover.change(self.view.engines, wanted, self.spec, self._mode)
        if change is None or not self._holds_all(wanted):
            self._refused += 1
            return
        self._relayouts += 1
        before, self.view.layout = self.view.layout, wanted
        leaving, coming = handover.offloads_s(self.spec.training, before.training, wanted.training)
        released = self.now + leaving
        for index in change.removed:
            released = max(released, self.now + self.spec.times.sleep_s(self.engines[index].state.tp))
            self._remove(index)
        for tp, node in change.added:
            self._add_engine(tp, node, released + self.spec.times.wake_s(tp))
        self._trainer.resize(wanted.training, self.now)
        if coming or wanted.training > before.training:
            self._trainer.wait_until(released + coming)

    def _holds_all(self, layout: Layout) -> bool:
        """Whether each of its engines holds the longest of the live episodes."""
        longest = max((s.episode.tokens for s in self._sequences.values()), default=0)
        return all(self.spec.times.kv_tokens(tp) >= longest for tp in set(layout.engines))

    def _remove(self, index: int) -> None:
        """Takes an engine away; its trajectories keep their tokens and go elsewhere."""
        engine = self._touch(index)
        engine.state.alive = engine.state.admitting = False
        for sequence in self._homed(index):
            self._evacuate(sequence, engine, lost=False)
        engine.stopped_at = self.now + self.spec.times.sleep_s(engine.state.tp)

    def _evacuate(self, sequence: Sequence, engine: Engine, *, lost: bool) -> None:
        seen = sequence.seen
        engine.take(sequence)
        sequence.pending = None
        sequence.copied_at = 0.0
        if lost and sequence.ready:
            made = sequence.current.generated - sequence.kept - sequence.left
            seen.generated -= made
            seen.context -= made
            sequence.left += made
            self._wasted += made
        self._hand_in(sequence)
        self._settle_home(seen, NOWHERE)
        self._moved += seen.context
        if sequence.ready:
            self._place(sequence)

    def _hand_in(self, sequence: Sequence) -> None:
        """What it has of its turn is a segment from now on."""
        if sequence.ready:
            sequence.kept = sequence.current.generated - sequence.left

    def _fail(self, failure: Any, _: None) -> None:
        engine = self._touch(failure.engine)
        self._failed_at[failure.engine] = self.now
        if failure.kind == "slow":
            engine.slowdown = failure.factor
            return
        engine.frozen = True
        self._at(self.now + self.spec.detect_s, self._lost, failure.engine, None)

    def _lost(self, index: int, _: None) -> None:
        """A dead or hung engine is noticed: what it had goes on elsewhere, from the last turn that had ended."""
        engine = self._touch(index)
        engine.state.alive = engine.state.admitting = False
        engine.stopped_at = self.now
        for sequence in self._homed(index):
            self._evacuate(sequence, engine, lost=True)

    def _homed(self, index: int) -> list[Sequence]:
        """All whose engine it is, also those in a tool call or on their way to it, in order of admission."""
        return [sequence for sequence in self._sequences.values() if sequence.seen.engine == index]

    # ---- foresight

    def _remaining(self, seen: Trajectory) -> float:
        return float(self._sequences[seen.index].total - seen.generated)

    def _predicted(self, seen: Trajectory) -> float:
        """One prediction of the total, made at admission."""
        if seen.index not in self._noise:
            rng = np.random.default_rng((self._seed, seen.index, 7))
            self._noise[seen.index] = self._sequences[seen.index].total * float(np.exp(NOISE * rng.standard_normal()))
        return max(1.0, self._noise[seen.index] - seen.generated)

    def _stuck(self) -> str:
        live = list(self.view.live.values())
        return (
            f"{self.policy.name}: nothing more happens at {self.now:.0f} s after {len(self._steps_done)} of "
            f"{self._steps} steps: {len(live)} trajectories live, {len(self.view.queued)} queued, "
            f"{sum(e.admitting for e in self.view.engines)} engines admit; does the policy ever place them?"
        )
