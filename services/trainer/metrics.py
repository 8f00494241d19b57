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
        self.steps = 0
        """Steps taken part in and committed."""
        self.participants = 0
        """Replicas that took part in the newest of them, this one included."""
        self._seconds = [0.0] * len(PHASES)
        self._marked = list(self._seconds)
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

    def mark(self) -> None:
        """A step was recorded: `since_mark` counts from here, the wait for the next batch included."""
        self._marked = self.seconds()

    def since_mark(self) -> dict[str, float]:
        """Seconds by phase name since the last `mark`."""
        spent = [now - then for now, then in zip(self.seconds(), self._marked, strict=True)]
        return {name: round(s, 4) for name, s in zip(PHASES, spent, strict=True) if s > 0.00005}


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

    def step(
        self,
        run: str,
        version: tuple[int, int],
        worker: str,
        replicas: int,
        metrics: Mapping[str, float],
        phase_seconds: Mapping[str, float],
        *,
        redo: bool,
    ) -> None:
        """Appends the line of one step."""
        if self._fd is not None:
            line = {
                "t": round(time.time(), 3), "run": run, "step": version[1], "lineage": version[0], "redo": redo,
                "worker": worker, "replicas": replicas, **metrics, "phase_seconds": dict(phase_seconds),
            }  # fmt: skip
            os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")
