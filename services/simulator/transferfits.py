"""Constants of weight sync, host copies and cold starts from the few published rows there are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from services.simulator.calibrate import least_squares, rounded
from services.simulator.hardware import AcceleratorType, ColdStart, HostCopy, WeightSync

Split = Literal["fit", "held", "published"]


@dataclass(frozen=True, slots=True)
class TransferRow:
    """One published time of moving a model's weights."""

    name: str
    event: Literal["weight_sync", "broadcast", "sleep", "wake", "cold_start"]
    """`broadcast`: one copy lies ready; `weight_sync`: it is gathered from trainers first."""
    bytes: float
    """Of the whole model."""
    accelerators: int
    """Of all engines, or of the one that sleeps, wakes or starts."""
    seconds: float
    split: Split
    source: str
    note: str = ""


def fit_weight_sync(rows: Sequence[TransferRow], node_accelerators: int) -> WeightSync:
    """From the rows of split fit: relative least squares of base, 1 / gather, 1 / broadcast and per_doubling."""
    used = [r for r in rows if r.split == "fit" and r.event in ("weight_sync", "broadcast")]
    nodes = [max(1, r.accelerators // node_accelerators) for r in used]
    features = [
        [1.0, r.bytes * (r.event == "weight_sync"), r.bytes, math.log2(n)] for r, n in zip(used, nodes, strict=True)
    ]
    base, gather, broadcast, doubling = least_squares(features, [r.seconds for r in used])
    return WeightSync(rounded(base), rounded(1 / gather), rounded(1 / broadcast), rounded(doubling))


def fit_host_copy(rows: Sequence[TransferRow], accelerator: AcceleratorType) -> HostCopy:
    """Base and link from the rows of one device, then what the host reaches from those of several."""
    used = [r for r in rows if r.split == "fit" and r.event in ("sleep", "wake")]
    single = [r for r in used if r.accelerators == 1]
    base, link = least_squares([[1.0, r.bytes] for r in single], [r.seconds for r in single])
    several = [r.bytes / (r.seconds - base) for r in used if r.accelerators > 1]
    return HostCopy(rounded(base), rounded(1 / link / accelerator.pcie_bytes_s), rounded(median(several)))


def fit_cold_start(rows: Sequence[TransferRow]) -> ColdStart:
    """A line through the rows of split fit."""
    used = [r for r in rows if r.split == "fit" and r.event == "cold_start"]
    base, load = least_squares([[1.0, r.bytes] for r in used], [r.seconds for r in used])
    return ColdStart(rounded(base), rounded(1 / load))
