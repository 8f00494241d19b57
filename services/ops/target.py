"""Which scheduler a command talks to: --scheduler, LIBRA_SCHEDULER, the cluster that runs here, or the default port."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT = "127.0.0.1:7070"
VARIABLE = "LIBRA_SCHEDULER"
CURRENT = Path("runs/current/cluster.json")
"""Written by the launcher; see cluster.py."""


@dataclass(frozen=True)
class Target:
    """A scheduler's address, the blob store of its cluster ("" if unknown) and its tool environments by type."""

    scheduler: str
    blobs: str = ""
    toolenvs: dict[str, str] = field(default_factory=dict)


def find(scheduler: str | None, current: Path = CURRENT) -> Target:
    """The scheduler asked for, else the one of the cluster that runs in this folder, else the default."""
    local = _local(current)
    address = scheduler or os.environ.get(VARIABLE, "")
    if not address:
        return local or Target(DEFAULT)
    return local if local is not None and local.scheduler == address else Target(address)


def _local(current: Path) -> Target | None:
    try:
        content = json.loads(current.read_text())
        return Target(content["scheduler"], content["blobs"], content["toolenvs"])
    except (OSError, ValueError, KeyError):
        return None
