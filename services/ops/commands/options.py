"""Options that many commands share, and how a command runs."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from services.client import LibraClient
from services.ops import target

T = TypeVar("T")

Scheduler = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="HOST:PORT",
        help="The scheduler; default: $LIBRA_SCHEDULER, the cluster that runs in this folder, or 127.0.0.1:7070.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]
Note = Annotated[str, typer.Option("--note", help="Why; kept in the record.")]

RETRY_FOR_S = 5.0
"""A person waits: a scheduler that does not answer is said to be away after so long."""


def call(scheduler: str | None, work: Callable[[LibraClient], Awaitable[T]]) -> T:
    """Runs one command's work with a client of its own."""
    address = target.find(scheduler).scheduler

    async def body() -> T:
        async with LibraClient(address, retry_for_s=RETRY_FOR_S) as client:
            return await work(client)

    return asyncio.run(body())
