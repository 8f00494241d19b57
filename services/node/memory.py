"""What processes hold, measured from /proc: anonymous resident memory, CPU time, and the host's memory."""

import os
from dataclasses import dataclass
from pathlib import Path

KIB = 1024


@dataclass(frozen=True)
class Usage:
    """Of one process: anonymous resident bytes (what it would give back by freeing) and CPU seconds so far."""

    anonymous_bytes: int
    cpu_seconds: float


def usage(pid: int) -> Usage | None:
    """None if the process is gone or a zombie."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if stat[0] in ("Z", "X"):
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    anonymous = sum(int(fields[key].split()[0]) for key in ("RssAnon", "RssShmem") if key in fields)
    ticks = int(stat[11]) + int(stat[12])
    return Usage(anonymous * KIB, ticks / os.sysconf("SC_CLK_TCK"))


def host() -> tuple[int, int]:
    """(total, available) bytes of the machine."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemTotal"].split()[0]) * KIB, int(fields["MemAvailable"].split()[0]) * KIB
