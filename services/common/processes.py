"""Child processes under supervision: own process group, own log, a ready file, bounded restarts, no survivors.

A child leads a process group, so that ending it ends what it started; it gets SIGKILL when its parent dies (see
tether.py), so that a killed launcher leaves nothing running; a zombie counts as dead.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.common import log

_log = log.get(__name__)

TETHER = Path(__file__).with_name("tether.py")
POLL_SECONDS = 0.05
TAIL_LINES = 12
TAIL_BYTES = 2_000
CONFIG_EXIT = 2
"""Exit code of a service whose configuration is wrong: starting it again cannot help."""


class StartFailed(Exception):
    """A child did not become ready; the message ends with the child's own last words."""

    def __init__(self, message: str, exit_code: int | None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Launch:
    """How to start a child."""

    name: str
    argv: Sequence[str]
    log: Path | None
    """None: its output goes where its parent's goes, as in a container."""
    ready_file: Path | None = None
    pid_file: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 120.0


@dataclass(frozen=True)
class RestartPolicy:
    """A child that dies is started again after a growing pause, at most `max_restarts` times in `window_s`."""

    max_restarts: int = 5
    window_s: float = 60.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 5.0


class Child:
    """One life of a child process."""

    def __init__(self, process: asyncio.subprocess.Process, launch: Launch, log_offset: int) -> None:
        self.pid = process.pid
        self.launch = launch
        self._process = process
        self._log_offset = log_offset

    @classmethod
    async def start(cls, launch: Launch) -> "Child":
        """Starts it; its output goes to the end of its log file, if it has one."""
        for path in (launch.log, launch.ready_file, launch.pid_file):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        if launch.ready_file is not None:
            launch.ready_file.unlink(missing_ok=True)
        with contextlib.ExitStack() as files:
            output = files.enter_context(launch.log.open("ab")) if launch.log is not None else None
            offset = output.tell() if output is not None else 0
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(TETHER), str(os.getpid()), *launch.argv,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **launch.env}, start_new_session=True,
            )  # fmt: skip
        if launch.pid_file is not None:
            launch.pid_file.write_text(f"{process.pid}\n")
        return cls(process, launch, offset)

    @property
    def alive(self) -> bool:
        """True while it runs; a zombie does not."""
        return self._process.returncode is None and is_alive(self.pid)

    async def wait(self) -> int:
        """Its exit code, negative for a signal; the rest of its process group is killed then."""
        code = await self._process.wait()
        self.signal(signal.SIGKILL)
        if self.launch.pid_file is not None:
            self.launch.pid_file.unlink(missing_ok=True)
        return code

    async def wait_ready(self) -> str:
        """Content of the ready file once it appears; StartFailed if the child ends or takes too long."""
        path = self.launch.ready_file
        assert path is not None
        deadline = time.monotonic() + self.launch.ready_timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                return path.read_text().strip()
            if self._process.returncode is not None:
                code = self._process.returncode
                raise StartFailed(f"{self.launch.name} {describe_exit(code)}: {self.last_words()}", code)
            await asyncio.sleep(POLL_SECONDS)
        raise StartFailed(
            f"{self.launch.name} was not ready within {self.launch.ready_timeout_s:.0f} s: {self.last_words()}", None
        )

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the whole process group; no effect if it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def stop(self, grace_s: float) -> int:
        """Asks it to end, waits, kills the group; returns the exit code."""
        if self._process.returncode is None and grace_s > 0:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)  # a frozen one would not hear it
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        self.signal(signal.SIGKILL)
        return await self.wait()

    def last_words(self) -> str:
        """End of what this life wrote to its log."""
        if self.launch.log is None:
            return "its last words are in this process's own output"
        return tail(self.launch.log, self._log_offset)


