"""What a person sees while a job runs, read from the scheduler alone: step, reward, speed, queue, who holds what, why.

On a terminal a panel that renews itself, elsewhere a plain line every two seconds. Each reading also goes to
samples.jsonl, for the report. A scheduler that is away is said to be away; the view goes on when it is back.
"""

import asyncio
import contextlib
import json
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.client import LibraClient
from services.common import log, wire
from services.common.errors import LibraError
from services.ops.archive import manifest_state

_log = log.get(__name__)

INTERVAL_SECONDS = 2.0
STOP_SECONDS = 3.0
SHOWN_DECISIONS = 6
EVENTS_AT_ONCE = 2_000
"""Events read in one reading; what is beyond comes with the next."""
DECISION_KINDS = (wire.RESOURCE_KIND_REASSIGNMENT, wire.RESOURCE_KIND_COMMAND, wire.RESOURCE_KIND_PLAN)
QUIET_CODES = ("LOAD_PHASE_PREPARE", "LOAD_PHASE_SWITCH", "RELEASE", "CONFIRM", "GRANT")
"""Steps that carry a decision out; the decision itself is shown."""
ROLE_COLOURS = {"ROLLOUT": "cyan", "TRAINER": "magenta"}


@dataclass(slots=True)
class Holding:
    """Who holds an accelerator, and since when (seconds since the epoch)."""

    role: str = ""
    worker: str = ""
    state: str = ""
    since: float = 0.0


@dataclass(slots=True)
class Reading:
    """One look at the scheduler."""

    t: float
    phase: str = ""
    run: str = ""
    step: int = 0
    reward: float | None = None
    tokens_per_s: float = 0.0
    queue: dict[str, int] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    ready: int = 0
    holders: dict[str, Holding] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainers: dict[str, list[float]] = field(default_factory=dict)
    away: str = ""


