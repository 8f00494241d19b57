"""ToolEnvService over an environment: checks requests, keeps the session table, runs tools and stores what they gave.

A tool call is a task of the server, not of the request that asked for it: a caller that goes away, or moves to another
worker, finds the result under its call id.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

from services.common import errors, log, wire
from services.common.clock import Clock
from services.common.errors import LibraError
from services.common.rpc.server import Context
from services.toolenv.config import ToolEnvConfig
from services.toolenv.envs.base import CallResult, Environment, Episode, InfraError, Outcome, ScoreResult, TaskError
from services.toolenv.exposition import Tally
from services.toolenv.sessions import MAX_CALLS, MAX_NAME_BYTES, RETRY_AFTER_S, Session, Sessions

SERVICE_NAME = "libra.v1.ToolEnvService"

MAX_PAYLOAD_BYTES = 256 << 10
"""Task, arguments, output, final answer."""

MAX_INSTRUCTIONS_BYTES = 64 << 10
MAX_CLASS_BYTES = 64
MAX_COMPONENTS = 32
OPEN_SECONDS = 60.0
"""Longest time an environment may take to open a session."""

KILL_SECONDS = 5.0
"""What a tool may take beyond its timeout to be killed; then the environment counts as broken."""

ANSWER_MARGIN_S = 0.25
"""A call answers this long before its deadline, so that `running` arrives in time."""

MAX_WAIT_S = 60.0
RETRY_AFTER_RUNNING_S = 0.2
EXPIRY_SECONDS = 1.0

_log = log.get(__name__)

_Session = Session[wire.ToolCall, wire.ScoreResponse]


class _Live:
    """What belongs to an open session besides its record: the episode, and the work that is under way."""

    def __init__(self, opening: "asyncio.Task[Episode]") -> None:
        self.opening = opening
        self.turn = asyncio.Lock()
        self.work: dict[str, asyncio.Task[None]] = {}

    async def episode(self) -> Episode:
        """Waits until it has started; what went wrong there is raised to each who waits."""
        return await asyncio.shield(self.opening)


class ToolEnvService(wire.ToolEnvServiceServicer):
    """The servicer of one environment."""

    def __init__(
        self,
        environment: Environment,
        config: ToolEnvConfig,
        sessions: Sessions[wire.ToolCall, wire.ScoreResponse],
        clock: Clock,
    ) -> None:
        self._environment = environment
        self._config = config
        self._table = sessions
        self._clock = clock
        self._tools = {tool.name: tool for tool in environment.tools}
        self._live: dict[str, _Live] = {}
        self._starting = 0
        self._running = asyncio.Semaphore(config.running())
        self.tally = Tally(self._tools)

    async def Describe(self, request: wire.DescribeRequest, context: Context) -> wire.DescribeResponse:
        return wire.DescribeResponse(
            environment=self._environment.name,
            version=self._environment.version,
            tools=[
                wire.Tool(
                    name=tool.name,
                    description=tool.description,
                    parameters_json_schema=json.dumps(tool.schema),
                    kind=wire.ToolKind.Value(f"TOOL_KIND_{tool.kind.value}"),
                    timeout=wire.duration(tool.timeout_s),
                    timeout_meaning=wire.TimeoutMeaning.Value(f"TIMEOUT_MEANING_{tool.timeout_meaning.value}"),
                )
                for tool in self._environment.tools
            ],
            snapshots=False,
            max_sessions=self._config.max_sessions,
            max_starting=self._config.max_starting,
            max_session_life=wire.duration(self._config.max_session_life_s),
        )

    async def OpenSession(self, request: wire.OpenSessionRequest, context: Context) -> wire.OpenSessionResponse:
        _check_text("request_id", request.request_id, MAX_NAME_BYTES, required=True)
        _check_epoch(request.epoch)
        task = _task(request.task_json)
        content = f"{request.seed}\n{request.task_json}".encode()
        session, new = self._table.open(request.request_id, content, request.epoch, wire.seconds(request.ttl))
        if new:
            try:
                self._start(session, task, request.seed)
            except LibraError:
                self._table.abandon(session)
                raise
            _log.debug("session opened", session=session.name, trajectory=request.trajectory, epoch=request.epoch)
        episode = await self._live[session.name].episode()
        return wire.OpenSessionResponse(
            session=session.name,
            ttl=wire.duration(self._table.left(session)),
            instructions=_clip(episode.instructions, MAX_INSTRUCTIONS_BYTES)[0],
            observation=_clip(episode.observation, MAX_PAYLOAD_BYTES)[0],
        )

    async def AttachSession(self, request: wire.AttachSessionRequest, context: Context) -> wire.AttachSessionResponse:
        _check_epoch(request.epoch)
        session = self._table.attach(request.session, request.epoch)
        _log.debug("session attached", session=session.name, epoch=request.epoch, attempt=request.attempt)
        ttl = wire.duration(self._table.left(session))
        return wire.AttachSessionResponse(epoch=session.epoch, call_ids=list(session.calls)[-MAX_CALLS:], ttl=ttl)

    async def CallTool(self, request: wire.CallToolRequest, context: Context) -> wire.CallToolResponse:
        _check_text("call_id", request.call_id, MAX_NAME_BYTES, required=True)
        content = f"{request.tool}\n{request.actor}\n{request.arguments_json}".encode()
        call, new = self._table.begin(request.session, request.epoch, request.call_id, content)
        live = self._live[request.session]
        if new:
            work = self._call(live, self._table.find(request.session), request)
            live.work[request.call_id] = asyncio.create_task(work, name=f"{request.session}/{request.call_id}")
        await self._wait(live, request.call_id, context)
        return wire.CallToolResponse(call=call.result or _still_running(request.call_id))

    async def GetCall(self, request: wire.GetCallRequest, context: Context) -> wire.GetCallResponse:
        call = self._table.call(request.session, request.call_id)
        return wire.GetCallResponse(call=call.result or _still_running(request.call_id))

    async def Snapshot(self, request: wire.SnapshotRequest, context: Context) -> wire.SnapshotResponse:
        raise errors.unimplemented("Snapshot")

    async def Restore(self, request: wire.RestoreRequest, context: Context) -> wire.RestoreResponse:
        raise errors.unimplemented("Restore")

    async def Score(self, request: wire.ScoreRequest, context: Context) -> wire.ScoreResponse:
        session = self._table.user(request.session, request.epoch)
        _check_text("final_answer", request.final_answer, MAX_PAYLOAD_BYTES)
        live = self._live[session.name]
        # the first answer stands, so whoever asks while it is computed waits for the same
        if session.score is None and _SCORE not in live.work:
            work = self._score(live, session, request)
            live.work[_SCORE] = asyncio.create_task(work, name=f"{session.name}/score")
        await self._wait(live, _SCORE, context)
        if session.score is None:
            message = f"scoring of {session.name} goes on; ask again"
            raise LibraError("CAPACITY", message, retry_after_s=str(RETRY_AFTER_S))
        return session.score

    async def RenewSession(self, request: wire.RenewSessionRequest, context: Context) -> wire.RenewSessionResponse:
        session = self._table.renew(request.session, request.epoch, wire.seconds(request.ttl))
        return wire.RenewSessionResponse(ttl=wire.duration(self._table.left(session)))

    async def CloseSession(self, request: wire.CloseSessionRequest, context: Context) -> wire.CloseSessionResponse:
        session = self._table.close(request.session, request.epoch)
        if session is not None:
            await self._end(session)
        return wire.CloseSessionResponse()

    async def keep_expiring(self) -> None:
        """The duty that frees sessions whose time is over; runs until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_SECONDS)
            await self.expire_once()

    async def expire_once(self) -> int:
        """Frees them now; returns how many."""
        over = self._table.expire()
        for session in over:
            await self._end(session)
        if over:
            _log.info("sessions expired", count=len(over), open=len(self._table))
        return len(over)

    async def shut_down(self) -> None:
        """Kills what runs and frees every session."""
        for session in self._table.all():
            self._table.close(session.name, session.epoch)
            await self._end(session)

    def _start(self, session: _Session, task: Mapping[str, Any], seed: int) -> None:
        if self._starting >= self._config.max_starting:
            message = f"{self._config.max_starting} sessions are starting already; try again"
            raise LibraError("CAPACITY", message, retry_after_s=str(RETRY_AFTER_S))
        self._starting += 1
        opening = asyncio.create_task(self._open(session, task, seed), name=f"{session.name}/open")
        self._live[session.name] = _Live(opening)

    async def _open(self, session: _Session, task: Mapping[str, Any], seed: int) -> Episode:
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await self._environment.open(task, seed)
        except TaskError as error:
            self._undo(session)
            message = f"task_json is no task of environment {self._environment.name}: {error}"
            raise errors.invalid_field(message, field="task_json") from None
        except Exception as error:
            self._undo(session)
            self.tally.infra_error("open")
            _log.error("session did not start", session=session.name, error=repr(error))
            message = f"environment {self._environment.name} could not start a session: {type(error).__name__}"
            raise LibraError("INTERNAL", message) from error
        finally:
            self._starting -= 1

    def _undo(self, session: _Session) -> None:
        self._table.abandon(session)
        self._live.pop(session.name, None)

    async def _wait(self, live: _Live, work: str, context: Context) -> None:
        """Until that work is done, or as long as the caller can wait."""
        task = live.work.get(work)
        if task is None:
            return
        remaining = context.time_remaining()
        patience = MAX_WAIT_S if remaining is None else min(remaining - ANSWER_MARGIN_S, MAX_WAIT_S)
        await asyncio.wait({task}, timeout=max(0.0, patience))

    async def _call(self, live: _Live, session: _Session, request: wire.CallToolRequest) -> None:
        began = self._clock.monotonic()
        result = CallResult(Outcome.INFRA_ERROR, "the session ended")
        try:
            result = await self._run_tool(live, request)
            self.tally.called(request.tool, result.outcome, self._clock.monotonic() - began)
        finally:
            live.work.pop(request.call_id, None)
            output, cut = _clip(result.output, MAX_PAYLOAD_BYTES)
            session.calls[request.call_id].result = wire.ToolCall(
                call_id=request.call_id,
                outcome=wire.ToolOutcome.Value(f"TOOL_OUTCOME_{result.outcome.value}"),
                output=output,
                truncated=result.truncated or cut,
                latency=wire.duration(self._clock.monotonic() - began),
                payload_class=_clip(result.payload_class, MAX_CLASS_BYTES)[0],
            )

    async def _run_tool(self, live: _Live, request: wire.CallToolRequest) -> CallResult:
        tool = self._tools.get(request.tool)
        if tool is None:
            known = ", ".join(self._tools)
            return CallResult(Outcome.TOOL_ERROR, f"error: no such tool; tools: {known}", "unknown_tool")
        try:
            arguments = _arguments(request.arguments_json)
        except ValueError as error:
            return CallResult(Outcome.TOOL_ERROR, f"error: {error}", "bad_arguments")
        timeout = tool.timeout_s
        if request.HasField("timeout"):
            timeout = min(timeout, wire.seconds(request.timeout))
        try:
            async with live.turn, self._slot(timeout), asyncio.timeout(timeout + KILL_SECONDS):
                return await (await live.episode()).call(request.call_id, request.tool, arguments, timeout)
        except TimeoutError:
            _log.error("tool did not run or end in time", session=request.session, tool=request.tool, limit_s=timeout)
        except InfraError as error:
            _log.error("environment broke", session=request.session, tool=request.tool, error=str(error))
        except Exception as error:  # noqa: BLE001 - whatever breaks in an environment voids the attempt, no more
            _log.error("tool failed", session=request.session, tool=request.tool, error=repr(error), exc_info=error)
        return CallResult(Outcome.INFRA_ERROR, "the environment failed", "infra_error")

    @contextlib.asynccontextmanager
    async def _slot(self, patience_s: float) -> AsyncIterator[None]:
        """One of the places to run in; TimeoutError after patience_s: a full server is not the model's fault."""
        async with asyncio.timeout(patience_s):
            await self._running.acquire()
        try:
            yield
        finally:
            self._running.release()

    async def _score(self, live: _Live, session: _Session, request: wire.ScoreRequest) -> None:
        timeout = self._config.tool_timeout_s
        if request.HasField("timeout"):
            timeout = min(timeout, wire.seconds(request.timeout))
        try:
            async with live.turn, self._slot(timeout), asyncio.timeout(timeout + KILL_SECONDS):
                result = await (await live.episode()).score(request.final_answer, timeout)
        except Exception as error:  # noqa: BLE001 - as above: no reward rather than a wrong one
            _log.error("scoring failed", session=session.name, error=repr(error), exc_info=error)
            result = ScoreResult(Outcome.INFRA_ERROR)
        finally:
            live.work.pop(_SCORE, None)
        session.score = _score_response(session.name, result)
        if session.score.outcome == wire.TOOL_OUTCOME_INFRA_ERROR:
            self.tally.infra_error("score")

    async def _end(self, session: _Session) -> None:
        live = self._live.pop(session.name, None)
        if live is None:
            return
        tasks = [live.opening, *live.work.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if live.opening.cancelled() or live.opening.exception() is not None:
            return
        try:
            await live.opening.result().close()
        except (OSError, InfraError) as error:
            _log.error("session was not freed completely", session=session.name, error=repr(error))


_SCORE = "/score"
"""Key of scoring among a session's work; no call id may equal it, since those are checked against it."""


def _task(text: str) -> Mapping[str, Any]:
    if len(text.encode()) > MAX_PAYLOAD_BYTES:
        raise errors.invalid_field(f"task_json is larger than {MAX_PAYLOAD_BYTES} bytes", field="task_json")
    try:
        task = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"task_json is not JSON: {error}; expected an object"
        raise errors.invalid_field(message, field="task_json") from None
    if not isinstance(task, dict):
        raise errors.invalid_field(f"task_json is a JSON {type(task).__name__}, expected an object", field="task_json")
    return task


def _arguments(text: str) -> Mapping[str, Any]:
    """What the model wrote, as an object; ValueError with a short message for the model."""
    if len(text.encode()) > MAX_PAYLOAD_BYTES:
        raise ValueError("arguments are too large")
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("arguments are not valid json") from None
    if not isinstance(arguments, dict):
        raise ValueError("arguments are not a json object")  # noqa: TRY004 - the caller catches one kind
    return arguments


def _check_epoch(epoch: int) -> None:
    if epoch < 0:
        raise errors.invalid_field(f"epoch is {epoch}; expected 0 or more", field="epoch")


def _check_text(field: str, text: str, limit: int, *, required: bool = False) -> None:
    if (required and not text) or len(text.encode()) > limit:
        raise errors.invalid_field(
            f"{field} has {len(text.encode())} bytes; expected {1 if required else 0} to {limit}", field=field
        )
    if field == "call_id" and text == _SCORE:
        raise errors.invalid_field(f"call_id {_SCORE!r} is reserved; use another", field=field)


def _clip(text: str, limit: int) -> tuple[str, bool]:
    """At most `limit` bytes of valid UTF-8 (lone surrogates replaced), and whether something was cut."""
    data = text.encode("utf-8", "replace")
    return data[:limit].decode("utf-8", "ignore"), len(data) > limit


def _still_running(call_id: str) -> wire.ToolCall:
    return wire.ToolCall(call_id=call_id, running=True, retry_after=wire.duration(RETRY_AFTER_RUNNING_S))


def _score_response(session: str, result: ScoreResult) -> wire.ScoreResponse:
    outcome = result.outcome
    if outcome is Outcome.OK and (result.reward is None or not math.isfinite(result.reward)):
        _log.error("an environment scored without a finite reward", session=session)
        outcome = Outcome.INFRA_ERROR
    answer = wire.ScoreResponse(outcome=wire.ToolOutcome.Value(f"TOOL_OUTCOME_{outcome.value}"))
    if outcome is Outcome.OK and result.reward is not None:
        answer.reward = result.reward
        answer.components.update(dict(list(result.components.items())[:MAX_COMPONENTS]))
    return answer
