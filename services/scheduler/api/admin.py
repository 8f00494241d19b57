"""AdminService: operators read everything and change what operators may change."""

from collections.abc import AsyncIterator

from services.common import errors, wire
from services.common.rpc.channel import MAX_ANSWER_BYTES
from services.common.rpc.server import Context
from services.scheduler.api import convert, pages, render
from services.scheduler.api.idempotency import Idempotency
from services.scheduler.api.resources import Resources
from services.scheduler.api.watching import watch
from services.scheduler.control import commands
from services.scheduler.control.cycle import Cycle
from services.scheduler.control.explain import explain
from services.scheduler.control.ledger import Change
from services.scheduler.core.lifecycle import RUN
from services.scheduler.store.store import Store


class AdminService(wire.AdminServiceServicer):
    """Reads, watches, explains; plans, moves, preempts, pauses."""

    def __init__(self, cycle: Cycle, store: Store, idempotency: Idempotency) -> None:
        self._cycle = cycle
        self._ledger = cycle.ledger
        self._store = store
        self._idempotency = idempotency
        self._resources = Resources(cycle, store)

    def _stamp(self, revision: int = 0) -> wire.Stamp:
        return render.stamp(self._ledger.fleet, revision or None)

    # ---- reading

    async def GetResource(self, request: wire.GetResourceRequest, context: Context) -> wire.GetResourceResponse:
        await self._ledger.barrier()
        return wire.GetResourceResponse(stamp=self._stamp(), resource=await self._resources.get(request.name))

    async def ListResources(self, request: wire.ListResourcesRequest, context: Context) -> wire.ListResourcesResponse:
        selector = request.selector
        if len(selector.kinds) != 1 or not selector.kinds[0]:
            raise errors.invalid_field(f"selector.kinds: {len(selector.kinds)} given; expected exactly one")
        kind = wire.ResourceKind.Name(selector.kinds[0]).removeprefix("RESOURCE_KIND_")
        query = (kind, selector.name_prefix, tuple(selector.states))
        token = pages.decode(request.page_token, query)
        size = pages.size(request.page_size)
        await self._ledger.barrier()
        revision = token.revision or self._ledger.fleet.revision
        rows = await self._resources.page(kind, selector.name_prefix, tuple(selector.states), token.after, size)
        answer = wire.ListResourcesResponse(stamp=self._stamp(revision))
        total = 0
        for row in rows:
            resource = await self._resources.render(kind, row)
            total += resource.ByteSize()
            if answer.resources and total > MAX_ANSWER_BYTES:
                break
            answer.resources.append(resource)
        if rows and (len(rows) == size or len(answer.resources) < len(rows)):
            last = rows[len(answer.resources) - 1]
            answer.next_page_token = pages.encode(revision, last.name, query)  # type: ignore[attr-defined]
        return answer

    async def ListEvents(self, request: wire.ListEventsRequest, context: Context) -> wire.ListEventsResponse:
        selector = request.selector
        kinds = tuple(wire.ResourceKind.Name(k).removeprefix("RESOURCE_KIND_") for k in selector.kinds if k)
        query = (kinds, selector.name_prefix, tuple(selector.states), request.start_revision)
        token = pages.decode(request.page_token, query)
        size = pages.size(request.page_size)
        compacted = await self._store.compacted_revision()
        if 0 < request.start_revision <= compacted:
            raise errors.LibraError(
                "COMPACTED", f"events up to revision {compacted} are gone", compacted_revision=str(compacted)
            )
        await self._ledger.barrier()
        after, index = (int(x) for x in (token.after or f"{max(0, request.start_revision - 1)}.{1 << 30}").split("."))
        events = await self._store.events(
            after, size, after_index=index, kinds=kinds, name_prefix=selector.name_prefix, states=tuple(selector.states)
        )
        answer = wire.ListEventsResponse(stamp=self._stamp(), events=[render.event(e) for e in events])
        if len(events) >= size:
            answer.next_page_token = pages.encode(0, f"{events[-1].revision}.{events[-1].index}", query)
        return answer

    async def Watch(self, request: wire.WatchRequest, context: Context) -> AsyncIterator[wire.WatchResponse]:
        async for batch in watch(self._cycle, self._store, request.options, context):
            yield wire.WatchResponse(batch=batch)

    async def Explain(self, request: wire.ExplainRequest, context: Context) -> wire.ExplainResponse:
        await self._ledger.barrier()
        resource = await self._resources.get(request.name)
        assert resource is not None
        summary = explain(self._cycle, request.name, resource)
        answer = wire.ExplainResponse(stamp=self._stamp(), summary=summary)
        recorded = await self._store.events_of(request.name, 32)
        rows = [
            (e.time, e.reason_code, e.reason_text, dict(e.numbers), e.revision, "")
            for e in recorded
            if e.reason_code or e.reason_text
        ]
        rows += [(d.time, d.code, d.text, dict(d.numbers), 0, d.about) for d in self._cycle.decisions.of(request.name)]
        for when, code, text, numbers, revision, about in sorted(rows, key=lambda r: -r[0])[:64]:
            answer.decisions.add(
                time=wire.timestamp(when), reason=render.reason(code, text, numbers), revision=revision, name=about
            )
        return answer

    # ---- plans and moves

    async def ProposePlan(self, request: wire.ProposePlanRequest, context: Context) -> wire.ProposePlanResponse:
        if request.HasField("layout"):
            raise errors.LibraError(
                "INVALID_FIELD",
                "judging a given layout is not supported yet; leave it unset to search (docs/limits.md)",
            )

        def mutate(change: Change) -> wire.ProposePlanResponse:
            plan = self._cycle.planning.propose(
                change, wire.seconds(request.horizon) if request.HasField("horizon") else None
            )
            return wire.ProposePlanResponse(stamp=self._stamp(self._ledger.fleet.revision + 1), plan=render.plan(plan))

        return await self._idempotency.run("ProposePlan", request, wire.ProposePlanResponse, mutate, "operator")

    async def ApplyPlan(self, request: wire.ApplyPlanRequest, context: Context) -> wire.ApplyPlanResponse:
        raise errors.unimplemented("AdminService.ApplyPlan")

    async def Reassign(self, request: wire.ReassignRequest, context: Context) -> wire.ReassignResponse:
        note = convert.note(request.note)

        def mutate(change: Change) -> wire.ReassignResponse:
            fleet = self._ledger.fleet
            if len(request.sources) != 1 or len(request.targets) != 1:
                raise errors.invalid_field(
                    f"{len(request.sources)} sources and {len(request.targets)} targets; only moves of one "
                    "replica are supported (docs/limits.md)"
                )
            source = request.sources[0]
            replica = fleet.replicas.get(source.replica)
            if replica is None:
                raise errors.not_found(source.replica)
            if replica.generation != source.generation:
                raise errors.stale_fence(
                    f"{replica.name} has generation {replica.generation}; {source.generation} was expected",
                    expected=str(source.generation), actual=str(replica.generation),
                )  # fmt: skip
            spec = request.targets[0].spec
            role = wire.Role.Name(spec.role).removeprefix("ROLE_")
            accelerators = tuple(spec.accelerators) or replica.accelerators
            if role not in ("ROLLOUT", "TRAINER"):
                raise errors.invalid_field(f"target role {role}: expected ROLLOUT or TRAINER")
            if set(accelerators) != set(replica.accelerators):
                raise errors.invalid_field("the target must stand on exactly the source's accelerators")
            if role == replica.role:
                raise errors.illegal_transition(f"{replica.name} serves {role} already")
            if replica.reassignment or replica.state not in ("ACTIVE", "CORDONED", "SUSPECT"):
                raise errors.illegal_transition(f"{replica.name} is {replica.state} and cannot be moved now")
            pools = {fleet.accelerators[a].pool for a in accelerators}
            if pools != {"HYBRID"}:
                raise errors.LibraError(
                    "LIMIT_BROKEN", f"{', '.join(accelerators)}: only HYBRID accelerators change sides"
                )
            shapes = self._cycle.handovers.shapes
            type_ = fleet.accelerators[accelerators[0]].type
            if shapes.rates is not None and not shapes.rates.has(role, type_, len(accelerators)):
                raise errors.LibraError(
                    "LIMIT_BROKEN",
                    f"the planner's table of rates has no {role} replica of {len(accelerators)} x {type_}; add its "
                    "kind to the file",
                )
            session = shapes.worker_for(change, role, accelerators)
            if session is None:
                raise errors.LibraError(
                    "LIMIT_BROKEN", f"no live {role} worker was started with {', '.join(accelerators)}"
                )
            target = shapes.target(fleet, role, accelerators, session.worker)
            item = self._cycle.handovers.start(
                change, [replica], [target], cause="operator", code="OPERATOR", text=note or "asked for by an operator"
            )
            if request.HasField("timeout"):
                item.timeout = wire.seconds(request.timeout)
                item.deadline_at = change.at + item.timeout
            return wire.ReassignResponse(stamp=self._stamp(fleet.revision + 1), reassignment=render.reassignment(item))

        return await self._idempotency.run("Reassign", request, wire.ReassignResponse, mutate, "operator")

    async def CancelReassignment(
        self, request: wire.CancelReassignmentRequest, context: Context
    ) -> wire.CancelReassignmentResponse:
        def mutate(change: Change) -> wire.CancelReassignmentResponse:
            item = self._ledger.fleet.reassignments.get(request.name)
            if item is None:
                raise errors.not_found(request.name)
            if item.state not in ("PENDING", "DRAINING", "RELEASING", "GRANTING", "LOADING"):
                raise errors.illegal_transition(f"{item.name} is {item.state}")
            self._cycle.handovers.fail(change, item, "OPERATOR", "cancelled by an operator")
            return wire.CancelReassignmentResponse(
                stamp=self._stamp(self._ledger.fleet.revision + 1), reassignment=render.reassignment(item)
            )

        return await self._idempotency.run(
            "CancelReassignment", request, wire.CancelReassignmentResponse, mutate, "operator"
        )

    async def ConfirmReleased(
        self, request: wire.ConfirmReleasedRequest, context: Context
    ) -> wire.ConfirmReleasedResponse:
        if not request.note:
            raise errors.invalid_field("note: say how it is known that the holder is dead and the memory free")
        note = convert.note(request.note)

        def mutate(change: Change) -> wire.ConfirmReleasedResponse:
            replica = self._ledger.fleet.replicas.get(request.replica)
            if replica is None:
                raise errors.not_found(request.replica)
            if replica.generation != request.generation:
                raise errors.stale_fence(
                    f"{replica.name} has generation {replica.generation}, not {request.generation}"
                )
            if replica.state not in ("UNCONFIRMED", "QUARANTINED"):
                raise errors.illegal_transition(
                    f"{replica.name} is {replica.state}; only UNCONFIRMED or QUARANTINED ones wait for this"
                )
            self._cycle.handovers.confirmed(change, replica, "OPERATOR", note)
            return wire.ConfirmReleasedResponse(
                stamp=self._stamp(self._ledger.fleet.revision + 1), replica=render.replica(replica)
            )

        return await self._idempotency.run("ConfirmReleased", request, wire.ConfirmReleasedResponse, mutate, "operator")

    async def Preempt(self, request: wire.PreemptRequest, context: Context) -> wire.PreemptResponse:
        if not 1 <= len(request.trajectories) <= 256:
            raise errors.invalid_field(f"trajectories: {len(request.trajectories)} given; expected 1 to 256")
        note = convert.note(request.note)

        def mutate(change: Change) -> wire.PreemptResponse:
            fleet = self._ledger.fleet
            answer = wire.PreemptResponse(stamp=self._stamp(fleet.revision + 1))
            for name in request.trajectories:
                item = fleet.trajectories.get(name)
                open_one = commands.open_commands(self._ledger, subject=name, kind="preempt")
                if item is None or item.state != "LEASED" or open_one:
                    answer.commands.append("")
                    continue
                command = commands.preempt(
                    change,
                    item,
                    cause="operator",
                    at_turn_end=False,
                    code="OPERATOR",
                    text=note or "asked for by an operator",
                )
                answer.commands.append(command.name)
            return answer

        return await self._idempotency.run("Preempt", request, wire.PreemptResponse, mutate, "operator")

    # ---- runs

    async def PauseRun(self, request: wire.PauseRunRequest, context: Context) -> wire.PauseRunResponse:
        note = convert.note(request.note)

        def mutate(change: Change) -> wire.PauseRunResponse:
            run = self._ledger.fleet.runs.get(request.name)
            if run is None:
                raise errors.not_found(request.name)
            if run.state != "ACTIVE":
                raise errors.illegal_transition(f"{run.name} is {run.state}")
            run.etag += 1
            change.move(RUN, run, "pause", "OPERATOR", note or "paused by an operator")
            for item in self._ledger.fleet.trajectories.values():
                if item.run == run.name and item.state == "LEASED":
                    commands.preempt(
                        change, item, cause="operator", at_turn_end=False, code="RUN_PAUSED", text=run.reason_text
                    )
            return wire.PauseRunResponse(stamp=self._stamp(self._ledger.fleet.revision + 1), run=render.run(run))

        return await self._idempotency.run("PauseRun", request, wire.PauseRunResponse, mutate, "operator")

    async def ResumeRun(self, request: wire.ResumeRunRequest, context: Context) -> wire.ResumeRunResponse:
        note = convert.note(request.note)
        paused = self._ledger.fleet.runs.get(request.name)
        if paused is not None and paused.task_blob and paused.name not in self._cycle.tasks:
            self._cycle.tasks[paused.name] = await self._cycle.read_tasks(paused)
            self._cycle.unreadable.pop(paused.name, None)

        def mutate(change: Change) -> wire.ResumeRunResponse:
            run = self._ledger.fleet.runs.get(request.name)
            if run is None:
                raise errors.not_found(request.name)
            if run.state != "PAUSED":
                raise errors.illegal_transition(f"{run.name} is {run.state}")
            run.etag += 1
            change.move(RUN, run, "resume", "OPERATOR", note or "resumed by an operator")
            return wire.ResumeRunResponse(stamp=self._stamp(self._ledger.fleet.revision + 1), run=render.run(run))

        return await self._idempotency.run("ResumeRun", request, wire.ResumeRunResponse, mutate, "operator")

    async def Cordon(self, request: wire.CordonRequest, context: Context) -> wire.CordonResponse:
        raise errors.unimplemented("AdminService.Cordon")

    async def Drain(self, request: wire.DrainRequest, context: Context) -> wire.DrainResponse:
        raise errors.unimplemented("AdminService.Drain")

    async def SetPool(self, request: wire.SetPoolRequest, context: Context) -> wire.SetPoolResponse:
        raise errors.unimplemented("AdminService.SetPool")
