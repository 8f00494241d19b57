"""What runs apart from where it runs: a sandbox turns a python script and limits into a command line."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one run, enforced from outside."""

    memory_bytes: int
    """Address space of each process; private resident memory of all together."""
    cpu_s: int
    """Processor time of each process."""
    processes: int
    output_bytes: int
    """Output that is kept; a run that writes HARD_OUTPUT times as much is killed."""
    disk_bytes: int
    """Size of the working folder, and of each file."""
    files: int
    """Entries in the working folder."""


@dataclass(frozen=True, slots=True)
class Script:
    """Python code to run. `arguments` go before it; `path` and `work` are on the host."""

    path: Path
    work: Path
    arguments: tuple[str, ...] = ()
    isolated: bool = False
    """Modules in `work` cannot stand in for the standard library's."""


class Sandbox(Protocol):
    """A way to confine a process."""

    def command(self, script: Script, limits: Limits, status_fd: int) -> list[str]:
        """The command line; it may write to status_fd what `ran` will read."""
        ...

    def ran(self, status: bytes) -> bool:
        """False if the code never ran, or its end is not known: the sandbox itself failed."""
        ...

    def kill(self, pid: int) -> None:
        """Kills everything that the command started, given the process that it became."""
        ...

    def prepare(self, work: Path) -> None:
        """Makes a new working folder usable for whom the code runs as."""
        ...


def rlimits(limits: Limits, *, processes: bool) -> list[str]:
    """prlimit(1) and its options, to be put before a command."""
    options = [
        f"--as={limits.memory_bytes}",
        # SIGXCPU at the first, SIGKILL at the second
        f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}",
        f"--fsize={limits.disk_bytes}",
        f"--nofile={OPEN_FILES}",
        "--core=0",
    ]
    return ["prlimit", *options, *([f"--nproc={limits.processes}"] if processes else []), "--"]


def python_arguments(script: Script, work: str, path: str) -> list[str]:
    """Arguments of the interpreter. The folder is last on an isolated script's path, so that it shadows nothing."""
    if not script.isolated:
        return ["-B", "-s", path, *script.arguments]
    start = "import runpy, sys; path = sys.argv.pop(1); sys.path.append(sys.argv.pop(1)); sys.argv[0] = path; "
    return ["-B", "-I", "-c", start + "runpy.run_path(path, run_name='__main__')", path, work, *script.arguments]


def children(pid: int) -> list[int]:
    """Direct children of a process; none if it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found
