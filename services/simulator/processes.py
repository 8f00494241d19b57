"""Independent simulations on several processes, or here; their order and results do not depend on it."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Protocol, TypeVar

J = TypeVar("J")
R = TypeVar("R")


class Run(Protocol):
    """Applies a module's function to each job; results in the jobs' order."""

    def __call__(self, function: Callable[[J], R], jobs: Sequence[J], /) -> list[R]:
        """All results."""
        ...


def here(function: Callable[[J], R], jobs: Sequence[J], /) -> list[R]:
    """One after the other in this process."""
    return [function(job) for job in jobs]


@contextmanager
def runner(workers: int | None = None) -> Iterator[Run]:
    """On so many processes (default: one a core). Functions and jobs must be picklable."""
    count = workers or os.cpu_count() or 1
    if count == 1:
        yield here
        return
    # spawned, not forked: whoever calls may have threads
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:

        def spread(function: Callable[[J], R], jobs: Sequence[J], /) -> list[R]:
            return list(pool.map(function, jobs))

        yield spread
