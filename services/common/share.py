"""A duty-cycle share of a CPU core: what makes a CPU slot an accelerator with a capacity of its own.

The compute thread pays after each unit of work: if it has used more CPU time than share x wall time, it sleeps the
difference. Only that thread is metered: the agent loop beside it (RPCs, files, tokenising) is the host's work, as it is
where the accelerator is a GPU. Credit from idle times is bounded (BURST_SECONDS), or a long wait would be followed by a
long run above the share.
"""

import threading
import time

BURST_SECONDS = 0.05


class CpuShare:
    """Keeps the thread that calls `pay` at `share` of one core; 0 or at least 1 turns it off."""

    def __init__(self, share: float) -> None:
        self.share = share if 0 < share < 1 else 0.0
        self.slept_seconds = 0.0
        self._thread = 0
        self._cpu = self._wall = 0.0

    def owed(self) -> float:
        """Seconds to sleep now so that the calling thread's CPU time since the last settlement is share x wall time."""
        if not self.share:
            return 0.0
        cpu, wall = time.thread_time(), time.monotonic()
        if self._thread != threading.get_ident():
            self._thread, self._cpu, self._wall = threading.get_ident(), cpu, wall  # another thread's clock begins
        debt = (cpu - self._cpu) / self.share - (wall - self._wall)
        if debt < -BURST_SECONDS:
            self._cpu, self._wall = cpu, wall - BURST_SECONDS
        return max(0.0, debt)

    def pay(self) -> None:
        """Sleeps what is owed."""
        owed = self.owed()
        if owed > 0.001:
            time.sleep(owed)
            self.slept_seconds += owed
