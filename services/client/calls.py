"""Calls to the scheduler: deadlines always, the same request id again while it is away, errors with reasons."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from services.common import wire
from services.common.errors import LibraError
from services.common.rpc.channel import connect
from services.common.rpc.status import from_rpc_error

R = TypeVar("R")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
STREAM_SECONDS = 60.0
"""A watch call is opened anew after so long; the server ends it with a bookmark."""


class Calls:
    """One channel to a scheduler.

    `timeout_s` is the deadline of one try; `retry_for_s` bounds how long a call is tried again while the scheduler is
    away (UNAVAILABLE, which covers NOT_LEADER). A mutation keeps its request id, so that a try whose answer was lost
    has no second effect.
    """

    def __init__(self, address: str, timeout_s: float, retry_for_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.retry_for_s = retry_for_s
        self.channel = connect(address)
        self.trajectories = wire.TrajectoryServiceStub(self.channel)
        self.admin = wire.AdminServiceStub(self.channel)

    async def unary(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """The answer; LibraError with the server's reason, or the transport's once trying is over."""
        give_up = time.monotonic() + self.retry_for_s
        pause = FIRST_PAUSE_S
        while True:
            try:
                return await method(request, timeout=timeout_s or self.timeout_s)
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
            if failure.status is not grpc.StatusCode.UNAVAILABLE or time.monotonic() + pause > give_up:
                raise self._explained(failure)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)

    def _explained(self, failure: LibraError) -> LibraError:
        if failure.reason == "UNAVAILABLE":
            return LibraError(
                "UNAVAILABLE",
                f"no scheduler answers at {self.address} ({failure.message}); is it running, is this its address?",
                failure.status,
            )
        if failure.reason == "DEADLINE_EXCEEDED":
            return LibraError(
                "DEADLINE_EXCEEDED",
                f"the scheduler at {self.address} did not answer within {self.timeout_s:.0f} s",
                failure.status,
            )
        return failure

    async def pages(
        self, method: Callable[..., Any], request: Any, items: Callable[[Any], Any], limit: int | None = None
    ) -> tuple[list[Any], int]:
        """All items of all pages (at most `limit`), and the first page's revision."""
        found: list[Any] = []
        revision = 0
        while True:
            answer = await self.unary(method, request)
            revision = revision or answer.stamp.revision
            found.extend(items(answer))
            if not answer.next_page_token or (limit is not None and len(found) >= limit):
                return found[:limit], revision
            request.page_token = answer.next_page_token

    async def watch(
        self, open_stream: Callable[[wire.WatchOptions, float], Any], options: wire.WatchOptions
    ) -> AsyncIterator[list[wire.Event]]:
        """Events for ever, one list per message, whole revisions only; resumes behind the last bookmark after a break.

        Raises COMPACTED when what was missed is no longer kept (list again, then watch from the list's revision + 1),
        and UNAVAILABLE when the scheduler stays away longer than `retry_for_s`.
        """
        seen_term = 0
        give_up = time.monotonic() + self.retry_for_s
        pause = FIRST_PAUSE_S
        while True:
            held_back: list[wire.Event] = []
            try:
                async for answer in open_stream(options, STREAM_SECONDS):
                    batch: wire.WatchBatch = answer.batch
                    if batch.term < seen_term:
                        break  # a deposed leader: what it says has no effect
                    seen_term = batch.term
                    give_up, pause = time.monotonic() + self.retry_for_s, FIRST_PAUSE_S
                    held_back.extend(batch.events)
                    if batch.continued:
                        continue
                    if batch.bookmark:
                        options.start_revision = batch.bookmark + 1
                    if held_back:
                        yield held_back
                        held_back = []
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                if failure.status is grpc.StatusCode.DEADLINE_EXCEEDED:
                    continue
                if failure.status is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > give_up:
                    raise self._explained(failure) from None
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Closes the channel."""
        await self.channel.close()


def request_id(given: str | None) -> str:
    """The caller's request id, or a new one."""
    return given or str(uuid.uuid4())


async def within(work: Awaitable[R], seconds: float, what: str) -> R:
    """`work`, or DEADLINE_EXCEEDED saying what was waited for."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise LibraError(
            "DEADLINE_EXCEEDED", f"{what} within {seconds:.0f} s", grpc.StatusCode.DEADLINE_EXCEEDED
        ) from None
