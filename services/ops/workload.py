"""The demo's task files: left-to-right sums that need one tool call for each operation, made from a seed.

A task is a JSON object:
  question    "31+14-20=?", the first observation of the episode
  answer      "25", what the final answer must be
  max_ops     operators that the calculator accepts in one call (1: every operation is a turn of its own)
  latency     {"p50_ms", "p99_ms"}: the calculator waits a lognormal time with these quantiles, milliseconds
  operations  number of operations, for records only

Operands of one expression differ from each other, so that the next one is found by looking up the last one used:
a model of half a million parameters learns that at every length, while it would not learn to count.
"""

import random
from typing import Any

OPERANDS = range(10, 100)
LARGEST = 999
"""Running totals stay within 0..LARGEST: at most three characters, never a sign."""

LONGEST = 26
"""Most operations that the demo's model was shown: about 450 tokens, within its 512 positions."""

HELDOUT_OPERATIONS = (1, 6)
"""Fewest and most operations of the held-out tasks and of the stationary training mix."""

DRIFT = (0.2, 0.5)
"""Shares of the run at which the drift begins and is complete."""
DRIFT_START = (1, 2)
DRIFT_END = (3, 6)
HELDOUT_SHARE = 0.3
"""Share of groups that keep the held-out mix while the others drift: a policy trained on long tasks alone forgets
within ten steps when to stop on short ones."""

TAIL = (10, 14)
"""Operations of the very long episodes."""
TAIL_SHARE_STATIONARY = 0.02
TAIL_SHARE_END = 0.04
LATENCY_START_MS = (5.0, 100.0)
LATENCY_END_MS = (1200.0, 6000.0)
"""(p50, p99) of one tool call at the start and at the end of the drift."""
TAIL_LATENCY = 0.5
"""Very long episodes make many quick calls. With calls as slow as the others' they would bound a step by themselves
within the staleness bound, and no split of the accelerators would be better than another."""


def training_tasks(seed: int, groups: int, drift: bool) -> list[dict[str, Any]]:
    """The task file of a training run: one task for each group, in the order of training.

    With drift, over the part DRIFT of the run operations move from DRIFT_START to DRIFT_END, latency from
    LATENCY_START_MS to LATENCY_END_MS and the share of very long episodes (TAIL) from none to TAIL_SHARE_END. Without,
    the mix is the same throughout: held-out lengths, and the latency of the end. Very long episodes have TAIL_LATENCY
    of the latency of the others.
    """
    rng = random.Random(f"train/{seed}/{drift}")  # noqa: S311 - a workload, no secret
    tasks = []
    for index in range(groups):
        done = index / max(1, groups - 1)
        progress = min(1.0, max(0.0, done - DRIFT[0]) / (DRIFT[1] - DRIFT[0])) if drift else 1.0
        low, high = HELDOUT_OPERATIONS
        if drift and rng.random() >= HELDOUT_SHARE:
            low, high = (round(bound) for bound in _between(DRIFT_START, DRIFT_END, progress))
        tail = TAIL_SHARE_END * progress if drift else TAIL_SHARE_STATIONARY
        long = rng.random() < tail
        operations = rng.randint(*TAIL) if long else rng.randint(low, high)
        p50, p99 = _between(LATENCY_START_MS, LATENCY_END_MS, progress)
        quick = TAIL_LATENCY if long else 1.0
        tasks.append(_task(rng, operations, (p50 * quick, p99 * quick)))
    return tasks


def heldout_tasks(seed: int, n: int = 256) -> list[dict[str, Any]]:
    """Tasks for evaluation before and after training: a stationary mix that no training file of any seed is drawn from.

    Their random stream is their own; a short expression may still occur in both by chance. No latency: evaluation
    measures the model.
    """
    rng = random.Random(f"heldout/{seed}")  # noqa: S311
    low, high = HELDOUT_OPERATIONS
    return [_task(rng, low + i % (high - low + 1), None) for i in range(n)]


def expression(rng: random.Random, operations: int) -> tuple[list[str], list[int]]:
    """A random expression as its terms ("31", "+14", "-20") and the running totals after each term (31, 45, 25)."""
    if not 0 <= operations < len(OPERANDS):
        raise ValueError(f"operations must be 0 to {len(OPERANDS) - 1}, since operands do not repeat; got {operations}")
    first, *rest = rng.sample(OPERANDS, operations + 1)
    terms, totals = [str(first)], [first]
    for operand in rest:
        sign = 1 if rng.random() < 0.5 else -1
        if not 0 <= totals[-1] + sign * operand <= LARGEST:
            sign = -sign
        terms.append(f"{'+' if sign > 0 else '-'}{operand}")
        totals.append(totals[-1] + sign * operand)
    return terms, totals


def _task(rng: random.Random, operations: int, latency_ms: tuple[float, float] | None) -> dict[str, Any]:
    terms, totals = expression(rng, operations)
    task: dict[str, Any] = {
        "question": "".join(terms) + "=?",
        "answer": str(totals[-1]),
        "max_ops": 1,
        "operations": operations,
    }
    if latency_ms is not None:
        task["latency"] = {"p50_ms": round(latency_ms[0], 1), "p99_ms": round(latency_ms[1], 1)}
    return task


def _between(start: tuple[float, float], end: tuple[float, float], progress: float) -> tuple[float, float]:
    return start[0] + (end[0] - start[0]) * progress, start[1] + (end[1] - start[1]) * progress
