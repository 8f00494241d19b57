"""Runs one confined process to its end or to a limit: wall time, output, memory and files are watched from outside."""

import asyncio
import contextlib
import enum
import itertools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from services.toolenv.sandbox.base import Limits, Sandbox, Script, children

HARD_OUTPUT = 128
"""A run is killed when it has written this many times the output that is kept."""

WATCH_SECONDS = 0.1
WAIT_FOR_KILL_SECONDS = 1.0
REAP_SECONDS = 5.0
MAX_STATUS_BYTES = 4096
MAX_TREE = 10_000

_PAGE = os.sysconf("SC_PAGE_SIZE")
_BLOCK = 512
"""Unit of st_blocks, whatever the file system's block size."""


class End(enum.Enum):
    """How a run ended."""

    EXIT = "exit"
    TIMEOUT = "timeout"
    OUTPUT = "output limit"
    MEMORY = "memory limit"
    DISK = "disk limit"
    BROKEN = "the sandbox failed"


@dataclass(frozen=True, slots=True)
class Run:
    """What a run left. `exit_code` is 128 + n if signal n ended it; None unless end is EXIT."""

    end: End
    exit_code: int | None
    output: bytes
    truncated: bool


async def run(sandbox: Sandbox, script: Script, limits: Limits, timeout_s: float) -> Run:
    """Starts the script in the sandbox and waits, at most timeout_s; stdout and stderr are one stream.

    Whatever happens, cancellation included, no process of it is left when this returns. OSError if nothing could
    be started.
    """
    status_read, status_write = os.pipe()
    try:
        command = sandbox.command(script, limits, status_write)
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=script.work,
            # the first process of a sandbox shows it to those inside
            env={"PATH": os.defpath},
            pass_fds=(status_write,),
            start_new_session=True,
        )
    except BaseException:
        os.close(status_read)
        raise
    finally:
        os.close(status_write)
    try:
        return await _watch(sandbox, child, script.work, limits, timeout_s, status_read)
    finally:
        os.close(status_read)


async def _watch(
    sandbox: Sandbox, child: asyncio.subprocess.Process, work: Path, limits: Limits, timeout_s: float, status: int
) -> Run:
    assert child.stdout is not None
    output = _Output(limits.output_bytes)
    reading = asyncio.create_task(output.read(child.stdout))
    ending = asyncio.create_task(child.wait())
    end = End.EXIT
    # a folder that is too full already may be tidied up, only not grow
    before = await asyncio.to_thread(usage, work, limits.files)
    allowed = Usage(max(limits.disk_bytes, before.size), max(limits.files, before.entries))
    try:
        deadline = time.monotonic() + timeout_s
        while not ending.done():
            left = deadline - time.monotonic()
            if left <= 0:
                end = End.TIMEOUT
            elif output.total > limits.output_bytes * HARD_OUTPUT:
                end = End.OUTPUT
            elif private_memory(child.pid) > limits.memory_bytes:
                end = End.MEMORY
            elif (await asyncio.to_thread(usage, work, allowed.entries)).exceeds(allowed):
                end = End.DISK
            if end is not End.EXIT:
                break
            await asyncio.wait({ending}, timeout=min(WATCH_SECONDS, left))
    finally:
        await _kill(sandbox, child, ending, reading)
    if end is End.EXIT and usage(work, allowed.entries).exceeds(allowed):
        end = End.DISK
    if end is End.EXIT and not sandbox.ran(os.read(status, MAX_STATUS_BYTES)):
        end = End.BROKEN
    code = child.returncode if end is End.EXIT else None
    # a signal that reached the outermost process itself comes as a negative number
    return Run(end, 128 - code if code is not None and code < 0 else code, bytes(output.kept), output.cut)


async def _kill(
    sandbox: Sandbox,
    child: asyncio.subprocess.Process,
    ending: "asyncio.Task[int]",
    reading: "asyncio.Task[None]",
) -> None:
    """Kills what is left: as the sandbox does it, then the whole process group."""
    if not ending.done():
        sandbox.kill(child.pid)
        await asyncio.wait({ending}, timeout=WAIT_FOR_KILL_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    _, alive = await asyncio.wait({ending, reading}, timeout=REAP_SECONDS)
    for task in alive:
        task.cancel()


class _Output:
    """The beginning of a stream; the rest is read and dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.kept = bytearray()
        self.total = 0

    @property
    def cut(self) -> bool:
        return self.total > len(self.kept)

    async def read(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(1 << 16):
            self.total += len(data)
            self.kept += data[: max(0, self._limit - len(self.kept))]


def private_memory(pid: int) -> int:
    """Resident bytes, without shared pages, of a process and all its descendants; what is gone counts nothing."""
    total, seen, waiting = 0, 0, [pid]
    while waiting and seen < MAX_TREE:
        seen += 1
        current = waiting.pop()
        with contextlib.suppress(OSError, ValueError):
            _, resident, shared, *_ = Path(f"/proc/{current}/statm").read_text().split()
            total += (int(resident) - int(shared)) * _PAGE
        waiting += children(current)
    return total


@dataclass(frozen=True, slots=True)
class Usage:
    """What a folder holds: bytes on disk, and entries at any depth."""

    size: int
    entries: int

    def exceeds(self, allowed: "Usage") -> bool:
        return self.size > allowed.size or self.entries > allowed.entries


def usage(folder: Path, enough: int) -> Usage:
    """What a folder holds; counting stops soon after `enough` entries. Never follows a link."""
    size = entries = 0
    waiting = [str(folder)]
    while waiting and entries <= enough:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as found:
            for entry in itertools.islice(found, enough + 1):
                entries += 1
                with contextlib.suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return Usage(size, entries)
