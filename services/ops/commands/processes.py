"""Commands that run processes here or judge what they left: up, demo, check."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from services.ops import clusterfile, nodefile, render, target
from services.ops.cluster import Cluster, ClusterFailed, WorkerState
from services.ops.clusterfile import ClusterConfig
from services.ops.commands.options import Json

WATCH_S = 0.5
Say = Callable[[str, str, str], None]


def up(
    file: Annotated[Path, typer.Argument(help="Cluster file; default: the local cluster of four CPU accelerators.")] = (
        clusterfile.LOCAL
    ),
    json: Json = False,
    name: Annotated[str, typer.Option("--name", help="Another name, and with it another run folder.")] = "",
    run_dir: Annotated[str, typer.Option("--run-dir", help="Folder of everything it writes.")] = "",
) -> None:
    """Starts a local cluster and keeps it until Ctrl-C."""
    cluster = clusterfile.load(file)
    changes = {k: v for k, v in (("name", name), ("run_dir", run_dir)) if v}
    asyncio.run(keep(cluster.model_copy(update=changes), _reporter(json), json=json))


def node(
    file: Annotated[Path, typer.Argument(help="Node file: this machine's accelerators and workers.")],
) -> None:
    """Serves a scheduler that runs elsewhere with this machine's accelerators: its node agent and workers."""
    settings = nodefile.load(file)
    services = settings.services()
    paths = [service.write(settings.folder) for service in services]
    agent = clusterfile.argv(services[-1].module, paths[-1])
    # the agent takes this process's place, so that whoever started it signals the agent itself
    os.execv(agent[0], agent)  # noqa: S606 - a list, no shell


async def keep(config: ClusterConfig, say: Say, *, json: bool) -> None:
    """Starts a cluster and watches it until SIGINT or SIGTERM, or until a process is given up (ClusterFailed).

    A second signal kills at once what has not ended yet.
    """
    cluster = Cluster(config, on_change=say)
    own = asyncio.current_task()
    assert own is not None
    asked: list[int] = []

    def on_signal(number: int) -> None:
        asked.append(number)
        if len(asked) == 1:
            own.cancel()
        else:
            cluster.kill()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await cluster.start()
        await cluster.wait_workers()
        _announce(cluster, json)
        await _watch(cluster, say)
    except asyncio.CancelledError:
        if not asked:
            raise
        say("cluster", "STOPPING", "")
    finally:
        await cluster.stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    say("cluster", "STOPPED", "")


async def _watch(cluster: Cluster, say: Say) -> None:
    seen: dict[str, WorkerState] = {}
    while not cluster.failure.done():
        for worker in cluster.workers().values():
            known = seen.get(worker.name)
            if known is not None and (known.state, known.restarts) != (worker.state, worker.restarts):
                say(worker.name, worker.state, worker.message)
            seen[worker.name] = worker
        await asyncio.sleep(WATCH_S)
    raise ClusterFailed(cluster.failure.result())


def _announce(cluster: Cluster, json: bool) -> None:
    toolenvs = cluster.addresses.toolenvs or {}
    if json:
        render.line(
            {
                "process": "cluster", "state": "READY", "scheduler": cluster.scheduler, "toolenvs": toolenvs,
                "run_dir": str(cluster.folder.path),
            }
        )  # fmt: skip
        return
    where = "".join(f", {name} at {address}" for name, address in sorted(toolenvs.items()))
    render.console().print(
        f"cluster {cluster.config.name} is up: scheduler at {cluster.scheduler}{where}\n"
        f"it writes to {cluster.folder.path}; Ctrl-C stops it",
        markup=False,
        soft_wrap=True,
    )


def _reporter(json: bool) -> Say:
    def say(process: str, state: str, message: str) -> None:
        told = message if state in ("PAUSED", "RETIRED") else ""
        if json:
            render.line({"process": process, "state": state, "message": told})
        else:
            # the whole message is in the log, and is the command's last word if the process is given up
            text = f"{process:<20} {state.lower()}" + (f": {_brief(told)}" if told else "")
            render.console().print(text, markup=False, soft_wrap=True)

    return say


def _brief(message: str) -> str:
    """How it ended, and the last line of what it said."""
    lines = message.splitlines()
    return message if len(lines) == 1 else f"{lines[0].partition(':')[0]}: {lines[-1]}"


def demo(
    seed: Annotated[int, typer.Option("--seed", help="Seed of tasks, sampling and training.")] = 0,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps at most.")] = 20,
    no_drift: Annotated[bool, typer.Option("--no-drift", help="A workload that does not drift.")] = False,
    chaos: Annotated[bool, typer.Option("--chaos", help="Kill services while it runs.")] = False,
    database: Annotated[str, typer.Option("--database", help="Database URL; default SQLite in the run folder.")] = "",
    name: Annotated[str, typer.Option("--name", help="Name of the run and its folder.")] = "demo",
    run_dir: Annotated[str, typer.Option("--run-dir", help="Folder of everything it writes; default runs/NAME.")] = "",
    json: Json = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the cluster running at the end, until Ctrl-C.")] = False,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler",
            metavar="HOST:PORT",
            help="Run in the cluster of this scheduler ($LIBRA_SCHEDULER); default: start one here.",
        ),
    ] = None,
) -> None:
    """Post-trains a small real model with tools, end to end, on a cluster of its own or in one that runs."""
    from services.ops import demo as demonstration

    options = demonstration.Options(
        seed=seed, steps=steps, drift=not no_drift, chaos=chaos, database=database, name=name, run_dir=run_dir,
        json=json, keep=keep, where=target.elsewhere(scheduler),
    )  # fmt: skip
    raise typer.Exit(demonstration.main(options))


def check(
    folder: Annotated[Path, typer.Argument(help="Folder of a demonstration that has ended.")],
    json: Json = False,
) -> None:
    """Judges a finished run from its records, histories and blobs alone."""
    from services.ops import checker

    raise typer.Exit(checker.main(folder, as_json=json))
