"""One trajectory's session at a tool environment: attach or open, call, score, renew, close, over gRPC.

Every call is idempotent at the environment (call ids, request ids), so what fails in transport is tried again a few
times. What is left after that, and INFRA_ERROR, is an EnvironmentFailure: it voids the attempt and is never a reward.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from services.common import wire
from services.common.rpc.channel import connect
from services.common.rpc.status import from_rpc_error

RETRIES = 6
RETRY_SECONDS = (0.1, 3.0)
RPC_SECONDS = 15.0
"""Deadline of calls that only touch the environment's memory."""
GRACE_SECONDS = 10.0
"""What a tool call's deadline is longer than the tool's own timeout."""
MAX_ENDPOINTS = 64
UNKNOWN_TOOL = "unknown"
TRANSIENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.ABORTED,
)


class EnvironmentFailure(Exception):
    """The environment broke or cannot be reached; nobody's fault but infrastructure's."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Environments:
    """Channels to tool environments, and what each offers."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, Any] = {}
        self._offers: dict[str, dict[str, wire.Tool]] = {}

    def stub(self, endpoint: str) -> Any:
        """A ToolEnvService stub on a shared channel."""
        if endpoint not in self._channels:
            if len(self._channels) >= MAX_ENDPOINTS:
                raise EnvironmentFailure("TOO_MANY_ENDPOINTS", f"{MAX_ENDPOINTS} tool environments are in use already")
            self._channels[endpoint] = connect(endpoint)
            # made once: building its ten methods costs more than a call
            self._stubs[endpoint] = wire.ToolEnvServiceStub(self._channels[endpoint])
        return self._stubs[endpoint]

    async def tools(self, endpoint: str) -> dict[str, wire.Tool]:
        """Tools by name; asked once, since Describe is constant for the life of a server."""
        if endpoint not in self._offers:
            answer = await attempt(endpoint, self.stub(endpoint).Describe, wire.DescribeRequest(), RPC_SECONDS)
            self._offers[endpoint] = {tool.name: tool for tool in answer.tools}
        return self._offers[endpoint]

    def offered(self, endpoint: str) -> Mapping[str, wire.Tool]:
        """Tools as far as they are known already."""
        return self._offers.get(endpoint, {})

    async def close(self) -> None:
        """Closes all channels."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))


class EnvironmentSession:
    """A session that is open and attached under this lease's epoch."""

    def __init__(self, environments: Environments, record: wire.ToolSession, epoch: int, ttl: float) -> None:
        self.record = record
        self.ttl = ttl
        self._epoch = epoch
        self._stub = environments.stub(record.endpoint)
        self._environments = environments
        self._expires = time.monotonic() + ttl

    @classmethod
    async def attach(
        cls, environments: Environments, record: wire.ToolSession, lease: wire.TrajectoryLease
    ) -> "EnvironmentSession":
        """Goes on with a session that the trajectory has."""
        request = wire.AttachSessionRequest(session=record.session, epoch=lease.lease_epoch, attempt=lease.attempt)
        answer = await attempt(record.endpoint, environments.stub(record.endpoint).AttachSession, request, RPC_SECONDS)
        own = wire.ToolSession()
        own.CopyFrom(record)
        own.epoch = lease.lease_epoch
        return cls(environments, own, lease.lease_epoch, wire.seconds(answer.ttl) or 60.0)

    @classmethod
    async def open(
        cls,
        environments: Environments,
        route: wire.ToolEnvRoute,
        lease: wire.TrajectoryLease,
        task_json: str,
        seed: int,
        ttl: float,
    ) -> tuple["EnvironmentSession", str, str]:
        """Opens one, or finds the one that an earlier lease of this attempt opened; (session, instructions, text)."""
        stub = environments.stub(route.endpoint)
        request = wire.OpenSessionRequest(
            request_id=str(uuid.uuid5(uuid.NAMESPACE_URL, f"{lease.trajectory}/attempts/{lease.attempt}")),
            task_json=task_json,
            trajectory=lease.trajectory,
            epoch=1,  # the same id must come with the same content, whatever lease sends it; attaching raises it
            ttl=wire.duration(ttl),
            seed=seed,
        )
        answer = await attempt(route.endpoint, stub.OpenSession, request, RPC_SECONDS)
        record = wire.ToolSession(environment=route.environment, endpoint=route.endpoint, session=answer.session)
        if lease.lease_epoch != 1:
            session = await cls.attach(environments, record, lease)
        else:
            record.epoch = 1
            session = cls(environments, record, 1, wire.seconds(answer.ttl) or ttl)
        return session, answer.instructions, answer.observation

    async def call(self, call_id: str, tool: str, arguments_json: str, timeout: float) -> wire.ToolCall:
        """Runs a tool, or takes the stored result of this call id. EnvironmentFailure on INFRA_ERROR."""
        endpoint = self.record.endpoint
        request = wire.CallToolRequest(
            session=self.record.session, epoch=self._epoch, call_id=call_id, tool=tool,
            arguments_json=arguments_json, timeout=wire.duration(timeout),
        )  # fmt: skip
        deadline = time.monotonic() + timeout + GRACE_SECONDS
        call: wire.ToolCall = (await attempt(endpoint, self._stub.CallTool, request, timeout + GRACE_SECONDS)).call
        while call.running:
            if time.monotonic() > deadline:
                raise EnvironmentFailure("CALL_STILL_RUNNING", f"{endpoint}: {tool} did not end within {timeout:.0f} s")
            await asyncio.sleep(min(max(wire.seconds(call.retry_after), 0.02), 5.0))
            ask = wire.GetCallRequest(session=self.record.session, call_id=call_id)
            call = (await attempt(endpoint, self._stub.GetCall, ask, RPC_SECONDS)).call
        if call.outcome in (wire.TOOL_OUTCOME_INFRA_ERROR, wire.TOOL_OUTCOME_UNSPECIFIED):
            raise EnvironmentFailure("TOOL_INFRA_ERROR", f"{endpoint}: {tool} failed on the environment's side")
        return call

    async def tool_kind(self, tool: str) -> int:
        """May its calls be repeated (wire.ToolKind)."""
        offered = (await self._environments.tools(self.record.endpoint)).get(tool)
        return offered.kind if offered is not None else wire.TOOL_KIND_UNSPECIFIED

    def label(self, tool: str) -> str:
        """The tool's name for statistics; what a model made up is not one of them."""
        return tool if tool in self._environments.offered(self.record.endpoint) else UNKNOWN_TOOL

    async def score(self, answer: str, timeout: float) -> wire.Reward:
        """The reward; EnvironmentFailure if the environment gives none."""
        request = wire.ScoreRequest(
            session=self.record.session, epoch=self._epoch, final_answer=answer, timeout=wire.duration(timeout)
        )
        result = await attempt(self.record.endpoint, self._stub.Score, request, timeout + GRACE_SECONDS)
        if result.outcome != wire.TOOL_OUTCOME_OK or not result.HasField("reward"):
            name = wire.ToolOutcome.Name(result.outcome).removeprefix("TOOL_OUTCOME_")
            raise EnvironmentFailure("NOT_SCORED", f"{self.record.endpoint}: Score ended {name} and without a reward")
        return wire.Reward(value=result.reward, components=result.components, actor_values=result.actor_rewards)

    async def keep(self, ttl: float) -> None:
        """Renews the session until cancelled, so that long waits do not end it."""
        while True:
            left = self._expires - time.monotonic()
            await asyncio.sleep(max(0.5, left / 2))
            request = wire.RenewSessionRequest(session=self.record.session, epoch=self._epoch, ttl=wire.duration(ttl))
            answer = await attempt(self.record.endpoint, self._stub.RenewSession, request, RPC_SECONDS)
            self._expires = time.monotonic() + (wire.seconds(answer.ttl) or ttl)

    async def close(self) -> None:
        """Ends it; what fails is left to its expiry."""
        request = wire.CloseSessionRequest(session=self.record.session, epoch=self._epoch)
        try:
            await self._stub.CloseSession(request, timeout=5.0)
        except grpc.aio.AioRpcError:
            return


async def attempt(endpoint: str, method: Callable[..., Awaitable[Any]], request: wire.Message, timeout: float) -> Any:
    """Calls with a deadline and tries transient errors again, RETRIES times with growing pauses."""
    delay = RETRY_SECONDS[0]
    for number in range(RETRIES + 1):
        try:
            return await method(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            if failure.status not in TRANSIENT or number == RETRIES:
                name = type(request).__name__.removesuffix("Request")
                text = f"tool environment {endpoint}: {name} failed: {failure}"
                raise EnvironmentFailure(failure.reason[:64], text[:1024]) from error
            await asyncio.sleep(delay)
            delay = min(delay * 2, RETRY_SECONDS[1])
    raise AssertionError
