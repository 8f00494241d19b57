"""How long tools take: quantile tables of measured calls, seconds.

Sources: `exec` 282 shell calls of a coding agent in SWE-rebench containers (120 s is its tool timeout); `step` 116
execution times of SWE-agent / SWE-smith; `read`, `edit`, `search` 955, 756 and 417 local file calls of the same agents;
`web` 4 fetches only. A few quantiles each, linear in the logarithm between them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of seconds by some of its quantiles: probabilities rise from 0 to 1, seconds are positive."""

    probabilities: tuple[float, ...]
    seconds: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        """`count` independent draws, seconds."""
        return np.exp(np.interp(rng.random(count), self.probabilities, [math.log(s) for s in self.seconds]))


_P = (0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

TABLES: Mapping[str, Quantiles] = {
    "exec": Quantiles(_P, (0.023, 0.034, 0.629, 1.063, 1.555, 3.408, 11.32, 120.7, 120.9)),
    "step": Quantiles(_P, (0.109, 0.111, 0.147, 0.155, 0.247, 0.927, 1.278, 2.098, 3.198)),
    "read": Quantiles(_P, (0.006, 0.008, 0.012, 0.013, 0.020, 0.042, 0.043, 0.249, 0.342)),
    "edit": Quantiles(_P, (0.005, 0.015, 0.021, 0.025, 0.048, 0.058, 0.068, 0.085, 0.138)),
    "search": Quantiles(_P, (0.006, 0.013, 0.017, 0.021, 0.031, 0.050, 0.058, 0.109, 0.234)),
    "web": Quantiles((0.0, 0.25, 0.5, 0.75, 1.0), (7.363, 8.272, 8.708, 12.51, 23.51)),
}

KINDS: Mapping[str, str] = {
    "user": "web",
    "open": "read", "cat": "read", "ls": "read", "cd": "read", "goto": "read",
    "scroll_down": "read", "scroll_up": "read",
    "edit": "edit", "create": "edit", "str_replace_editor": "edit", "insert": "edit",
    "search_file": "search", "search_dir": "search", "find_file": "search", "grep": "search", "find": "search",
    "curl": "web", "wget": "web",
    "sql": "step", "think": "read", "calculate": "read",
}  # fmt: skip
"""Table of a tool by its name in recorded episodes; a simulated user is like a web call; any other: `exec`."""


def table_of(tool: str) -> Quantiles:
    """The table that stands for a tool."""
    return TABLES[KINDS.get(tool, "exec")]
