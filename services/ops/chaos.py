"""Kills services of a running job on purpose, at chosen steps, and writes down what was killed when.

The launcher and the node agent restart what died, as they would after any crash; nothing here helps them.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from services.client import LibraClient
from services.common import log, wire
from services.common.errors import LibraError
from services.common.history import History
from services.ops.cluster import Cluster

_log = log.get(__name__)

POLL_SECONDS = 0.2
COMMIT_POLL_SECONDS = 0.002
"""Between CommitStep and publish lie some tens of milliseconds."""
COMMIT_WAIT_SECONDS = 90.0
CORE_TRAINER = "trainer-0"
COMMIT_PAUSE = "trainer.after_commit=sleep:0.15"
"""Failpoint of the core trainer in such a job: it widens the moment between CommitStep and publish so that a kill from
outside falls into it."""
HYBRID_SHARE = 0.8
"""If no hybrid trainer was active up to this share of the job, a warm one is killed."""
LAST_SHARE = 0.9
"""From this share of the job on, kills do not wait for a step in between."""


@dataclass(frozen=True, slots=True)
class Killed:
    """One process that was ended with SIGKILL."""

    what: str
    process: str
    pid: int
    step: int
    t: float


@dataclass(slots=True)
class Planned:
    """A kill that is due from a share of the job's steps on; `act` returns True once it is done."""

    what: str
    share: float
    act: Callable[[], Awaitable[bool]]
    done: bool = False


@dataclass
class Chaos:
    """Five kinds of kills, spread over the job. `run` ends when all are done or it is cancelled."""

    cluster: Cluster
    client: LibraClient
    run_name: str
    steps: int
    say: Callable[[str], None]
    killed: list[Killed] = field(default_factory=list)
    _planned: list[Planned] = field(default_factory=list)
    _history: History | None = None
    _head: int = 0

    def __post_init__(self) -> None:
        self._history = History(self.cluster.folder.history("chaos"), "chaos")
        self._planned = [
            Planned("scheduler", 0.10, self._scheduler),
            Planned("rollout worker", 0.25, self._rollout),
            Planned("core trainer between commit and publish", 0.40, self._core_trainer),
            Planned("hybrid trainer", 0.30, self._hybrid_trainer),
            Planned("scheduler again", 0.65, self._scheduler),
        ]

    @property
    def missing(self) -> list[str]:
        """What was not killed (yet)."""
        return [p.what for p in self._planned if not p.done]

    async def run(self) -> None:
        """Kills one after the other; a scheduler that is away is waited for."""
        while self.missing:
            await asyncio.sleep(POLL_SECONDS)
            try:
                self._head = (await self.client.get_run(self.run_name)).policies[0].head.number
                due = [p for p in self._planned if not p.done and self._head >= p.share * self.steps]
                if not due or not self._recovered():
                    continue
                for planned in due:
                    planned.done = await planned.act()
                    if planned.done:
                        break
            except LibraError as error:
                _log.info("chaos waits for the scheduler", error=str(error))

    def _recovered(self) -> bool:
        """One at a time: a step was made since the last kill, or the job is too near its end to wait for one."""
        if not self.killed or self._head >= LAST_SHARE * self.steps:
            return True
        return self._head > self.killed[-1].step + 1

    # ---- the kinds

    async def _scheduler(self) -> bool:
        return self._kill("scheduler", "scheduler")

    async def _rollout(self) -> bool:
        """A rollout worker in the middle of work: the one with most of it."""
        busiest, most = "", 0
        for item in (await self.client.list_resources(wire.RESOURCE_KIND_WORKER)).resources:
            running = sum(e.running for e in item.worker.load.rollout.engines)
            if running > most:
                busiest, most = item.worker.name.removeprefix("workers/"), running
        return bool(busiest) and self._kill(f"rollout worker with {most} running", busiest)

    async def _hybrid_trainer(self) -> bool:
        """A trainer on a hybrid accelerator, while it holds a replica beside the core's if that can be had."""
        active: set[str] = set()
        for item in (await self.client.list_resources(wire.RESOURCE_KIND_REPLICA)).resources:
            replica = item.replica
            owner = replica.owner_session.removeprefix("workers/").partition("/")[0]
            if replica.desired.role == wire.ROLE_TRAINER and replica.state == wire.REPLICA_STATE_ACTIVE:
                active.add(owner)
        if CORE_TRAINER in active and len(active) > 1:
            return self._kill("hybrid trainer holding a replica", min(active - {CORE_TRAINER}))
        if self._head < HYBRID_SHARE * self.steps:
            return False
        warm = [n for n in self.cluster.workers() if n.startswith("trainer") and n != CORE_TRAINER]
        return bool(warm) and self._kill("warm hybrid trainer", warm[0])

    async def _core_trainer(self) -> bool:
        """The core trainer right after its CommitStep was answered: its weights are not published then."""
        path = self.cluster.folder.history(CORE_TRAINER)
        offset = path.stat().st_size if path.exists() else 0
        deadline = time.monotonic() + COMMIT_WAIT_SECONDS
        while time.monotonic() < deadline:
            await asyncio.sleep(COMMIT_POLL_SECONDS)
            version = committed_since(path, offset)
            if version is None:
                continue
            if not self._kill("core trainer between commit and publish", CORE_TRAINER):
                return False
            # what it managed to write before it died tells whether the moment was hit
            await asyncio.sleep(POLL_SECONDS)
            if version in published_since(path, offset):
                self.say(f"chaos: {CORE_TRAINER} had published {version[0]}-{version[1]} before it died; once more")
                return False
            return True
        return False

    def _kill(self, what: str, process: str) -> bool:
        pid = self.cluster.pid(process)
        if pid is None:
            return False
        try:
            # it leads a process group of its own
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        row = Killed(what, process, pid, self._head, time.time())
        self.killed.append(row)
        assert self._history is not None
        self._history.write("killed", what=what, process=process, pid=pid, step=self._head)
        self.say(f"chaos: killed {process} ({what}) at step {self._head}")
        return True


def committed_since(path: Path, offset: int) -> tuple[int, int] | None:
    """The version of the first `committed` line behind `offset`; None while there is none."""
    found = _versions_since(path, offset, "committed")
    return found[0] if found else None


def published_since(path: Path, offset: int) -> list[tuple[int, int]]:
    """Versions of `published` lines behind `offset`."""
    return _versions_since(path, offset, "published")


def _versions_since(path: Path, offset: int, kind: str) -> list[tuple[int, int]]:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read().decode()
    except FileNotFoundError:
        return []
    rows = [json.loads(row) for row in text.split("\n")[:-1] if f'"kind":"{kind}"' in row]
    return [(int(r["version"][0]), int(r["version"][1])) for r in rows]
