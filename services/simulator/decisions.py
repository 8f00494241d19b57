"""The scheduler's estimator and live queue wired together, without a service around them: events in, decisions out.

Decisions are carried out at once, as by workers that answer in no time: a lease is given, a preemption takes effect at
the trajectory's next turn (or now, where it asks for that), after which it queues again with its tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.scheduler.core.cmlfq import Assign, EngineView, Preempt, QueueSettings
from services.scheduler.core.estimator import RemainingWork
from services.scheduler.core.livequeue import LiveQueue


@dataclass(slots=True, eq=False)
class Followed:
    """One trajectory."""

    name: str
    run: str
    group: str
    number: int
    """Admission number of its group."""
    priority: int
    prompt: int
    generated: int = 0
    tokens: int = 0
    turns: int = 0
    level: int = 0
    engine: str = ""
    """Empty while it waits."""
    last: str = ""
    pending: bool = False
    moves: int = 0
    since: float = 0.0
    """When it began to wait."""


class DecisionCore:
    """Estimator, queue, and what is known of each trajectory. `now` in seconds, never falling."""

    def __init__(self, settings: QueueSettings) -> None:
        self.remaining = RemainingWork()
        self.queue = LiveQueue(settings, self._estimate)
        self.followed: dict[str, Followed] = {}

    def _estimate(self, name: str) -> tuple[float, float]:
        one = self.followed[name]
        guess = self.remaining.estimate(one.run, one.group, name, one.generated, one.turns)
        return guess.p50, guess.p90

    def engine(self, view: EngineView, now: float) -> list[Assign | Preempt]:
        """An engine appeared, or reported its load."""
        self.queue.engine(view)
        return self._decide(now)

    def scheduled(self, arrivals: Iterable[Followed], now: float) -> list[Assign | Preempt]:
        """New trajectories want an engine."""
        for one in arrivals:
            one.tokens, one.since = one.prompt + one.generated, now
            self.followed[one.name] = one
            self._queue(one)
        return self._decide(now)

    def turned(
        self, name: str, generated: int, observed: int, tool: str, payload: str, outcome: str, now: float
    ) -> list[Assign | Preempt]:
        """A turn of so many tokens ended with a tool's return of so many."""
        one = self.followed[name]
        one.generated += generated
        one.tokens += generated + observed
        self.remaining.observe_turn(one.group, name, one.turns, one.generated, tool, payload, outcome)
        one.turns += 1
        if one.engine and not one.pending:
            self.queue.turned(name, generated=one.generated, tokens=one.tokens, in_tool_wait=False)
        else:
            one.since = now if one.pending else one.since
            self._queue(one)
        return self._decide(now)

    def finished(self, name: str, generated: int, now: float) -> list[Assign | Preempt]:
        """The episode ended by itself with a last turn of so many tokens."""
        one = self.followed.pop(name)
        self.remaining.observe_end(one.run, one.group, name, one.generated + generated)
        self.queue.ended(name)
        self.queue.group_learnt(one.group)
        return self._decide(now)

    def _queue(self, one: Followed) -> None:
        one.last, one.moves = one.last or one.engine, one.moves + one.pending
        one.engine, one.pending = "", False
        self.queue.queued(
            one.name, run=one.run, group=one.group, admission_number=one.number, priority=one.priority,
            level=one.level, waiting_since=one.since, tokens=one.tokens, generated=one.generated, last_engine=one.last,
            moves=one.moves,
        )  # fmt: skip

    def _decide(self, now: float) -> list[Assign | Preempt]:
        actions = self.queue.decide(now)
        for action in actions:
            one = self.followed[action.trajectory]
            one.level = action.level
            if isinstance(action, Assign):
                one.engine, one.last = action.engine, ""
                self.queue.leased(one.name, engine=action.engine, level=action.level, since=now)
            else:
                one.pending, one.last = True, action.target_engine
                self.queue.preempting(one.name, level=action.level, target=action.target_engine)
                if not action.at_turn_end:
                    one.since = now
                    self._queue(one)
        return actions
