"""The generation lock of an accelerator: a file that its holder keeps locked and that carries its generation.

The kernel lets the lock go when its holder dies, so a lock that can be taken proves that nobody holds it; the number
in the file makes the resource itself refuse an older owner.
"""

import fcntl
import os
import time
from pathlib import Path

from services.common import errors

PROBE_TRIES = 10
PROBE_SECONDS = 0.005


class GenerationLock:
    """One accelerator's lock file in the node's lock folder."""

    def __init__(self, folder: str | Path, accelerator: str) -> None:
        self.accelerator = accelerator
        self.path = Path(folder) / (accelerator.replace("/", "_") + ".lock")
        self._fd: int | None = None

    def acquire(self, generation: int) -> None:
        """Takes the lock under `generation`. STALE_FENCE if another process holds it or a newer generation had it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = self._fd if self._fd is not None else os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if self._fd is None:
                if not _lock(fd):
                    raise errors.stale_fence(
                        f"{self.accelerator} is locked by another process (generation {_read(fd)[0]}); generation "
                        f"{generation} may start only after it is released",
                        resource=self.accelerator,
                    )
            seen = _read(fd)[0]
            if generation < seen:
                raise errors.stale_fence(
                    f"{self.accelerator} was held under generation {seen}; generation {generation} is older",
                    resource=self.accelerator,
                    expected=str(seen),
                    actual=str(generation),
                )
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{generation} {os.getpid()}\n".encode(), 0)
            os.fsync(fd)
        except BaseException:
            if self._fd is None:
                os.close(fd)
            raise
        self._fd = fd

    @property
    def held(self) -> bool:
        """True while this process holds it."""
        return self._fd is not None

    def release(self) -> None:
        """Lets go; the generation stays in the file. No effect if not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def probe(self) -> tuple[int, int, bool]:
        """(last generation, pid that wrote it, held now by some process); (0, 0, False) if never taken."""
        try:
            fd = os.open(self.path, os.O_RDWR)
        except FileNotFoundError:
            return 0, 0, False
        try:
            generation, pid = _read(fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return generation, pid, True
            return generation, pid, False
        finally:
            os.close(fd)


def _lock(fd: int) -> bool:
    """Takes the lock exclusively; tries again for a moment, since a probe holds it shared for some microseconds."""
    for _ in range(PROBE_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PROBE_SECONDS)
        else:
            return True
    return False


def _read(fd: int) -> tuple[int, int]:
    parts = os.pread(fd, 64, 0).split()
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 else (0, 0)
