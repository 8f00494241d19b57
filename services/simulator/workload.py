"""What is to be done: episodes of agents as numbers. From files (`traces`) or a generator (`parametric`).

An episode is a list of turns; a turn generates tokens and then, but for the last, calls a tool whose output is added to
the context. Policies never see an `Episode`, only how far it has come (`trajectory.Trajectory`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from services.common.errors import ConfigError, shown

OUTCOMES = ("ok", "error", "timeout")
LONGEST_CALL_S = 86_400.0
"""A tool call of more than a day is taken for a mistake: nothing would happen in between but the clock of a policy."""
MOST_TOKENS = 1 << 40
"""Of one turn or prompt; far beyond any model's context."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens generated, then a tool call ('' = none, the last turn): its outcome, seconds, and output in tokens."""

    generated: int
    tool: str
    outcome: str
    latency_s: float
    observation: int


@dataclass(frozen=True, slots=True)
class Episode:
    """One trajectory's whole course. `group`: the prompt that it shares with its siblings; `prompt` in tokens."""

    id: str
    group: str
    prompt: int
    turns: tuple[Turn, ...]

    @property
    def generated(self) -> int:
        """Tokens generated in all."""
        return sum(turn.generated for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Length of the final sequence, without what the last call returned, which nobody reads."""
        return self.prompt + self.generated + sum(turn.observation for turn in self.turns[:-1])


class Workload(Protocol):
    """Batches of whole groups, one a training step."""

    def batch(self, step: int, seed: int) -> list[Episode]:
        """The episodes of a step (from 0), siblings adjacent. Depends on its arguments alone."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same episodes at each step, named by it."""

    episodes: tuple[Episode, ...]

    def batch(self, step: int, seed: int) -> list[Episode]:
        """The episodes; seeds change nothing."""
        del seed
        return [replace(e, id=f"{step}/{e.id}", group=f"{step}/{e.group}") for e in self.episodes]


@dataclass(frozen=True, slots=True)
class Resampled:
    """`groups` whole groups a step, drawn with replacement: a bootstrap sample of recorded episodes."""

    episodes: tuple[Episode, ...]
    groups: int

    def batch(self, step: int, seed: int) -> list[Episode]:
        """A sample that depends on (seed, step)."""
        by_group: dict[str, list[Episode]] = {}
        for episode in self.episodes:
            by_group.setdefault(episode.group, []).append(episode)
        names = list(by_group)
        picked = np.random.default_rng((seed, step)).integers(len(names), size=self.groups)
        return [
            replace(e, id=f"{step}.{place}/{e.id}", group=f"{step}.{place}/{e.group}")
            for place, at in enumerate(picked)
            for e in by_group[names[at]]
        ]


def shuffled_outcomes(episodes: Sequence[Episode], rng: np.random.Generator) -> list[Episode]:
    """The same episodes with the outcomes of the calls permuted within each; lengths stay."""
    found = []
    for episode in episodes:
        calls = [i for i, turn in enumerate(episode.turns) if turn.tool]
        turns = list(episode.turns)
        for at, source in zip(calls, rng.permutation(calls), strict=True):
            turns[at] = replace(turns[at], outcome=episode.turns[source].outcome)
        found.append(replace(episode, turns=tuple(turns)))
    return found


def scaled(episodes: Sequence[Episode], *, generated: float = 1.0, latency: float = 1.0) -> list[Episode]:
    """Episodes with the tokens of each turn and the seconds of each call multiplied; tool outputs stay as they are.

    Raises ConfigError as `check_scale` does.
    """
    check_scale(episodes, generated=generated, latency=latency)
    return [
        replace(
            episode,
            turns=tuple(
                replace(t, generated=max(1, round(t.generated * generated)), latency_s=t.latency_s * latency)
                for t in episode.turns
            ),
        )
        for episode in episodes
    ]


def check_scale(episodes: Sequence[Episode], *, generated: float = 1.0, latency: float = 1.0) -> None:
    """Raises ConfigError for a factor that is not finite, negative or, for tokens, 0, and beyond the bounds above.

    Those are MOST_TOKENS for a turn and LONGEST_CALL_S for a call.
    """
    if not (0 < generated < math.inf and 0 <= latency < math.inf):  # NaN is neither
        raise ConfigError(f"scale of generated {generated}, of latency {latency}: expected finite, > 0 and >= 0")
    for episode in episodes:
        tokens = max(turn.generated for turn in episode.turns) * generated
        seconds = max(turn.latency_s for turn in episode.turns) * latency
        where = f"of episode {shown(episode.id)} comes to"
        if tokens > MOST_TOKENS:
            raise ConfigError(
                f"scale of generated {generated:g}: a turn {where} {tokens:.3g} tokens; at most {MOST_TOKENS:,} are "
                f"simulated, take a smaller factor"
            )
        if seconds > LONGEST_CALL_S:
            raise ConfigError(
                f"scale of latency {latency:g}: a call {where} {seconds:.3g} s; at most {LONGEST_CALL_S:,.0f} are "
                f"simulated, take a smaller factor"
            )
