"""Engines in levels, for policies that route by length: by degree, or three quarters and a quarter of equal ones."""

from collections.abc import Sequence

from services.simulator.engine import EngineState

BOUNDS = (2_048, 8_192, 16_384)
"""Tokens between the classes of length; classes beyond the last level share it."""
LOW_SHARE = 0.75


def class_of(tokens: float) -> int:
    """Class of a length, from 0."""
    return sum(tokens >= bound for bound in BOUNDS)


def engines_of(able: Sequence[EngineState], level: int) -> Sequence[EngineState]:
    """The admitting engines of a level: the degree of that rank; of one degree alone, the first three quarters are
    level 0 and the rest all others.
    """
    degrees = sorted({engine.tp for engine in able})
    if len(degrees) > 1:
        wanted = degrees[min(level, len(degrees) - 1)]
        return [engine for engine in able if engine.tp == wanted]
    low = max(1, int(LOW_SHARE * len(able)))
    return able[:low] if level == 0 or low == len(able) else able[low:]
