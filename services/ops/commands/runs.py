"""Commands around files: run (submit a run), validate."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import grpc
import typer
import yaml

from services.client import LibraClient
from services.common import config, wire
from services.common.blobs import BlobStore
from services.common.errors import ConfigError, LibraError
from services.ops import clusterfile, nodefile, render, runcheck, runfile, target
from services.ops.commands.options import RETRY_FOR_S, Json, Scheduler
from services.ops.runcheck import Tasks
from services.ops.runfile import RunConfig
from services.ops.target import Target

FOLLOW_S = 7 * 86_400.0
REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def run(
    file: Annotated[Path, typer.Argument(help="Run file: model, tasks, environment, algorithm.")],
    scheduler: Scheduler = None,
    json: Json = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait until the run is over.")] = False,
) -> None:
    """Checks a run file completely, then submits the run."""
    settings = config.load(file, RunConfig)
    found = asyncio.run(_submit(settings, file, target.find(scheduler), follow=follow))
    if json:
        render.document(render.as_json(found))
        return
    render.facts(
        {
            "run": found.name,
            "state": render.enum(wire.RunState, "RUN_STATE_", found.state),
            "model": found.policies[0].model,
            "version": render.version(found.policies[0].head),
            "environment": found.environment,
            "groups": f"{found.batch.groups} × {found.group_size} trajectories a step",  # noqa: RUF001 - for people
            "staleness": f"at most {found.staleness.max_versions} versions",
            "ended": render.terminal(found),
        }
    )
    if not follow:
        run_id = found.name.removeprefix("runs/")
        render.console().print(f"see `libra status`, `libra events --follow --prefix runs/{run_id}`", markup=False)


async def _submit(settings: RunConfig, file: Path, where: Target, *, follow: bool) -> wire.Run:
    tasks = await _check_local(settings, file, where.toolenvs)
    async with LibraClient(where.scheduler, retry_for_s=RETRY_FOR_S) as client:
        ref = await _task_ref(settings, file, tasks, where)
        await _check_with(client, settings, file, ref)
        try:
            created = await client.create_run(settings.run, runfile.message(settings, file, ref))
        except LibraError as error:
            if error.status in REFUSALS:
                raise runcheck.refused(file, error) from None
            raise
        return await client.wait_run(created.name, FOLLOW_S) if follow else created


async def _task_ref(settings: RunConfig, file: Path, tasks: Tasks, where: Target) -> wire.BlobRef:
    """Where the scheduler reads the tasks: a copy in the blob store, which nobody edits while the run goes on and which
    other machines see, or the file itself where no blob store is known.
    """
    ref = runfile.task_ref(settings.tasks_path(file), tasks.data)
    if not where.blobs:
        return ref
    store = BlobStore(where.blobs)
    return await asyncio.to_thread(store.put, f"{settings.run}/tasks-{ref.sha256[:16]}.jsonl", tasks.data)


async def _check_local(settings: RunConfig, file: Path, known: dict[str, str]) -> Tasks:
    """What needs no scheduler: tasks, model, environment, and whether the longest prompt fits."""
    tasks = runcheck.tasks(settings.tasks_path(file))
    details = runcheck.model(settings, file)
    address = runcheck.environment_address(settings, file, known)
    if address:
        await runcheck.environment(settings, file, address)
        await runcheck.prompt(settings, file, details, tasks.longest, address)
    return tasks


async def _check_with(client: LibraClient, settings: RunConfig, file: Path, ref: wire.BlobRef) -> None:
    """What only the scheduler knows: the accelerators there are, and its own rules."""
    found = await client.list_resources(wire.RESOURCE_KIND_ACCELERATOR)
    runcheck.replicas(settings, file, [r.accelerator for r in found.resources])
    message = runfile.message(settings, file, ref)
    try:
        await client.create_run(settings.run, message, validate_only=True)
    except LibraError as error:
        if error.status in REFUSALS:
            raise runcheck.refused(file, error) from None
        raise


def validate(
    file: Annotated[Path, typer.Argument(help="A cluster file, a node file or a run file.")],
    scheduler: Scheduler = None,
    json: Json = False,
    online: Annotated[bool, typer.Option("--online", help="Run files: ask the scheduler too.")] = False,
) -> None:
    """Checks a file and starts nothing."""
    kind = _kind(file)
    if kind == "cluster":
        cluster = clusterfile.load(file)
        what = f"{len(cluster.nodes)} nodes, {len(cluster.workers)} workers, {len(cluster.toolenvs)} tool environments"
    elif kind == "node":
        node = nodefile.load(file)
        what = f"node {node.node.name}: {len(node.node.accelerators)} accelerators, {len(node.workers)} workers"
    else:
        settings = config.load(file, RunConfig)
        tasks = asyncio.run(_validate_run(settings, file, target.find(scheduler), online=online))
        what = f"run {settings.run}: {tasks.count:,} tasks"
    if json:
        render.document({"file": str(file), "kind": kind, "valid": True, "content": what})
    else:
        render.console().print(f"{file}: valid {kind} file ({what})", markup=False, soft_wrap=True)


async def _validate_run(settings: RunConfig, file: Path, where: Target, *, online: bool) -> Tasks:
    tasks = await _check_local(settings, file, where.toolenvs if online else {})
    if online:
        async with LibraClient(where.scheduler, retry_for_s=RETRY_FOR_S) as client:
            await _check_with(client, settings, file, await _task_ref(settings, file, tasks, where))
    return tasks


def _kind(file: Path) -> str:
    """What a file is meant to be, by the keys that only one kind has."""
    try:
        content = yaml.safe_load(config.interpolate(file.read_text(), os.environ, str(file)))
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the file: {error.strerror}") from None
    except yaml.YAMLError:
        content = {}
    keys = set(content) if isinstance(content, dict) else set()
    if "node" in keys:
        return "node"
    return "cluster" if keys & {"nodes", "workers", "scheduler", "toolenvs", "lighthouse"} else "run"
