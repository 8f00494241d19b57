"""`libra demo`: a small real model is post-trained with tools, watched, judged and reported on.

On a cluster that it starts on this machine and ends again, or, where a scheduler is named, on that one's.

Evaluate, train under the scheduler, evaluate again; then the records are exported, everything is stopped, and the
offline checker has the last word. Every wait has a deadline: a job that stalls ends with the scheduler's own
explanation. Ctrl-C ends every process.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Awaitable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from services.client import LibraClient
from services.common import wire
from services.common.blobs import BlobStore
from services.common.errors import ConfigError, LibraError
from services.common.rpc.channel import connect
from services.ops import checker, checkpoint, clusterfile, jobs, records, report, summary
from services.ops.archive import Archive
from services.ops.attached import AttachedCluster
from services.ops.chaos import COMMIT_PAUSE, CORE_TRAINER, Chaos
from services.ops.cluster import Cluster, ClusterFailed, claim
from services.ops.clusterfile import ClusterConfig
from services.ops.jobs import EVAL_END, EVAL_START, TRAIN, Job
from services.ops.live import View
from services.ops.target import Target

NAME = re.compile(r"[A-Za-z0-9._-]{1,63}")
WORKERS_SECONDS = 120.0
EVAL_SECONDS = 240.0
STEP_SECONDS = 20.0
"""Time allowed for a training step, on top of START_SECONDS."""
START_SECONDS = 180.0
CHAOS_SECONDS = 300.0
"""Time allowed for five restarts and what they have to do again."""
STALL_SECONDS = 150.0
"""Without a new token, end or step for so long a job counts as stalled: longer than a trainer needs to be back."""
EXPORT_SECONDS = 120.0
RETRY_SECONDS = 30.0
"""How long the driver tries again while the scheduler restarts."""
ELSEWHERE_RETRY_SECONDS = 120.0
"""The same in a cluster that others run, where its database may have to come back first."""
VIEW_RETRY_SECONDS = 0.5
"""The view rather says that the scheduler is away."""
POLL_SECONDS = 0.5
INTERRUPTED = 130
RUN_FACTS = {EVAL_START: "eval_start_run", TRAIN: "train_run", EVAL_END: "eval_end_run"}
"""Keys of demo.json that name the runs."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for on the command line."""

    seed: int = 0
    steps: int = 20
    drift: bool = True
    chaos: bool = False
    database: str = ""
    name: str = "demo"
    run_dir: str = ""
    json: bool = False
    keep: bool = False
    where: Target | None = None
    """A cluster that runs already; None: one of its own, here."""


class Stalled(Exception):
    """A run did not end; the message is the scheduler's own explanation."""


def main(options: Options) -> int:
    """Runs the demonstration. 0: all promises hold; 1: failed or broken; 130: interrupted. ConfigError at first."""
    if not NAME.fullmatch(options.name):
        raise ConfigError(f"--name {options.name!r}: expected letters, digits, '.', '_' and '-', at most 63")
    if options.where is not None:
        _only_for_own(options)
        AttachedCluster.check(options.where)
    model = jobs.model_folder()
    console = Console(stderr=options.json)
    return asyncio.run(Demonstration(options, model, console).run())


def _only_for_own(options: Options) -> None:
    """ConfigError for what can only be done to a cluster that this command starts itself."""
    assert options.where is not None
    for name, given in (("--chaos", options.chaos), ("--database", options.database), ("--keep", options.keep)):
        if given:
            raise ConfigError(
                f"{name} is for a cluster that the demonstration starts itself; the one at {options.where.scheduler} "
                "is not (leave out --scheduler and LIBRA_SCHEDULER to start one)"
            )


