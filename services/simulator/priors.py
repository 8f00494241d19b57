"""Tables of rates for the planner from a profile: what a cluster is believed to do before anything was observed."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.common.errors import ConfigError
from services.scheduler.core.rates import EngineKind, EngineRates, TrainerKind, TrainerRates
from services.simulator.times import EngineTimes, TrainingTimes

Floats = NDArray[np.float64]

TYPICAL = (
    (1, 4_096.0), (1, 32_768.0), (4, 16_384.0), (16, 65_536.0), (32, 393_216.0), (64, 262_144.0), (128, 1_048_576.0),
)  # fmt: skip
"""(sequences, context tokens) of the steps that the linear rates are fitted to."""
PREFILL = (2_048.0, 8_192.0)
"""(new tokens, cached tokens) of a typical prefill."""


def engine_rates(
    times: EngineTimes, type_: str, degrees: Sequence[int] = (1, 2, 4, 8), max_running: int = 256,
    rollout_accelerators: int = 16, asleep_bytes: float = 0.0,
) -> dict[EngineKind, EngineRates]:  # fmt: skip
    """Of each degree that holds the model. `asleep_bytes`: host memory of a sleeping engine, all its weights.

    Exact for dense models; for experts a least-squares line over TYPICAL.
    """
    found = {}
    for tp in degrees:
        try:
            kv_tokens = times.kv_tokens(tp)
        except ConfigError:
            continue
        given = np.array([(1.0, n, c) for n, c in TYPICAL])
        seconds = np.array([times.decode_s(tp, n, c) for n, c in TYPICAL])
        # relative errors count: a step of one sequence matters to the tail as much as a full one to the rate
        step_s, sequence_s, context_s = _nonnegative(given / seconds[:, None], np.ones(len(seconds)))
        found[EngineKind(type_, tp)] = EngineRates(
            step_s, sequence_s, context_s, kv_tokens,
            prefill_s=times.prefill_s(tp, *PREFILL) / PREFILL[0],
            max_running=max_running,
            start_s=times.wake_s(tp),
            pause_s=times.weight_update_s(0, rollout_accelerators),
            asleep_bytes=asleep_bytes,
        )  # fmt: skip
    return found


def _nonnegative(given: Floats, wanted: Floats) -> tuple[float, float, float]:
    """Least squares in three unknowns of at least 0: the best of the solutions with some of them left out."""
    best, least = np.zeros(3), np.inf
    for used in itertools.product((True, False), repeat=3):
        columns = np.flatnonzero(used)
        found = np.zeros(3)
        if len(columns):
            found[columns] = np.linalg.lstsq(given[:, columns], wanted, rcond=None)[0]
        rest = float(np.sum((given @ found - wanted) ** 2))
        if found.min() >= 0 and rest < least:
            best, least = found, rest
    return float(best[0]), float(best[1]), float(best[2])


def trainer_rates(
    times: TrainingTimes, type_: str, sizes: Sequence[int], micro_batch_tokens: float, asleep_bytes: float = 0.0
) -> dict[TrainerKind, TrainerRates]:
    """Of each size that holds a replica, solved from a few training steps. `asleep_bytes`: of a whole replica."""
    found, least = {}, times.min_accelerators()
    for size in sizes:
        if size < least:
            continue
        batches = ([1_024] * 64, [16_384] * 64, [4_096] * 128)
        rows = np.array([(float(sum(b)), float(sum(t * t for t in b)), 1.0) for b in batches])
        seconds = np.array([times.step_s(1, size, b) for b in batches])
        token_s, square_s, fixed_s = (max(0.0, float(v)) for v in np.linalg.solve(rows, seconds))
        gather_s = max(0.0, times.step_s(1, size, [1]) - fixed_s)
        halved = times.step_s(2, size, batches[2])
        reduce_s = max(0.0, 2.0 * (halved - fixed_s - (token_s * rows[2][0] + square_s * rows[2][1]) / 2.0))
        found[TrainerKind(type_, size)] = TrainerRates(
            token_s,
            square_s,
            gather_s,
            fixed_s,
            reduce_s,
            micro_batch_tokens,
            start_s=times.offload_s(1, size),
            asleep_bytes=asleep_bytes,
        )
    return found
