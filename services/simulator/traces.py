"""Reader of recorded agent episodes, schema `agentic-traj/1` (JSON lines).

Line 1 is a header with `schema`; each further line is one episode:

    {"id", "group", "prompt", "turns": [{"gen", "tool", "out", "lat_s", "obs"}, ...]}

tokens and seconds; `tool` null = no call; `lat_s` null = not measured: drawn here once, from the quantile table of the
tool, so that every policy sees the same seconds. `lat_kind` "measured_incl_llm_gate" is drawn anew as well. Fields that
are not named here are notes and are passed over.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from services.common.errors import ConfigError, shown
from services.simulator.latency import table_of
from services.simulator.workload import LONGEST_CALL_S, MOST_TOKENS, OUTCOMES, Episode, Turn

SCHEMA = "agentic-traj/1"
UNKNOWN_S = -1.0
GATED = "measured_incl_llm_gate"


def read(path: Path, rng: np.random.Generator) -> list[Episode]:
    """All episodes of a file, in its order; missing latencies drawn from `rng`.

    Raises ConfigError naming the line, what is wrong there and what was expected.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; expected JSON lines") from error
    if not lines:
        raise ConfigError(f"{path}: empty; expected a header line with schema {SCHEMA!r}, then one episode a line")
    header = _object(lines[0], path, 1)
    if header.get("schema") != SCHEMA:
        raise ConfigError(f"{path}:1: schema is {shown(header.get('schema'))}, expected {SCHEMA!r}")
    episodes: list[Episode] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        episode = _episode(_object(line, path, number), f"{path}:{number}")
        if episode.id in seen:
            raise ConfigError(
                f"{path}:{number}: id {shown(episode.id)} was used on line {seen[episode.id]}; ids are unique"
            )
        seen[episode.id] = number
        episodes.append(episode)
    if not episodes:
        raise ConfigError(f"{path}: has a header and no episode; expected one a line from line 2 on")
    return [_drawn(episode, rng) for episode in episodes]


def _object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{number}: not JSON at column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, nesting without end
        raise ConfigError(f"{path}:{number}: cannot be read: {error}; expected one episode as a JSON object") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}:{number}: {type(content).__name__} where a JSON object was expected")
    return content


def _episode(content: Mapping[str, Any], where: str) -> Episode:
    turns = _field(content, "turns", list, where)
    if not turns:
        raise ConfigError(f"{where}: turns is empty; expected at least one turn")
    return Episode(
        id=_field(content, "id", str, where),
        group=_field(content, "group", str, where),
        prompt=_count(content, "prompt", where),
        turns=tuple(_turn(turn, f"{where}: turns[{at}]") for at, turn in enumerate(turns)),
    )


def _turn(content: Any, where: str) -> Turn:
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: {shown(content)} where an object with gen, tool, out, lat_s, obs was expected")
    tool = content.get("tool")
    if tool is not None and not isinstance(tool, str):
        raise ConfigError(f"{where}: tool is {shown(tool)}, expected a name or null")
    outcome = content.get("out") or "ok"
    if outcome not in OUTCOMES:
        raise ConfigError(f"{where}: out is {shown(outcome)}, expected one of {', '.join(OUTCOMES)}")
    return Turn(
        _count(content, "gen", where), tool or "", outcome, _latency(content, where), _count(content, "obs", where)
    )


def _latency(content: Mapping[str, Any], where: str) -> float:
    seconds = content.get("lat_s")
    if seconds is None or content.get("lat_kind") == GATED:
        return UNKNOWN_S if content.get("tool") else 0.0
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST_CALL_S:
        raise ConfigError(
            f"{where}: lat_s is {shown(seconds)}, expected seconds >= 0 or null, at most {LONGEST_CALL_S:,.0f}"
        )
    return float(seconds)


def _count(content: Mapping[str, Any], name: str, where: str) -> int:
    value = _field(content, name, int, where)
    if isinstance(value, bool) or not 0 <= value <= MOST_TOKENS:
        raise ConfigError(
            f"{where}: {name} is {shown(value)}, expected a number of tokens >= 0 and at most {MOST_TOKENS:,}"
        )
    return int(value)


def _field(content: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    if name not in content:
        raise ConfigError(f"{where}: {name} is missing; expected {kind.__name__}")
    if not isinstance(content[name], kind):
        raise ConfigError(f"{where}: {name} is {shown(content[name])}, expected {kind.__name__}")
    return content[name]


def _drawn(episode: Episode, rng: np.random.Generator) -> Episode:
    """Missing latencies drawn, one draw a turn."""
    if all(turn.latency_s != UNKNOWN_S for turn in episode.turns):
        return episode
    turns = (
        replace(t, latency_s=float(table_of(t.tool).draw(rng, 1)[0])) if t.latency_s == UNKNOWN_S else t
        for t in episode.turns
    )
    return replace(episode, turns=tuple(turns))
