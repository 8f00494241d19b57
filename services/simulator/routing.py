"""A router's event list through the decision core: what it would have decided, how quickly, and where each one went.

One JSON object a line, in order of time:

    {"event": "schedule", "trajectory": "t1", "group": "g1", "tokens": 812, "at_s": 0.0, "engine": "e3"}
    {"event": "tool_return", "trajectory": "t1", "generated": 140, "tokens": 60, "tool": "search", "outcome": "OK"}
    {"event": "finish", "trajectory": "t1", "generated": 75}

`group`, `tokens` (of the prompt, of the tool's answer), `tool`, `outcome`, `generated` (by this turn) and `at_s` may
be absent; without `at_s` an event comes a millisecond after the one before. `engine` is what the router chose: it names
the engines there are, and is compared with what is chosen here.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.common.errors import ConfigError, shown
from services.scheduler.core.cmlfq import Assign, EngineView, Preempt, QueueSettings
from services.simulator.decisions import DecisionCore, Followed
from services.simulator.workload import MOST_TOKENS

FIELDS = {
    "event": str, "trajectory": str, "group": str, "engine": str, "generated": int, "tokens": int, "tool": str,
    "outcome": str, "at_s": float,
}  # fmt: skip
KINDS = ("schedule", "tool_return", "finish")
OUTCOMES = ("OK", "TOOL_ERROR", "TIMEOUT", "INFRA_ERROR")
STEP_S = 0.001
MAX_LINE = 65_536
ASSUMED_SECONDS_PER_TOKEN = 0.02
"""Assumed, measured nowhere: of every engine alike, since an event list says nothing of their speed."""
ASSUMED_PREFILL_TOKENS_PER_S = 1_000.0
"""Assumed likewise: what computing a context again costs on another engine, against waiting for its own."""


@dataclass(frozen=True, slots=True)
class RouterEvent:
    """One line. Times in seconds."""

    event: str
    trajectory: str
    group: str = ""
    engine: str = ""
    generated: int = 0
    tokens: int = 0
    tool: str = ""
    outcome: str = "OK"
    at_s: float | None = None


@dataclass(slots=True)
class Routed:
    """What came of an event list."""

    counts: Counter[str] = field(default_factory=Counter)
    """Events by kind."""
    decided: Counter[str] = field(default_factory=Counter)
    """Decisions by reason."""
    seconds: list[float] = field(default_factory=list)
    """That each event took, with its decision."""
    places: dict[str, list[str]] = field(default_factory=dict)
    """Engines that each trajectory was leased to, in order; none if it never left the queue."""
    agreed: int = 0
    """Trajectories whose first engine is the one that the router chose, of ..."""
    compared: int = 0
    """... those for which it named one."""


def read(lines: Iterable[str], name: str) -> list[RouterEvent]:
    """The events of a file; empty lines are passed over. ConfigError names the first wrong line."""
    found: list[RouterEvent] = []
    live: set[str] = set()
    over: set[str] = set()
    at = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        event = _event(line, where)
        if event.event == "schedule":
            if event.trajectory in live or event.trajectory in over:
                raise ConfigError(f"{where}: {shown(event.trajectory)} is scheduled a second time")
            live.add(event.trajectory)
        elif event.trajectory not in live:
            why = "has finished already" if event.trajectory in over else "was never scheduled"
            raise ConfigError(f"{where}: {event.event} of {shown(event.trajectory)}, which {why}")
        if event.event == "finish":
            live.discard(event.trajectory)
            over.add(event.trajectory)
        if event.at_s is not None:
            if event.at_s < at:
                raise ConfigError(f"{where}: at_s {event.at_s:g} lies before {at:g}; events come in order of time")
            at = event.at_s
        found.append(event)
    if not found:
        raise ConfigError(f"{name}: no events; expected one JSON object a line, {' | '.join(KINDS)}")
    return found


def _event(line: str, where: str) -> RouterEvent:
    if len(line) > MAX_LINE:
        raise ConfigError(f"{where}: {len(line)} characters; at most {MAX_LINE} are read")
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: an event is a JSON object, found {type(content).__name__}")
    for key, value in content.items():
        kind = FIELDS.get(key)
        if kind is None:
            raise ConfigError(f"{where}: unknown key {shown(key)}; known are {', '.join(FIELDS)}")
        wanted = (int, float) if kind is float else (kind,)
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ConfigError(f"{where}: {key} is {shown(value)}; expected {kind.__name__}")
        if isinstance(value, (int, float)) and not 0 <= value <= MOST_TOKENS:  # NaN is not either
            raise ConfigError(f"{where}: {key} is {shown(value)}; expected 0 or more and at most {MOST_TOKENS}")
    if content.get("event") not in KINDS:
        raise ConfigError(f"{where}: event is {shown(content.get('event'))}; expected one of {', '.join(KINDS)}")
    if not content.get("trajectory"):
        raise ConfigError(f"{where}: trajectory is missing")
    if content.get("outcome", "OK") not in OUTCOMES:
        raise ConfigError(f"{where}: outcome is {shown(content['outcome'])}; expected one of {', '.join(OUTCOMES)}")
    return RouterEvent(**content)


def route(events: Sequence[RouterEvent], engines: int, slots: int, settings: QueueSettings) -> Routed:
    """Runs the events. The engines are those that the events name, or `engines` of them; each has `slots` places."""
    result = Routed()
    core = DecisionCore(settings)
    named = sorted({e.engine for e in events if e.engine})
    for name in named or [f"engine-{i}" for i in range(engines)]:
        core.engine(_assumed(name, slots), 0.0)
    numbers: dict[str, int] = {}
    now = 0.0
    for event in events:
        now = event.at_s if event.at_s is not None else now + STEP_S
        began = time.perf_counter()
        actions = _one(core, event, numbers, now)
        result.seconds.append(time.perf_counter() - began)
        result.counts[event.event] += 1
        if event.event == "schedule":
            result.places[event.trajectory] = []
        for action in actions:
            result.decided[action.reason.code] += 1
            if isinstance(action, Assign):
                result.places[action.trajectory].append(action.engine)
    for event in events:
        if event.event == "schedule" and event.engine and result.places[event.trajectory]:
            result.compared += 1
            result.agreed += result.places[event.trajectory][0] == event.engine
    return result


def _assumed(name: str, slots: int) -> EngineView:
    """An idle engine of whose speed and memory nothing is known."""
    return EngineView(
        name, "run", level=0, concurrency_cap=slots, running=0, kv_capacity_tokens=0, kv_used_tokens=0,
        seconds_per_token=ASSUMED_SECONDS_PER_TOKEN, prefill_tokens_per_second=ASSUMED_PREFILL_TOKENS_PER_S,
        admitting=True,
    )  # fmt: skip


def _one(core: DecisionCore, event: RouterEvent, numbers: dict[str, int], now: float) -> list[Assign | Preempt]:
    if event.event == "schedule":
        group = event.group or event.trajectory
        number = numbers.setdefault(group, len(numbers))
        return core.scheduled([Followed(event.trajectory, "run", group, number, 0, event.tokens)], now)
    if event.event == "tool_return":
        return core.turned(
            event.trajectory, event.generated, event.tokens, event.tool or "tool", "", event.outcome, now
        )
    return core.finished(event.trajectory, event.generated, now)
