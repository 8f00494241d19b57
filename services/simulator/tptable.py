"""Eight accelerators as one engine or as eight: the comparison of the paper, as steady decoding.

Each engine runs min(batch / engines, KV tokens / mean final length) sequences: as many as can all be finished without
preempting one. Each is on average half way in tokens written, so that the mean context while lengths are uniform in
[a, b] is E[l^2] / (2 E[l]). Tokens per second are engines * sequences / decode_s. Prompts, prefill and the batch's tail
are left out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from services.simulator.hardware import Extra, Hardware, ModelShape
from services.simulator.steptimes import ModelledEngine

ACCELERATORS = 8
BATCH = 512
HALVINGS = 60
LARGEST_TP = 8


@dataclass(frozen=True, slots=True)
class Lengths:
    """Final lengths in tokens, uniform between two."""

    least: float
    most: float

    @property
    def mean(self) -> float:
        """E[l]."""
        return (self.least + self.most) / 2

    @property
    def context(self) -> float:
        """Mean context of a token being decoded."""
        square = (self.least**2 + self.least * self.most + self.most**2) / 3
        return square / (2 * self.mean)


SHORT = Lengths(0, 2_048)
LONG = Lengths(16_384, 32_768)


def tokens_per_s(hardware: Hardware, model: ModelShape, tp: int, lengths: Lengths) -> float:
    """All engines together."""
    engine, engines = ModelledEngine(hardware, model), ACCELERATORS // tp
    sequences = max(1.0, min(BATCH / engines, engine.kv_tokens(tp) / lengths.mean))
    return engines * sequences / engine.decode_s(tp, sequences, sequences * lengths.context)


def ratio(hardware: Hardware, model: ModelShape, lengths: Lengths) -> float:
    """1 x TP8 over 8 x TP1."""
    return tokens_per_s(hardware, model, LARGEST_TP, lengths) / tokens_per_s(hardware, model, 1, lengths)


def fit_extra(hardware: Hardware, model: ModelShape, short: float, long: float, tp_step_s: float = 0.0) -> Extra:
    """The all-reduce rate and the share of memory at which both ratios come out as given.

    Slower all-reduces cost TP8 in proportion to its sequences, which is what short sequences show; less memory starves
    TP1 first, since its weights take more of each device. A fixed time per step alone cannot do both: it costs TP8 most
    where it has few sequences, which is the long end. A small one, `tp_step_s`, can be part of it. ValueError if no
    rate and share give both.
    """

    def at(fraction: float) -> Hardware:
        def with_rate(log_rate: float) -> Hardware:
            return replace(hardware, extra=Extra(math.exp(log_rate), tp_step_s, fraction))

        found = _bisect(lambda x: ratio(with_rate(x), model, SHORT) - short, math.log(1e8), math.log(1e13))
        return with_rate(found)

    spare = ModelledEngine(hardware, model).kv_tokens(1) - LONG.mean  # what TP1 can lose and still run one sequence
    least = (hardware.engine_bytes - spare * model.kv_bytes_per_token()) / hardware.accelerator.hbm_bytes
    fraction = _bisect(lambda f: long - ratio(at(f), model, LONG), least, hardware.operations.memory.fraction)
    return at(fraction).extra


def _bisect(rises: Callable[[float], float], low: float, high: float) -> float:
    """Where `rises` crosses 0; ValueError if it does not between `low` and `high`."""
    if rises(low) > 0 or rises(high) < 0:
        raise ValueError(f"no solution between {low:g} and {high:g}: {rises(low):g} to {rises(high):g}")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < 0 else (low, middle)
    return (low + high) / 2
