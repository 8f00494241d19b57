"""The same client for code without an event loop: each call runs on a loop in a thread of its own."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from services.client.client import LibraClient

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[LibraClient, P], Coroutine[Any, Any, T]],
) -> "Callable[Concatenate[BlockingClient, P], T]":
    @functools.wraps(method)
    def call(self: "BlockingClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(method(self.client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[LibraClient, P], AsyncIterator[T]],
) -> "Callable[Concatenate[BlockingClient, P], Iterator[T]]":
    @functools.wraps(method)
    def call(self: "BlockingClient", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = method(self.client, *args, **kwargs)
        try:
            while True:
                try:
                    yield self.run(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                self.run(close())

    return call


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


class BlockingClient:
    """LibraClient with blocking methods; watches are ordinary iterators. Use in a `with` statement."""

    def __init__(self, address: str, *, timeout_s: float = 10.0, retry_for_s: float = 30.0) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="libra-client", daemon=True)
        self._thread.start()

        async def build() -> LibraClient:
            return LibraClient(address, timeout_s=timeout_s, retry_for_s=retry_for_s)

        self.client = self.run(build())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the client's loop and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel and ends the thread."""
        self.run(self.client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    create_run = _blocking(LibraClient.create_run)
    get_run = _blocking(LibraClient.get_run)
    submit_groups = _blocking(LibraClient.submit_groups)
    watch_run = _iterating(LibraClient.watch_run)
    wait_run = _blocking(LibraClient.wait_run)
    get_trajectory = _blocking(LibraClient.get_trajectory)
    list_trajectories = _blocking(LibraClient.list_trajectories)
    cancel = _blocking(LibraClient.cancel)
    list_manifest_members = _blocking(LibraClient.list_manifest_members)
    get_resource = _blocking(LibraClient.get_resource)
    list_resources = _blocking(LibraClient.list_resources)
    list_events = _blocking(LibraClient.list_events)
    watch = _iterating(LibraClient.watch)
    explain = _blocking(LibraClient.explain)
    propose_plan = _blocking(LibraClient.propose_plan)
    apply_plan = _blocking(LibraClient.apply_plan)
    reassign = _blocking(LibraClient.reassign)
    preempt = _blocking(LibraClient.preempt)
    pause_run = _blocking(LibraClient.pause_run)
    resume_run = _blocking(LibraClient.resume_run)
