"""What the scheduler knows of a run, exported over its API once the run is over: the record that the checker judges.

One JSON line for each thing, in the contract's JSON form, under <run folder>/records/. The files are whole or absent:
each is written beside its name and renamed when complete.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from services.common import log, wire
from services.common.errors import LibraError
from services.common.rpc.status import from_rpc_error

_log = log.get(__name__)

CALL_SECONDS = 20.0
"""Deadline of one page."""
ATTEMPTS = 8
"""Tries for one page; a scheduler that restarts is back within a few seconds."""
RETRY_SECONDS = 1.0
PAGE = 1_000
MAX_PAGES = 10_000
"""Pages of one listing; more means a page token that never ends."""

KINDS = {
    "manifests": wire.RESOURCE_KIND_MANIFEST,
    "versions": wire.RESOURCE_KIND_WEIGHT_VERSION,
    "reassignments": wire.RESOURCE_KIND_REASSIGNMENT,
    "commands": wire.RESOURCE_KIND_COMMAND,
    "replicas": wire.RESOURCE_KIND_REPLICA,
    "accelerators": wire.RESOURCE_KIND_ACCELERATOR,
    "workers": wire.RESOURCE_KIND_WORKER,
    "runs": wire.RESOURCE_KIND_RUN,
}
"""File name and kind of what ListResources gives."""

OF_RUNS = ("manifests", "versions", "runs")
"""Of these, only what belongs to the exported runs is written."""

NAMES = ("events", "trajectories", "members", *KINDS)
"""All record files, without .jsonl."""

TRANSIENT = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "NOT_LEADER", "CANCELLED"}
"""Reasons after which the same page is asked for again."""


def line(message: wire.Message) -> dict[str, Any]:
    """The contract's JSON form with its own field names."""
    fields: dict[str, Any] = wire.MessageToDict(message, preserving_proto_field_name=True)
    return fields


class Reader:
    """Reads everything of interest from the scheduler, page by page, over restarts of it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._admin = wire.AdminServiceStub(channel)
        self._trajectories = wire.TrajectoryServiceStub(channel)

    async def _call(self, method: Any, request: Any) -> Any:
        for attempt in range(ATTEMPTS):
            try:
                return await method(request, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
                if error.reason not in TRANSIENT or attempt == ATTEMPTS - 1:
                    raise error from None
            await asyncio.sleep(RETRY_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    async def _pages(self, method: Any, request: Any) -> AsyncIterator[Any]:
        for _ in range(MAX_PAGES):
            page = await self._call(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token
        raise LibraError("INTERNAL", f"a listing did not end within {MAX_PAGES} pages; the last token repeats itself")

    async def resources(self, kind: "wire.ResourceKind.ValueType", prefix: str = "") -> list[wire.Resource]:
        """All resources of a kind."""
        selector = wire.Selector(kinds=[kind], name_prefix=prefix)
        pages = self._pages(self._admin.ListResources, wire.ListResourcesRequest(selector=selector, page_size=PAGE))
        return [resource async for page in pages for resource in page.resources]

    async def events(self, start_revision: int = 0) -> AsyncIterator[wire.Event]:
        """All events from a revision on, oldest first."""
        request = wire.ListEventsRequest(start_revision=start_revision, page_size=PAGE)
        async for page in self._pages(self._admin.ListEvents, request):
            for event in page.events:
                yield event

    async def trajectories(self, run: str) -> AsyncIterator[wire.Trajectory]:
        """All trajectories of a run in view FULL, in admission order."""
        request = wire.ListTrajectoriesRequest(parent=run, page_size=PAGE, view=wire.TRAJECTORY_VIEW_FULL)
        async for page in self._pages(self._trajectories.ListTrajectories, request):
            for trajectory in page.trajectories:
                yield trajectory

    async def members(self, manifest: str) -> AsyncIterator[wire.ManifestMember]:
        """The members of a manifest, in its order."""
        request = wire.ListManifestMembersRequest(manifest=manifest, page_size=256)
        async for page in self._pages(self._trajectories.ListManifestMembers, request):
            for member in page.members:
                yield member


async def export(channel: grpc.aio.Channel, folder: Path, runs: Sequence[str]) -> dict[str, int]:
    """Writes all record files of these runs under `folder`; returns the number of lines in each.

    Fleet-wide things (events, commands, replicas ...) are written whole: a run's story includes what the fleet did. Of
    other runs' steps and versions nothing is written.
    """
    reader = Reader(channel)
    counts: dict[str, int] = {}
    found: dict[str, list[wire.Resource]] = {}
    for name, kind in KINDS.items():
        found[name] = await reader.resources(kind)
        if name in OF_RUNS:
            found[name] = [r for r in found[name] if "/".join(_content(r).name.split("/")[:2]) in runs]
        counts[name] = write_lines(folder / f"{name}.jsonl", (line(_content(r)) for r in found[name]))
    rows = [line(event) async for event in reader.events()]
    counts["events"] = write_lines(folder / "events.jsonl", rows)
    rows = [line(t) for run in runs async for t in _or_none(reader.trajectories(run), run)]
    counts["trajectories"] = write_lines(folder / "trajectories.jsonl", rows)
    rows = []
    for resource in found["manifests"]:
        manifest = resource.manifest.name
        rows += [{"manifest": manifest, "member": line(m)} async for m in reader.members(manifest)]
    counts["members"] = write_lines(folder / "members.jsonl", rows)
    return counts


async def _or_none(items: AsyncIterator[wire.Trajectory], run: str) -> AsyncIterator[wire.Trajectory]:
    """The items; none if the run was never created, which a job that ended early explains elsewhere."""
    try:
        async for item in items:
            yield item
    except LibraError as error:
        if error.reason != "NOT_FOUND":
            raise
        _log.warning("no such run to export", run=run)


def _content(resource: wire.Resource) -> Any:
    """The message inside a resource."""
    which = resource.WhichOneof("resource")
    if which is None:
        raise LibraError("INTERNAL", "the scheduler listed an empty resource")
    return getattr(resource, which)


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Writes one JSON line for each row, whole or not at all; returns how many.

    Keys are sorted: protobuf's maps come in another order in each process, and equal records shall be equal text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    count = 0
    with part.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, sort_keys=True, separators=(",", ":")) + "\n")
            count += 1
    part.replace(path)
    return count
