"""Group-relative advantages: a pure function of the manifest's rewards, the same on every replica."""

from collections.abc import Sequence

EPSILON = 1e-6


def advantages(groups: Sequence[str], rewards: Sequence[float], *, divide_by_std: bool = True) -> list[float]:
    """(reward - group mean) / (group standard deviation + 1e-6) for each member; without the divisor if told so.

    The deviation is the population's (divisor n), so a group of one, or of equal rewards, gets exactly 0. Members of a
    group need not be adjacent.
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    result = [0.0] * len(rewards)
    for indices in members.values():
        mean = sum(rewards[i] for i in indices) / len(indices)
        if all(rewards[i] == rewards[indices[0]] for i in indices):
            continue  # no signal, and no rounding error in its place
        scale = 1.0
        if divide_by_std:
            scale = (sum((rewards[i] - mean) ** 2 for i in indices) / len(indices)) ** 0.5 + EPSILON
        for i in indices:
            result[i] = (rewards[i] - mean) / scale
    return result
