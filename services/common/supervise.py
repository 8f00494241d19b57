"""Background tasks whose death is seen: it is logged, changes the health of the service and can end the process."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from services.common import log

_log = log.get(__name__)


class Tasks:
    """The background tasks of one service. `on_failure(name, error)` is called once for each that dies."""

    def __init__(self, on_failure: Callable[[str, BaseException], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure
        self.failed: dict[str, BaseException] = {}

    def start(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a task under a name."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        assert error is not None
        self.failed[task.get_name()] = error
        _log.error("background task died", task=task.get_name(), error=repr(error), exc_info=error)
        if self._on_failure is not None:
            self._on_failure(task.get_name(), error)

    async def stop(self) -> None:
        """Cancels all and waits for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