class Supervised:
    """A child kept running. States: IDLE, STARTING, READY, PAUSED (before a restart), STOPPED, RETIRED.

    `on_change(self)` is called after each change of state; `message` says why it last ended.
    """

    def __init__(
        self,
        launch: Launch,
        policy: RestartPolicy | None = None,
        on_change: Callable[["Supervised"], None] | None = None,
    ) -> None:
        self.launch = launch
        self.state = "IDLE"
        self.child: Child | None = None
        self.restarts = 0
        self.message = ""
        self.exit_code: int | None = None
        self.address = ""
        self._policy = policy or RestartPolicy()
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def name(self) -> str:
        """The child's name."""
        return self.launch.name

    @property
    def pid(self) -> int | None:
        """Process id of the present life."""
        return self.child.pid if self.child is not None and self.child.alive else None

    def start(self) -> None:
        """Begins to keep it running; no effect if it is kept already."""
        if self._task is None or self._task.done():
            self._stop.clear()
            self.state, self.message, self.exit_code = "IDLE", "", None
            self._task = asyncio.create_task(self._keep(), name=f"supervise {self.name}")

    async def wait_ready(self, *, first_try: bool = False) -> str:
        """The ready file's content; StartFailed once it is retired or stopped, with `first_try` once it has ended."""
        while self.state != "READY":
            if self.state in ("RETIRED", "STOPPED") or (first_try and self.state == "PAUSED"):
                raise StartFailed(self.message or f"{self.name} was stopped", self.exit_code)
            self._changed.clear()
            await self._changed.wait()
        return self.address

    async def stop(self, grace_s: float = 5.0) -> None:
        """Ends it and stops keeping it."""
        self._stop.set()
        if self.child is not None:
            await self.child.stop(grace_s)
        if self._task is not None:
            # not cancelled: a child that is just being started must be ended too
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self.state != "RETIRED":
            self._become("STOPPED")

    def kill(self) -> None:
        """SIGKILL to its process group; it is then restarted as after any crash."""
        if self.child is not None:
            self.child.signal(signal.SIGKILL)

    def _become(self, state: str) -> None:
        self.state = state
        self._changed.set()
        if self._on_change is not None:
            self._on_change(self)

    async def _keep(self) -> None:
        ends: deque[float] = deque()
        while not self._stop.is_set():
            self.child = child = await Child.start(self.launch)
            if self._stop.is_set():
                await child.stop(0)
                return
            self._become("STARTING")
            watch = asyncio.create_task(self._watch_ready(child))
            try:
                self.exit_code = await child.wait()
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
            if self._stop.is_set():
                return
            # one that was killed from outside had no words about it
            words = "" if -self.exit_code in (signal.SIGKILL, signal.SIGTERM) else child.last_words()
            self.message = f"{self.name} {describe_exit(self.exit_code)}" + (f": {words}" if words else "")
            now = time.monotonic()
            ends.append(now)
            while ends and ends[0] < now - self._policy.window_s:
                ends.popleft()
            if self.exit_code == CONFIG_EXIT or len(ends) > self._policy.max_restarts:
                self._become("RETIRED")
                return
            self._become("PAUSED")
            pause = min(self._policy.first_pause_s * 2 ** (len(ends) - 1), self._policy.longest_pause_s)
            _log.info("ended and will be restarted", child=self.name, exit_code=self.exit_code, pause_s=pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause)
            self.restarts += 1

    async def _watch_ready(self, child: Child) -> None:
        try:
            self.address = "" if self.launch.ready_file is None else await child.wait_ready()
        except StartFailed as error:
            if error.exit_code is None:  # it hangs: end this life, the loop starts the next
                _log.error("not ready in time", child=self.name)
                child.signal(signal.SIGKILL)
            return
        self._become("READY")


def is_alive(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if sys.platform == "linux":
            return False
    except ProcessLookupError:
        return False
    else:
        # the command name in parentheses may hold anything; the state follows the last one
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "did not end"
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"ended with exit code {code}"


def tail(path: Path, offset: int = 0) -> str:
    """The last lines of a file, not from before `offset`; empty if there are none."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(offset, end - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.strip().splitlines()[-TAIL_LINES:])
