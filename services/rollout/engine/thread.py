"""Drives a core in a thread of its own and brings what it makes to the event loop, once per step.

The thread takes commands between two steps, so a core needs no locks and a switch of weights or an abort lands exactly
between two tokens. After each step it pays for the CPU time used (services.common.share).
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from services.common import log
from services.common.errors import LibraError
from services.common.share import CpuShare
from services.rollout.engine.base import (
    Codec,
    Core,
    EngineStats,
    Event,
    GenerationRequest,
    Interruption,
    Outcome,
    Tokens,
    Version,
    Weights,
)

_log = log.get(__name__)
T = TypeVar("T")

MAX_COMMANDS = 8_192
"""Commands waiting for the engine thread; more means that it hangs."""
STOP_SECONDS = 10.0


class GenerationStream:
    """The tokens of one generation: iterate over its chunks, then read `outcome`.

    Chunks waiting here are bounded by the request's max_tokens.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.outcome: Outcome | None = None
        self._chunks: deque[Tokens] = deque()
        self._error: LibraError | None = None
        self._changed = asyncio.Event()

    def put(self, event: Event) -> None:
        """Takes what the engine made; called on the event loop."""
        if event.tokens is not None:
            self._chunks.append(event.tokens)
        if event.outcome is not None:
            self.outcome = event.outcome
        self._changed.set()

    def fail(self, error: LibraError) -> None:
        """The engine refused the request."""
        self._error = error
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        """The chunks; ends when `outcome` is set. Raises the LibraError with which the engine refused the request."""
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            if self._error is not None:
                raise self._error
            if self.outcome is not None:
                return
            self._changed.clear()
            await self._changed.wait()


class Engine:
    """A core, its thread, and the streams of its requests. All methods are called on the event loop."""

    def __init__(
        self, core: Core, share: CpuShare | None = None, *, after_step: Callable[[Core], None] | None = None
    ) -> None:
        self.core = core
        self.failure = ""
        """Why the engine is broken; empty while it works."""
        self.switching = False
        self._share = share or CpuShare(0.0)
        self._after_step = after_step
        self._streams: dict[str, GenerationStream] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # ---- what the core tells

    @property
    def build(self) -> str:
        """Engine name and build."""
        return self.core.build

    @property
    def dtype(self) -> str:
        """Number type it computes in."""
        return self.core.dtype

    @property
    def version(self) -> Version | None:
        """Version served; None before the first load."""
        return self.core.version

    @property
    def codec(self) -> Codec | None:
        """Tokenizer of the model served."""
        return self.core.codec

    @property
    def max_sequence_tokens(self) -> int:
        """Context length; 0 before the first load."""
        return self.core.max_sequence_tokens

    # ---- life

    def start(self) -> None:
        """Starts the thread; events come to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Frees everything and ends the thread."""
        if self._thread is None:
            return
        await self.release()
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    # ---- requests

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Starts a generation. A refusal is raised by the stream: INVALID_FIELD, CAPACITY, ENGINE_STATE."""
        stream = GenerationStream(request.request_id)
        if request.request_id in self._streams:
            stream.fail(LibraError("ALREADY_EXISTS", f"a generation {request.request_id!r} runs already"))
            return stream
        self._streams[request.request_id] = stream

        def refused(error: LibraError) -> None:
            if self._streams.pop(request.request_id, None) is not None:
                stream.fail(error)

        def work() -> None:
            try:
                self.core.submit(request)
            except LibraError as error:
                self._soon(refused, error)

        try:
            self._post(work)
        except LibraError as error:
            refused(error)
        return stream

    def abort(self, request_id: str, interruption: Interruption) -> None:
        """Ends a generation between two tokens; its stream delivers what there is, then the interruption."""
        with contextlib.suppress(LibraError):  # a broken engine has ended every stream already
            self._post(lambda: self._soon(self._deliver, self.core.abort(request_id, interruption)))

    def forget(self, prefix_key: str) -> None:
        """Drops the cache kept for a sequence that will not come back."""
        with contextlib.suppress(LibraError):
            self._post(lambda: self.core.forget(prefix_key))

    def set_concurrency(self, sequences: int) -> None:
        """Bounds the sequences running at once."""
        with contextlib.suppress(LibraError):
            self._post(lambda: self.core.set_concurrency(sequences))

    # ---- weights and state

    async def prepare(self, version: Version, weights: Weights) -> None:
        """Reads a version beside the running one; generation goes on meanwhile."""
        await asyncio.to_thread(self.core.prepare, version, weights)

    async def load(self, version: Version, weights: Weights) -> None:
        """Prepares and switches."""
        await self.prepare(version, weights)
        await self.switch(version)

    async def switch(self, version: Version) -> None:
        """Serves a prepared version from the next token on."""
        self.switching = True
        try:
            self._deliver(await self._call(lambda: self.core.switch(version)))
        finally:
            self.switching = False

    async def abandon(self, version: Version) -> None:
        """Drops a prepared version."""
        await self._call(lambda: self.core.abandon(version))

    async def stats(self) -> EngineStats:
        """Load and counters."""
        return await self._call(self.core.stats)

    async def release(self) -> None:
        """Ends every request (LOST) and frees model and cache, also of an engine that died."""
        if self.failure:
            self.core.release()
        else:
            self._deliver(await self._call(self.core.release))

    # ---- the thread

    def _post(self, work: Callable[[], None]) -> None:
        if self.failure:
            raise LibraError("ENGINE_STATE", f"the engine is broken: {self.failure}")
        if len(self._commands) >= MAX_COMMANDS:
            raise LibraError("CAPACITY", f"{MAX_COMMANDS} commands wait for the engine; it seems to hang")
        with self._wake:
            self._commands.append(work)
            self._wake.notify()

    async def _call(self, work: Callable[[], T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - handed to the caller
                self._soon(_fail, future, error)
            else:
                self._soon(_settle, future, result)

        self._post(run)
        return await future

    def _soon(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not self._commands and not self._stopping and not self.core.has_work():
                        self._wake.wait()
                    if self._stopping:
                        return
                while self._commands:
                    self._commands.popleft()()
                if self.core.has_work():
                    events = self.core.step()
                    if events:
                        self._soon(self._deliver, events)
                    if self._after_step is not None:
                        self._after_step(self.core)
                    self._share.pay()
        except Exception as error:  # noqa: BLE001 - the thread's death must reach every stream and the load report
            _log.error("engine died", error=repr(error), exc_info=error)
            self._soon(self._die, f"{type(error).__name__}: {error}")

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if event.outcome is not None:
                del self._streams[event.request_id]
            stream.put(event)

    def _die(self, failure: str) -> None:
        self.failure = failure
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(Event(stream.request_id, None, Outcome(0, error=failure)))
        while self._commands:
            # commands posted before the failure was known: their callers get it instead of waiting for ever
            self._commands.popleft()()


def _settle(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
