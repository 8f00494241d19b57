"""A generator of agentic episodes: long tail, tools, failures, siblings, and drift over training.

The tokens that an episode wants are log-normal: log w = m + s (sqrt(r) z_group + sqrt(1 - r) z_own), so that siblings
of one prompt correlate with r. Turns are drawn one after the other, gamma-distributed around the family's mean turn,
until the wanted tokens are made or the sequence (prompt, generated, tool outputs) reaches the cap. Each call fails with
the prompt's own probability p (Beta around the family's rate). With `lengthening` l > 0 a failure *causes* work: it
adds l times the tokens of the turn that failed. With l = 0 the outcomes say nothing about what follows. m is solved so
that the mean before failures, times the mean of 1 / (1 - p l), is the wanted one under the cap.

Mean length grows geometrically from `mean_start` to `mean_end` over `drift_steps`; a turn grows with its square root.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from services.simulator.latency import TABLES
from services.simulator.workload import Episode, Turn

CAP_TOKENS = 40_960
"""Longest sequence."""
MIN_TOKENS = 32.0
TURN_SHAPE = 2.0
"""Of the gamma distribution of a turn's tokens."""
FAILURE_SPREAD = 4.0
"""a + b of the Beta distribution of an episode's failure rate: prompts differ in how hard they are."""
MAX_LOAD = 0.6
"""Bound of p l: above 1 an episode would never end."""
FAILED_SHARE_TIMEOUT = 0.1
"""Of failures, those that are timeouts."""


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of task. Tokens; `tools` are (name, share of calls, latency table)."""

    name: str = "code"
    spread: float = 1.0
    """Standard deviation of log tokens, before the cap."""
    siblings: float = 0.5
    """Correlation of log tokens within a group."""
    turn_tokens: float = 250.0
    """Mean of a turn at a mean length of 2,500; grows with the root of the mean length."""
    prompt: tuple[int, int] = (400, 2_000)
    observation: float = 250.0
    """Mean tokens that a call returns."""
    tools: tuple[tuple[str, float, str], ...] = (
        ("bash", 0.35, "exec"), ("read", 0.3, "read"), ("edit", 0.2, "edit"), ("search", 0.15, "search"),
    )  # fmt: skip
    failures: float = 0.2
    lengthening: float = 0.0


CODE = Family()
SEARCH = Family(
    name="search", spread=0.6, turn_tokens=180.0, prompt=(100, 400), observation=500.0,
    tools=(("search", 0.7, "search"), ("web", 0.3, "web")), failures=0.1,
)  # fmt: skip
REPAIR = Family(name="repair", spread=0.5, failures=0.25, lengthening=2.5)
"""Failures cause the tail: what one returns says how much is still to come."""


@dataclass(frozen=True, slots=True)
class Shift:
    """From a step on lengths and tool seconds are multiplied."""

    step: int
    length: float = 4.0
    latency: float = 5.0


@dataclass(frozen=True, slots=True)
class Parametric:
    """`groups` x `members` episodes a step. With several families, each has `family_steps` steps in turn."""

    families: tuple[Family, ...] = (CODE,)
    groups: int = 32
    members: int = 16
    mean_start: float = 2_500.0
    mean_end: float = 11_500.0
    drift_steps: int = 20
    family_steps: int = 5
    shift: Shift | None = None
    latency: float = 1.0

    def mean(self, step: int) -> float:
        """Mean generated tokens that a step's episodes aim at."""
        share = min(1.0, step / max(1, self.drift_steps - 1))
        mean = self.mean_start * float((self.mean_end / self.mean_start) ** share)
        return mean * self.shift.length if self.shift is not None and step >= self.shift.step else mean

    def batch(self, step: int, seed: int) -> list[Episode]:
        """The episodes of a step; the same (step, seed) gives the same ones."""
        return list(_batch(self, step, seed))

    def family(self, step: int) -> Family:
        """The one whose turn it is."""
        return self.families[(step // self.family_steps) % len(self.families)]

    def slowness(self, step: int) -> float:
        """Factor on tool seconds."""
        return self.latency * (self.shift.latency if self.shift is not None and step >= self.shift.step else 1.0)


@lru_cache(maxsize=96)
def _batch(workload: Parametric, step: int, seed: int) -> tuple[Episode, ...]:
    """Kept: every policy runs on the same ones, and drawing them costs as much as simulating them."""
    drawn = episodes(
        workload.family(step), workload.mean(step), workload.groups, workload.members,
        np.random.default_rng((seed, step)), prefix=f"s{step}", latency=workload.slowness(step),
    )  # fmt: skip
    return tuple(drawn)


def episodes(
    family: Family,
    mean: float,
    groups: int,
    members: int,
    rng: np.random.Generator,
    *,
    prefix: str = "s0",
    latency: float = 1.0,
) -> list[Episode]:
    """`groups` x `members` episodes of a mean generated length (tokens, within the cap)."""
    own, shared = math.sqrt(1.0 - family.siblings), math.sqrt(family.siblings)
    failing = _failure_rates(family, rng, groups)
    turn = family.turn_tokens * math.sqrt(mean / 2_500.0)
    cap = (CAP_TOKENS - sum(family.prompt) / 2) * turn / (turn + family.observation)
    growth = float(np.mean(1.0 / (1.0 - failing * family.lengthening)))
    middle = log_middle(mean / growth, family.spread, cap)
    normal = shared * rng.standard_normal(groups)[:, None] + own * rng.standard_normal((groups, members))
    wanted = np.clip(np.exp(middle + family.spread * normal), MIN_TOKENS, CAP_TOKENS)
    prompts = rng.integers(*family.prompt, size=groups, endpoint=True)
    return [
        Episode(
            f"{prefix}/g{g}/{m}", f"{prefix}/g{g}", int(prompts[g]),
            _turns(family, int(prompts[g]), float(wanted[g, m]), turn, float(failing[g]), rng, latency),
        )
        for g in range(groups) for m in range(members)
    ]  # fmt: skip


def _failure_rates(
    family: Family, rng: np.random.Generator, groups: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One rate a prompt: some are harder than others."""
    if not 0 < family.failures < 1:
        return np.full(groups, family.failures)
    rates = rng.beta(FAILURE_SPREAD * family.failures, FAILURE_SPREAD * (1 - family.failures), size=groups)
    return np.minimum(rates, MAX_LOAD / family.lengthening) if family.lengthening > 0 else rates


def _turns(
    family: Family,
    context: int,
    wanted: float,
    mean_turn: float,
    failing: float,
    rng: np.random.Generator,
    latency: float,
) -> tuple[Turn, ...]:
    sizes: list[int] = []
    failed: list[bool] = []
    outputs: list[int] = []
    made = 0
    while made < wanted and context < CAP_TOKENS:
        room = 8 + int(2 * (wanted - made) / mean_turn)
        gammas = rng.gamma(TURN_SHAPE, mean_turn / TURN_SHAPE, room).tolist()
        returned = rng.exponential(family.observation, room).tolist()
        for size, draw, output in zip(gammas, rng.random(room).tolist(), returned, strict=True):
            tokens = max(1, min(round(size), math.ceil(wanted - made), CAP_TOKENS - context))
            made += tokens
            sizes.append(tokens)
            failed.append(draw < failing)
            outputs.append(min(int(output), CAP_TOKENS - context - tokens))
            context += tokens + outputs[-1]
            if failed[-1]:
                wanted += family.lengthening * tokens
            if made >= wanted or context >= CAP_TOKENS:
                break
    return _with_calls(family, sizes, failed, outputs, rng, latency)


def _with_calls(
    family: Family,
    sizes: list[int],
    failed: list[bool],
    outputs: list[int],
    rng: np.random.Generator,
    latency: float,
) -> tuple[Turn, ...]:
    count = len(sizes)
    bounds = np.cumsum([share for _, share, _ in family.tools])
    picks = np.minimum(np.searchsorted(bounds, rng.random(count) * bounds[-1], side="right"), len(bounds) - 1)
    ranks, kinds = rng.random(count), rng.random(count).tolist()
    seconds = np.zeros(count)
    for at, (_, _, table) in enumerate(family.tools):
        mine = picks == at
        seconds[mine] = np.exp(np.interp(ranks[mine], TABLES[table].probabilities, np.log(TABLES[table].seconds)))
    turns = []
    for i, size in enumerate(sizes):
        if i == count - 1:
            turns.append(Turn(size, "", "ok", 0.0, 0))
            continue
        outcome = "ok" if not failed[i] else "timeout" if kinds[i] < FAILED_SHARE_TIMEOUT else "error"
        tool = family.tools[int(picks[i])][0]
        turns.append(Turn(size, tool, outcome, float(seconds[i]) * latency, outputs[i]))
    return tuple(turns)


@lru_cache(maxsize=256)
def log_middle(mean: float, spread: float, cap: float) -> float:
    """M such that min(exp(m + spread z), cap) has the given mean, by bisection.

    E[min(X, c)] = exp(m + s^2/2) Phi((ln c - m - s^2) / s) + c (1 - Phi((ln c - m) / s)). A mean above nine tenths of
    the cap is taken as nine tenths.
    """
    wanted = min(mean, 0.9 * cap)
    phi = NormalDist().cdf
    top = math.log(cap)
    low, high = 0.0, top + 4.0 * spread
    for _ in range(60):
        m = 0.5 * (low + high)
        below = math.exp(m + spread**2 / 2) * phi((top - m - spread**2) / spread)
        got = below + cap * (1.0 - phi((top - m) / spread))
        low, high = (m, high) if got < wanted else (low, m)
    return 0.5 * (low + high)
