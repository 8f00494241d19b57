"""A worker's session with the scheduler: one Await always outstanding, reports in sequence, commands at most once.

The naive form would be: report each change in a call of its own, act on each command as it comes. This one batches the
changes of concurrent callers into one report (each caller is woken by the commit that holds its part), resends the very
same report until it is answered (the scheduler tells a repetition by its seq), and keeps a journal of commands by name,
so that a command delivered again has no second effect. Losing any message costs latency only.
"""

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import grpc
import grpc.aio

from services.common import log, wire
from services.common.errors import LibraError
from services.common.rpc.channel import connect
from services.common.rpc.status import from_rpc_error

_log = log.get(__name__)

MAX_DELTA_BYTES = 2 << 20
MAX_JOURNAL = 4_096
PAGE_ITEMS = 2_048
RETRY_SECONDS = (0.05, 2.0)
AWAIT_SECONDS = 10.0
REPORT_TIMEOUT_SECONDS = 10.0
LEAVE_RETRY_SECONDS = 0.2


class SessionLost(Exception):
    """The session that this report belonged to has ended; what it carried was not acknowledged."""


class SessionFenced(Exception):
    """A newer session of the same worker exists; this process must stop."""


class FleetHandler(Protocol):
    """What a worker does with what it is told."""

    async def on_desired(self, desired: wire.Desired) -> None:
        """Takes over what the worker should have. Called one at a time; must not wait for the work itself."""

    async def on_command(self, command: wire.Command) -> wire.CommandResult:
        """Carries a command out; called at most once for each. Commands run side by side."""

    async def on_session_lost(self, reason: str) -> None:
        """All leases are gone: stop the work, let go of replicas."""


