"""A cluster that others started: jobs run in it, and what its nodes wrote of them is collected afterwards."""

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from services.client import LibraClient
from services.common import wire
from services.common.errors import ConfigError, LibraError
from services.ops.cluster import ClusterFailed
from services.ops.clusterfile import RunFolder
from services.ops.target import Target

REACH_SECONDS = 5.0
POLL_SECONDS = 0.5


class AttachedCluster:
    """The same face as `cluster.Cluster`, over a scheduler that runs elsewhere. Starts, kills and stops nothing."""

    def __init__(self, where: Target, folder: Path) -> None:
        self.scheduler = where.scheduler
        self.blobs = where.blobs
        self.folder = RunFolder(folder)
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._nodes = Path(where.nodes)

    @staticmethod
    def check(where: Target) -> None:
        """ConfigError unless the blob store and the nodes' folders are known and can be seen from here."""
        if not where.blobs:
            raise ConfigError(
                f"the blob store of the cluster at {where.scheduler} is unknown here; set LIBRA_BLOBS to the URI that "
                "its workers use"
            )
        if not where.nodes or not Path(where.nodes).is_dir():
            raise ConfigError(
                f"the nodes' run folders of the cluster at {where.scheduler} are not to be seen here "
                f"({where.nodes or 'LIBRA_NODES is not set'}); set LIBRA_NODES to the folder that holds them: the "
                "checker needs what each process wrote down"
            )

    async def start(self) -> None:
        """Makes sure that the scheduler answers; ConfigError if it does not."""
        async with LibraClient(self.scheduler, retry_for_s=REACH_SECONDS) as client:
            try:
                await client.list_resources(wire.RESOURCE_KIND_ACCELERATOR)
            except LibraError as error:
                raise ConfigError(f"no scheduler answers at {self.scheduler}: {error.message}") from None

    async def wait_workers(self, timeout_s: float) -> None:
        """Returns once somebody trains and somebody generates; ClusterFailed if that does not come."""
        deadline = time.monotonic() + timeout_s
        async with LibraClient(self.scheduler, retry_for_s=REACH_SECONDS) as client:
            while True:
                listed = await client.list_resources(wire.RESOURCE_KIND_REPLICA)
                roles = {
                    r.replica.desired.role for r in listed.resources if r.replica.state == wire.REPLICA_STATE_ACTIVE
                }
                if {wire.ROLE_ROLLOUT, wire.ROLE_TRAINER} <= roles:
                    return
                if time.monotonic() > deadline:
                    names = ", ".join(sorted(wire.Role.Name(r) for r in roles)) or "none"
                    raise ClusterFailed(
                        f"the cluster at {self.scheduler} had no active trainer and rollout replica within "
                        f"{timeout_s:.0f} s (active roles: {names}); `libra status` shows what it waits for"
                    )
                await asyncio.sleep(POLL_SECONDS)

    def collect(self, runs: Sequence[str], since: float) -> None:
        """Copies what the nodes' processes wrote down of these runs, and of themselves, since a time (unix seconds)."""
        for kind in ("history", "metrics"):
            for path in sorted(self._nodes.glob(f"*/{kind}/*.jsonl")):
                rows = [row for row in _rows(path) if _concerns(row, runs, since)]
                if rows:
                    target = self.folder.path / kind / f"{path.parent.parent.name}-{path.name}"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    _write(target, rows)

    def kill(self) -> None:
        """Nothing here is ours to kill."""

    async def stop(self) -> None:
        """Nothing here is ours to stop."""


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that may be being written: a torn last one is left out."""
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        if line:
            yield json.loads(line)


def _concerns(row: dict[str, Any], runs: Sequence[str], since: float) -> bool:
    named = [str(row[key]) for key in ("run", "trajectory", "manifest") if key in row]
    if named:
        return all("/".join(name.split("/")[:2]) in runs for name in named)
    return float(row.get("t", 0.0)) >= since


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
