"""A duty-cycle share of a CPU core: what makes a CPU slot an accelerator with a capacity of its own.

The worker pays after each unit of compute: if its process has used more CPU time than share x wall time, it sleeps the
difference. CPU time of the whole process is counted, so helpers and transport are not free. Credit from idle times is
bounded (BURST_SECONDS), or a long wait would be followed by a long run above the share.
"""

import asyncio
import time

BURST_SECONDS = 0.05


class CpuShare:
    """Keeps a process at `share` of one core; 0 or at least 1 turns it off."""

    def __init__(self, share: float) -> None:
        self.share = share if 0 < share < 1 else 0.0
        self.slept_seconds = 0.0
        self._cpu = time.process_time()
        self._wall = time.monotonic()

    def owed(self) -> float:
        """Seconds to sleep now so that CPU time used since the last settlement is share x wall time."""
        if not self.share:
            return 0.0
        cpu, wall = time.process_time(), time.monotonic()
        debt = (cpu - self._cpu) / self.share - (wall - self._wall)
        if debt < -BURST_SECONDS:
            self._cpu, self._wall = cpu, wall - BURST_SECONDS
        return max(0.0, debt)

    def pay(self) -> None:
        """Sleeps what is owed; for compute threads."""
        owed = self.owed()
        if owed > 0.001:
            time.sleep(owed)
            self.slept_seconds += owed

    async def pay_async(self) -> None:
        """Sleeps what is owed without holding the event loop."""
        owed = self.owed()
        if owed > 0.001:
            await asyncio.sleep(owed)
            self.slept_seconds += owed
