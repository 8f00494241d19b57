"""The node agent: speaks for a node's hardware, proves releases, keeps the worker processes.

Measuring and proving read files only; nothing here waits for a worker. A holder that should be gone (the scheduler asks
to confirm it) and still is there after `kill_after_s` is killed: a worker whose session ended must have let go by
itself, so one that has not is frozen or broken.
"""

import asyncio
import contextlib
import time

from services.common import errors, log, wire
from services.common.processes import Supervised
from services.common.session import FleetSession, SessionLost
from services.node import memory
from services.node.accelerators import MIB, Proof, Slot, WorkerView
from services.node.config import NodeConfig
from services.node.workers import Workers

_log = log.get(__name__)

HOST_MEMORY_STEP = 256 * MIB
"""Free host memory is reported in such steps: its last digits are no news."""
MAX_REASON_BYTES = 1_024
LEAVE_SECONDS = 15.0
"""Longest wait, when the agent ends, for the scheduler to have asked for the last proofs: longer than the lease of a
worker that had to be killed and so could not end its session itself."""


class NodeAgent:
    """FleetHandler of a node."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self.workers = Workers(config, self._worker_changed)
        self.slots = {
            config.accelerator_name(a.index): Slot(
                config.accelerator_name(a.index), a, config.locks, config.residue_mib * MIB
            )
            for a in config.accelerators
        }
        for template in config.workers:
            worker = self.workers.by_name[template.name]
            view = WorkerView(
                name=template.name,
                accelerators=template.accelerators,
                pid=lambda worker=worker: worker.pid,  # type: ignore[misc]
                ready=lambda worker=worker: worker.state == "READY",  # type: ignore[misc]
            )
            for accelerator in template.accelerators:
                self.slots[accelerator].workers.append(view)
        self.session = FleetSession(
            config.scheduler, config.worker or f"node-{config.node}", wire.WORKER_KIND_NODE, handler=self
        )
        self.observed: list[wire.AcceleratorObservation] = []
        """The newest measurement."""
        self._held_since: dict[tuple[str, int], float] = {}
        self._incidents: asyncio.Queue[wire.Incident] = asyncio.Queue(maxsize=256)
        self._reported: dict[str, tuple[int, tuple[tuple[int, int], ...]]] = {}
        self._reported_epoch = 0

    # ---- measuring

    async def measure_forever(self) -> None:
        """Measures, hands the newest load to the session, and reports what changed as a delta."""
        while True:
            observations = self.measure()
            await self._report_changes(observations)
            await asyncio.sleep(self._config.measure_s)

    def measure(self) -> list[wire.AcceleratorObservation]:
        """Measures everything now and makes it the session's load."""
        self.observed = observations = [slot.observe() for slot in self.slots.values()]
        total, available = memory.host()
        node = wire.Node(
            name=f"nodes/{self._config.node}",
            host_memory_bytes=total,
            host_memory_free_bytes=available // HOST_MEMORY_STEP * HOST_MEMORY_STEP,
            rack=self._config.rack,
        )
        described = [slot.describe() for slot in self.slots.values()]
        load = wire.NodeLoad(node=node, accelerators=described, observations=observations)
        self.session.set_load(wire.Load(node=load))
        return observations

    async def _report_changes(self, observations: list[wire.AcceleratorObservation]) -> None:
        """Who holds what is worth a committed report when it changes; the free bytes alone go with the load."""
        if self.session.epoch != self._reported_epoch:
            self._reported.clear()
            self._reported_epoch = self.session.epoch
        delta = wire.Delta()
        for observation in observations:
            key = (observation.locked_generation, tuple((h.pid, h.generation) for h in observation.holders))
            if self._reported.get(observation.accelerator) != key:
                delta.observations.append(observation)
                self._reported[observation.accelerator] = key
        while not self._incidents.empty() and len(delta.incidents) < 16:
            delta.incidents.append(self._incidents.get_nowait())
        if delta.observations or delta.incidents:
            try:
                await self.session.report(delta)
            except SessionLost:
                for incident in delta.incidents:
                    self._put_incident(incident)
                self._reported.clear()

    def _worker_changed(self, worker: Supervised) -> None:
        if worker.state == "READY":
            # the idle baseline: before the scheduler can have granted anything
            for accelerator in self.workers.templates[worker.name].accelerators:
                self.slots[accelerator].held()
        if worker.state in ("PAUSED", "RETIRED"):
            code = "WORKER_CRASHED" if worker.state == "PAUSED" else "WORKER_RETIRED"
            text = worker.message.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
            numbers = {"restarts": float(worker.restarts), "exit_code": float(worker.exit_code or 0)}
            self._put_incident(
                wire.Incident(
                    resource=f"workers/{worker.name}", reason=wire.Reason(code=code, text=text, numbers=numbers)
                )
            )

    def _put_incident(self, incident: wire.Incident) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self._incidents.put_nowait(incident)

    async def leave(self) -> None:
        """Ends all workers, answers for what they held and ends the session in order; the node's hardware goes with it.

        What the scheduler could not be shown to be free within LEAVE_SECONDS stays unconfirmed there.
        """
        await self.workers.stop_all()
        if not await self.session.leave(LEAVE_SECONDS):
            await self.session.stop(abandon=True)

    # ---- what the scheduler says

    async def on_desired(self, desired: wire.Desired) -> None:
        """Nothing is placed on an agent itself."""

    async def on_session_lost(self, reason: str) -> None:
        """Workers keep their own sessions; the agent only begins a new one."""
        _log.warning("the agent's session ended; workers go on", reason=reason)

    async def on_command(self, command: wire.Command) -> wire.CommandResult:
        """CONFIRM, START and STOP; anything else is not for an agent."""
        match command.WhichOneof("action"):
            case "handover" if command.handover.step.kind == wire.HANDOVER_KIND_CONFIRM:
                return self._confirm(command)
            case "start_worker":
                start = command.start_worker
                self._check_generation(start)
                self.workers.start(start.worker, start.template)
                return wire.CommandResult(state=wire.COMMAND_STATE_SUCCEEDED)
            case "stop_worker":
                return await self._stop(command.stop_worker)
            case other:
                raise errors.invalid_field(
                    f"{other} is not for a node agent; expected CONFIRM, start_worker or stop_worker"
                )

    def _confirm(self, command: wire.Command) -> wire.CommandResult:
        step = command.handover.step
        # a replica may span nodes: each agent proves its own part
        mine = [a for a in command.handover.spec.accelerators if a in self.slots]
        if not mine:
            named = ", ".join(command.handover.spec.accelerators) or "no accelerator named"
            raise errors.not_found(f"{named} on nodes/{self._config.node}")
        proofs = [self.slots[a].prove_free(step.generation) for a in mine]
        failed = [p for p in proofs if not p.free]
        answer = wire.HandoverStep()
        answer.CopyFrom(step)
        answer.observations.extend(self.slots[a].observe() for a in mine)
        key = (step.replica, step.generation)
        if not failed:
            self._held_since.pop(key, None)
            answer.state = wire.HANDOVER_STEP_STATE_DONE
            return wire.CommandResult(state=wire.COMMAND_STATE_SUCCEEDED, handover=answer)
        since = self._held_since.setdefault(key, time.monotonic())
        waited = time.monotonic() - since
        text = "; ".join(p.why for p in failed)
        if waited >= self._config.kill_after_s:
            text += self._kill_blockers(failed, waited)
            del self._held_since[key]
        reason = wire.Reason(
            code="RELEASE_UNCONFIRMED", text=text[:MAX_REASON_BYTES], numbers={**failed[0].numbers, "waited_s": waited}
        )
        answer.state = wire.HANDOVER_STEP_STATE_FAILED
        answer.reason.CopyFrom(reason)
        return wire.CommandResult(state=wire.COMMAND_STATE_FAILED, reason=reason, handover=answer)

    def _kill_blockers(self, failed: list[Proof], waited: float) -> str:
        killed = []
        for held in {h.pid: h for p in failed for h in p.blockers}.values():
            # only processes this agent started: any other one is for the operator
            if held.worker:
                self.workers.kill(held.worker)
                killed.append(f"{held.worker} ({held.pid})")
        if not killed:
            return f"; after {waited:.0f} s still there, and not a process of this agent: end it by hand"
        _log.warning("killed what did not let go", processes=killed, waited_s=round(waited, 1))
        return f"; killed {', '.join(killed)} after {waited:.0f} s, ask again"

    def _check_generation(self, start: wire.StartWorkerCommand) -> None:
        for accelerator in start.accelerators:
            slot = self.slots.get(accelerator)
            if slot is None:
                raise errors.not_found(accelerator)
            seen, _, _ = slot.lock.probe()
            if start.generation < seen:
                raise errors.stale_fence(
                    f"{accelerator} was held under generation {seen}; {start.generation} is older",
                    resource=accelerator, expected=str(seen), actual=str(start.generation),
                )  # fmt: skip

    async def _stop(self, stop: wire.StopWorkerCommand) -> wire.CommandResult:
        name = stop.worker.removeprefix("workers/")
        template = self.workers.templates.get(name)
        if template is None:
            raise errors.not_found(stop.worker)
        held = [h for a in template.accelerators for h in self.slots[a].held() if h.worker == name and h.locked]
        newer = [h for h in held if h.generation > stop.up_to_generation]
        if newer:
            raise errors.stale_fence(
                f"{stop.worker} holds generation {newer[0].generation}; the command ends only generations up to "
                f"{stop.up_to_generation}",
                resource=stop.worker, expected=str(newer[0].generation), actual=str(stop.up_to_generation),
            )  # fmt: skip
        await self.workers.stop(name, wire.seconds(stop.grace))
        observations = wire.AcceleratorObservations(
            observations=[self.slots[a].observe() for a in template.accelerators]
        )
        return wire.CommandResult(state=wire.COMMAND_STATE_SUCCEEDED, stopped=observations)
