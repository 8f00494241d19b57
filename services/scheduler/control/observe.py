"""What was seen: load reports, measurements, turns and steps; feeds the estimator and the cost model.

In memory only. After a take-over it starts empty and learns again; nothing that must survive lives here.
"""

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

from services.common import wire
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.control.trajectories import End, Progress
from services.scheduler.core.estimator import RemainingWork
from services.scheduler.core.evidence import Consumed
from services.scheduler.core.model import Manifest, Replica, Session, Trajectory
from services.scheduler.core.occupancy import LONG, Occupancy

MAX_STEPS = 256
MAX_WAITED = 65_536
"""Trajectories that ended and may still be consumed, whose tool seconds are kept."""
SMOOTHING = 0.2
"""Weight of the newest report in an engine's seconds per token: single intervals are noisy."""


@dataclass(slots=True)
class Times:
    """Where a trajectory's time went so far, seconds."""

    engine: float = 0.0
    tool: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """A committed step: when, how many tokens, by how many replicas."""

    at: float
    number: int
    tokens: int
    replicas: int
    generated: int
    run: str
    manifest: str
    reward: float
    """Mean over the step's trajectories."""
    staleness: int
    """Versions by which the step's oldest trained token is behind its base."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An episode that ended by itself."""

    at: float
    generated: int
    turns: int
    tool_seconds: float
    engine_seconds: float


@dataclass(slots=True)
class EngineRate:
    """An engine's counters at the last look, and the rate since the one before."""

    at: float = 0.0
    generated: int = 0
    paused: float = 0.0
    tokens_per_second: float = 0.0
    running: int = 0
    seconds_per_token: float = 0.0
    measured_load: float = 0.0
    """Sequences that ran while `seconds_per_token` was measured: an idle engine keeps both."""
    kv_capacity: int = 0
    kv_used: int = 0
    waiting: int = 0
    speed: Occupancy = field(default_factory=lambda: Occupancy(LONG))
    """Seconds per token by sequences that run at once."""


@dataclass(slots=True)
class TrainerTimes:
    """A trainer's counters at the last look."""

    at: float = 0.0
    trained_tokens: int = 0
    phase: str = ""
    phase_seconds: list[float] = field(default_factory=list)


class Listener(Protocol):
    """Who learns from each observation by itself."""

    def decoded(self, replica: Replica, engine: wire.EngineLoad) -> None:
        """A report of an engine."""
        ...

    def consumed(self, manifest: Manifest, trajectories: Many[Consumed], seconds: float) -> None:
        """A step counts. `seconds` from its batch's arrival to the commit; 0 if it arrived before this process."""
        ...