class FleetSession:
    """Keeps a worker's session alive until `stop`. See FleetService for the rules that it follows."""

    def __init__(
        self,
        scheduler: str,
        worker: str,
        kind: "wire.WorkerKind.ValueType",
        *,
        handler: FleetHandler,
        endpoint: str = "",
        accelerators: Sequence[str] = (),
        features: Sequence[str] = (),
        ttl: float = 0.0,
        software_version: str = "",
    ) -> None:
        self.worker = worker if worker.startswith("workers/") else f"workers/{worker}"
        self.kind = kind
        self.endpoint = endpoint
        self.term = 0
        self.epoch = 0
        self.name = ""
        self._accelerators = list(accelerators)
        self._features = list(features)
        self._ttl_wish = ttl
        self._version = software_version
        self._handler = handler
        self._channel = connect(scheduler)
        self._stub = wire.FleetServiceStub(self._channel)
        self._stopping = asyncio.Event()
        self._lost = asyncio.Event()
        self._began = asyncio.Event()
        self._wake = asyncio.Event()
        self._items: dict[str, tuple[int, str]] = {}
        self._digest = 0
        self._changed: dict[str, None] = {}
        self._removed: dict[str, None] = {}
        self._queue: list[tuple[wire.Delta, asyncio.Future[list[wire.Refusal]]]] = []
        self._load: wire.Load | None = None
        self._load_dirty = False
        self._need_state = False
        self._seq = 0
        self._journal: OrderedDict[str, wire.CommandResult | None] = OrderedDict()
        self._command_sequence = 0
        self._desired_revision = 0
        self._ttl = 10.0
        self._margin = 1.0
        self._report_interval = 1.0
        self._valid_until = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Lock()

    # ---- what the worker calls

    async def run(self) -> None:
        """Begins a session and keeps it, again and again, until `stop`. Raises SessionFenced when replaced."""
        try:
            while not self._stopping.is_set():
                await self._begin()
                try:
                    reason = await self._keep()
                finally:
                    self._fail_queue()
                async with self._ending:
                    pass
                if reason and not self._stopping.is_set():
                    _log.warning("session lost", session=self.name, reason=reason)
                    await self._handler.on_session_lost(reason)
        finally:
            for task in list(self._tasks):
                task.cancel()

    @property
    def alive(self) -> bool:
        """True while a session exists and is not known to be over."""
        return self._began.is_set() and not self._lost.is_set()

    async def wait_begun(self) -> None:
        """Returns once a session exists."""
        await self._began.wait()

    async def report(self, delta: wire.Delta) -> list[wire.Refusal]:
        """Hands in changes; returns after the commit with what was refused of them. SessionLost if it ended first."""
        if self._lost.is_set() or not self._began.is_set():
            raise SessionLost(self.name or "no session yet")
        future: asyncio.Future[list[wire.Refusal]] = asyncio.get_running_loop().create_future()
        self._queue.append((delta, future))
        self._wake.set()
        return await future

    def set_load(self, load: wire.Load) -> None:
        """The newest load; sent with the next report, at the latest after the report interval."""
        self._load = load
        self._load_dirty = True

    def put_item(self, name: str, fence: int, state: str) -> None:
        """States that the worker has this; goes out with the next report."""
        if self._items.get(name) == (fence, state):
            return
        self.drop_item(name, quiet=True)
        self._items[name] = (fence, state)
        self._digest = (self._digest + item_digest(name, fence, state)) % (1 << 64)
        self._changed[name] = None
        self._removed.pop(name, None)

    def drop_item(self, name: str, *, quiet: bool = False) -> None:
        """States that the worker no longer has this."""
        old = self._items.pop(name, None)
        if old is not None:
            self._digest = (self._digest - item_digest(name, *old)) % (1 << 64)
        self._changed.pop(name, None)
        if old is not None and not quiet:
            self._removed[name] = None

    def caller(self) -> wire.Caller:
        """Signs a call to the scheduler."""
        return wire.Caller(session=self.name, epoch=self.epoch, seen_term=self.term)

    def lease_valid(self) -> bool:
        """True while this process may act on what it holds, by its own monotonic clock."""
        return time.monotonic() < self._valid_until

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel to the scheduler, for other services on it."""
        return self._channel

    async def leave(self, patience_s: float) -> bool:
        """Ends the session in order once the scheduler says that nothing is held any more; answers commands until then.

        False if that was not so within patience_s, or the session was over already: then it is still to be stopped.
        """
        deadline = time.monotonic() + patience_s
        refused = "the session was over already"
        while self.alive and time.monotonic() < deadline:
            request = wire.EndSessionRequest(request_id=str(uuid.uuid4()), caller=self.caller())
            # whether the session that is about to end is to be followed by another depends on the answer
            async with self._ending:
                try:
                    await self._stub.EndSession(request, timeout=2.0)
                except grpc.aio.AioRpcError as error:
                    refused = str(from_rpc_error(error))
                else:
                    self._stopping.set()
                    self._wake.set()
            if self._stopping.is_set():
                await self._channel.close()
                return True
            await asyncio.sleep(LEAVE_RETRY_SECONDS)
        _log.warning("the session cannot be ended in order", patience_s=patience_s, last=refused)
        return False

    async def stop(self, *, abandon: bool = False) -> None:
        """Flushes what is queued, ends the session in order and closes the channel."""
        deadline = time.monotonic() + REPORT_TIMEOUT_SECONDS
        while self._queue and time.monotonic() < deadline and not self._lost.is_set():
            self._wake.set()
            await asyncio.sleep(0.01)
        self._stopping.set()
        self._wake.set()
        if self._began.is_set() and not self._lost.is_set():
            request = wire.EndSessionRequest(request_id=str(uuid.uuid4()), caller=self.caller(), abandon=abandon)
            try:
                await self._stub.EndSession(request, timeout=2.0)
            except grpc.aio.AioRpcError as error:
                _log.warning("the session could not be ended in order", error=str(from_rpc_error(error)))
        await self._channel.close()

    # ---- the session

    async def _begin(self) -> None:
        request = wire.BeginSessionRequest(
            request_id=str(uuid.uuid4()),
            worker=self.worker,
            kind=self.kind,
            endpoint=self.endpoint,
            software_version=self._version,
            features=self._features,
            accelerators=self._accelerators,
        )
        if self._ttl_wish:
            request.ttl.CopyFrom(wire.duration(self._ttl_wish))
        delay = RETRY_SECONDS[0]
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                answer = await self._stub.BeginSession(request, timeout=5.0)
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                if failure.status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED):
                    raise failure from None
                await self._pause(delay)
                delay = min(delay * 2, RETRY_SECONDS[1])
                continue
            self.name, self.epoch, self.term = answer.session.name, answer.session.epoch, answer.stamp.term
            self._seq = self._command_sequence = self._desired_revision = 0
            self._journal.clear()
            self._changed = dict.fromkeys(self._items)
            self._removed.clear()
            self._need_state = False
            self._take_terms(answer.lease, started)
            self._lost.clear()
            self._began.set()
            self._wake.set()
            _log.info("session begun", session=self.name, term=self.term)
            return

    async def _keep(self) -> str:
        """Runs the session until it ends; returns why ("" when stopping)."""
        loops = [asyncio.create_task(self._report_loop()), asyncio.create_task(self._await_loop())]
        stopping = asyncio.create_task(self._stopping.wait())
        lease = asyncio.create_task(self._watch_lease())
        try:
            done, _ = await asyncio.wait({*loops, stopping, lease}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task in loops or task is lease:
                    return str(task.result())
            return ""
        finally:
            self._lost.set()
            for task in (*loops, stopping, lease):
                task.cancel()
            await asyncio.gather(*loops, stopping, lease, return_exceptions=True)

    async def _watch_lease(self) -> str:
        """The holder's own clock: after start of the last answered call + ttl - margin nothing may be held."""
        while self.lease_valid():
            await asyncio.sleep(max(0.05, min(0.5, self._valid_until - time.monotonic())))
        return "the lease ran out: the scheduler did not answer in time"

    def _take_terms(self, terms: wire.LeaseTerms, started: float) -> None:
        if terms.HasField("ttl"):
            self._ttl, self._margin = wire.seconds(terms.ttl), wire.seconds(terms.margin)
            self._report_interval = wire.seconds(terms.report_interval) or 1.0
        self._valid_until = max(self._valid_until, started + self._ttl - self._margin)

    def _fail_queue(self) -> None:
        queue, self._queue = self._queue, []
        for _, future in queue:
            if not future.done():
                future.set_exception(SessionLost(self.name))

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _stale(self, stamp: wire.Stamp) -> bool:
        """True for an answer of a deposed leader, which has no effect."""
        if stamp.term < self.term:
            _log.warning("dropped an answer of an older leader", term=stamp.term, seen=self.term)
            return True
        self.term = stamp.term
        return False

    def _ends_session(self, failure: LibraError) -> str | None:
        if failure.reason == "SESSION_FENCED":
            raise SessionFenced(failure.message)
        if failure.reason in ("SESSION_EXPIRED", "SEQUENCE_GAP", "REQUEST_ID_REUSED", "NOT_FOUND", "STALE_FENCE"):
            return str(failure)
        return None

    # ---- reports

    async def _report_loop(self) -> str:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._report_interval):
                    await self._wake.wait()
            self._wake.clear()
            ended = await self._report_once()
            if ended is not None:
                return ended
        return ""

    async def _report_once(self) -> str | None:
        request, futures = self._next_report()
        delay = RETRY_SECONDS[0]
        while not self._stopping.is_set() or futures:
            started = time.monotonic()
            request.caller.CopyFrom(self.caller())
            try:
                answer = await self._stub.Report(request, timeout=REPORT_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                ended = self._ends_session(failure)
                if ended is None and failure.status is grpc.StatusCode.INVALID_ARGUMENT:
                    ended = str(failure)
                if ended is not None:
                    self._settle(futures, error=SessionLost(ended))
                    return ended
                await self._pause(delay)
                if self._stopping.is_set() and not futures:
                    return None
                delay = min(delay * 2, RETRY_SECONDS[1])
                continue
            if self._stale(answer.stamp):
                continue
            self._take_terms(answer.lease, started)
            self._settle(futures, refusals=list(answer.refusals))
            if answer.need_state:
                self._need_state = True
                self._wake.set()
            if self._queue or self._changed or self._removed:
                self._wake.set()
            return None
        return None

    @staticmethod
    def _settle(
        futures: list[asyncio.Future[list[wire.Refusal]]],
        *,
        refusals: list[wire.Refusal] | None = None,
        error: Exception | None = None,
    ) -> None:
        for future in futures:
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(refusals or [])

    def _next_report(self) -> tuple[wire.ReportRequest, list[asyncio.Future[list[wire.Refusal]]]]:
        """Packs what is queued, changed and known into the next report; seq 0 if it carries load alone."""
        request = wire.ReportRequest()
        futures: list[asyncio.Future[list[wire.Refusal]]] = []
        if self._load is not None and self._load_dirty:
            request.load.CopyFrom(self._load)
            self._load_dirty = False
        if self._need_state:
            self._fill_state(request)
            self._need_state = False
            self._changed.clear()
            self._removed.clear()
        else:
            size = 0
            while self._queue and size < MAX_DELTA_BYTES and (not futures or _fits(request.delta, self._queue[0][0])):
                delta, future = self._queue.pop(0)
                request.delta.MergeFrom(delta)
                futures.append(future)
                size += delta.ByteSize()
            for name in list(self._changed)[: wire.DELTA_LIMITS["changed"] - len(request.delta.changed)]:
                fence, state = self._items[name]
                request.delta.changed.append(wire.Item(name=name, fence=fence, state=state))
                del self._changed[name]
            for name in list(self._removed)[: wire.DELTA_LIMITS["removed"] - len(request.delta.removed)]:
                request.delta.removed.append(name)
                del self._removed[name]
        if request.WhichOneof("content"):
            self._seq += 1
            request.seq = self._seq
        # the digest is of what the scheduler will know after this report: items still waiting are not in it
        request.digest = self._sent_digest()
        return request, futures

    def _sent_digest(self) -> int:
        digest = self._digest
        for name in self._changed:
            digest -= item_digest(name, *self._items[name])
        return digest % (1 << 64)

    def _fill_state(self, request: wire.ReportRequest) -> None:
        # one page holds far more than the contract's 256 trajectories and 64 replicas of a worker
        items = list(self._items.items())[:PAGE_ITEMS]
        request.state_page.last = True
        for name, (fence, state) in items:
            request.state_page.items.append(wire.Item(name=name, fence=fence, state=state))

    # ---- what we should have

    async def _await_loop(self) -> str:
        delay = RETRY_SECONDS[0]
        while not self._stopping.is_set():
            started = time.monotonic()
            request = wire.AwaitRequest(
                caller=self.caller(),
                desired_revision=self._desired_revision,
                command_sequence=self._command_sequence,
            )
            try:
                answer = await self._stub.Await(request, timeout=AWAIT_SECONDS)
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                if failure.status is grpc.StatusCode.DEADLINE_EXCEEDED:
                    continue
                ended = self._ends_session(failure)
                if ended is not None:
                    return ended
                await self._pause(delay)
                delay = min(delay * 2, RETRY_SECONDS[1])
                continue
            delay = RETRY_SECONDS[0]
            if self._stale(answer.stamp):
                continue
            self._take_terms(answer.lease, started)
            sent = started + wire.seconds(answer.held_for)
            if answer.HasField("desired") and answer.desired.revision > self._desired_revision:
                await self._handler.on_desired(answer.desired)
                self._desired_revision = answer.desired.revision
            for command in answer.commands:
                self._accept(command, sent)
        return ""

    def _accept(self, command: wire.Command, sent: float) -> None:
        """Starts a command unless its fence is stale, its time is over or its effect is there already."""
        self._command_sequence = max(self._command_sequence, command.fence.sequence)
        if command.name in self._journal:
            known = self._journal[command.name]
            if known is not None:
                self._spawn(self._send_result(known))
            return
        self._journal[command.name] = None
        while len(self._journal) > MAX_JOURNAL:
            self._journal.popitem(last=False)
        if command.fence.session_epoch != self.epoch or command.fence.term < self.term:
            text = f"epoch {command.fence.session_epoch}, term {command.fence.term}; expected {self.epoch}, {self.term}"
            self._spawn(self._finish(command, _failed(command, "STALE_FENCE", text)))
            return
        deadline = sent + wire.seconds(command.valid_for)
        if time.monotonic() >= deadline:
            result = wire.CommandResult(command=command.name, state=wire.COMMAND_STATE_EXPIRED)
            self._spawn(self._finish(command, result))
            return
        self._spawn(self._carry_out(command, deadline))

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, command: wire.Command, deadline: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                result = await self._handler.on_command(command)
        except TimeoutError:
            result = wire.CommandResult(command=command.name, state=wire.COMMAND_STATE_EXPIRED)
        except LibraError as error:
            result = _failed(command, error.reason, error.message)
        except (SessionLost, asyncio.CancelledError):
            return
        except Exception as error:  # noqa: BLE001 - a defect in a handler fails its command, not the worker
            _log.error("command failed", command=command.name, error=repr(error), exc_info=error)
            result = _failed(command, "INTERNAL", f"{type(error).__name__}: {error}")
        await self._finish(command, result)

    async def _finish(self, command: wire.Command, result: wire.CommandResult) -> None:
        result.command = command.name
        if result.state == wire.COMMAND_STATE_UNSPECIFIED:
            result.state = wire.COMMAND_STATE_SUCCEEDED
        self._journal[command.name] = result
        await self._send_result(result)

    async def _send_result(self, result: wire.CommandResult) -> None:
        try:
            await self.report(wire.Delta(results=[result]))
        except SessionLost:
            return


def _failed(command: wire.Command, code: str, text: str) -> wire.CommandResult:
    return wire.CommandResult(
        command=command.name, state=wire.COMMAND_STATE_FAILED, reason=wire.Reason(code=code, text=text[:1024])
    )


def _fits(delta: wire.Delta, more: wire.Delta) -> bool:
    """True if both together keep to the contract's bounds."""
    return all(len(getattr(delta, p)) + len(getattr(more, p)) <= most for p, most in wire.DELTA_LIMITS.items())


def item_digest(name: str, fence: int, state: str) -> int:
    """First eight bytes (big-endian) of SHA-256 of "name\\nfence\\nstate\\n"; digests of items add up modulo 2^64."""
    return int.from_bytes(hashlib.sha256(f"{name}\n{fence}\n{state}\n".encode()).digest()[:8], "big")
