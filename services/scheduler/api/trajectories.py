"""TrajectoryService: clients bring runs and prompts, trainers take batches and commit steps."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import grpc.aio

from services.common import errors, log, wire
from services.common.rpc.channel import MAX_ANSWER_BYTES, connect
from services.common.rpc.server import Context
from services.common.rpc.status import from_rpc_error
from services.scheduler.api import convert, pages, render
from services.scheduler.api.idempotency import Idempotency
from services.scheduler.api.resources import Resources
from services.scheduler.api.watching import watch
from services.scheduler.control import batches, runs, sessions, specs, trajectories
from services.scheduler.control.cycle import Cycle
from services.scheduler.control.ledger import Change
from services.scheduler.core.lifecycle import TRAJECTORY
from services.scheduler.core.model import Manifest, Run, Segment, Sequence, Session, Trajectory, Turn
from services.scheduler.store.store import Store

_log = log.get(__name__)

DESCRIBE_SECONDS = 5.0

MAX_SUBMITTED = 8_192
"""Trajectories that one SubmitGroups may make; more would hold up the reports of all workers meanwhile."""


class TrajectoryService(wire.TrajectoryServiceServicer):
    """Admits work and turns it into trained steps."""

    def __init__(self, cycle: Cycle, store: Store, idempotency: Idempotency) -> None:
        self._cycle = cycle
        self._ledger = cycle.ledger
        self._store = store
        self._idempotency = idempotency
        self._runs = Resources(cycle, store)

    # ---- runs

    async def CreateRun(self, request: wire.CreateRunRequest, context: Context) -> wire.CreateRunResponse:
        known = await self._idempotency.known("CreateRun", request, wire.CreateRunResponse)
        if known is not None:
            return known
        clock = self._ledger.clock
        run = convert.new_run(request.run_id, request.run, clock.wall(), secrets.randbits(48))
        if run.name in self._ledger.fleet.runs:
            raise errors.already_exists(run.name, "a run of that id; choose another run_id")
        tasks = None
        if run.task_blob:
            ref = wire.BlobRef.FromString(run.task_blob)
            tasks = await asyncio.to_thread(runs.read_tasks, self._cycle.blobs, ref)
            run.task_lines = len(tasks.lines)
        await self._check_environments(run)
        if request.validate_only:
            return wire.CreateRunResponse(stamp=render.stamp(self._ledger.fleet), run=render.run(run))

        def mutate(change: Change) -> wire.CreateRunResponse:
            # again: another run of that id may have come while files and environments were looked at
            if run.name in self._ledger.fleet.runs:
                raise errors.already_exists(run.name, "a run of that id; choose another run_id")
            if tasks is not None:
                self._cycle.tasks[run.name] = tasks
            runs.create(self._ledger, run, change)
            return wire.CreateRunResponse(
                stamp=render.stamp(self._ledger.fleet, self._ledger.fleet.revision + 1), run=render.run(run)
            )

        return await self._idempotency.run("CreateRun", request, wire.CreateRunResponse, mutate, "client")

    async def _check_environments(self, run: Run) -> None:
        """Asks each environment of the run to describe itself: an unreachable or different one is refused now."""
        for route in self._cycle.environments_of(run, strict=True):
            channel = connect(route.endpoint)
            try:
                answer = await wire.ToolEnvServiceStub(channel).Describe(
                    wire.DescribeRequest(), timeout=DESCRIBE_SECONDS
                )
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                what = (
                    "does not speak libra.v1.ToolEnvService"
                    if failure.status is grpc.StatusCode.UNIMPLEMENTED
                    else "cannot be reached"
                )
                raise errors.LibraError(
                    "INCONSISTENT_SETTINGS", f"tool environment {route.environment!r} at {route.endpoint} {what}: "
                    f"{failure.message}",
                    resource=route.endpoint,
                ) from None  # fmt: skip
            finally:
                await channel.close()
            if answer.environment != route.environment:
                raise errors.inconsistent(
                    f"the server at {route.endpoint} is environment {answer.environment!r}; "
                    f"the run wants {route.environment!r}"
                )
            life = wire.seconds(answer.max_session_life)
            if life and life < run.max_run_time:
                raise errors.inconsistent(
                    f"sessions of environment {route.environment!r} live at most {life:g} s, but an episode may run "
                    f"{run.max_run_time:g} s (limits.max_run_time); lower one or raise the other"
                )

    def _run(self, name: str) -> Run:
        run = self._ledger.fleet.runs.get(name)
        if run is None:
            raise errors.not_found(name)
        return run

    async def GetRun(self, request: wire.GetRunRequest, context: Context) -> wire.GetRunResponse:
        run = self._run(request.name)
        await self._ledger.barrier()
        return wire.GetRunResponse(stamp=render.stamp(self._ledger.fleet), run=await self._runs.run(run))

    async def UpdateRun(self, request: wire.UpdateRunRequest, context: Context) -> wire.UpdateRunResponse:
        raise errors.unimplemented("TrajectoryService.UpdateRun")

    async def SubmitGroups(self, request: wire.SubmitGroupsRequest, context: Context) -> wire.SubmitGroupsResponse:
        run = self._run(request.run)
        if not 1 <= len(request.tasks) <= 256:
            raise errors.invalid_field(f"tasks: {len(request.tasks)} given; expected 1 to 256")
        members = len(request.tasks) * (run.group_size + specs.spec(run).limits.oversample)
        if members > MAX_SUBMITTED:
            raise errors.invalid_field(
                f"tasks: {len(request.tasks)} groups of {run.group_size} are {members} trajectories; at most "
                f"{MAX_SUBMITTED} in one request: submit them in several"
            )
        for number, task in enumerate(request.tasks):
            if len(task.id.encode()) > 128:
                raise errors.invalid_field(f"tasks[{number}].id: more than 128 bytes")
            if task.WhichOneof("content") != "json":
                raise errors.invalid_field(f"tasks[{number}]: expected the task as json text")
            runs.check_task(task.json, f"tasks[{number}]")

        def mutate(change: Change) -> wire.SubmitGroupsResponse:
            if run.state not in ("ACTIVE", "PAUSED"):
                raise errors.LibraError("RUN_NOT_ACTIVE", f"{run.name} is {run.state}: {run.reason_text}")
            if run.task_blob:
                raise errors.inconsistent(f"{run.name} draws from its own task file; it takes no groups from clients")
            bound = run.max_in_flight
            flying = runs.in_flight(self._ledger, run) if bound else 0
            wanted = len(request.tasks) * run.group_size
            if bound and flying + wanted > bound:
                raise errors.LibraError(
                    "CAPACITY", f"{flying} trajectories of {run.name} are in flight, {wanted} more "
                    f"would pass its quota of {bound}",
                    retry_after_s="1",
                )  # fmt: skip
            groups = [runs.admit(change, run, task, request.priority) for task in request.tasks]
            return wire.SubmitGroupsResponse(
                stamp=render.stamp(self._ledger.fleet, self._ledger.fleet.revision + 1), groups=[g.name for g in groups]
            )

        return await self._idempotency.run("SubmitGroups", request, wire.SubmitGroupsResponse, mutate, "client")

    async def WatchRun(self, request: wire.WatchRunRequest, context: Context) -> AsyncIterator[wire.WatchRunResponse]:
        run = self._run(request.run)
        options = wire.WatchOptions()
        options.CopyFrom(request.options)
        if not options.selector.kinds:
            options.selector.kinds.append(wire.RESOURCE_KIND_GROUP)
            options.with_resource = True
        prefix = options.selector.name_prefix
        if prefix and prefix != run.name and not prefix.startswith(run.name + "/"):
            raise errors.invalid_field(f"selector.name_prefix {prefix!r} is outside {run.name}")
        options.selector.name_prefix = prefix or run.name
        async for batch in watch(self._cycle, self._store, options, context):
            yield wire.WatchRunResponse(batch=batch)

    # ---- trajectories

    async def GetTrajectory(self, request: wire.GetTrajectoryRequest, context: Context) -> wire.GetTrajectoryResponse:
        await self._ledger.barrier()
        item = self._ledger.fleet.trajectories.get(request.name) or await self._store.trajectory(request.name)
        if item is None:
            raise errors.not_found(request.name)
        return wire.GetTrajectoryResponse(
            stamp=render.stamp(self._ledger.fleet), trajectory=await self._render(item, request.view)
        )

    async def _render(self, item: Trajectory, view: int) -> wire.Trajectory:
        run = self._run(item.run)
        attempts = await self._store.attempts(item.name)
        live = item.state not in TRAJECTORY.terminal
        message = render.trajectory(
            item, run.max_generated_tokens, self._cycle.observe.estimate(item) if live else None, attempts,
            self._ledger.clock.monotonic() if live else None,
        )  # fmt: skip
        if view == wire.TRAJECTORY_VIEW_FULL:
            sequences, segments, turns = await self._content(item.name, item.attempt)
            message.sequences.extend(render.sequences(sequences, segments))
            message.turns.extend(render.turns(turns))
        return message

    async def _content(self, name: str, attempt: int) -> tuple[list[Sequence], list[Segment], list[Turn]]:
        """Of a live trajectory from memory, else from the store."""
        fleet, key = self._ledger.fleet, (name, attempt)
        if name in fleet.trajectories and key in fleet.segments:
            return fleet.sequences.get(key, []), fleet.segments[key], fleet.turns.get(key, [])
        return (
            await self._store.sequences(name, attempt),
            await self._store.segments(name, attempt),
            await self._store.turns(name, attempt),
        )

    async def ListTrajectories(
        self, request: wire.ListTrajectoriesRequest, context: Context
    ) -> wire.ListTrajectoriesResponse:
        run_name, _, group = request.parent.partition("/groups/")
        self._run(run_name)
        states = tuple(wire.TrajectoryState.Name(s).removeprefix("TRAJECTORY_STATE_") for s in request.states)
        token = pages.decode(request.page_token, (request.parent, states, request.view))
        size = pages.size(request.page_size)
        await self._ledger.barrier()
        revision = token.revision or self._ledger.fleet.revision
        rows = await self._store.trajectories(
            run=run_name, group=request.parent if group else "", states=states, after=token.after, limit=size
        )
        answer = wire.ListTrajectoriesResponse(stamp=render.stamp(self._ledger.fleet, revision))
        total = 0
        for row in rows:
            message = await self._render(row, request.view)
            total += message.ByteSize()
            if answer.trajectories and total > MAX_ANSWER_BYTES:
                break
            answer.trajectories.append(message)
        if rows and (len(rows) == size or len(answer.trajectories) < len(rows)):
            after = rows[len(answer.trajectories) - 1].name
            answer.next_page_token = pages.encode(revision, after, (request.parent, states, request.view))
        return answer

    async def CancelTrajectories(
        self, request: wire.CancelTrajectoriesRequest, context: Context
    ) -> wire.CancelTrajectoriesResponse:
        if not 1 <= len(request.names) <= 256:
            raise errors.invalid_field(f"names: {len(request.names)} given; expected 1 to 256")
        note = convert.note(request.note)

        def mutate(change: Change) -> wire.CancelTrajectoriesResponse:
            fleet = self._ledger.fleet
            answer = wire.CancelTrajectoriesResponse(stamp=render.stamp(fleet, fleet.revision + 1))
            groups = {}
            for name in request.names:
                group = fleet.groups.get(name)
                members = list(group.members) if group else [name]
                for member in members:
                    item = fleet.trajectories.get(member)
                    if item is None or item.state not in ("QUEUED", "LEASED", "SCORED"):
                        answer.unchanged.append(member)
                        continue
                    trajectories.cancel(change, item, "CANCELLED", note or "cancelled by a client")
                    groups[item.group] = fleet.groups[item.group]
                    answer.cancelled.append(member)
            for group in groups.values():
                trajectories.after_cancel(change, group)
            return answer

        return await self._idempotency.run(
            "CancelTrajectories", request, wire.CancelTrajectoriesResponse, mutate, "client"
        )

    # ---- steps

    def _trainer(self, caller: wire.Caller) -> Session:
        """The live session of a trainer, ours or somebody's own."""
        session = sessions.check(self._ledger, caller.session, caller.epoch, caller.seen_term)
        kind = self._ledger.fleet.workers[session.worker].kind
        if kind not in ("TRAINER", "EXTERNAL"):
            raise errors.LibraError(
                "NOT_ALLOWED", f"{session.worker} is a {kind} worker; steps are a trainer's to take and commit"
            )
        return session

    async def TakeBatch(self, request: wire.TakeBatchRequest, context: Context) -> wire.TakeBatchResponse:
        session = self._trainer(request.caller)
        run = self._run(request.run)
        if run.kind != "TRAIN":
            raise errors.inconsistent(f"{run.name} is a {run.kind} run; only TRAIN runs are taken in batches")
        if request.step < 1:
            raise errors.invalid_field(f"step: {request.step}; steps are numbered from 1")
        if request.policy not in ("", run.trainable_policy):
            raise errors.invalid_field(
                f"policy: {request.policy!r} is not the one that {run.name} trains, "
                f"{run.trainable_policy or 'its only one'!r}; leave it empty"
            )
        size = request.size
        for field in ("groups", "min_groups", "multiple_of"):
            convert.count(getattr(size, field), f"size.{field}", 65_536)
        if size.min_groups > (size.groups or run.batch_groups) or size.multiple_of > (size.groups or run.batch_groups):
            raise errors.inconsistent(
                f"size: groups {size.groups or run.batch_groups}, min_groups {size.min_groups}, "
                f"multiple_of {size.multiple_of}; the latter two may not exceed the first"
            )
        remaining = context.time_remaining() or 30.0
        wait = max(
            0.0, min(wire.seconds(request.wait) or run.no_progress_timeout, remaining - 1.0, run.no_progress_timeout)
        )
        manifest = await batches.take(
            self._ledger, caused_by=session.name, run=run, policy=run.trainable_policy, step=request.step,
            size=size, wait=wait,
        )  # fmt: skip
        members = batches.roster_of(self._ledger.fleet, run, manifest)
        return wire.TakeBatchResponse(
            stamp=render.stamp(self._ledger.fleet), manifest=render.manifest(manifest),
            roster=render.roster(self._cycle.dispatcher.roster_revision, members),
        )  # fmt: skip

    async def _manifest(self, name: str) -> Manifest:
        manifest = self._ledger.fleet.manifests.get(name) or await self._store.manifest(name)
        if manifest is None:
            raise errors.not_found(name)
        return manifest

    async def ListManifestMembers(
        self, request: wire.ListManifestMembersRequest, context: Context
    ) -> wire.ListManifestMembersResponse:
        await self._ledger.barrier()
        manifest = await self._manifest(request.manifest)
        token = pages.decode(request.page_token, (request.manifest,))
        size = pages.size(request.page_size, default=256)
        first = int(token.after) if token.after else 0
        answer = wire.ListManifestMembersResponse(stamp=render.stamp(self._ledger.fleet))
        total, index = 0, first
        while index < len(manifest.members) and index - first < size:
            member = await self._member(manifest, index)
            total += member.ByteSize()
            if answer.members and total > MAX_ANSWER_BYTES:
                break
            answer.members.append(member)
            index += 1
        if index < len(manifest.members):
            answer.next_page_token = pages.encode(0, str(index), (request.manifest,))
        return answer

    async def _member(self, manifest: Manifest, index: int) -> wire.ManifestMember:
        name, attempt = manifest.members[index], manifest.attempts[index]
        item = self._ledger.fleet.trajectories.get(name) or await self._store.trajectory(name)
        if item is None:
            raise errors.not_found(name)
        sequences, segments, _ = await self._content(name, attempt)
        member = wire.ManifestMember(
            trajectory=name, attempt=attempt, sample=item.sample, group=item.group, truncated=item.truncated,
            finish=wire.FinishReason.Value(f"FINISH_REASON_{item.finish or 'UNSPECIFIED'}"),
            tokens=wire.TokenCounts(
                prompt=item.prompt_tokens, generated=item.generated_tokens, trainable=item.trainable_tokens,
                observation=item.observation_tokens,
            ),
            sequences=render.sequences(sequences, segments),
        )  # fmt: skip
        member.reward.ParseFromString(item.reward_record)
        member.masked.extend(
            wire.MaskedSpan(sequence=m.sequence, first_position=m.first_position, tokens=m.tokens)
            for m in manifest.masked
            if m.trajectory == name
        )
        return member

    async def CommitStep(self, request: wire.CommitStepRequest, context: Context) -> wire.CommitStepResponse:
        session = self._trainer(request.caller)
        manifest = await self._manifest(request.manifest)
        if len(request.members) > 1_024:
            raise errors.invalid_field(f"members: {len(request.members)}; at most 1,024")

        def mutate(change: Change) -> wire.CommitStepResponse:
            version = batches.commit(
                change, manifest, lineage=request.base_version.lineage, base=request.base_version.number,
                trainable_tokens=request.trainable_tokens,
                members=[(m.worker, m.replica, m.generation) for m in request.members],
            )  # fmt: skip
            return wire.CommitStepResponse(
                stamp=render.stamp(self._ledger.fleet, self._ledger.fleet.revision + 1),
                version=wire.VersionRef(policy=version.policy, lineage=version.lineage, number=version.number),
            )

        was = manifest.state
        known = self._ledger.fleet.trajectories
        members = [known[m] for m in manifest.members if m in known]
        answer = await self._idempotency.run("CommitStep", request, wire.CommitStepResponse, mutate, session.name)
        if was == "TAKEN" and manifest.state == "COMMITTED":
            self._cycle.observe.committed(manifest, len(request.members), members)
        return answer

    async def ReturnBatch(self, request: wire.ReturnBatchRequest, context: Context) -> wire.ReturnBatchResponse:
        session = self._trainer(request.caller)
        manifest = await self._manifest(request.manifest)
        if len(request.broken) > 256:
            raise errors.invalid_field(f"broken: {len(request.broken)}; at most 256")

        def mutate(change: Change) -> wire.ReturnBatchResponse:
            if manifest.state != "TAKEN":
                raise errors.illegal_transition(
                    f"{manifest.name} is {manifest.state}; only a TAKEN one can be returned"
                )
            batches.give_back(change, manifest, request.broken, request.reason.code, request.reason.text[:1024])
            return wire.ReturnBatchResponse(stamp=render.stamp(self._ledger.fleet, self._ledger.fleet.revision + 1))

        return await self._idempotency.run("ReturnBatch", request, wire.ReturnBatchResponse, mutate, session.name)

    async def PublishWeights(
        self, request: wire.PublishWeightsRequest, context: Context
    ) -> wire.PublishWeightsResponse:
        session = self._trainer(request.caller)
        run = self._run(request.run)
        ref = request.version
        name = batches.version_name(run, ref.policy or run.trainable_policy, ref.lineage, ref.number)
        version = self._ledger.fleet.versions.get(name)
        if version is None:
            raise errors.LibraError("VERSION_UNUSABLE", f"{name} was never committed", resource=name)
        if not request.files.shards and not version.files:
            raise errors.invalid_field("files: durable files must be given (live sources alone are not supported yet)")
        for number, shard in enumerate(request.files.shards):
            convert.blob(shard.blob, f"files.shards[{number}].blob")

        def mutate(change: Change) -> wire.PublishWeightsResponse:
            files = request.files.SerializeToString() if request.files.shards else b""
            checkpoint = request.checkpoint.SerializeToString() if request.HasField("checkpoint") else b""
            batches.publish(change, version, files, request.files.checksum, checkpoint)
            return wire.PublishWeightsResponse(
                stamp=render.stamp(self._ledger.fleet, self._ledger.fleet.revision + 1),
                version=render.weight_version(version),
            )

        return await self._idempotency.run("PublishWeights", request, wire.PublishWeightsResponse, mutate, session.name)

    async def RewindRun(self, request: wire.RewindRunRequest, context: Context) -> wire.RewindRunResponse:
        raise errors.unimplemented("TrajectoryService.RewindRun")
