"""Watches: committed events in order, from any revision that the store still has, to any number of bounded listeners.

A listener first reads the store up to the newest committed revision, then follows memory. One that falls behind its
bound is cut off with its bookmark, from which it resumes; nothing is skipped silently.
"""

import asyncio
from collections import deque

from services.scheduler.core.model import Event

MAX_BACKLOG = 8_192
"""Events a follower may lag behind before it is cut off."""


class Overrun(Exception):
    """The follower was too slow; it resumes from its bookmark."""


class Follower:
    """One watch's window on the stream of committed events."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, tuple[Event, ...]]] = deque()
        self._size = 0
        self._ready = asyncio.Event()
        self.overrun = False

    def push(self, revision: int, events: tuple[Event, ...]) -> None:
        if self.overrun:
            return
        self._size += len(events) + 1
        if self._size > MAX_BACKLOG:
            self.overrun = True
            self._queue.clear()
        else:
            self._queue.append((revision, events))
        self._ready.set()

    async def next(self, timeout: float) -> list[tuple[int, tuple[Event, ...]]]:
        """What came since the last call, waiting up to `timeout` seconds; Overrun if it was too much."""
        if not self._queue and not self.overrun:
            try:
                async with asyncio.timeout(timeout):
                    await self._ready.wait()
            except TimeoutError:
                return []
        self._ready.clear()
        if self.overrun:
            raise Overrun
        items = list(self._queue)
        self._queue.clear()
        self._size = 0
        return items


class Stream:
    """Hands committed events to followers; the ledger calls `committed` in order."""

    def __init__(self, revision: int) -> None:
        self.revision = revision
        self._followers: set[Follower] = set()

    def committed(self, revision: int, events: tuple[Event, ...]) -> None:
        self.revision = revision
        for follower in self._followers:
            follower.push(revision, events)

    def follow(self) -> Follower:
        """A follower that sees every revision above `self.revision` as of now."""
        follower = Follower()
        self._followers.add(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        self._followers.discard(follower)
