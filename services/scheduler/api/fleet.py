"""FleetService: sessions of workers and node agents, their reports, and what they should have."""

import hashlib
from collections.abc import Callable
from functools import partial

from services.common import errors, log, wire
from services.common.rpc import requests
from services.common.rpc.channel import MAX_ANSWER_BYTES
from services.common.rpc.server import Context
from services.scheduler.api import convert, render
from services.scheduler.control import commands, sessions, trajectories
from services.scheduler.control.cycle import Cycle
from services.scheduler.control.dispatcher import Wanted
from services.scheduler.control.ledger import Change
from services.scheduler.core.lifecycle import COMMAND, SESSION, IllegalTransition
from services.scheduler.core.model import Accelerator, Command, Node, Session, Trajectory

_log = log.get(__name__)

AWAIT_SLACK_SECONDS = 1.0
"""An Await is answered this long before its deadline, so that the answer arrives in time."""


class FleetService(wire.FleetServiceServicer):
    """The workers' side of the scheduler."""

    def __init__(self, cycle: Cycle) -> None:
        self._cycle = cycle
        self._ledger = cycle.ledger
        self._awaiting: dict[str, int] = {}

    def _terms(self, session: Session) -> wire.LeaseTerms:
        leases = self._ledger.config.leases
        return wire.LeaseTerms(
            ttl=wire.duration(session.ttl),
            margin=wire.duration(min(leases.margin, session.ttl / 4)),
            report_interval=wire.duration(leases.report_interval),
        )

    async def BeginSession(self, request: wire.BeginSessionRequest, context: Context) -> wire.BeginSessionResponse:
        rid = convert.request_id(request.request_id)
        worker = convert.name(request.worker, convert.WORKER, "worker", "workers/rollout-1")
        kind = wire.WorkerKind.Name(request.kind).removeprefix("WORKER_KIND_")
        if kind == "UNSPECIFIED":
            raise errors.invalid_field("kind: expected ROLLOUT, TRAINER, TOOLENV, NODE or EXTERNAL")
        for accelerator in request.accelerators:
            convert.name(accelerator, convert.ACCELERATOR, "accelerators", "nodes/n0/accelerators/0")
        session, change = sessions.begin(
            self._ledger, self._cycle.holds, request_id=rid, worker_name=worker, kind=kind, endpoint=request.endpoint,
            version=request.software_version, features=tuple(request.features),
            accelerators=tuple(request.accelerators),
            ttl=wire.seconds(request.ttl),
        )  # fmt: skip
        await self._ledger.commit(change)
        return wire.BeginSessionResponse(
            stamp=render.stamp(self._ledger.fleet),
            session=render.session(session, self._ledger.fleet.workers[worker]),
            lease=self._terms(session),
            features=request.features,
        )

    async def EndSession(self, request: wire.EndSessionRequest, context: Context) -> wire.EndSessionResponse:
        convert.request_id(request.request_id)
        session = self._ledger.fleet.sessions.get(request.caller.session)
        if session is not None and session.state in sessions.ALIVE:
            sessions.check(self._ledger, request.caller.session, request.caller.epoch, request.caller.seen_term)
            held = self._held(session)
            if held and not request.abandon:
                raise errors.illegal_transition(
                    f"{session.name} still holds {', '.join(held)}; hand them over first, or set abandon",
                    resource=session.name,
                )
            change = self._ledger.change(session.name, request.request_id)
            sessions.end(change, self._cycle.holds, session, "close", "CLOSED", "closed by the worker")
            await self._ledger.commit(change)
        return wire.EndSessionResponse(stamp=render.stamp(self._ledger.fleet))

    def _held(self, session: Session) -> list[str]:
        """Replicas that a session answers for: its own, for a node agent those on its node's accelerators."""
        fleet = self._ledger.fleet
        mine = tuple(f"{n.name}/" for n in fleet.nodes.values() if n.agent_session == session.name)
        return [
            r.name
            for r in fleet.live_replicas()
            if r.owner_session == session.name or any(a.startswith(mine) for a in r.accelerators if mine)
        ]

    # ---- reports

    async def Report(self, request: wire.ReportRequest, context: Context) -> wire.ReportResponse:
        caller = request.caller
        session = sessions.check(self._ledger, caller.session, caller.epoch, caller.seen_term)
        if request.HasField("load"):
            self._take_load(session, request.load)
        if request.seq == 0:
            if request.WhichOneof("content"):
                raise errors.invalid_field("seq 0 is for load alone; number reports from 1")
            return self._answer(session, request, [])
        refusals = await self._numbered(session, request)
        return self._answer(session, request, refusals)

    async def _numbered(self, session: Session, request: wire.ReportRequest) -> list[wire.Refusal]:
        kind = request.WhichOneof("content")  # none: a mere renewal that has a number
        content = getattr(request, kind).SerializeToString(deterministic=True) if kind else b""
        digest = hashlib.sha256(f"{kind}\n".encode() + content).hexdigest()
        if request.seq == session.acked_seq:
            if digest != session.acked_sha256:
                raise errors.LibraError("REQUEST_ID_REUSED", f"report {request.seq} came again with other content")
            await self._ledger.barrier()
            return list(wire.ReportResponse.FromString(session.acked_answer).refusals)
        if request.seq != session.acked_seq + 1:
            raise errors.LibraError(
                "SEQUENCE_GAP", f"report {request.seq} after {session.acked_seq}", expected=str(session.acked_seq + 1)
            )
        change = self._ledger.change(session.name)
        refusals: list[wire.Refusal] = []
        with self._ledger.guard(change):
            if kind == "delta":
                refusals = self._delta(change, session, request.delta)
            elif kind == "state_page":
                self._page(change, session, request.state_page)
        session.acked_seq = request.seq
        session.acked_sha256 = digest
        session.acked_answer = wire.ReportResponse(refusals=refusals).SerializeToString()
        change.put(session)
        await self._ledger.commit(change)
        return refusals

    def _answer(
        self, session: Session, request: wire.ReportRequest, refusals: list[wire.Refusal]
    ) -> wire.ReportResponse:
        holdings = self._cycle.holds.of(session.name)
        # a load alone says nothing of the items that wait for the next numbered report
        need = request.seq > 0 and (not holdings.complete or holdings.digest != request.digest)
        need = need or session.state == "RECOVERING"
        return wire.ReportResponse(
            stamp=render.stamp(self._ledger.fleet), acked_seq=session.acked_seq, need_state=need, refusals=refusals,
            backpressure=wire.BACKPRESSURE_OPEN, lease=self._terms(session),
        )  # fmt: skip

    def _delta(self, change: Change, session: Session, delta: wire.Delta) -> list[wire.Refusal]:
        """Applies each part by itself; what is stale or wrong is named and left out."""
        for part, most in wire.DELTA_LIMITS.items():
            if len(getattr(delta, part)) > most:
                raise errors.invalid_field(f"{part}: {len(getattr(delta, part))} entries; at most {most} in one report")
        refusals: list[wire.Refusal] = []
        holdings = self._cycle.holds.of(session.name)
        for item in delta.changed:
            holdings.put(item.name, item.fence, item.state)
        for name in delta.removed:
            holdings.drop(name)
        attempt = partial(self._attempt, change, refusals)
        for status in delta.replicas:
            attempt(status, status.replica, partial(self._replica, change, session, status))
        for progress in delta.progress:
            attempt(progress, progress.trajectory, partial(self._progress, change, session, progress))
        for end in delta.ends:
            attempt(end, end.trajectory, partial(self._end, change, session, end))
        for result in delta.results:
            attempt(result, result.command, partial(self._result, change, session, result))
        for seen in delta.observations:
            attempt(seen, seen.accelerator, partial(self._cycle.observe.accelerator, seen))
        for incident in delta.incidents:
            attempt(incident, incident.resource, partial(self._incident, change, session, incident))
        return refusals

    @staticmethod
    def _attempt(
        change: Change, refusals: list[wire.Refusal], message: wire.Message, name: str, part: Callable[[], None]
    ) -> None:
        marks = change.marks
        try:
            requests.check(message)
            part()
        except errors.LibraError as error:
            code, text = error.reason, error.message
        except IllegalTransition as error:
            code, text = "ILLEGAL_TRANSITION", str(error)
        except Exception as error:  # one part that nobody expected must not keep the others from being registered
            if change.marks != marks:
                raise
            _log.error("a part of a report failed", part=name, error=repr(error), exc_info=error)
            code, text = "INTERNAL", f"{type(error).__name__} while this part was read; the scheduler's log says where"
        else:
            return
        refusals.append(wire.Refusal(name=name[:256], reason=wire.Reason(code=code, text=text[:1024])))

    @staticmethod
    def _incident(change: Change, session: Session, incident: wire.Incident) -> None:
        resource, reason = incident.resource[:256] or session.worker, incident.reason
        change.record("WORKER", resource, "", "", reason.code[:64], reason.text[:1024])

    def _progress(self, change: Change, session: Session, message: wire.TrajectoryProgress) -> None:
        report = convert.progress(message)
        trajectory = trajectories.progress(change, session.name, report)
        self._cycle.observe.progress(trajectory, report)

    def _end(self, change: Change, session: Session, message: wire.TrajectoryEnd) -> None:
        end = convert.trajectory_end(message)
        trajectory = trajectories.end(change, session.name, end)
        self._cycle.observe.ended(change, trajectory, end)

    def _replica(self, change: Change, session: Session, status: wire.ReplicaStatus) -> None:
        replica = self._ledger.fleet.replicas.get(status.replica)
        if replica is None or replica.owner_session != session.name or replica.generation != status.generation:
            raise errors.stale_fence(f"{status.replica} generation {status.generation} is not held by {session.name}")
        replica.endpoint = status.endpoint or replica.endpoint
        replica.engine_build = status.engine_build[:128] or replica.engine_build
        replica.positional_seed, replica.restarts = status.positional_seed, status.restarts
        change.put(replica)

    def _result(self, change: Change, session: Session, result: wire.CommandResult) -> None:
        command = self._ledger.fleet.commands.get(result.command)
        if command is None or command.session != session.name:
            raise errors.not_found(result.command)
        state = wire.CommandState.Name(result.state).removeprefix("COMMAND_STATE_")
        event = {"ACCEPTED": "accept", "SUCCEEDED": "succeed", "FAILED": "fail", "EXPIRED": "expire"}.get(state)
        if event is None:
            raise errors.invalid_field(
                f"{result.command}: state {state}; expected ACCEPTED, SUCCEEDED, FAILED or EXPIRED"
            )
        if command.state in COMMAND.terminal:
            if command.state == state:
                return
            raise errors.illegal_transition(f"{command.name} is {command.state}; it cannot become {state}")
        command.result = result.SerializeToString()
        code, text = result.reason.code[:64], result.reason.text[:1024]
        change.move(COMMAND, command, event, code or state, text, related=[command.subject, command.cause])
        if event != "accept":
            self._settled(change, command, result, code, text)

    def _settled(self, change: Change, command: Command, result: wire.CommandResult, code: str, text: str) -> None:
        succeeded = command.state == "SUCCEEDED"
        if command.kind.startswith("handover."):
            for observation in result.handover.observations:
                self._cycle.observe.accelerator(observation)
            self._cycle.handovers.on_result(change, command, succeeded, code, text)
        elif command.kind.startswith("load."):
            self._cycle.weights.on_result(change, command, succeeded, result.weights, text)

    def _page(self, change: Change, session: Session, page: wire.StatePage) -> None:
        holdings = self._cycle.holds.of(session.name)
        if page.page == 0:
            holdings.items.clear()
            holdings.digest = 0
            holdings.complete = False  # until the last page, what is missing proves nothing
        for item in page.items:
            holdings.put(item.name, item.fence, item.state)
        if not page.last:
            return
        holdings.complete = True
        if session.state == "RECOVERING":
            change.move(SESSION, session, "reported_in_full", "REPORTED", f"{len(holdings.items)} items")
        for name, (fence, _) in list(holdings.items.items()):
            known = self._ledger.fleet.trajectories.get(name) if "/trajectories/" in name else None
            foreign = known is None or known.holder != session.name or known.lease_epoch != fence
            if "/trajectories/" in name and foreign:
                session.desired_revision += 1
                revoked = self._ledger.revoked.by_session.setdefault(session.name, [])
                revoked.append((session.desired_revision, name))

    def _take_load(self, session: Session, load: wire.Load) -> None:
        """Newest wins; kept in memory, except what a node says of its hardware. A broken one is dropped."""
        kind = load.WhichOneof("kind")
        try:
            if kind == "node" and self._ledger.fleet.workers[session.worker].kind != "NODE":
                raise errors.invalid_field(f"{session.worker} is no node agent")
            requests.check(load)
            if kind == "node" and load.node.HasField("node"):
                convert.node(load.node.node)
                self._only_agent(session, load.node.node.name)
                for message in load.node.accelerators:
                    convert.accelerator(message)
        except errors.LibraError as error:
            _log.warning("load report dropped", worker=session.worker, why=error.message)
            return
        self._cycle.observe.load(session, load)
        if kind != "node" or not load.node.HasField("node"):
            return
        change = self._ledger.change(session.name)
        fleet = self._ledger.fleet
        node = fleet.nodes.get(load.node.node.name)
        if node is None or node.agent_session != session.name:
            node = node or Node(name=load.node.node.name)
            node.agent_session, node.rack = session.name, load.node.node.rack
            node.host_memory_bytes = load.node.node.host_memory_bytes
            fleet.nodes[node.name] = node
            change.put(node)
            change.record("NODE", node.name, "", "", "AGENT", f"{session.worker} speaks for it")
        with self._ledger.guard(change):
            for message in load.node.accelerators:
                self._accelerator(change, message)
        if not change.empty:
            self._ledger.submit(change)

    def _only_agent(self, session: Session, name: str) -> None:
        """A node has one agent: what a second one measured, perhaps on another machine, must not free anything here."""
        node = self._ledger.fleet.nodes.get(name)
        agent = self._ledger.fleet.sessions.get(node.agent_session) if node is not None else None
        if agent is not None and agent.worker != session.worker and agent.state in sessions.ALIVE:
            raise errors.inconsistent(
                f"{agent.worker} is the agent of {name}; {session.worker} says it is too: give each machine a name of "
                "its own, or end the other agent"
            )

    def _accelerator(self, change: Change, message: wire.Accelerator) -> None:
        known = change.fleet.accelerators.get(message.name)
        pool = wire.Pool.Name(message.pool).removeprefix("POOL_")
        if known is not None:
            if known.device_uuid != message.device_uuid:
                change.record(
                    "ACCELERATOR",
                    known.name,
                    "",
                    "",
                    "DEVICE_CHANGED",
                    f"was {known.device_uuid}, is {message.device_uuid}",
                )
                known.device_uuid = message.device_uuid
                change.put(known)
            return
        accelerator = Accelerator(
            name=message.name, type=message.type, device_uuid=message.device_uuid, memory_bytes=message.memory_bytes,
            link_domain=message.link_domain, partition=message.partition, cpu_share=message.cpu_share, pool=pool,
            sharing="TIME_SLICED" if message.sharing == wire.SHARING_TIME_SLICED else "EXCLUSIVE",
            preemptible=message.preemptible, price_per_hour=message.price_per_hour,
        )  # fmt: skip
        change.fleet.accelerators[accelerator.name] = accelerator
        change.put(accelerator)
        change.record("ACCELERATOR", accelerator.name, "", pool, "FOUND", f"{accelerator.type} in pool {pool}")

    # ---- what they should have

    async def Await(self, request: wire.AwaitRequest, context: Context) -> wire.AwaitResponse:
        clock = self._ledger.clock
        started = clock.monotonic()
        remaining = context.time_remaining() or 10.0
        until = started + max(0.05, min(remaining, 60.0) - AWAIT_SLACK_SECONDS)
        ticket = self._awaiting.get(request.caller.session, 0) + 1
        self._awaiting[request.caller.session] = ticket
        while True:
            session = sessions.check(
                self._ledger, request.caller.session, request.caller.epoch, request.caller.seen_term
            )
            wanted = self._cycle.dispatcher.wanted(session, request.desired_revision)
            sent = list(self._cycle.dispatcher.outbox(session, request.command_sequence))
            replaced = self._awaiting.get(session.name) != ticket
            if wanted is not None or sent or replaced or clock.monotonic() >= until:
                break
            await self._ledger.wait_change(min(1.0, until - clock.monotonic()))
        answer = wire.AwaitResponse(backpressure=wire.BACKPRESSURE_OPEN, lease=self._terms(session))
        if wanted is not None:
            answer.desired.CopyFrom(self._desired(wanted))
        change = self._ledger.change("scheduler/dispatcher")
        self._cycle.dispatcher.delivered(change, sent)
        # nothing is told that a crash could still undo
        await self._ledger.commit(change)
        now = clock.monotonic()
        answer.commands.extend(commands.message(c, self._ledger.fleet.term, now, session.epoch) for c in sent)
        answer.stamp.CopyFrom(render.stamp(self._ledger.fleet))
        answer.held_for.CopyFrom(wire.duration(now - started))
        return answer

    def _desired(self, wanted: Wanted) -> wire.Desired:
        message = wire.Desired(
            revision=wanted.revision, complete=wanted.complete, removed=wanted.removed[:1_024], more=wanted.more,
            runs=[render.run(r) for r in wanted.runs[:32]],
        )  # fmt: skip
        if wanted.roster or wanted.roster_revision:
            message.roster.CopyFrom(render.roster(wanted.roster_revision, wanted.roster))
        for replica in wanted.replicas:
            state = replica.state if replica.state in ("ACTIVE", "CORDONED", "ASLEEP") else "ACTIVE"
            if replica.state in ("DRAINING", "RELEASING"):
                state = "CORDONED"
            message.replicas.add(
                replica=replica.name, generation=replica.generation, spec=commands.replica_spec(replica),
                state=wire.ReplicaState.Value(f"REPLICA_STATE_{state}"),
            )  # fmt: skip
        size, before = 0, 0
        for item in wanted.trajectories:
            lease = self._lease(item)
            size += lease.ByteSize()
            if size > MAX_ANSWER_BYTES and before not in (0, item.lease_revision):
                # the rest comes with the next answer, as soon as the worker says that it has this much
                message.revision, message.complete, message.more = before, False, True
                break
            message.trajectories.append(lease)
            before = item.lease_revision
        return message

    def _lease(self, item: Trajectory) -> wire.TrajectoryLease:
        fleet = self._ledger.fleet
        run, group = fleet.runs[item.run], fleet.groups[item.group]
        key = (item.name, item.attempt)
        replica = fleet.replicas.get(item.replica)
        lease = wire.TrajectoryLease(
            trajectory=item.name, attempt=item.attempt, lease_epoch=item.lease_epoch, sample=item.sample,
            tokens_left=max(0, run.max_generated_tokens - item.tokens_spent - item.generated_tokens),
            time_left=wire.duration(run.max_run_time - item.run_seconds),
            turns_left=max(0, run.max_turns - item.turns_done),
            sequences=render.sequences(fleet.sequences.get(key, []), fleet.segments.get(key, [])),
            turns=render.turns(fleet.turns.get(key, [])), group_number=item.admission_number,
        )  # fmt: skip
        lease.task.ParseFromString(group.task)
        if replica is not None:
            lease.routes.add(replica=replica.name, generation=replica.generation, endpoint=replica.endpoint)
        if item.tool_sessions:
            lease.tool_sessions.extend(wire.Trajectory.FromString(item.tool_sessions).tool_sessions)
        lease.environments.extend(self._cycle.environments_of(run))
        return lease
