"""A bound that knows every length and every time: list scheduling, and the analytic bound that no schedule beats.

Older batches first, within one the longest first; each to the engine that then is done first, computed from its step
times, among those whose KV cache holds a bounded share of what its trajectories need at every moment to come. While
nothing is queued, those that would end last move where they end sooner by more than the move costs.

Greedy is not optimal, so that knowledge is tried in several ways (VARIANTS) and each run's best counts.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from services.simulator.engine import EngineState
from services.simulator.layout import ClusterSpec, Layout
from services.simulator.policies.base import Assign, Foresight, Move, Policy, View
from services.simulator.policies.priority import TrajectoryPriority
from services.simulator.times import EngineTimes
from services.simulator.trajectory import NOWHERE, Trajectory
from services.simulator.workload import Episode

EXACT, CROWDED = 0.97, 1.25
"""Shares of the KV cache that are given away. Above 1: caches of those in tool calls make room."""
MARGIN = 1.25
"""A move gains at least so many times its cost."""
MAX_MOVES = 8
"""In one decision."""
MAX_LOOKED_AT = 48
"""Of those that end last, in one decision."""
STRETCHES = 8
SLOTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Numbers of sequences tried for an engine's best rate in `bound`."""


class _Engine:
    """What an engine has, as it will be."""

    __slots__ = ("fill", "members", "middle", "state", "times")

    def __init__(self, state: EngineState, times: EngineTimes, fill: float) -> None:
        self.state = state
        self.fill = fill
        self.times = times
        self.members: list[tuple[float, float]] = []
        """(tokens still to be generated, context), fewest tokens first."""
        self.middle = 0.0
        """Sum of contexts at the middle of what is left."""

    def step_s(self, remaining: float, context: float) -> float:
        """Seconds of a token with one more."""
        middle = self.middle + context + remaining / 2
        return self.times.decode_s(self.state.tp, len(self.members) + 1, middle)

    def ends_s(self, remaining: float, context: float) -> float:
        """Seconds until all are done with one more: stretches between ends, each with those that are left; every
        STRETCHES-th part of the members is taken to end together.
        """
        decode, tp = self.times.decode_s, self.state.tp
        members = self._with(remaining, context)
        held, total, shorter = sum(c for _, c in members), 0.0, 0.0
        part = -(-len(members) // STRETCHES)
        for first in range(0, len(members), part):
            chunk = members[first : first + part]
            count, longest = len(members) - first, chunk[-1][0]
            # half of the chunk has gone by the middle of the stretch, if it ends evenly
            running = count - (len(chunk) - 1) / 2
            total += (longest - shorter) * decode(tp, round(running), held + running * (longest + shorter) / 2)
            shorter = longest
            held -= sum(c for _, c in chunk)
        return total

    def holds(self, remaining: float, context: float) -> bool:
        """Whether the cache holds all with one more: n longest at (their contexts + the tokens of the n-th) each."""
        if len(self.members) >= self.state.max_running:
            return False
        limit = self.fill * self.state.kv_capacity
        contexts = 0.0
        for count, (left, held) in enumerate(reversed(self._with(remaining, context)), start=1):
            contexts += held
            if contexts + count * left > limit:
                return False
        return True

    def add(self, remaining: float, context: float) -> None:
        """One more."""
        insort(self.members, (remaining, context))
        self.middle += context + remaining / 2

    def _with(self, remaining: float, context: float) -> list[tuple[float, float]]:
        members = self.members.copy()
        insort(members, (remaining, context))
        return members


class Clairvoyant(Policy):
    """Knows what each trajectory still generates, and how long an engine takes for it."""

    name = "clairvoyant"
    foresight: Foresight = "exact"
    decide_every_s = 10.0

    def __init__(self, layout: Layout, fill: float = EXACT) -> None:
        super().__init__(layout)
        self._fill = fill
        self._remaining: Callable[[Trajectory], float] = lambda _: 0.0
        self._spec: ClusterSpec | None = None

    def start(self, spec: ClusterSpec) -> Layout:
        """Keeps the times."""
        self._spec = spec
        return super().start(spec)

    def reveal(self, oracle: Callable[[Trajectory], float]) -> None:
        """Kept."""
        self._remaining = oracle

    def place(self, view: View, trajectory: Trajectory) -> int:
        """All wait for `admit`."""
        del view, trajectory
        return NOWHERE

    def resume(self, view: View, trajectory: Trajectory) -> int:
        """Sticky: what it will need was kept free."""
        return trajectory.engine if view.engines[trajectory.engine].admitting else NOWHERE

    def admit(self, view: View) -> Iterable[Assign]:
        """In order, until one fits nowhere; an empty engine holds any."""
        engines = self._engines(view)
        for trajectory in self._ordered(view.queued.values()):
            left, context = self._remaining(trajectory), float(trajectory.context)
            able = [e for e in engines.values() if not e.members or e.holds(left, context)]
            if not able:
                return
            best = min(able, key=lambda e: (e.ends_s(left, context), e.state.index))
            best.add(left, context)
            yield Assign(trajectory, best.state.index)

    def decide(self, view: View) -> Sequence[Assign | Move]:
        """Moves of those that end last."""
        if view.queued:
            return ()
        engines = self._engines(view)
        moves: list[Assign | Move] = []
        placed = self._ordered(t for t in view.live.values() if t.engine in engines)
        for trajectory in placed[:MAX_LOOKED_AT]:
            if len(moves) == MAX_MOVES:
                break
            target = self._better(trajectory, engines)
            if target is not None:
                moves.append(Move(trajectory, target.state.index, at_turn_end=not trajectory.in_tool))
        return moves

    def _better(self, trajectory: Trajectory, engines: dict[int, _Engine]) -> _Engine | None:
        """Where it ends sooner by more than the move; it is counted there from then on."""
        left, context = self._remaining(trajectory), float(trajectory.context)
        here = engines[trajectory.engine]
        now = here.state.seconds_per_token
        best, least = None, 0.0
        for engine in engines.values():
            if engine is here:
                continue
            gain = left * (now - engine.step_s(left, context))
            gain -= MARGIN * engine.times.prefill_s(engine.state.tp, context, 0.0)
            if gain > least and engine.holds(left, context):
                best, least = engine, gain
        if best is not None and least > 0.05 * left * now:
            best.add(left, context)
            return best
        return None

    def _ordered(self, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
        return sorted(trajectories, key=lambda t: (t.batch, -self._remaining(t), t.index))

    def _engines(self, view: View) -> dict[int, _Engine]:
        assert self._spec is not None
        engines = {e.index: _Engine(e, self._spec.times, self._fill) for e in view.admitting()}
        for trajectory in view.live.values():
            if trajectory.engine in engines:
                engines[trajectory.engine].add(self._remaining(trajectory), float(trajectory.context))
        return engines


class ClairvoyantPriority(TrajectoryPriority):
    """`priority.TrajectoryPriority` with exact lengths."""

    name = "clairvoyant"
    foresight: Foresight = "exact"

    def reveal(self, oracle: Callable[[Trajectory], float]) -> None:
        """In the place of what it would expect."""
        self._oracle = oracle

    def expect(self, trajectory: Trajectory) -> float:
        """Exactly."""
        return self._oracle(trajectory)


VARIANTS: tuple[Callable[[Layout], Policy], ...] = (
    Clairvoyant,
    partial(Clairvoyant, fill=CROWDED),
    ClairvoyantPriority,
)


def bound(episodes: Sequence[Episode], spec: ClusterSpec, accelerators: int, degrees: Sequence[int]) -> float:
    """Seconds that no rollout of a batch on so many accelerators beats: max(total work / capacity, longest chain).

    Capacity: for each degree the best tokens per second and accelerator of an engine over SLOTS, each sequence at its
    prompt's length alone (contexts only grow). Chain: each episode alone on the fastest engine, decoding at its
    prompt's length, with its tool calls.
    """
    shortest = min(e.prompt for e in episodes)
    rate = max(
        n / spec.times.decode_s(tp, n, n * shortest) / tp for tp in degrees for n in SLOTS if n <= spec.max_running
    )
    work = sum(e.generated for e in episodes) / (rate * accelerators)
    chain = max(
        min(spec.times.decode_s(tp, 1, e.prompt) for tp in degrees) * e.generated
        + sum(t.latency_s for t in e.turns[:-1])
        for e in episodes
    )
    return max(work, chain)
