"""Consistent hashing of trajectories onto engines, blind to load, as routers do for prefix reuse."""

import bisect
import hashlib

from services.simulator.layout import Layout
from services.simulator.policies.base import Policy, View
from services.simulator.trajectory import NOWHERE, Trajectory

POINTS = 64
"""Places of each engine on the ring."""


class StickyHash(Policy):
    """Each trajectory goes to the engine that follows its hash on a ring, for all of its turns."""

    name = "sticky-hash"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._members: list[int] = []
        self._ring: list[tuple[int, int]] = []

    def place(self, view: View, trajectory: Trajectory) -> int:
        """The next admitting engine on the ring."""
        members = [engine.index for engine in view.admitting()]
        if members != self._members:
            self._members = members
            self._ring = sorted((_hash(f"{member}.{point}"), member) for member in members for point in range(POINTS))
        if not members:
            return NOWHERE
        at = bisect.bisect(self._ring, (_hash(trajectory.id), NOWHERE))
        return self._ring[at % len(self._ring)][1]


def _hash(text: str) -> int:
    """Spread over 32 bits; CRC alone keeps names that differ in one digit close together."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())
