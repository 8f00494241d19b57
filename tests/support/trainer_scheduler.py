"""A scheduler made of a few dictionaries: what trainers call, the rules that they rely on, and switches for faults.

Steps are prepared manifests. A batch is handed out once the version before it is published (bound K = 0), so a version
that nobody publishes stops everything, as it would with real engines.
"""

import asyncio
import contextlib
import time
import uuid
from collections import defaultdict

from services.common import errors, wire
from services.common.errors import LibraError
from services.common.rpc.server import serve
from tests.support.trainer_steps import RUN


class FakeScheduler(wire.FleetServiceServicer, wire.TrajectoryServiceServicer, wire.AdminServiceServicer):
    """One run. Steps 1..len(steps); then it is FINISHED."""

    def __init__(self, steps, model, settings):
        self.steps = dict(enumerate(steps, 1))
        self.run = wire.Run(
            name=RUN, kind=wire.RUN_KIND_TRAIN, state=wire.RUN_STATE_ACTIVE, group_size=2,
            policies=[wire.Policy(model=str(model), head=wire.VersionRef(lineage=1, number=0))],
            batch=wire.BatchSize(groups=4),
        )  # fmt: skip
        self.run.algorithm.name = "grpo"
        self.run.algorithm.settings.update(settings)
        self.limit = len(steps)
        self.head = 0
        self.versions = {0: wire.VERSION_STATE_PUBLISHED}
        self.files = {}
        self.checkpoints = {}
        self.commits = []
        self.refuse_commits = 0
        self.returned = []
        self.incidents = []
        self.statuses = []
        self.results = {}
        self.roster = {}
        self.roster_revision = 1
        self.sessions = {}
        self.commands = defaultdict(list)
        self.changed = asyncio.Condition()
        self._sequence = 0
        self._epoch = 0
        self._server = None

    async def start(self):
        adds = [
            wire.add_FleetServiceServicer_to_server,
            wire.add_TrajectoryServiceServicer_to_server,
            wire.add_AdminServiceServicer_to_server,
        ]
        names = ["libra.v1.FleetService", "libra.v1.TrajectoryService", "libra.v1.AdminService"]
        self._server = await serve([(add, self) for add in adds], "127.0.0.1:0", service_names=names)
        return self._server.address

    async def stop(self):
        await self._server.stop(0.1)

    async def touch(self):
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition, seconds=90.0):
        """Returns once the condition holds; looked at after each change here."""
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(condition), seconds)

    # ---- hand-over

    async def command(self, worker, **action):
        await self.until(lambda: worker in self.sessions)
        self._sequence += 1
        command = wire.Command(name=f"commands/{uuid.uuid4()}", valid_for=wire.duration(60.0), **action)
        command.fence.CopyFrom(wire.Fence(term=1, session_epoch=self.sessions[worker], sequence=self._sequence))
        self.commands[worker].append(command)
        await self.touch()
        await self.until(lambda: command.name in self.results)
        return self.results[command.name]

    async def grant(self, worker, generation, accelerator="nodes/n0/accelerators/0"):
        self.roster[worker] = wire.RosterMember(
            worker=f"workers/{worker}", replica=f"replicas/{generation}", generation=generation
        )
        self.roster_revision += 1
        spec = wire.ReplicaSpec(role=wire.ROLE_TRAINER, accelerators=[accelerator])
        return await self.handover(worker, generation, wire.HANDOVER_KIND_GRANT, spec)

    async def release(self, worker):
        member = self.roster.pop(worker)
        self.roster_revision += 1
        return await self.handover(worker, member.generation, wire.HANDOVER_KIND_RELEASE, wire.ReplicaSpec())

    async def handover(self, worker, generation, kind, spec):
        step = wire.HandoverStep(kind=kind, replica=f"replicas/{generation}", generation=generation)
        return await self.command(worker, handover=wire.HandoverCommand(step=step, spec=spec))

    # ---- FleetService

    async def BeginSession(self, request, context):
        self._epoch += 1
        worker = request.worker.removeprefix("workers/")
        self.sessions[worker] = self._epoch
        self.commands[worker].clear()
        await self.touch()
        session = wire.Session(name=f"{request.worker}/sessions/{self._epoch}", epoch=self._epoch)
        return wire.BeginSessionResponse(stamp=self._stamp(), session=session, lease=self._lease())

    async def Report(self, request, context):
        for result in request.delta.results:
            if result.state != wire.COMMAND_STATE_ACCEPTED:
                self.results[result.command] = result
        self.incidents.extend(request.delta.incidents)
        self.statuses.extend(request.delta.replicas)
        await self.touch()
        return wire.ReportResponse(stamp=self._stamp(), acked_seq=request.seq, lease=self._lease())

    async def Await(self, request, context):
        worker = request.caller.session.split("/")[1]
        started = time.monotonic()

        def news():
            return request.desired_revision < self.roster_revision or any(
                c.fence.sequence > request.command_sequence for c in self.commands[worker]
            )

        async with self.changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait_for(news), 1.0)
        answer = wire.AwaitResponse(stamp=self._stamp(), lease=self._lease())
        answer.held_for.CopyFrom(wire.duration(time.monotonic() - started))
        if request.desired_revision < self.roster_revision:
            roster = wire.Roster(revision=self.roster_revision, members=list(self.roster.values()))
            runs = [self.run] if self.run.state == wire.RUN_STATE_ACTIVE else []
            answer.desired.CopyFrom(
                wire.Desired(revision=self.roster_revision, complete=True, runs=runs, roster=roster)
            )
        answer.commands.extend(c for c in self.commands[worker] if c.fence.sequence > request.command_sequence)
        return answer

    async def EndSession(self, request, context):
        return wire.EndSessionResponse(stamp=self._stamp())

    # ---- TrajectoryService

    async def GetRun(self, request, context):
        self.run.policies[0].head.number = self.head
        return wire.GetRunResponse(stamp=self._stamp(), run=self.run)

    async def TakeBatch(self, request, context):
        assert request.size == self.run.batch
        if request.step <= self.head:
            return self._taken(request.step)
        if request.step > self.head + 1:
            raise errors.illegal_transition(f"the next step is {self.head + 1}")
        if request.step not in self.steps:
            self.run.state = wire.RUN_STATE_FINISHED
            raise LibraError("RUN_NOT_ACTIVE", "no tasks are left")

        def ready():
            published = self.versions.get(request.step - 1) == wire.VERSION_STATE_PUBLISHED
            return published and request.step <= self.limit

        try:
            await self.until(ready, wire.seconds(request.wait))
        except TimeoutError:
            raise LibraError("NO_PROGRESS", "no groups are ready", cause="no groups") from None
        return self._taken(request.step)

    def _taken(self, step):
        roster = wire.Roster(revision=self.roster_revision, members=list(self.roster.values()))
        return wire.TakeBatchResponse(stamp=self._stamp(), manifest=self.steps[step][0], roster=roster)

    async def ListManifestMembers(self, request, context):
        members = next(m for h, m in self.steps.values() if h.name == request.manifest)
        start = int(request.page_token or 0)
        page = members[start : start + 3]
        token = str(start + 3) if start + 3 < len(members) else ""
        return wire.ListManifestMembersResponse(stamp=self._stamp(), members=page, next_page_token=token)

    async def CommitStep(self, request, context):
        step = next(n for n, (h, _) in self.steps.items() if h.name == request.manifest)
        manifest = self.steps[step][0]
        if self.refuse_commits:
            self.refuse_commits -= 1
            raise LibraError("COMMIT_REFUSED", "as the test wanted")
        found = (request.base_version, request.trainable_tokens)
        if found != (manifest.base_version, manifest.divisors.trainable_tokens):
            raise LibraError("COMMIT_REFUSED", "base version or token sum")
        if any(m not in self.roster.values() for m in request.members) or not request.members:
            raise LibraError("COMMIT_REFUSED", "members outside the roster")
        self.commits.append((step, request.caller.session, tuple(m.generation for m in request.members)))
        if manifest.state == wire.MANIFEST_STATE_TAKEN:
            manifest.state = wire.MANIFEST_STATE_COMMITTED
            self.head = step
            self.versions[step] = wire.VERSION_STATE_COMMITTED
            if step == len(self.steps):
                # the last trajectory is terminal now, whatever becomes of the weights
                self.run.state = wire.RUN_STATE_FINISHED
            await self.touch()
        return wire.CommitStepResponse(stamp=self._stamp(), version=wire.VersionRef(lineage=1, number=step))

    async def ReturnBatch(self, request, context):
        self.returned.append(request)
        step = next(n for n, (h, _) in self.steps.items() if h.name == request.manifest)
        self.steps[step] = self.replacement
        await self.touch()
        return wire.ReturnBatchResponse(stamp=self._stamp())

    async def PublishWeights(self, request, context):
        number = request.version.number
        if self.versions.get(number) is None:
            raise LibraError("VERSION_UNUSABLE", f"version {number} is not committed")
        if number in self.files and self.files[number] != request.files:
            raise LibraError("IMMUTABLE_FIELD", "other files")
        self.files[number] = request.files
        self.versions[number] = wire.VERSION_STATE_PUBLISHED
        if request.HasField("checkpoint"):
            self.checkpoints[number] = request.checkpoint
        await self.touch()
        return wire.PublishWeightsResponse(stamp=self._stamp(), version=self._version(number))

    # ---- AdminService

    async def ListResources(self, request, context):
        if list(request.selector.kinds) == [wire.RESOURCE_KIND_RUN]:
            self.run.policies[0].head.number = self.head
            return wire.ListResourcesResponse(stamp=self._stamp(), resources=[wire.Resource(run=self.run)])
        assert request.selector.name_prefix == RUN
        if list(request.selector.kinds) == [wire.RESOURCE_KIND_MANIFEST]:
            found = [wire.Resource(manifest=h) for h, _ in self.steps.values()]
        else:
            found = [wire.Resource(weight_version=self._version(n)) for n in self.versions]
        return wire.ListResourcesResponse(stamp=self._stamp(), resources=found)

    def _version(self, number):
        version = wire.WeightVersion(
            name=f"{RUN}/policies/default/lineages/1/versions/{number}",
            version=wire.VersionRef(lineage=1, number=number),
            state=self.versions[number],
        )
        if number in self.files:
            version.files.CopyFrom(self.files[number])
        return version

    @staticmethod
    def _stamp():
        return wire.Stamp(term=1, revision=1)

    @staticmethod
    def _lease():
        return wire.LeaseTerms(ttl=wire.duration(20.0), margin=wire.duration(1.0), report_interval=wire.duration(0.2))
