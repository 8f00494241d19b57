"""What the multi-level queue decides, and how it is said: one wording for the live queue and for its reference."""

from dataclasses import dataclass
from typing import Protocol

from services.scheduler.core.reason import Reason


@dataclass(frozen=True, slots=True)
class Assign:
    """Lease the trajectory to an engine."""

    trajectory: str
    engine: str
    level: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop it, keep its tokens; it queues again in `level`, with `target_engine` in mind ('' = any)."""

    trajectory: str
    engine: str
    target_engine: str
    level: int
    at_turn_end: bool
    reason: Reason


class Waiting(Protocol):
    """What a decision says of one that waits."""

    @property
    def name(self) -> str: ...
    @property
    def level(self) -> int: ...
    @property
    def waiting_since(self) -> float: ...
    @property
    def estimate_p50(self) -> float: ...
    @property
    def estimate_p90(self) -> float: ...
    @property
    def last_engine(self) -> str: ...


class Leased(Protocol):
    """What a decision says of one that runs."""

    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def level(self) -> int: ...
    @property
    def generated(self) -> int: ...
    @property
    def quantum_used(self) -> int: ...
    @property
    def in_tool_wait(self) -> bool: ...
    @property
    def estimate_p50(self) -> float: ...


class Place(Protocol):
    """What a decision says of an engine."""

    @property
    def name(self) -> str: ...
    @property
    def level(self) -> int: ...


def lease(item: Waiting, engine: Place, level: int, load: int, now: float, aged: bool) -> Assign:
    """The lease with its reason; `load` counts this one. Spilled work keeps its level: it was not demoted."""
    waited = now - item.waiting_since
    code = "AGED" if aged else "PREFERRED" if engine.name == item.last_engine else "LEAST_LOADED"
    text = f"waited {waited:.1f} s in level {level}; {engine.name} (level {engine.level}) has room"
    if level < item.level:
        text += f"; up from level {item.level}: at most {item.estimate_p90:.0f} tokens remain (p90)"
    numbers = {"waited_s": waited, "running": float(load), "remaining_p50": item.estimate_p50}
    return Assign(item.name, engine.name, level, Reason(code, text, numbers))


def make_way(victim: Leased, item: Waiting, now: float) -> Preempt:
    """Stops one that is past its quantum for one that waited too long."""
    waited = now - item.waiting_since
    text = f"{item.name} waited {waited:.1f} s; this one has used {victim.quantum_used} tokens of its level"
    reason = Reason("STARVING", text, {"waited_s": waited, "quantum_used": float(victim.quantum_used)})
    return Preempt(victim.name, victim.engine, "", victim.level, not victim.in_tool_wait, reason)


def relieve(victim: Leased, share: float, running: int) -> Preempt:
    """Stops the youngest of an engine whose KV cache is full to `share`."""
    text = f"{victim.engine} uses {share:.0%} of its KV cache; the youngest of {running} makes room"
    reason = Reason("KV_PRESSURE", text, {"kv_share": share, "generated": float(victim.generated)})
    return Preempt(victim.name, victim.engine, "", victim.level, False, reason)


def move(item: Leased, target: Place, spent: bool, gain: float, cost: float) -> Preempt:
    """Stops one to go on elsewhere. Re-homed, it queues in its target's level: another one would draw it back."""
    level = max(item.level, target.level) if spent else target.level
    why = f"used {item.quantum_used} tokens of level {item.level}" if spent else "nothing is queued"
    text = f"{why}; {item.estimate_p50:.0f} tokens remain, {target.name} saves {gain:.2f} s for {cost:.2f} s of moving"
    numbers = {
        "gain_s": gain,
        "cost_s": cost,
        "remaining_p50": item.estimate_p50,
        "kept_tokens": float(item.generated),
    }
    reason = Reason("QUANTUM" if spent else "REHOME", text, numbers)
    return Preempt(item.name, item.engine, target.name, level, not item.in_tool_wait, reason)
