"""How many tokens fit into a micro-batch: a memory model that learns from reported peaks and backs off when close.

    peak = fixed + per_token x tokens of the micro-batch

by least squares over reports with exponential forgetting, begun from a prior (a profile's, or none). The budget is the
largest for which the predicted peak stays below the limit by a margin. A peak within NEAR_MISS of the limit, or an
allocation that failed, widens the margin at once; clean steps take it back slowly. Pure; one writer.
"""

import math
from dataclasses import dataclass, field

FORGET = 0.9
"""Weight of a report against the next one."""
PRIOR = 1.0
"""Strength of the prior, in reports; it fades like one."""
MARGIN = 0.08
"""Share of the limit that is left free."""
MAX_MARGIN = 0.5
WIDEN = 2.0
"""What a near miss multiplies the margin by; a failed allocation does so twice."""
RECOVER = 0.03
"""Share of what the margin is too wide that one clean step takes back."""
NEAR_MISS = 0.97
"""Share of the limit from which a peak is a near miss."""
GROWTH = 1.5
"""A budget is at most so many times the largest micro-batch that was seen: lines are not trusted far from the data."""
BACK_OFF = 0.75
"""Of the tokens that failed, those allowed next; a clean step raises that by RECOVER."""


@dataclass(slots=True)
class TokenBudget:
    """Of one trainer's devices. Bytes."""

    limit_bytes: float
    """What the process may use of one device."""
    fixed_bytes: float = 0.0
    """Prior: weights, gradients, optimizer state, runtime."""
    token_bytes: float = 0.0
    """Prior: activations for each token; 0 = unknown, and the first budget is the caller's."""
    least: int = 1
    """Tokens of the longest sequence, which cannot be split: no budget is smaller."""
    margin: float = MARGIN
    near_misses: int = 0
    failures: int = 0
    _ceiling: float = math.inf
    """Tokens, after a failure."""
    _largest: int = 0
    _fade: float = 1.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Decayed: reports, tokens, squared tokens, peaks, peaks x tokens."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.limit_bytes) and self.limit_bytes > self.fixed_bytes >= 0):
            raise ValueError(
                f"limit of {self.limit_bytes} bytes, {self.fixed_bytes} of them fixed: expected 0 <= fixed < limit"
            )

    def observe(self, tokens: int, peak_bytes: float) -> None:
        """The largest micro-batch of a step and the peak of that step. What is not finite and positive is left out."""
        if tokens < 1 or not (math.isfinite(peak_bytes) and peak_bytes > 0):
            return
        self._largest = max(self._largest, tokens)
        new = (1.0, tokens, tokens * tokens, peak_bytes, peak_bytes * tokens)
        self._fade *= FORGET
        self._sums = [FORGET * old + value for old, value in zip(self._sums, new, strict=True)]
        if peak_bytes >= NEAR_MISS * self.limit_bytes:
            self.near_misses += 1
            self._widen()
        else:
            self.margin -= RECOVER * (self.margin - MARGIN)
            self._ceiling *= 1.0 + RECOVER

    def failed(self, tokens: int) -> None:
        """An allocation failed in a micro-batch of so many tokens."""
        self.failures += 1
        self._widen()
        self._widen()
        if tokens >= 1:
            self._ceiling = min(self._ceiling, BACK_OFF * tokens)

    def line(self) -> tuple[float, float]:
        """(fixed, per token) bytes, as learnt; neither negative."""
        reports, tokens, squares, peaks, products = self._sums
        # the prior is a report at 0 tokens, and one at the mean of those seen (or as many as fill half)
        at = tokens / reports if reports else self._half()
        prior = ((0.0, self.fixed_bytes), (at, self.fixed_bytes + self.token_bytes * at))
        if self.token_bytes > 0:
            weight = PRIOR * self._fade
            for x, y in prior:
                reports, tokens, squares = reports + weight, tokens + weight * x, squares + weight * x * x
                peaks, products = peaks + weight * y, products + weight * y * x
        if not reports:
            return self.fixed_bytes, 0.0
        spread = squares / reports - (tokens / reports) ** 2
        joint = products / reports - peaks * tokens / reports**2
        mean_x, mean_y = tokens / reports, peaks / reports
        if spread <= 1e-9 * max(1.0, mean_x**2):
            # all of one size: what is not known to be fixed is taken to grow with the tokens, which is the safe guess
            slope = max(0.0, mean_y - self.fixed_bytes) / mean_x
        else:
            slope = min(max(0.0, joint / spread), mean_y / mean_x)
        return mean_y - slope * mean_x, slope

    def predict(self, tokens: int) -> float:
        """Peak bytes expected of a micro-batch."""
        fixed, slope = self.line()
        return fixed + slope * tokens

    def budget(self, first: int = 1) -> int:
        """Tokens of a micro-batch, at least `least`. `first`: the budget while nothing at all is known."""
        fixed, slope = self.line()
        if slope <= 0 and not self._largest:
            return max(self.least, first)
        room = (1.0 - self.margin) * self.limit_bytes - fixed
        most = room / slope if slope > 0 else math.inf
        if self._largest:
            most = min(most, GROWTH * self._largest)
        return max(self.least, int(min(most, self._ceiling, 2**53)))

    def _half(self) -> float:
        return max(1.0, (self.limit_bytes - self.fixed_bytes) / max(self.token_bytes, 1e-9) / 2)

    def _widen(self) -> None:
        self.margin = min(MAX_MARGIN, self.margin * WIDEN)