class Demonstration:
    """One run of it, from an empty folder to the report."""

    def __init__(self, options: Options, model: Path, console: Console) -> None:
        self.options = options
        # others may have run this in the same cluster before
        prefix = f"{_run_id(options.name)}-{int(time.time())}-" if options.where is not None else ""
        self.job = Job(options.seed, options.steps, options.drift, model, prefix)
        self.console = console
        self.config = cluster_config(options)
        self.folder = clusterfile.RunFolder.of(self.config).path
        self._signals: list[int] = []
        self._facts: dict[str, Any] = {}
        self._unmet: list[str] = []

    async def run(self) -> int:
        """Everything; returns the exit code."""
        earlier = set_aside(self.folder)
        self.folder.mkdir(parents=True)
        self._tell(
            started=time.time(), options=asdict(self.options), seed=self.options.seed, machine=summary.machine(),
            blobs=self.options.where.blobs if self.options.where is not None else "",
        )  # fmt: skip
        self.console.print(f"libra demo: everything goes to {self.folder}", highlight=False, soft_wrap=True)
        if earlier is not None:
            self.console.print(f"the earlier run of this name is kept as {earlier}", highlight=False, soft_wrap=True)
        cluster: Cluster | AttachedCluster
        if self.options.where is not None:
            cluster = AttachedCluster(self.options.where, self.folder)
            self.console.print(f"in the cluster of {cluster.scheduler}", highlight=False, soft_wrap=True)
        else:
            cluster = Cluster(self.config, on_change=self._changed)
        try:
            with self._interruptible(cluster):
                return await self._run(cluster)
        except asyncio.CancelledError:
            if not self._signals:
                raise
            ended = "every process has ended" if self.options.where is None else "its runs go on in the cluster"
            self.console.print(f"interrupted; {ended}", highlight=False)
            return INTERRUPTED
        except Stalled as error:
            await self._report_what_there_is()
            self.console.print(f"libra demo: {error}", style="bold red", highlight=False, markup=False, soft_wrap=True)
            if self.options.where is None:
                said = f"what every process said is in {self.folder / 'logs'}"
                self.console.print(said, highlight=False, soft_wrap=True)
            return 1

    async def _report_what_there_is(self) -> None:
        """Summary and report of a job that did not end; its records were exported before the cluster was stopped."""
        try:
            await asyncio.to_thread(self._judge)
        except Exception as error:  # noqa: BLE001 - whatever is missing, what was wrong with the job comes next
            self.console.print(f"no report could be made of it: {error!r}", style="bold red", highlight=False)

    async def _run(self, cluster: Cluster | AttachedCluster) -> int:
        try:
            await cluster.start()
            async with (
                LibraClient(cluster.scheduler, retry_for_s=self._patience()) as client,
                LibraClient(cluster.scheduler, retry_for_s=VIEW_RETRY_SECONDS) as looking,
            ):
                view = View(looking, self.folder, self.console)
                view.start()
                try:
                    await cluster.wait_workers(WORKERS_SECONDS)
                    await self._jobs(cluster, client, view)
                finally:
                    await view.stop()
                    if not self._signals and not cluster.failure.done():
                        # also of a job that failed: that is when the records are needed
                        await self._export(cluster)
            if self.options.keep:
                code = await asyncio.to_thread(self._judge)
                self.console.print(f"the cluster stays up at {cluster.scheduler}; Ctrl-C ends it", highlight=False)
                with contextlib.suppress(asyncio.CancelledError):
                    await cluster.failure
                return code
        finally:
            await cluster.stop()
        return await asyncio.to_thread(self._judge)

    def _patience(self) -> float:
        return RETRY_SECONDS if self.options.where is None else ELSEWHERE_RETRY_SECONDS

    async def _export(self, cluster: Cluster | AttachedCluster) -> None:
        """Writes down what the scheduler knows; a failure is said, and shows as missing records afterwards."""
        runs = [self._facts[key] for key in RUN_FACTS.values() if key in self._facts]
        try:
            async with connect(cluster.scheduler) as channel, asyncio.timeout(EXPORT_SECONDS):
                counts = await records.export(channel, self.folder / "records", runs)
        except (LibraError, TimeoutError) as error:
            self.console.print(f"the records could not be exported: {error!r}", style="bold red", highlight=False)
            return
        if isinstance(cluster, AttachedCluster):
            await asyncio.to_thread(cluster.collect, runs, self._facts["started"])
        self._tell(exported=counts, ended=time.time())

    # ---- the three runs

    async def _jobs(self, cluster: Cluster | AttachedCluster, client: LibraClient, view: View) -> None:
        blobs = BlobStore(cluster.blobs)
        first = jobs.evaluation(self.job, self.job.model, blobs)
        await self._one(cluster, client, view, EVAL_START, "eval before", first, EVAL_SECONDS)
        # in a cluster that others run, others may also restart what they run
        disturbed = self.options.chaos or self.options.where is not None
        limit = START_SECONDS + STEP_SECONDS * self.options.steps + (CHAOS_SECONDS if disturbed else 0.0)
        train = self._one(cluster, client, view, TRAIN, "train", jobs.training(self.job, blobs), limit)
        name = f"runs/{self.job.run_id(TRAIN)}"
        if self.options.chaos:
            assert isinstance(cluster, Cluster)
            chaos = Chaos(cluster, client, name, self.options.steps, view.note)
            await _beside(train, chaos.run())
            self._unmet = chaos.missing
            self._tell(killed=[asdict(k) for k in chaos.killed], not_killed=chaos.missing)
        else:
            await train
        version = await checkpoint.newest_published(client, name)
        target = self.folder / "checkpoint"
        await asyncio.to_thread(checkpoint.assemble, version, self.job.model, blobs, target)
        last = jobs.evaluation(self.job, target, blobs)
        await self._one(cluster, client, view, EVAL_END, "eval after", last, EVAL_SECONDS)

    async def _one(
        self,
        cluster: Cluster | AttachedCluster,
        client: LibraClient,
        view: View,
        which: str,
        phase: str,
        run: wire.Run,
        limit: float,
    ) -> None:
        """Creates a run and waits for its end; Stalled if it does not end well."""
        run_id = self.job.run_id(which)
        name = f"runs/{run_id}"
        await client.create_run(run_id, run)
        view.phase, view.run = phase, name
        self._tell(**{RUN_FACTS[which]: name})
        deadline = time.monotonic() + limit
        moved_at = time.monotonic()
        marks: tuple[int, ...] = ()
        while True:
            if cluster.failure.done():
                raise ClusterFailed(cluster.failure.result())
            found = await client.get_run(name)
            if found.state == wire.RUN_STATE_FINISHED:
                return
            if found.state in (wire.RUN_STATE_CANCELLED, wire.RUN_STATE_PAUSED):
                raise Stalled(await explain(client, name, f"{name} is over before its end"))
            now = time.monotonic()
            seen = progress(found, view)
            if seen != marks:
                moved_at, marks = now, seen
            if now - moved_at > STALL_SECONDS:
                raise Stalled(await explain(client, name, f"{name} made no progress for {STALL_SECONDS:.0f} s"))
            if now > deadline:
                raise Stalled(await explain(client, name, f"{name} did not end within {limit:.0f} s"))
            await asyncio.sleep(POLL_SECONDS)

    # ---- afterwards

    def _judge(self) -> int:
        """Checker, summary and report; prints the last word."""
        archive = Archive(self.folder)
        verdict = checker.check(archive)
        checker.write(self.folder, verdict)
        content = summary.write(archive)
        report.write(archive)
        self.console.print(summary.text(content, self.folder), highlight=False, markup=False, soft_wrap=True)
        self.console.print(checker.text(verdict), highlight=False, markup=False, soft_wrap=True)
        if self._unmet:
            self.console.print(f"chaos: not killed: {', '.join(self._unmet)}", style="bold red", highlight=False)
        if self.options.json:
            print(json.dumps(content, indent=2))
        return 0 if verdict.passed and not self._unmet else 1

    def _tell(self, **facts: Any) -> None:
        """Keeps demo.json up to date."""
        self._facts |= facts
        path = self.folder / "demo.json"
        part = path.with_name(".demo.json.part")
        part.write_text(json.dumps(self._facts, indent=2) + "\n")
        part.replace(path)

    def _changed(self, name: str, state: str, message: str) -> None:
        if state == "RETIRED":
            self.console.print(
                f"{name} was given up: {message}", style="bold red", highlight=False, markup=False, soft_wrap=True
            )

    @contextlib.contextmanager
    def _interruptible(self, cluster: Cluster | AttachedCluster) -> Iterator[None]:
        """SIGINT and SIGTERM end the job in order; a second one kills what has not ended yet."""
        own = asyncio.current_task()
        assert own is not None
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            self._signals.append(number)
            if len(self._signals) == 1:
                own.cancel()
            else:
                cluster.kill()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def cluster_config(options: Options) -> ClusterConfig:
    """The local cluster under the demonstration's name, on free ports."""
    base = clusterfile.load(clusterfile.LOCAL)
    scheduler: dict[str, Any] = {"listen": "127.0.0.1:0"}
    if options.database:
        scheduler["database"] = options.database
    workers = base.workers
    if options.chaos:
        pause = {"LIBRA_FAILPOINTS": COMMIT_PAUSE}
        workers = [w.model_copy(update={"env": w.env | pause}) if w.name == CORE_TRAINER else w for w in workers]
    return base.model_copy(
        update={
            "name": options.name,
            "run_dir": options.run_dir,
            "scheduler": base.scheduler.model_copy(update=scheduler),
            "workers": workers,
        }
    )