class View:
    """Reads, shows and records until `stop`. `phase` and `run` are set by who drives the job."""

    def __init__(self, client: LibraClient, folder: Path, console: Console | None = None) -> None:
        self.phase = "starting"
        self.run = ""
        self.console = console or Console()
        self.last = Reading(time.time())
        self._client = client
        self._samples = (folder / "samples.jsonl").open("a", encoding="utf-8")
        self._decisions: deque[tuple[float, str]] = deque(maxlen=SHOWN_DECISIONS)
        self._revision = 0
        self._generated: dict[str, tuple[float, int]] = {}
        self._rewards: dict[str, tuple[int, float]] = {}
        self._started = time.monotonic()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # ---- life

    def start(self) -> None:
        """Begins to show, in a task of its own."""
        self._task = asyncio.create_task(self._show(), name="live view")

    async def stop(self) -> None:
        """Ends the view; a reading that takes longer than STOP_SECONDS is broken off."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=STOP_SECONDS)
            self._task.cancel()
            (outcome,) = await asyncio.gather(self._task, return_exceptions=True)
            if isinstance(outcome, Exception):
                _log.error("the live view died", error=repr(outcome), exc_info=outcome)
            self._task = None
        self._samples.close()

    def note(self, text: str) -> None:
        """Shows something that the scheduler did not decide, such as a process killed on purpose."""
        self._decisions.append((time.time(), text))
        if not self.console.is_terminal:
            self.console.print(f"{self._elapsed()} {text}", highlight=False, markup=False, soft_wrap=True)

    async def _show(self) -> None:
        if not self.console.is_terminal:
            while not self._stopping.is_set():
                for text in await self._read():
                    self.console.print(
                        f"{self._elapsed()}   decided: {text}", highlight=False, markup=False, soft_wrap=True
                    )
                self.console.print(
                    f"{self._elapsed()} {line(self.last)}", highlight=False, markup=False, soft_wrap=True
                )
                await self._pause()
            return
        with Live(self.render(), console=self.console, auto_refresh=False, transient=True) as live:
            while not self._stopping.is_set():
                await self._read()
                live.update(self.render(), refresh=True)
                await self._pause()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INTERVAL_SECONDS):
                await self._stopping.wait()

    def _elapsed(self) -> str:
        return f"[{time.monotonic() - self._started:5.0f}s]"

    # ---- reading

    async def _read(self) -> list[str]:
        """One reading; returns the decisions that are new."""
        reading = Reading(time.time(), phase=self.phase, run=self.run)
        decided: list[str] = []
        try:
            await self._read_fleet(reading)
            decided = await self._read_events()
            if self.run:
                await self._read_run(reading)
        except LibraError as error:
            _log.debug("no reading", error=str(error))
            reading.away = (
                "the scheduler does not answer" if error.reason in ("UNAVAILABLE", "NOT_FOUND") else error.reason
            )
            reading.step, reading.reward, reading.holders = self.last.step, self.last.reward, self.last.holders
        self.last = reading
        self._samples.write(json.dumps(sample(reading), separators=(",", ":")) + "\n")
        self._samples.flush()
        return decided

    async def _read_fleet(self, reading: Reading) -> None:
        replicas = (await self._client.list_resources(wire.RESOURCE_KIND_REPLICA)).resources
        accelerators = (await self._client.list_resources(wire.RESOURCE_KIND_ACCELERATOR)).resources
        workers = (await self._client.list_resources(wire.RESOURCE_KIND_WORKER)).resources
        by_name = {r.replica.name: r.replica for r in replicas}
        for item in accelerators:
            held = [by_name[n] for n in item.accelerator.replicas if n in by_name]
            reading.holders[item.accelerator.name] = _holding(held[-1]) if held else Holding()
        for item in workers:
            self._read_worker(reading, item.worker)

    def _read_worker(self, reading: Reading, worker: wire.Worker) -> None:
        name = worker.name.removeprefix("workers/")
        which = worker.load.WhichOneof("kind")
        if which == "trainer":
            reading.trainers[name] = [round(s, 3) for s in worker.load.trainer.phase_seconds]
        if which != "rollout":
            return
        for engine in worker.load.rollout.engines:
            reading.engines[name] = {
                "activity": wire.EngineActivity.Name(engine.activity).removeprefix("ENGINE_ACTIVITY_"),
                "running": engine.running,
                "waiting": engine.waiting,
                "kv_used": engine.kv_used_tokens,
                "generated": engine.generated_tokens,
            }
            before = self._generated.get(name)
            self._generated[name] = (reading.t, engine.generated_tokens)
            if before is not None and engine.generated_tokens >= before[1] and reading.t > before[0]:
                reading.tokens_per_s += (engine.generated_tokens - before[1]) / (reading.t - before[0])

    async def _read_run(self, reading: Reading) -> None:
        run = await self._client.get_run(self.run)
        reading.step, reading.ready = run.policies[0].head.number, run.counts.ready
        waiting: dict[str, int] = defaultdict(int)
        running: dict[str, int] = defaultdict(int)
        states = [wire.TRAJECTORY_STATE_QUEUED, wire.TRAJECTORY_STATE_LEASED]
        for item in await self._client.list_trajectories(self.run, states=states):
            counts = waiting if item.state == wire.TRAJECTORY_STATE_QUEUED else running
            counts[str(item.level)] += 1
        reading.queue, reading.running = dict(waiting), dict(running)
        reading.reward = await self._reward(run, reading.step)

    async def _reward(self, run: wire.Run, step: int) -> float | None:
        """Mean reward of the newest committed step; of an evaluation, of what is delivered so far."""
        if run.kind == wire.RUN_KIND_EVAL:
            done = await self._client.list_trajectories(run.name, states=[wire.TRAJECTORY_STATE_DELIVERED])
            return sum(t.reward.value for t in done) / len(done) if done else None
        known = self._rewards.get(run.name)
        if not step or (known is not None and known[0] == step):
            return known[1] if known is not None else None
        listed = await self._client.list_resources(wire.RESOURCE_KIND_MANIFEST, prefix=run.name)
        newest = [r.manifest for r in listed.resources if r.manifest.step == step]
        newest = [m for m in newest if manifest_state(m) in ("COMMITTED", "COVERED")]
        if not newest:
            return known[1] if known is not None else None
        members = await self._client.list_manifest_members(newest[0].name)
        mean = sum(m.reward.value for m in members) / max(1, len(members))
        self._rewards[run.name] = (step, mean)
        return mean

    async def _read_events(self) -> list[str]:
        selector = wire.Selector(kinds=DECISION_KINDS)
        events = await self._client.list_events(
            selector=selector, start_revision=self._revision + 1, limit=EVENTS_AT_ONCE
        )
        decided: list[str] = []
        for event in events:
            self._revision = max(self._revision, event.revision)
            if event.from_state or not event.reason.text or event.reason.code in QUIET_CODES:
                continue
            subject = event.related[0] if event.related else event.name
            text = f"{event.reason.code}: {event.reason.text} ({subject})"
            decided.append(text)
            self._decisions.append((event.time.ToNanoseconds() / 1e9, text))
        return decided[-SHOWN_DECISIONS:]

    # ---- showing

    def render(self) -> Panel:
        """The panel for terminals."""
        reading = self.last
        head = Text.assemble(
            (f" {reading.phase} ", "bold reverse"), f"  {self._elapsed()}  step ", (str(reading.step), "bold"),
            "  reward ", (_reward_text(reading.reward), "bold green"),
            f"  {reading.tokens_per_s:,.0f} tok/s  {reading.ready} ready",
        )  # fmt: skip
        if reading.away:
            head.append(f"  {reading.away}", style="bold red")
        return Panel(
            Group(head, Text(), _holders_table(reading), Text(), _queue_table(reading), Text(), self._decided()),
            title="libra", border_style="dim",
        )  # fmt: skip

    def _decided(self) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="ellipsis", no_wrap=True)
        for at, text in reversed(self._decisions):
            table.add_row(time.strftime("%H:%M:%S", time.localtime(at)), Text(text))
        return table


def _holding(replica: wire.Replica) -> Holding:
    return Holding(
        role=wire.Role.Name(replica.desired.role).removeprefix("ROLE_"),
        worker=replica.owner_session.removeprefix("workers/").partition("/")[0],
        state=wire.ReplicaState.Name(replica.state).removeprefix("REPLICA_STATE_"),
        since=replica.create_time.ToNanoseconds() / 1e9,
    )


def _holders_table(reading: Reading) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("accelerator", "role", "held by", "state", "since", "running"):
        table.add_column(column)
    for name, held in sorted(reading.holders.items()):
        since = f"{max(0.0, reading.t - held.since):.0f} s" if held.since else ""
        running = reading.engines.get(held.worker, {}).get("running", "") if held.role == "ROLLOUT" else ""
        role = Text(held.role or "free", style=ROLE_COLOURS.get(held.role, "dim"))
        table.add_row(_short(name), role, held.worker, held.state, since, str(running))
    return table


def _queue_table(reading: Reading) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("level", "waiting", "running"):
        table.add_column(column)
    for level in sorted({"0", "1"} | reading.queue.keys() | reading.running.keys()):
        table.add_row(level, str(reading.queue.get(level, 0)), str(reading.running.get(level, 0)))
    return table


def line(reading: Reading) -> str:
    """One reading as a plain line."""
    levels: Sequence[str] = sorted(reading.queue.keys() | reading.running.keys())
    queue = " ".join(f"L{v}:{reading.queue.get(v, 0)}+{reading.running.get(v, 0)}" for v in levels) or "empty"
    held = " ".join(f"{_short(n)}={h.role.lower() or 'free'}" for n, h in sorted(reading.holders.items()))
    tail = f" | {reading.away}" if reading.away else ""
    return (
        f"{reading.phase} step {reading.step} reward {_reward_text(reading.reward)} {reading.tokens_per_s:,.0f} tok/s"
        f" | queue+running {queue} | {held}{tail}"
    )


def _reward_text(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"


def _short(accelerator: str) -> str:
    node, _, index = accelerator.removeprefix("nodes/").partition("/accelerators/")
    return f"{node}:{index}"


def sample(reading: Reading) -> dict[str, Any]:
    """The JSON form of a reading, for samples.jsonl."""
    return {
        "t": round(reading.t, 3), "phase": reading.phase, "run": reading.run, "step": reading.step,
        "reward": reading.reward, "tokens_per_s": round(reading.tokens_per_s, 1), "queue": reading.queue,
        "running": reading.running, "ready": reading.ready, "engines": reading.engines, "trainers": reading.trainers,
        "holders": {name: [h.role, h.worker, h.state] for name, h in reading.holders.items()},
    }  # fmt: skip
