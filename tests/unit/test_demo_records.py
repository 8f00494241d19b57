"""The export over the API, against a scheduler that pages, fails once, and then answers."""

import grpc
import pytest

from services.common import wire
from services.common.errors import LibraError
from services.common.rpc.channel import connect
from services.ops import records
from services.ops.archive import Archive
from tests.support.records import PREEMPTED, RUN, TinyRun


class Pages:
    """Gives a list out two at a time."""

    def __init__(self, size=2):
        self.size = size

    def page(self, items, token):
        start = int(token or 0)
        end = start + self.size
        return items[start:end], str(end) if end < len(items) else ""


class Admin(wire.AdminServiceServicer, Pages):
    def __init__(self, archive, failures=0):
        super().__init__()
        self.archive, self.failures, self.calls = archive, failures, 0
        self.endless = False

    async def ListResources(self, request, context):
        kind = request.selector.kinds[0]
        by_kind = {
            wire.RESOURCE_KIND_MANIFEST: ("manifest", list(self.archive.manifests.values())),
            wire.RESOURCE_KIND_WEIGHT_VERSION: ("weight_version", self.archive.versions),
            wire.RESOURCE_KIND_REASSIGNMENT: ("reassignment", self.archive.reassignments),
            wire.RESOURCE_KIND_REPLICA: ("replica", list(self.archive.replicas.values())),
            wire.RESOURCE_KIND_ACCELERATOR: ("accelerator", self.archive.accelerators),
            wire.RESOURCE_KIND_RUN: ("run", list(self.archive.runs.values())),
        }
        name, items = by_kind.get(kind, ("worker", []))
        rows, token = self.page(items, request.page_token)
        return wire.ListResourcesResponse(resources=[wire.Resource(**{name: r}) for r in rows], next_page_token=token)

    async def ListEvents(self, request, context):
        self.calls += 1
        if self.calls <= self.failures:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        if self.endless:
            return wire.ListEventsResponse(next_page_token="again")
        rows, token = self.page(self.built.events, request.page_token)
        return wire.ListEventsResponse(events=rows, next_page_token=token)


class Trajectories(wire.TrajectoryServiceServicer, Pages):
    def __init__(self, archive):
        super().__init__()
        self.archive = archive

    async def ListTrajectories(self, request, context):
        if request.parent != RUN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such run")
        assert request.view == wire.TRAJECTORY_VIEW_FULL
        rows, token = self.page(self.archive.trajectories, request.page_token)
        return wire.ListTrajectoriesResponse(trajectories=rows, next_page_token=token)

    async def ListManifestMembers(self, request, context):
        mine = [m.member for m in self.archive.members if m.manifest == request.manifest]
        rows, token = self.page(mine, request.page_token)
        return wire.ListManifestMembersResponse(members=rows, next_page_token=token)


@pytest.fixture
async def served(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RETRY_SECONDS", 0.0)
    built = TinyRun(tmp_path / "tiny", with_model=False).build()
    archive = Archive(built.folder)
    admin = Admin(archive, failures=2)
    admin.built = built
    server = grpc.aio.server()
    wire.add_AdminServiceServicer_to_server(admin, server)
    wire.add_TrajectoryServiceServicer_to_server(Trajectories(archive), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        yield channel, built.folder, admin
    await server.stop(None)


async def test_export_writes_what_the_scheduler_has_over_all_pages_and_a_restart(served, tmp_path):
    channel, folder, admin = served
    out = tmp_path / "out"
    counts = await records.export(channel, out / "records", [RUN, "runs/never-created"])
    assert set(counts) == set(records.NAMES)
    assert admin.calls > 2, "the first two answers were UNAVAILABLE"
    for name in ("events", "trajectories", "members", "manifests", "versions", "reassignments"):
        ours = (out / "records" / f"{name}.jsonl").read_text()
        assert ours == (folder / "records" / f"{name}.jsonl").read_text(), name
    again = Archive(out)
    preempted = next(t for t in again.trajectories if t.name == PREEMPTED)
    assert [s.tokens for s in preempted.sequences[0].segments] == [17, 9]
    assert not list((out / "records").glob(".*.part"))


async def test_export_ends_when_the_scheduler_stays_away(served, tmp_path):
    channel, _, admin = served
    admin.failures = 1_000
    with pytest.raises(LibraError) as gave_up:
        await records.export(channel, tmp_path / "out", [RUN])
    assert gave_up.value.reason == "UNAVAILABLE"
    assert admin.calls == records.ATTEMPTS


async def test_a_page_token_that_never_ends_is_noticed(served, tmp_path, monkeypatch):
    channel, _, admin = served
    monkeypatch.setattr(records, "MAX_PAGES", 20)
    admin.failures, admin.endless = 0, True
    with pytest.raises(LibraError, match="did not end within 20 pages"):
        await records.export(channel, tmp_path / "out", [RUN])