def _run_id(name: str) -> str:
    """A demonstration's name as the beginning of run ids, which are lower case and short."""
    return re.sub(r"[^a-z0-9-]+", "-", name.lower())[:32]


def set_aside(folder: Path) -> Path | None:
    """An earlier run of the same name keeps its results under a name with its time, which is returned.

    None if there is none; another folder is not touched (ConfigError).
    """
    if not folder.exists() or not any(folder.iterdir()):
        if folder.exists():
            folder.rmdir()
        return None
    if not (folder / "demo.json").exists():
        raise ConfigError(f"{folder}: not empty, and not a demonstration's folder; choose another --name or --run-dir")
    os.close(claim(folder))
    when = time.strftime("%Y%m%d-%H%M%S", time.localtime((folder / "demo.json").stat().st_mtime))
    return folder.rename(folder.with_name(f"{folder.name}-{when}"))


def progress(run: wire.Run, view: View) -> tuple[int, ...]:
    """What rises while a run gets on: versions, ends, tokens."""
    tokens = sum(int(e.get("generated", 0)) for e in view.last.engines.values())
    return (run.policies[0].head.number, sum(t.count for t in run.counts.terminal), run.counts.admitted, tokens)


async def explain(client: LibraClient, name: str, what: str) -> str:
    """A sentence of ours, then the scheduler's: what it waits for, and its last decisions."""
    try:
        answer = await client.explain(name)
    except LibraError as error:
        return f"{what}; the scheduler does not say why: {error.message}"
    decisions = "".join(f"\n  {d.reason.code}: {d.reason.text}" for d in answer.decisions[:5])
    return f"{what}. {answer.summary}{decisions}"


async def _beside(work: Awaitable[None], other: Awaitable[None]) -> None:
    """Waits for `work`; `other` runs beside it, and an error of it ends both."""
    main_task, side = asyncio.ensure_future(work), asyncio.ensure_future(other)
    try:
        while not main_task.done():
            await asyncio.wait(
                {main_task, side} if not side.done() else {main_task}, return_when=asyncio.FIRST_COMPLETED
            )
            if side.done() and side.exception() is not None:
                side.result()
        main_task.result()
    finally:
        for task in (main_task, side):
            task.cancel()
        await asyncio.gather(main_task, side, return_exceptions=True)
