"""Accelerators and what they are given to: the cluster's specification, layouts, and where engines fit."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from services.common.errors import ConfigError, shown
from services.simulator.times import EngineTimes, TrainingTimes

FailureKind = Literal["die", "hang", "slow"]
MOST_ACCELERATORS = 100_000
"""In a layout that is read: of training, and of all engines together."""


class Mode(Enum):
    """How rollout and training take turns."""

    ROLLOUT = "rollout"
    """No training: one batch after the other."""
    COLOCATED = "colocated"
    """Synchronous: all accelerators generate a batch, then all train on it."""
    SPLIT = "split"
    """Rollout of a batch beside training on the one before; both wait for each other."""
    ASYNC = "async"
    """Rollout goes on; a step takes whole groups no staler than the bound."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensor-parallel degrees of the engines and the number of training accelerators."""

    engines: tuple[int, ...]
    training: int

    @property
    def rollout(self) -> int:
        """Accelerators that generate."""
        return sum(self.engines)

    def words(self) -> str:
        """Such as `24 training, 8xTP2 + 2xTP4`."""
        counts = {tp: self.engines.count(tp) for tp in sorted(set(self.engines))}
        return f"{self.training} training, " + (" + ".join(f"{n}xTP{tp}" for tp, n in counts.items()) or "no engine")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """What `words` writes. Raises ConfigError, also beyond MOST_ACCELERATORS."""
        whole = re.fullmatch(r"\s*(\d+)\s+training\s*,(.*)", text)
        parts = whole.group(2).split("+") if whole else []
        engines = [re.fullmatch(r"\s*(\d+)\s*xTP(\d+)\s*", part) for part in parts]
        if whole is None or not all(engines):
            raise ConfigError(f"layout {shown(text)}: expected such as '24 training, 8xTP1 + 2xTP2'")
        training = _count(whole.group(1), text)
        kinds = [(_count(m[1], text), _count(m[2], text)) for m in engines if m]
        if sum(count * max(1, tp) for count, tp in kinds) > MOST_ACCELERATORS:  # before any engine is listed
            raise ConfigError(f"layout {shown(text)}: expected engines of at most {MOST_ACCELERATORS:,} accelerators")
        return cls(tuple(tp for count, tp in kinds for _ in range(count)), training)


def _count(digits: str, text: str) -> int:
    """A number in a layout's text; those of thousands of digits are not even converted."""
    if len(digits.lstrip("0")) > len(str(MOST_ACCELERATORS)) or int(digits) > MOST_ACCELERATORS:
        raise ConfigError(
            f"layout {shown(text)}: {shown(digits)} is too large; expected at most {MOST_ACCELERATORS:,} accelerators"
        )
    return int(digits)


@dataclass(frozen=True, slots=True)
class Failure:
    """What befalls the engine of an index: it dies, hangs (answers nothing, generates nothing) or slows by a factor."""

    engine: int
    kind: FailureKind
    at_s: float
    factor: float = 4.0


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster and the job on it; what is the same for all policies."""

    times: EngineTimes
    training: TrainingTimes | None
    accelerators: int = 48
    node_size: int = 8
    staleness: int = 1
    """K: base version of a step - oldest version of its tokens is at most this, in ASYNC."""
    max_running: int = 256
    """Sequences in one decoding step of an engine."""
    min_kv_tokens: int = 49_152
    """Degrees whose engine holds fewer are not chosen by searches: the longest sequence must fit beside others."""
    recompute: bool = True
    """KV caches are computed again after a weight update, else kept."""
    detect_s: float = 15.0
    """From an engine's death or standstill until it is noticed: the lease."""
    failures: tuple[Failure, ...] = ()


def replicas_of(training: TrainingTimes, accelerators: int) -> tuple[int, int]:
    """Data-parallel replicas and accelerators of each: as many replicas as fit."""
    least = max(1, training.min_accelerators())
    count = accelerators // least
    return (count, accelerators // count) if count else (0, 0)


def check(layout: Layout, spec: ClusterSpec, mode: Mode) -> None:
    """Raises ConfigError, saying what is wrong, if the cluster cannot be laid out so."""
    total = layout.rollout + (0 if mode is Mode.COLOCATED else layout.training)
    if not layout.engines or any(tp < 1 or tp > spec.node_size for tp in layout.engines):
        raise ConfigError(
            f"layout {layout.words()}: expected engines of 1 to {spec.node_size} accelerators, one node's"
        )
    if total > spec.accelerators:
        raise ConfigError(f"layout {layout.words()} takes {total} accelerators; there are {spec.accelerators}")
    if mode is not Mode.ROLLOUT:
        if spec.training is None:
            raise ConfigError(f"mode {mode.value} trains; expected training times in the cluster's specification")
        least = spec.training.min_accelerators()
        given = spec.accelerators if mode is Mode.COLOCATED else layout.training
        if given < least:
            raise ConfigError(f"layout {layout.words()}: {given} training accelerators; one replica needs {least}")
    for tp in set(layout.engines):
        if spec.times.kv_tokens(tp) < 1:
            raise ConfigError(f"layout {layout.words()}: an engine of TP{tp} has no memory left for a KV cache")


def place(engines: Sequence[int], kept: Sequence[tuple[int, int]], spec: ClusterSpec) -> list[int] | None:
    """A node for each new engine (`engines`: their degrees), beside those kept, (tp, node) each.

    Largest first, each into the fullest node that still has room; None if they do not fit so. Training takes what is
    left, on any node.
    """
    nodes = -(-spec.accelerators // spec.node_size)
    free = [min(spec.node_size, spec.accelerators - n * spec.node_size) for n in range(nodes)]
    for tp, node in kept:
        free[node] -= tp
    found = [0] * len(engines)
    for at in sorted(range(len(engines)), key=lambda i: (-engines[i], i)):
        able = [n for n in range(nodes) if free[n] >= engines[at]]
        if not able:
            return None
        node = min(able, key=lambda n: (free[n], n))
        free[node] -= engines[at]
        found[at] = node
    return found