class Observe:
    """Keeps the newest load of each worker and what follows from a series of them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.remaining = RemainingWork()
        self.loads: dict[str, wire.Load] = {}
        self.observations: dict[str, wire.AcceleratorObservation] = {}
        self.engines: dict[str, EngineRate] = {}
        """By replica."""
        self.trainers: dict[str, TrainerTimes] = {}
        """By worker."""
        self.steps: deque[Step] = deque(maxlen=MAX_STEPS)
        self.ends: deque[Ended] = deque(maxlen=MAX_STEPS * 8)
        self.learnt: set[str] = set()
        """Groups of which a member's end was learnt since the queue was last told; it empties this in every pass."""
        self.listeners: list[Listener] = []
        self._times: dict[str, Times] = {}
        self._waited: dict[str, float] = {}
        """Tool seconds by trajectory, from its end until it is consumed."""
        self._since = ledger.clock.wall()

    # ---- reports

    def load(self, session: Session, load: wire.Load) -> None:
        """The newest load of a worker; NaN and negative numbers are dropped with the engine that sent them."""
        self.loads[session.worker] = load
        now = self._ledger.clock.monotonic()
        kind = load.WhichOneof("kind")
        if kind == "rollout":
            for engine in load.rollout.engines:
                replica = self._ledger.fleet.replicas.get(engine.replica)
                if replica is not None and replica.owner_session == session.name:
                    self._engine(engine, now)
                    for listener in self.listeners:
                        listener.decoded(replica, engine)
        elif kind == "trainer":
            times = self.trainers.setdefault(session.worker, TrainerTimes())
            times.at, times.trained_tokens = now, load.trainer.trained_tokens
            times.phase = wire.TrainerPhase.Name(load.trainer.phase).removeprefix("TRAINER_PHASE_")
            times.phase_seconds = list(load.trainer.phase_seconds)
        elif kind == "node":
            for observation in load.node.observations:
                self.accelerator(observation)

    def _engine(self, engine: wire.EngineLoad, now: float) -> None:
        if engine.seconds_per_token != engine.seconds_per_token or engine.seconds_per_token < 0 or engine.running < 0:
            return
        rate = self.engines.setdefault(engine.replica, EngineRate(at=now, generated=engine.generated_tokens))
        if now > rate.at:
            made = max(0, engine.generated_tokens - rate.generated)
            rate.tokens_per_second = made / (now - rate.at)
            if engine.seconds_per_token > 0:
                running_seconds = engine.running * (now - rate.at)
                rate.speed.add(running_seconds, running_seconds / engine.seconds_per_token, now - rate.at)
        rate.at, rate.generated, rate.paused = now, engine.generated_tokens, engine.paused_seconds
        rate.running, rate.waiting = engine.running, engine.waiting
        rate.kv_capacity, rate.kv_used = engine.kv_capacity_tokens, engine.kv_used_tokens
        if engine.seconds_per_token > 0:
            weight = SMOOTHING if rate.seconds_per_token else 1.0
            rate.seconds_per_token += weight * (engine.seconds_per_token - rate.seconds_per_token)
            # what was generated was generated by at least one, even if none runs any more
            rate.measured_load += weight * (max(1, engine.running) - rate.measured_load)

    def accelerator(self, observation: wire.AcceleratorObservation) -> None:
        """A node agent's measurement."""
        stored = wire.AcceleratorObservation()
        stored.CopyFrom(observation)
        stored.receive_time.CopyFrom(wire.timestamp(self._ledger.clock.wall()))
        self.observations[observation.accelerator] = stored

    def progress(self, item: Trajectory, report: Progress) -> None:
        """Turns of a trajectory: its times, and what the tools returned."""
        times = self._times.setdefault(item.name, Times())
        times.engine += report.engine_seconds
        for answer in report.tool_returns:
            times.tool += answer.seconds
            # a report may carry the return together with the turn that followed it
            later = sum(t.generated_tokens for t in report.turns if t.index > answer.turn)
            self.remaining.observe_turn(
                item.group, item.name, answer.turn, item.generated_tokens - later, answer.tool,
                answer.payload_class, answer.outcome,
            )  # fmt: skip

    def ended(self, change: Change, item: Trajectory, end: End) -> None:
        """A lease ended: an episode that ended by itself teaches the estimator."""
        if end.interrupted:
            return
        times = self._times.pop(item.name, Times())
        if end.reward is None:
            if item.state in ("VOID", "CANCELLED"):
                self.remaining.forget(item.name)
            return
        self.remaining.observe_end(item.run, item.group, item.name, item.generated_tokens)
        self.learnt.add(item.group)
        self.ends.append(Ended(change.at, item.generated_tokens, item.turns_done, times.tool, times.engine))
        self._waited[item.name] = times.tool
        while len(self._waited) > MAX_WAITED:
            del self._waited[next(iter(self._waited))]

    def committed(self, manifest: Manifest, replicas: int, members: Many[Trajectory]) -> None:
        """A step counts. Each of its replicas says so, often at the same moment: the first word counts."""
        if any(s.manifest == manifest.name for s in self.steps):
            return
        self.steps.append(step_of(manifest, members, self._ledger.clock.monotonic(), replicas))
        waited = [self._waited.pop(m.name, 0.0) for m in members]
        done = [
            Consumed(
                m.prompt_tokens, m.generated_tokens, m.prompt_tokens + m.generated_tokens + m.observation_tokens, w
            )
            for m, w in zip(members, waited, strict=True)
        ]
        fresh = manifest.create_time >= self._since
        seconds = self._ledger.clock.wall() - manifest.create_time if fresh else 0.0
        for listener in self.listeners:
            listener.consumed(manifest, done, seconds)

    # ---- questions

    def estimate(self, item: Trajectory) -> wire.RemainingEstimate:
        """Predicted tokens to go."""
        guess = self.remaining.estimate(item.run, item.group, item.name, item.generated_tokens, item.turns_done)
        return wire.RemainingEstimate(p50=guess.p50, p90=guess.p90, evidence=guess.evidence, source=guess.source)

    def phase(self, worker: str) -> str:
        """What a trainer does, as it last reported."""
        times = self.trainers.get(worker)
        return times.phase if times is not None and times.phase else "unknown"

    def trained_rate(self, window: float) -> float:
        """Trained tokens per second over the last `window` seconds of steps; 0 before two steps."""
        now = self._ledger.clock.monotonic()
        recent = [s for s in self.steps if s.at > now - window]
        if len(recent) < 2:
            return 0.0
        return sum(s.tokens for s in recent[1:]) / max(1e-6, recent[-1].at - recent[0].at)


def step_of(manifest: Manifest, members: Many[Trajectory], at: float, replicas: int) -> Step:
    """A committed step in numbers. Where tokens were masked for their age, `staleness` is at most the bound."""
    ages = [manifest.base - m.oldest_version for m in members if m.oldest_version >= 0]
    oldest = max(ages, default=0)
    return Step(
        at=at,
        number=manifest.step,
        tokens=manifest.trainable_tokens,
        replicas=replicas,
        generated=sum(m.generated_tokens for m in members),
        run=manifest.run,
        manifest=manifest.name,
        reward=sum(m.reward or 0.0 for m in members) / max(1, len(members)),
        staleness=min(oldest, manifest.max_versions) if manifest.masked else oldest,
    )
