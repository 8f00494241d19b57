"""How much an engine can do, learnt from how long its work takes at different loads.

By Little's law an engine with N leased trajectories yields N / W tokens per second, W being the seconds that a
trajectory is held for each token it generates: decoding, and its tool calls and reports with it. W grows with N where
they share a processor, and stays where they only wait:

    W(N) = w0 + w1 N          capacity with s slots = s / (w0 + w1 s)

w0 and w1 come from a least-squares fit over windows of a few seconds, weighted by tokens, with exponential forgetting.
A busy share would mislead: a batched engine that decodes three sequences is as busy as one that decodes thirty. Where
all windows saw nearly the same load, the slope is a prior: half of W is taken to be contention.
"""

import math
from dataclasses import dataclass

FORGET = 0.93
"""Weight of a window against the next one: about the last fifteen count."""
PRIOR = 0.02
"""Strength of the prior slope, in units of the mean load squared: little, once loads differ by a quarter."""
LONG = 0.999
"""Loads rise and fall with the steps, and contexts grow while they fall: a curve needs windows of both."""
MIN_WINDOWS = 3


@dataclass(slots=True)
class Occupancy:
    """Decayed sums over windows, weighted by tokens."""

    forget: float = FORGET
    """Weight of a window against the next one; of a load report of a second it is LONG."""
    windows: int = 0
    weight: float = 0.0
    load: float = 0.0
    residence: float = 0.0
    load_load: float = 0.0
    load_residence: float = 0.0

    def add(self, leased_seconds: float, tokens: float, seconds: float) -> None:
        """One window: integral of the leased trajectories over it, tokens generated in it, its length."""
        if not (leased_seconds > 0 and tokens > 0 and seconds > 0):
            return
        if not math.isfinite(leased_seconds + tokens + seconds):
            return
        load, residence = leased_seconds / seconds, leased_seconds / tokens
        self.windows += 1
        self.weight = self.forget * self.weight + tokens
        self.load = self.forget * self.load + tokens * load
        self.residence = self.forget * self.residence + tokens * residence
        self.load_load = self.forget * self.load_load + tokens * load * load
        self.load_residence = self.forget * self.load_residence + tokens * load * residence

    def fit(self) -> tuple[float, float] | None:
        """(w0, w1) in seconds per token, neither negative; None before MIN_WINDOWS."""
        if self.windows < MIN_WINDOWS:
            return None
        load, residence = self.load / self.weight, self.residence / self.weight
        variance = max(0.0, self.load_load / self.weight - load * load)
        covariance = self.load_residence / self.weight - load * residence
        strength = PRIOR * load * load
        slope = (covariance + strength * 0.5 * residence / load) / (variance + strength)
        slope = min(max(0.0, slope), residence / load)
        return residence - slope * load, slope

    def slope_at(self, load: float, residence: float) -> float | None:
        """Seconds per token that one more adds where so many take `residence` each: the fitted curve's shape at the
        height measured now, since an engine that slowed down is slower at every load. None before there is evidence.
        """
        fitted = self.fit()
        if fitted is None or load <= 0:
            return None
        whole = fitted[0] + fitted[1] * load
        return fitted[1] * residence / whole if whole > 0 else None

    def capacity(self, slots: int) -> float | None:
        """Tokens per second with all slots leased; None before there is evidence."""
        fitted = self.fit()
        if fitted is None or slots < 1:
            return None
        residence = fitted[0] + fitted[1] * slots
        return slots / residence if residence > 0 else None
