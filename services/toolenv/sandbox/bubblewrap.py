"""The bubblewrap sandbox: new user, mount, process, network, IPC, host-name and cgroup namespaces.

Inside there is /usr read-only (with /bin, /lib, /lib64 as links into it), an own /proc and /dev, small in-memory /tmp
and /dev/shm, and the session's folder as /work; nothing else of the host, no network but an unconnected loopback, no
capability, no environment, no further user namespaces. A service that runs as root runs sandboxes as `nobody`: the
kernel exempts root from the limit on processes, even in a user namespace.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path

from services.toolenv.sandbox import process
from services.toolenv.sandbox.base import Limits, Sandbox, Script, children, python_arguments, rlimits

NOBODY = 65534
WORK = "/work"
SCRIPT = "/run.py"
TMP_BYTES = 16 << 20
SHM_BYTES = 1 << 20
PROBE_SECONDS = 20.0
CONTAINER_OPTIONS = "security_opt seccomp=deploy/toolenv-seccomp.json and systempaths=unconfined"
"""What Docker must be told; docs/sandbox-in-containers.md says why."""

INTERPRETERS = ("/usr/bin/python3", "/usr/local/bin/python3")

_NAMESPACES = [
    "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
    "--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
    "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--clearenv",
]  # fmt: skip
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8", "PYTHONPATH": WORK}
_LINKS = ("bin", "lib", "lib32", "lib64", "libx32")


class Bubblewrap:
    """Runs each script in a sandbox of its own."""

    def __init__(self, interpreter: str | None = None) -> None:
        self._interpreter = interpreter or find_interpreter() or INTERPRETERS[0]

    def command(self, script: Script, limits: Limits, status_fd: int) -> list[str]:
        mounts = ["--ro-bind", "/usr", "/usr"]
        for name in _LINKS:
            if Path(f"/{name}").is_symlink():
                mounts += ["--symlink", f"usr/{name}", f"/{name}"]
            elif Path(f"/{name}").is_dir():
                mounts += ["--ro-bind", f"/{name}", f"/{name}"]
        mounts += ["--proc", "/proc", "--dev", "/dev", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm"]  # noqa: S108
        mounts += ["--remount-ro", "/dev", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"]  # noqa: S108
        mounts += ["--bind", str(script.work), WORK, "--ro-bind", str(script.path), SCRIPT, "--remount-ro", "/"]
        environment = [word for name, value in _ENVIRONMENT.items() for word in ("--setenv", name, value)]
        return [
            *_drop_root(), _program("bwrap"), *_NAMESPACES, *mounts, *environment, "--chdir", WORK,
            "--json-status-fd", str(status_fd), "--",
            # inside, so that the limit on processes counts this sandbox's own
            *rlimits(limits, processes=True), self._interpreter, *python_arguments(script, WORK, SCRIPT),
        ]  # fmt: skip

    def ran(self, status: bytes) -> bool:
        return b'"exit-code"' in status

    def kill(self, pid: int) -> None:
        """Kills the first process of the sandbox, whose namespace dies with it; bwrap then reaps it and ends.

        Killing bwrap instead would leave a zombie to whoever is process 1 here, which may reap nothing.
        """
        for child in children(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)

    def prepare(self, work: Path) -> None:
        if os.geteuid() == 0:
            os.chown(work, NOBODY, NOBODY)


def _drop_root() -> list[str]:
    if os.geteuid() != 0:
        return []
    return [_program("setpriv"), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]


def _program(name: str) -> str:
    return shutil.which(name) or name


def find_interpreter() -> str | None:
    """A python below /usr, since that is all that a sandbox sees."""
    return next((path for path in INTERPRETERS if Path(path).exists()), None)


async def usable(parent: Path | None = None) -> str | None:
    """Why sandboxes cannot run here; None if one was started, in a folder under `parent`, and did what it should."""
    for program in ("bwrap", "prlimit", *(("setpriv",) if os.geteuid() == 0 else ())):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if find_interpreter() is None:
        return f"no python at {' or '.join(INTERPRETERS)}, and a sandbox sees nothing outside /usr"
    limits = Limits(512 << 20, 10, 16, 4096, 1 << 20, 100)
    with tempfile.TemporaryDirectory(prefix="probe-", dir=parent) as name:
        folder = Path(name)
        await asyncio.to_thread(folder.chmod, 0o711)
        work, path = folder / "work", folder / "probe.py"
        await asyncio.to_thread(work.mkdir)
        await asyncio.to_thread(path.write_text, "print(sum(range(10)))")
        sandbox: Sandbox = Bubblewrap()
        sandbox.prepare(work)
        run = await process.run(sandbox, Script(path, work), limits, PROBE_SECONDS)
    if run.end is process.End.EXIT and run.exit_code == 0 and run.output == b"45\n":
        return None
    said = run.output.decode("utf-8", "replace").strip()
    return (
        f"bubblewrap does not work here ({said or run.end.value}); it needs unprivileged user namespaces and, in a "
        f"container, a proc file system without masks: {CONTAINER_OPTIONS}"
    )
