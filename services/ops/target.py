"""Which scheduler a command talks to: --scheduler, LIBRA_SCHEDULER, the cluster that runs here, or the default port.

LIBRA_BLOBS and LIBRA_NODES tell what else is to be known of a cluster that was not started here.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT = "127.0.0.1:7070"
VARIABLE = "LIBRA_SCHEDULER"
BLOBS_VARIABLE = "LIBRA_BLOBS"
NODES_VARIABLE = "LIBRA_NODES"
CURRENT = Path("runs/current/cluster.json")
"""Written by the launcher; see cluster.py."""


@dataclass(frozen=True)
class Target:
    """A scheduler's address and what is known here of its cluster."""

    scheduler: str
    blobs: str = ""
    """Blob store URI; "" if unknown."""
    toolenvs: dict[str, str] = field(default_factory=dict)
    """Addresses of tool environments by type."""
    nodes: str = ""
    """Folder that holds the run folders of its nodes, if it can be seen here; "" if unknown."""


def find(scheduler: str | None, current: Path = CURRENT) -> Target:
    """The scheduler asked for, else the one of the cluster that runs in this folder, else the default."""
    local = _local(current)
    address = scheduler or os.environ.get(VARIABLE, "")
    if not address:
        return local or Target(DEFAULT)
    if local is not None and local.scheduler == address:
        return local
    return Target(address, blobs=os.environ.get(BLOBS_VARIABLE, ""), nodes=os.environ.get(NODES_VARIABLE, ""))


def elsewhere(scheduler: str | None) -> Target | None:
    """The scheduler that was asked for by option or variable; None if nobody named one."""
    named = scheduler or os.environ.get(VARIABLE, "")
    return find(named) if named else None


def _local(current: Path) -> Target | None:
    try:
        content = json.loads(current.read_text())
        return Target(content["scheduler"], content["blobs"], content["toolenvs"])
    except (OSError, ValueError, KeyError):
        return None
