"""No sandbox: resource limits and a clean environment only. The code sees the host's files and network."""

import contextlib
import os
import signal
import sys
from pathlib import Path

from services.toolenv.sandbox.base import Limits, Script, python_arguments, rlimits


class Bare:
    """Used only where the configuration says unsafe: true and bubblewrap does not work."""

    def command(self, script: Script, limits: Limits, status_fd: int) -> list[str]:
        del status_fd
        # a limit on processes would count all that this user runs, not this script's
        arguments = python_arguments(script, str(script.work), str(script.path))
        return ["env", f"PYTHONPATH={script.work}", *rlimits(limits, processes=False), sys.executable, *arguments]

    def ran(self, status: bytes) -> bool:
        del status
        return True

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def prepare(self, work: Path) -> None:
        del work
