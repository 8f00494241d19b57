"""Engines in levels by their degree, for policies that route by length."""

from collections.abc import Sequence

from services.simulator.engine import EngineState

BOUNDS = (2_048, 8_192, 16_384)
"""Tokens between the classes of length; classes beyond the last level share it."""


def class_of(tokens: float) -> int:
    """Class of a length, from 0."""
    return sum(tokens >= bound for bound in BOUNDS)


def engines_of(able: Sequence[EngineState], level: int) -> Sequence[EngineState]:
    """The admitting engines of a level: the degree of that rank. Engines of one degree are one level: to set some apart
    for long trajectories, without being faster, only starves these.
    """
    degrees = sorted({engine.tp for engine in able})
    if len(degrees) < 2:
        return able
    wanted = degrees[min(level, len(degrees) - 1)]
    return [engine for engine in able if engine.tp == wanted]
