"""One JSON line per fact a process saw, for the offline checkers. Flushed to the OS, so it survives SIGKILL."""

import json
import os
import threading
from pathlib import Path

from services.common.clock import Clock, SystemClock


class History:
    """Appends facts to one file; `path=None` records nothing."""

    def __init__(self, path: str | Path | None, who: str, clock: Clock | None = None) -> None:
        self._who = who
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._fd: int | None = None
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **fields: object) -> None:
        """Appends one line; fields must be JSON values without payloads (no prompts, no token ids)."""
        if self._fd is None:
            return
        line = {"t": round(self._clock.wall(), 6), "who": self._who, "kind": kind, **fields}
        with self._lock:
            os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")
