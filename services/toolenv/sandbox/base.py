"""What runs apart from where it runs: a sandbox turns a command, files and limits into a process to start."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one run, enforced from outside."""

    memory_bytes: int
    """Address space of each process; resident memory of all together."""
    cpu_s: int
    """Processor time of each process."""
    processes: int
    output_bytes: int
    disk_bytes: int
    """Size of the working folder, and of each file."""
    files: int
    """Entries in the working folder."""


class Sandbox(Protocol):
    """A way to confine a process."""

    def command(self, interpreter_arguments: list[str], script: Path, work: Path, limits: Limits) -> list[str]:
        """The command line that runs python with these arguments on `script`, in `work`, confined."""
        ...

    def prepare(self, work: Path) -> None:
        """Makes a new working folder usable for whom the code runs as."""
        ...
