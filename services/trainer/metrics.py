"""Where the time goes and how learning goes: seconds by phase, counters, one JSON line a step."""

import contextlib
import json
import os
import resource
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from services.common import wire

PHASES = tuple(
    wire.TrainerPhase.Name(number).removeprefix("TRAINER_PHASE_").lower()
    for number in sorted(wire.TrainerPhase.values())
)
"""Names by phase number."""


class Phases:
    """The present phase of a training thread, and seconds in each since start. Read by other threads."""

    def __init__(self) -> None:
        self.current: wire.TrainerPhase.ValueType = wire.TRAINER_PHASE_UNSPECIFIED
        self.trained_tokens = 0
        self.micro_batches = 0
        self._seconds = [0.0] * len(PHASES)
        self._since = time.monotonic()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def phase(self, number: "wire.TrainerPhase.ValueType") -> Iterator[None]:
        """Time inside counts for this phase; phases nest, the inner one counts."""
        before = self._switch(number)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, number: "wire.TrainerPhase.ValueType") -> "wire.TrainerPhase.ValueType":
        with self._lock:
            now = time.monotonic()
            self._seconds[self.current] += now - self._since
            self._since = now
            before, self.current = self.current, number
            return before

    def seconds(self) -> list[float]:
        """Seconds in each phase up to now; index = phase number."""
        with self._lock:
            seconds = list(self._seconds)
            seconds[self.current] += time.monotonic() - self._since
            return seconds


def peak_memory_bytes() -> int:
    """Peak resident memory of the process, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MetricsFile:
    """JSON lines, one a step; "" writes nothing. Several replicas may append to one file, each line in one write."""

    def __init__(self, path: str) -> None:
        self._fd: int | None = None
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, line: Mapping[str, object]) -> None:
        """Appends one line."""
        if self._fd is not None:
            os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")
